//! The commands that talk to a running daemon. Each sends requests, prints the answers, and returns
//! the exit code of the process.

use super::args::{
    BenchCommand, Cli, Command, DrillKind, EventsArgs, GpuCommand, HistoryArgs, ImportArgs, OnlineArgs,
    RepairArgs, ReplaceArgs, ScrubArgs, StatusArgs, WaitArgs, WaitKind,
};
use super::client::{Client, ClientError, Done};
use super::paths::Paths;
use super::wait::{Goal, Look, POLL, Progress, ScrubMark, Waiter};
use super::{
    CliError, Outcome, attach, clear_terminal, complain, offline, run, say, say_json, say_json_line,
    tell_warnings, text,
};
use crate::control::{
    Event, GpuDrill, Reply, Request, ScanKind, ScrubAction, Status, Verdict, is_healthy, verdict,
};
use crate::daemon::{clock, logging};
use std::io::{self, IsTerminal};
use std::process::ExitCode;
use std::time::Duration;
use tracing::level_filters::LevelFilter;

/// Time between two reports of `status --watch` and `events -f`.
const WATCH: Duration = Duration::from_secs(1);

/// Runs a command.
pub(super) fn run(cli: Cli) -> Outcome {
    let Cli { socket, patience, log_format, command } = cli;
    let patience = Duration::from_secs(patience.into());
    let has_its_own =
        matches!(&command, Command::Up(_) | Command::Serve(_) | Command::Attach(_) | Command::GpuHelper(_));
    if !has_its_own {
        logging::start(log_format.unwrap_or_default(), LevelFilter::WARN);
    }
    let connect = || Client::connect(socket.as_deref(), patience);
    let mut paths = Paths::default();
    match command {
        Command::Up(_) if socket.is_some() => {
            let message =
                "'calpe up' keeps its control socket in its directory: leave --socket away, or use --dir";
            Err(CliError::Usage(message.into()))
        }
        Command::Up(args) => run::up(args, log_format),
        Command::Serve(args) => run::serve(args, socket, log_format),
        Command::Create(args) => offline::create(args, connect),
        Command::Inspect(args) => offline::inspect(&args),
        Command::Check(args) => offline::check(&args, connect),
        Command::Bench(BenchCommand::Codec(args)) => offline::bench_codec(args),
        Command::Bench(BenchCommand::Hash(args)) => offline::bench_hash(&args),
        Command::Status(args) => status(connect(), &args),
        Command::Import(args) => import(connect()?, args),
        Command::Export(args) => {
            let request = Request::Export { array: args.name, force: args.force, dry_run: args.dry_run };
            change(connect()?, &request, &paths)
        }
        Command::Fail(args) => {
            let member = paths.member(args.member)?;
            change(connect()?, &Request::Fail { array: args.name, member, dry_run: args.dry_run }, &paths)
        }
        Command::Offline(args) => {
            let member = paths.member(args.member)?;
            change(connect()?, &Request::Offline { array: args.name, member, dry_run: args.dry_run }, &paths)
        }
        Command::Online(args) => online(connect()?, args),
        Command::Replace(args) => replace(connect()?, args),
        Command::Scrub(args) => scrub(connect()?, args),
        Command::Repair(args) => repair(connect()?, args),
        Command::Clear(args) => {
            let member = args.member.map(|member| paths.member(member)).transpose()?;
            change(connect()?, &Request::Clear { array: args.name, member, dry_run: args.dry_run }, &paths)
        }
        Command::Gpu(GpuCommand::Drill(args)) => {
            let drill = match args.kind {
                DrillKind::Error => GpuDrill::Error,
                DrillKind::Hang => GpuDrill::Hang,
            };
            change(connect()?, &Request::GpuDrill { drill, dry_run: args.dry_run }, &paths)
        }
        Command::GpuHelper(args) => run::gpu_helper(&args),
        Command::Attach(args) => attach::attach(args, socket, patience, log_format),
        Command::Detach(args) => attach::detach(&args),
        Command::Wait(args) => wait(connect()?, args),
        Command::Events(args) => events(connect()?, &args),
        Command::History(args) => history(connect()?, &args),
    }
}

