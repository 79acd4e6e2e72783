//! The `calpe` binary: hands its arguments to the library's command line and exits with its code.

fn main() -> std::process::ExitCode {
    calpe::cli::main()
}
