//! The `calpe` binary: hands its arguments to the library's command line and exits with its code.

mod no_alternate_stack;

fn main() -> std::process::ExitCode {
    no_alternate_stack::restore();
    calpe::cli::main()
}