fn change(mut client: Client, request: &Request, paths: &Paths) -> Outcome {
    let done = client.change(request).map_err(|error| paths.error(error))?;
    let (is_whole, failures) = (done.failures.is_empty(), done.failures.clone());
    tell(done, paths)?;
    failures.into_iter().for_each(|error| complain(&paths.error(error.into())));
    Ok(if is_whole { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn tell(done: Done, paths: &Paths) -> io::Result<()> {
    let warnings: Vec<_> = done.warnings.iter().map(|warning| paths.as_given(warning)).collect();
    tell_warnings(&warnings);
    say(&format!("{}\n", paths.as_given(&done.message)))
}

fn status(client: Result<Client, ClientError>, args: &StatusArgs) -> Outcome {
    let mut client = match client {
        Ok(client) => client,
        Err(error) if args.test => return Ok(cannot_tell(&error)),
        Err(error) => return Err(error.into()),
    };
    loop {
        let status = match client.status(args.name.as_deref()) {
            Ok(status) => status,
            Err(error) if args.test => return Ok(cannot_tell(&error)),
            Err(error) => return Err(error.into()),
        };
        let verdict = verdict(&status.arrays);
        match show_status(status, args) {
            Ok(()) => {}
            // The exit code is the answer, so it does not matter whether the text could be printed.
            Err(error) if args.test && error.kind() == io::ErrorKind::BrokenPipe => {
                return Ok(verdict.exit_code().into());
            }
            Err(error) if args.test => {
                complain(&CliError::Output(error));
                return Ok(Verdict::CannotTell.exit_code().into());
            }
            Err(error) => return Err(error.into()),
        }
        if !args.watch {
            return Ok(if args.test { verdict.exit_code().into() } else { ExitCode::SUCCESS });
        }
        std::thread::sleep(WATCH);
    }
}

fn show_status(mut status: Status, args: &StatusArgs) -> io::Result<()> {
    if args.watch && !args.json && io::stdout().is_terminal() {
        clear_terminal()?;
    }
    if args.json {
        status.arrays.retain(|array| !args.unhealthy || !is_healthy(array));
        return if args.watch { say_json_line(&status) } else { say_json(&status) };
    }
    say(&text::status(&status.arrays, args.name.as_deref(), args.unhealthy, args.verbose))?;
    say(&text::problems(&status.problems))?;
    say(&text::certificates(&status.certificates, clock::unix_seconds()))
}

fn cannot_tell(error: &ClientError) -> ExitCode {
    complain(error);
    Verdict::CannotTell.exit_code().into()
}

fn import(mut client: Client, args: ImportArgs) -> Outcome {
    let mut paths = Paths::default();
    let dirs = args.dirs.iter().map(|dir| paths.absolute(dir)).collect::<Result<Vec<_>, _>>()?;
    if args.all || args.array.is_some() {
        let ImportArgs { array, all, force, once, dry_run, .. } = args;
        return change(client, &Request::Import { array, all, dirs, force, once, dry_run }, &paths);
    }
    match client.ask(&Request::ListImportable { dirs }).map_err(|error| paths.error(error))? {
        Reply::Importable { arrays, warnings } => {
            let warnings: Vec<_> = warnings.iter().map(|warning| paths.as_given(warning)).collect();
            tell_warnings(&warnings);
            if args.json {
                say_json(&arrays)?;
            } else {
                say(&text::importable(&arrays))?;
            }
        }
        other => return Err(client.unexpected(&other).into()),
    }
    Ok(ExitCode::SUCCESS)
}

fn online(client: Client, args: OnlineArgs) -> Outcome {
    let mut paths = Paths::default();
    let request = Request::Online {
        array: args.which.name,
        member: paths.member(args.which.member)?,
        path: args.path.as_deref().map(|path| paths.absolute(path)).transpose()?,
        dry_run: args.which.dry_run,
    };
    change(client, &request, &paths)
}

fn replace(mut client: Client, args: ReplaceArgs) -> Outcome {
    let mut paths = Paths::default();
    let old = paths.member(args.old)?;
    let Some(new) = args.new else {
        let request = Request::CancelReplace { array: args.name, member: old, dry_run: args.dry_run };
        return change(client, &request, &paths);
    };
    let new = paths.absolute(&new)?;
    let request = Request::Replace {
        array: args.name.clone(),
        old,
        new: new.clone(),
        force: args.force,
        dry_run: args.dry_run,
    };
    tell(client.change(&request).map_err(|error| paths.error(error))?, &paths)?;
    if args.wait {
        return follow(client, &args.name, Goal::Replacement { new: new.display().to_string() }, &paths);
    }
    Ok(ExitCode::SUCCESS)
}

fn scrub(mut client: Client, args: ScrubArgs) -> Outcome {
    let action = match (args.pause, args.stop) {
        (true, _) => ScrubAction::Pause,
        (_, true) => ScrubAction::Stop,
        _ => ScrubAction::Start,
    };
    // The request for history reports a bad name itself.
    let since = scrub_mark(&mut client, &args.name);
    tell(
        client.change(&Request::Scrub { array: args.name.clone(), action, dry_run: args.dry_run })?,
        &Paths::default(),
    )?;
    if args.wait {
        return follow(client, &args.name, Goal::Scrub { since: since? }, &Paths::default());
    }
    Ok(ExitCode::SUCCESS)
}

fn repair(mut client: Client, args: RepairArgs) -> Outcome {
    tell(
        client.change(&Request::Repair { array: args.name.clone(), dry_run: args.dry_run })?,
        &Paths::default(),
    )?;
    if args.wait {
        return follow(client, &args.name, Goal::Repair, &Paths::default());
    }
    Ok(ExitCode::SUCCESS)
}

fn scrub_mark(client: &mut Client, name: &str) -> Result<ScrubMark, ClientError> {
    let unix = clock::unix_seconds();
    let status = client.status(Some(name))?;
    Ok(ScrubMark { unix, last: status.arrays.first().and_then(|array| array.last_scrub) })
}

fn wait(mut client: Client, args: WaitArgs) -> Outcome {
    let kinds = match args.types.as_slice() {
        [] => vec![ScanKind::Rebuild, ScanKind::Scrub, ScanKind::Repair],
        types => types.iter().map(|kind| scan_kind(*kind)).collect(),
    };
    let since = scrub_mark(&mut client, &args.name)?;
    follow(
        client,
        &args.name,
        Goal::Passes { kinds, are_named: !args.types.is_empty(), since },
        &Paths::default(),
    )
}

fn scan_kind(kind: WaitKind) -> ScanKind {
    match kind {
        WaitKind::Rebuild => ScanKind::Rebuild,
        WaitKind::Scrub => ScanKind::Scrub,
        WaitKind::Repair => ScanKind::Repair,
    }
}

/// Reads the status of the array again and again until the goal is decided.
fn follow(mut client: Client, name: &str, goal: Goal, paths: &Paths) -> Outcome {
    let mut waiter = Waiter::new(goal);
    let mut progress = Progress::new();
    loop {
        let status = client.status(Some(name)).inspect_err(|_| progress.clear())?;
        let Some(array) = status.arrays.first() else {
            progress.clear();
            return Err(CliError::Outcome(format!("array '{name}' is not there any more")));
        };
        match waiter.look(array) {
            Look::Running(scan) => {
                if let Some(scan) = scan {
                    progress.show(&scan)?;
                }
                std::thread::sleep(POLL);
            }
            Look::Succeeded(message) => {
                progress.clear();
                say(&format!("{}\n", paths.as_given(&message)))?;
                return Ok(ExitCode::SUCCESS);
            }
            Look::Failed(message) => {
                progress.clear();
                return Err(CliError::Outcome(paths.as_given(&message)));
            }
        }
    }
}

fn history(mut client: Client, args: &HistoryArgs) -> Outcome {
    match client.ask(&Request::History { array: args.name.clone() })? {
        Reply::Events { events, .. } => say_events(&events, args.json)?,
        other => return Err(client.unexpected(&other).into()),
    }
    Ok(ExitCode::SUCCESS)
}

fn say_events(events: &[Event], json: bool) -> io::Result<()> {
    for event in events {
        if json {
            say_json_line(event)?;
        } else {
            say(&(text::event_line(event) + "\n"))?;
        }
    }
    Ok(())
}

fn events(mut client: Client, args: &EventsArgs) -> Outcome {
    let mut since = 0;
    loop {
        match client.ask(&Request::Events { since })? {
            Reply::Events { events, next } => {
                say_events(&events, args.json)?;
                since = next;
            }
            other => return Err(client.unexpected(&other).into()),
        }
        if !args.follow {
            return Ok(ExitCode::SUCCESS);
        }
        std::thread::sleep(WATCH);
    }
}
