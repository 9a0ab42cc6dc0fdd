//! Measures one load of Allow requests.

use crate::commands::bench::args::BenchArgs;
use crate::commands::bench::error::Error;
use crate::commands::bench::plan::{Keys, Load};
use crate::commands::bench::rig::Rig;
use crate::commands::bench::run::{command_line, drive_measured};
use crate::commands::bench::stats::Round;
use crate::measurement::figures::Latency;

/// Measures `load` and records its figures under its name.
pub fn load(rig: &mut Rig, args: &BenchArgs, load: &Load, round: &mut Round) -> Result<(), Error> {
    let name = load.to_string();
    rig.start(load.backend)?;
    if matches!(load.keys, Keys::Uniform | Keys::Zipf) {
        rig.fill(load.backend)?;
    }
    let server = rig.server(load.backend)?;
    let (servers, address) = ([server.process.id()], &server.address);
    let mut command_line = command_line(args, load.keys, rig.buckets());
    command_line += &format!(" --target {address} --connections {}", load.connections);
    match load.pace {
        None => command_line += &format!(" --in-flight {}", load.in_flight),
        Some(share) => {
            let peak = round.get(&format!("{}.rate", load.peak())).copied().unwrap_or_default();
            // `--rate` must be above 0.
            command_line += &format!(" --rate {}", (peak * share).max(1.0));
        }
    }
    let stores = rig.store(load.backend).into_iter().collect();
    let (tally, before, after) = drive_measured(&command_line, &servers, stores)?;
    let decided = tally.decided_in_time as f64;
    after.record(before, decided, &name, round);
    let latency = Latency::of(&tally.latency);
    let share = |part: u64| part as f64 / tally.counts.requests().max(1) as f64;
    let figures = [
        ("rate", Some(decided / args.seconds)),
        ("p50_us", latency.p50_us),
        ("p99_us", latency.p99_us),
        ("p99_9_us", latency.p99_9_us),
        ("granted", Some(share(tally.counts.granted))),
        ("failed", Some(share(tally.counts.failed() + tally.counts.shed + tally.counts.degraded))),
    ];
    for (figure, value) in figures {
        round.extend(value.map(|value| (format!("{name}.{figure}"), value)));
    }
    Ok(())
}
