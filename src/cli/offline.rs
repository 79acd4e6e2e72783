//! The commands that need no daemon: create, inspect, check, bench.

use super::args::{BenchCodecArgs, BenchHashArgs, CheckArgs, CreateArgs, InspectArgs};
use super::wait::Progress;
use super::{CliError, Outcome, say, say_json};
use crate::codec::bench;
use crate::daemon::check;
use crate::daemon::clock;
use crate::daemon::create::{CreatePlan, CreateRequest, default_checksum};
use crate::daemon::report::Meters;
use crate::daemon::superblocks;
use crate::member::{Access, Device};
use crate::units::HumanSize;
use std::process::ExitCode;

/// `calpe create`.
pub(super) fn create(args: CreateArgs) -> Outcome {
    let chunk = u32::try_from(args.chunk.0).map_err(|_| {
        CliError::Outcome(format!(
            "a chunk of {} is not possible: use 4 MiB or less",
            HumanSize(args.chunk.0)
        ))
    })?;
    let checksum = args.checksum.unwrap_or(default_checksum(!args.no_log));
    let plan = CreatePlan::new(CreateRequest {
        name: args.name.clone(),
        data: args.data,
        parity: args.parity,
        chunk,
        checksum,
        log: !args.no_log,
        volume: args.volume,
        volume_bytes: args.size.map(|size| size.0),
        members: args.members,
        force: args.force,
    })?;
    if args.dry_run {
        say(&format!("would create:\n{}\n", plan.describe().join("\n")))?;
        return Ok(ExitCode::SUCCESS);
    }
    for note in plan.notes() {
        eprintln!("calpe: {note}");
    }
    let created = plan.execute(clock::unix_seconds())?;
    let geometry = created.geometry;
    let resync = if created.needs_resync { "; its parity is computed after the first import" } else { "" };
    say(&format!(
        "created array '{}' ({}): {} data + {} parity, checksum {checksum}, volume of {}{resync}\n",
        args.name,
        created.array,
        geometry.data,
        geometry.parity,
        HumanSize(geometry.volume_bytes)
    ))?;
    Ok(ExitCode::SUCCESS)
}

/// `calpe inspect`. Fails when there is no usable superblock, after having told all that is known.
pub(super) fn inspect(args: &InspectArgs) -> Outcome {
    let device = Device::open(&args.member, Access::ReadOnly)?;
    let inspection = superblocks::inspect(&device);
    if args.json {
        say_json(&inspection)?;
    } else {
        say(&inspection.to_string())?;
    }
    match inspection.error {
        None => Ok(ExitCode::SUCCESS),
        Some(error) => Err(CliError::Outcome(format!("{}: {error}", args.member.display()))),
    }
}

/// `calpe check`. Fails unless all is proved good, after having told all that is known.
pub(super) fn check(args: &CheckArgs) -> Outcome {
    let mut bar = (!args.json).then(Progress::new);
    let mut shown = Ok(());
    let mut meters = Meters::default();
    let result = check::check(&args.members, &mut |activity| {
        meters.observe(clock::now(), std::slice::from_ref(activity));
        if let (Some(bar), Ok(())) = (&mut bar, &shown) {
            shown = bar.show(&meters.scan(activity));
        }
    });
    if let Some(bar) = &bar {
        bar.clear();
    }
    shown?;
    let report = result?;
    if args.json {
        say_json(&report)?;
    } else {
        say(&report.to_string())?;
    }
    if report.good { Ok(ExitCode::SUCCESS) } else { Err(CliError::Outcome(report.verdict())) }
}

/// `calpe bench hash`.
pub(super) fn bench_hash(args: &BenchHashArgs) -> Outcome {
    let report = bench::run_hash(args.seconds);
    if args.json {
        say_json(&report)?;
    } else {
        say(&report.render())?;
    }
    Ok(ExitCode::SUCCESS)
}

/// `calpe bench codec`.
pub(super) fn bench_codec(args: BenchCodecArgs) -> Outcome {
    let mut options = bench::BenchOptions { seconds: args.seconds, ..bench::BenchOptions::default() };
    if !args.engines.is_empty() {
        options.engines = args.engines;
    }
    if !args.geometries.is_empty() {
        options.geometries = args.geometries;
    }
    if !args.blocks.is_empty() {
        options.block_bytes = args
            .blocks
            .iter()
            .map(|block| usize::try_from(block.0))
            .collect::<Result<_, _>>()
            .map_err(|_| CliError::Outcome("a block of this size does not fit in memory".into()))?;
    }
    let report = bench::run(&options);
    if args.json {
        say_json(&report)?;
    } else {
        say(&report.render())?;
    }
    Ok(ExitCode::SUCCESS)
}
