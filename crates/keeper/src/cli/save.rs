//! `hearth save`: its arguments, and what they ask for.

use std::path::PathBuf;

use clap::Args;
use hearth_api::{FreezeRequest, SaveRequest, SaveThen, ScanRequest};

use super::object_store::place;
use super::{CliError, Context, Exit, NameArgument, WaitArgument, order};
use crate::config::seconds;

#[derive(Debug, Args)]
pub struct SaveArguments {
    #[command(flatten)]
    machine: NameArgument,
    /// Folder or address to save to; must not exist.
    ///
    /// An address is s3://BUCKET/PREFIX; gs, az and abfs work too, see docs/object-store.md. The keeper needs the
    /// store's credentials.
    #[arg(long, short, value_name = "FOLDER", required_unless_present = "cancel")]
    output: Option<PathBuf>,
    /// Let the guest continue after the save (default).
    #[arg(long = "continue", conflicts_with = "stop")]
    go_on: bool,
    /// Stop the machine after the save.
    #[arg(long)]
    stop: bool,
    /// Compress memory with zstd: smaller, but slower to save.
    #[arg(long)]
    compress: bool,
    /// For pages that are also on the disks, store only their location.
    ///
    /// The snapshot is smaller, but slower to save.
    #[arg(long)]
    dedup_disk: bool,
    /// Scan which pages the guest uses, to prefetch them at restore.
    ///
    /// Without a value: 1s,5. Pages used in many rounds come first. The scan costs the guest about a microsecond for
    /// each page that it touches in a round.
    #[arg(long, value_name = "PERIOD,ROUNDS", num_args = 0..=1, default_missing_value = "1s,5", value_parser = scan_plan)]
    scan: Option<ScanRequest>,
    /// Freeze the guest's file systems for the moment of the save.
    ///
    /// The file systems on the snapshot's disks are then consistent. The guest's agent may take PATIENCE for it, 10s
    /// without a value. This needs `guest_agent = true` in machine.toml and qemu-guest-agent in the guest. Writes in
    /// the guest wait meanwhile.
    #[arg(long, value_name = "PATIENCE", num_args = 0..=1, default_missing_value = "10s", value_parser = freeze_patience)]
    freeze: Option<FreezeRequest>,
    /// Cancel the running save.
    #[arg(long, conflicts_with_all = ["output", "go_on", "stop", "compress", "dedup_disk", "scan", "freeze"])]
    cancel: bool,
    #[command(flatten)]
    wait: WaitArgument,
}

pub fn save(context: &mut Context<'_>, arguments: SaveArguments) -> Result<Exit, CliError> {
    let SaveArguments { machine, output, go_on, stop, compress, dedup_disk, scan, freeze, cancel, wait } = arguments;
    match output.filter(|_| !cancel) {
        // Only cancelling needs no folder.
        None => order::cancel_save(context, &machine.name, !wait.no_wait),
        Some(folder) => {
            let then = if stop && !go_on { SaveThen::Stop } else { SaveThen::Continue };
            let request = SaveRequest { folder: place(folder), then, compress, dedup_disk, scan, freeze };
            order::save(context, &machine.name, &request, !wait.no_wait)
        }
    }
}

/// Parses `1s,5`: duration and number of rounds.
fn scan_plan(text: &str) -> Result<ScanRequest, String> {
    let hint = || "write PERIOD,ROUNDS, such as 1s,5 or 500ms,10: 50ms to 10m, 1 to 1000 rounds".to_owned();
    let (period, rounds) = text.split_once(',').ok_or_else(hint)?;
    let plan = milliseconds(period)
        .zip(rounds.trim().parse().ok())
        .map(|(period_ms, rounds)| ScanRequest { period_ms, rounds });
    plan.filter(ScanRequest::is_sane).ok_or_else(hint)
}

/// Parses `10s`.
fn freeze_patience(text: &str) -> Result<FreezeRequest, String> {
    let patience = milliseconds(text).map(|patience_ms| FreezeRequest { patience_ms });
    patience.filter(FreezeRequest::is_sane).ok_or_else(|| "write a time from 1s to 10m".to_owned())
}

/// Parses `50ms`, or seconds and larger units.
fn milliseconds(text: &str) -> Option<u64> {
    match text.trim().strip_suffix("ms") {
        Some(number) => number.trim().parse().ok(),
        None => seconds(text).and_then(|seconds| seconds.checked_mul(1000)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scan_plan_is_period_and_count() {
        let check = |text: &str, expect: Option<(u64, u32)>| {
            let plan = scan_plan(text).ok().map(|plan| (plan.period_ms, plan.rounds));
            assert_eq!(plan, expect, "{text}");
        };
        check("1s,5", Some((1000, 5)));
        check("500ms, 10", Some((500, 10)));
        check("10m,1", Some((600_000, 1)));
        for text in
            ["", "1s", "5", "1,5", "1s,0", "1s,1001", "49ms,5", "11m,5", "1s,5,5", "99999999999999999999s,1", "web"]
        {
            check(text, None);
        }
    }

    #[test]
    fn patience_with_an_agent_has_bounds() {
        let check = |text: &str, expect: Option<u64>| {
            assert_eq!(freeze_patience(text).ok().map(|freeze| freeze.patience_ms), expect, "{text}");
        };
        check("10s", Some(10_000));
        check("1500ms", Some(1500));
        check("10m", Some(600_000));
        for text in ["", "10", "999ms", "11m", "0s", "99999999999999999999s", "web"] {
            check(text, None);
        }
    }
}
