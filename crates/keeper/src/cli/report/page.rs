//! The report's page. Pure: history and status -> HTML. Texts of the guest reach it only through parts that escape them.

use hearth_api::{EventRecord, MachineStatus};
use hearth_page::memory_plot::{self, MemoryPlot};
use hearth_page::timeline::{self, Phase};
use hearth_page::{Page, Run, figure, paragraphs, preformatted, table};

use super::history::{History, PastDump, PastRecovery};
use crate::cli::text::{bytes, milliseconds, percent};

/// Number of recoveries that are shown in detail.
pub const DETAILED: usize = 5;
/// Number of rows of a table, at most.
pub const LISTED: usize = 50;
/// Length of a memory plot, at least; it goes on to twice the last moment that matters.
const PLOT_S_MIN: f64 = 30.0;

const RECOVERIES: &str = "Each line is the end of one guest, newest first. Downtime: until the next guest runs its first \
                          instruction; the boot of that guest comes after it. None: the machine was stopped, failed or lost its \
                          keeper before. A domain's time off does not count. Better: shorter, and warm.";
const PHASES: &str = "The keeper's steps, on a time axis that starts when the old guest ended. Steps that overlap ran at the same \
                      time. Steps after the next guest's start, such as writing the dump, cost no downtime. Better: shorter bars.";
const CRASH: &str = "What the kernel said, from its dump.";
const MEMORY: &str = "Memory of dead guests, which serves reads and is dumped, and of the living guest. Dashed: the limit for both \
                      together. Better: below the limit, and the dead guests' memory falling as it is used or dumped.";
const READS: &str = "What the guest has read from its disks since this recovery: from the dead guest's memory, and from the images. \
                     Better: a larger share from memory.";
const PREDICTED: &str = "Predicted: the median of this machine's earlier recoveries with the same cause and of the same kind, or of its \
                         earlier moves to another QEMU. The first of its kind has no prediction; a recovery that waited, in a \
                         crash loop or for what it lacked, is left out. Better: short, and no longer than predicted.";
const DISKS: &str = "What guests have read and written since the keeper started. Better: a larger share from memory.";

/// The page. `status`: None if no keeper answers.
pub fn html(name: &str, records: &[EventRecord], status: Option<&MachineStatus>, made: &str) -> String {
    let mut history = History::of(records);
    if let Some(recovery) = status.and_then(|status| status.last_recovery.as_ref()) {
        history.refine(recovery);
    }
    let mut page = Page::new(&format!("Recoveries of {name}"), &lead(name, &history, status));
    page.section("Recoveries", RECOVERIES, &overview(&history));
    for past in history.recoveries.iter().rev().take(DETAILED) {
        page.section(&title(past), "", &details(past));
    }
    page.section("Predicted and measured downtime", PREDICTED, &predictions(&history));
    page.section("Disks", DISKS, &status.map_or_else(String::new, disks));
    page.section("Where these figures come from", "", &sources(records, &history, status));
    page.html(&format!("Hearth {}, {made}", env!("CARGO_PKG_VERSION")))
}

fn lead(name: &str, history: &History, status: Option<&MachineStatus>) -> String {
    let now = status.map_or_else(
        || format!("No keeper of {name} answers at the moment."),
        |status| format!("{name} is {}, incarnation {}.", status.state.name(), status.incarnation),
    );
    let count = match history.recoveries.len() {
        0 => "Its events show no recovery".to_owned(),
        1 => "Its events show 1 recovery".to_owned(),
        many => format!("Its events show {many} recoveries"),
    };
    let hops = match history.hops.len() {
        0 => String::new(),
        1 => " and 1 move to another QEMU".to_owned(),
        many => format!(" and {many} moves to another QEMU"),
    };
    format!("{now} {count}{hops}.")
}

/// `2026-03-01 12:00:00`, of a time that `rfc3339` wrote.
fn moment(time: &str) -> String {
    match (time.get(..10), time.get(11..19)) {
        (Some(day), Some(clock)) => format!("{day} {clock}"),
        _ => time.to_owned(),
    }
}

fn dash(text: Option<String>) -> String {
    text.unwrap_or_else(|| "–".to_owned())
}

fn warmth(past: &PastRecovery) -> &'static str {
    match past.warm {
        Some(true) => "warm",
        Some(false) => "cold",
        None => "–",
    }
}

fn overview(history: &History) -> String {
    let row = |past: &PastRecovery| {
        vec![
            moment(&past.ended_at),
            format!("{} → {}", past.dead, past.dead + 1),
            past.cause.words().to_owned(),
            dash(past.downtime_ms.map(milliseconds)),
            warmth(past).to_owned(),
            dash(past.kept_bytes.map(bytes)),
            dash(past.dump.as_ref().map(|dump| dump.state.name().to_owned())),
        ]
    };
    let rows: Vec<_> = history.recoveries.iter().rev().take(LISTED).map(row).collect();
    table(&["ended (UTC)", "incarnations", "because", "downtime", "kind", "kept in memory", "dump"], &rows)
}

fn title(past: &PastRecovery) -> String {
    let downtime =
        past.downtime_ms.map_or("no guest followed at once".to_owned(), |ms| format!("{} down", milliseconds(ms)));
    format!("{} UTC: {} (incarnation {}), {downtime}", moment(&past.ended_at), past.cause.words(), past.dead)
}

fn details(past: &PastRecovery) -> String {
    let run = if past.warm == Some(true) { Run::Warm } else { Run::Cold };
    let phase = |phase: &hearth_api::PhaseTime| Phase {
        name: phase.phase.clone(),
        start_ms: phase.started_ms,
        duration_ms: phase.duration_ms,
    };
    let mut phases: Vec<Phase> = past.phases.iter().map(phase).collect();
    phases.sort_by(|one, other| one.start_ms.total_cmp(&other.start_ms));
    [
        paragraphs(&facts(past)),
        past.panic.as_deref().map_or_else(String::new, |panic| figure("Crash message", CRASH, &preformatted(panic))),
        figure("Phases", PHASES, &timeline::draw_bars(run, &phases)),
        figure("Memory over time", MEMORY, &memory(past)),
        figure("Reads from memory and from the disks", READS, &reads(past)),
    ]
    .concat()
}

fn facts(past: &PastRecovery) -> Vec<String> {
    let kept = past.kept_bytes.map(|kept| {
        let released = past
            .released_bytes
            .map_or_else(String::new, |released| format!("; {} were released at once", bytes(released)));
        match kept {
            0 => format!("No disk blocks were kept in the dead guest's memory{released}."),
            _ => format!("Disk blocks kept in the dead guest's memory: {}{released}.", bytes(kept)),
        }
    });
    let ready = past.ready.map(|(after_ms, hit_pct)| {
        let hits =
            hit_pct.map_or_else(String::new, |hits| format!("; {hits:.1} % of its boot's reads came from memory"));
        format!("The next guest was ready {} after the old one ended{hits}.", milliseconds(after_ms))
    });
    [kept, ready, past.dump.as_ref().map(dump_line)].into_iter().flatten().collect()
}

fn dump_line(dump: &PastDump) -> String {
    let size = dump.bytes.map_or_else(String::new, |size| format!(", {}", bytes(size)));
    let after = dump.complete_ms.map_or_else(String::new, |ms| format!(", {} after the guest ended", milliseconds(ms)));
    let why = dump.why.as_ref().map_or_else(String::new, |why| format!(": {why}"));
    format!("Dump {}, {}{size}{after}{why}.", dump.file, dump.state.name())
}

fn memory(past: &PastRecovery) -> String {
    let marks: Vec<(f64, &'static str)> = [
        (past.downtime_ms, "guest runs"),
        (past.ready.map(|(after_ms, _)| after_ms), "ready"),
        (past.dump.as_ref().and_then(|dump| dump.complete_ms), "dump complete"),
    ]
    .into_iter()
    .filter_map(|(ms, what)| Some((ms? / 1e3, what)))
    .collect();
    let end_s = marks.iter().map(|mark| mark.0 * 2.0).fold(PLOT_S_MIN, f64::max);
    let mut points = past.points();
    points.retain(|held| held.second <= end_s);
    // A mark beyond the last sample would be drawn at a wrong moment.
    let last_s = points.last().map_or(0.0, |held| held.second);
    let limit_mib =
        past.samples.iter().map(|sample| sample.limit_bytes).max().unwrap_or_default() as f64 / (1 << 20) as f64;
    let marks = marks.into_iter().filter(|mark| mark.0 <= last_s).collect();
    memory_plot::draw(&MemoryPlot { points, limit_mib, x_label: "seconds since the old guest ended", marks })
}

/// A row for a sample about twice as late as the one before, and for the last one. None if nothing was read.
fn reads(past: &PastRecovery) -> String {
    if past.samples.iter().all(|sample| sample.warm_bytes + sample.image_bytes == 0) {
        return String::new();
    }
    let mut rows: Vec<Vec<String>> = Vec::new();
    let mut next_s = 0.0;
    for (number, sample) in past.samples.iter().enumerate() {
        let is_last = number + 1 == past.samples.len();
        if sample.second < next_s && !is_last {
            continue;
        }
        next_s = sample.second * 2.0;
        let (warm, image) = (sample.warm_bytes, sample.image_bytes);
        rows.push(vec![format!("{:.1} s", sample.second), bytes(warm), bytes(image), share(warm, image)]);
    }
    table(&["after", "from memory", "from the disks", "share from memory"], &rows)
}

/// Share of reads from memory. None of nothing.
fn share(warm: u64, image: u64) -> String {
    dash((warm + image > 0).then(|| percent(warm, warm + image)))
}

fn predictions(history: &History) -> String {
    let row = |what: String, at: &str, expected: Option<f64>, measured: f64| {
        let off = expected.filter(|expected| *expected > 0.0).map(|expected| (measured - expected) / expected * 100.0);
        vec![
            moment(at),
            what,
            dash(expected.map(milliseconds)),
            milliseconds(measured),
            dash(off.map(|off| format!("{off:+.0} %"))),
        ]
    };
    let recoveries = history.predictions().into_iter().map(|(past, expected, measured)| {
        row(format!("{}, {}", past.cause.words(), warmth(past)), &past.ended_at, expected, measured)
    });
    let hops = history.hop_predictions().into_iter().map(|(hop, expected)| {
        let what = format!("moved from QEMU {} to {}", hop.from_version, hop.version);
        row(what, &hop.at, expected, hop.pause_ms)
    });
    let mut rows: Vec<_> = recoveries.chain(hops).collect();
    rows.sort_by(|one, other| other[0].cmp(&one[0]));
    rows.truncate(LISTED);
    table(&["when (UTC)", "what", "predicted", "measured", "difference"], &rows)
}

fn disks(status: &MachineStatus) -> String {
    let row = |disk: &hearth_api::DiskStatus| {
        let (warm, image) = (disk.read_warm_bytes, disk.read_image_bytes);
        vec![disk.name.clone(), bytes(warm), bytes(image), share(warm, image), bytes(disk.written_bytes)]
    };
    let rows: Vec<_> = status.disks.iter().map(row).collect();
    table(&["disk", "read from memory", "read from the image", "share from memory", "written"], &rows)
}

fn sources(records: &[EventRecord], history: &History, status: Option<&MachineStatus>) -> String {
    let listed = match history.recoveries.len() + history.hops.len() {
        0..=LISTED => String::new(),
        _ => format!("The tables list the {LISTED} newest; details are shown for the {DETAILED} newest recoveries."),
    };
    let since = match records.first() {
        Some(first) if first.sequence > 1 => {
            format!(" The events go back to {} UTC; older ones are no longer kept.", moment(&first.time))
        }
        _ => String::new(),
    };
    let from = match status {
        Some(_) => "the machine's events and its keeper's status",
        None => "the machine's events alone, because no keeper answers",
    };
    paragraphs(&[
        format!("The figures are from {from}.{since}"),
        listed,
        "Memory and reads are sampled every second while a guest is young, and at growing intervals later. Between two samples a \
         line is straight because nothing is known. Each keeper counts reads from zero."
            .to_owned(),
        "A keeper knows when a guest starts. It knows when the guest's services answer only if a readiness probe is configured \
         (remount.ready)."
            .to_owned(),
    ])
}

#[cfg(test)]
mod tests {
    use hearth_api::{DumpState, EndCause, EventKind};

    use super::*;
    use crate::cli::report::history::Sample;

    fn past() -> PastRecovery {
        let history = History::of(&events(&[
            (0, 1, EventKind::IncarnationEnded { cause: EndCause::Panic }),
            (200, 2, EventKind::IncarnationStarted { generation: 2, warm: true }),
        ]));
        history.recoveries[0].clone()
    }

    fn events(of: &[(u32, u32, EventKind)]) -> Vec<EventRecord> {
        let record = |(at_ms, incarnation, event): &(u32, u32, EventKind)| EventRecord {
            sequence: 1,
            time: format!("2026-03-01T12:00:{:02}.{:03}Z", at_ms / 1000, at_ms % 1000),
            machine: "web".into(),
            incarnation: *incarnation,
            event: event.clone(),
        };
        of.iter().map(record).collect()
    }

    #[test]
    fn text_from_the_guest_is_escaped_everywhere() {
        let evil = "</pre><script>alert('x')</script>\u{1b}[2J";
        // A file's name has no slash.
        let file = format!("/srv/web-1-{}.vmcore", evil.replace('/', ""));
        let records = events(&[
            (0, 1, EventKind::IncarnationEnded { cause: EndCause::Panic }),
            (100, 1, EventKind::Phase { phase: evil.into(), duration_ms: 3.0 }),
            (200, 2, EventKind::IncarnationStarted { generation: 2, warm: true }),
            (300, 2, EventKind::CrashReason { message: evil.into() }),
            (301, 2, EventKind::DumpStarted { file: file.clone(), level: 31, ram_pages: 2, pages: 1 }),
            (302, 2, EventKind::DumpWaits { file, why: evil.into() }),
            (
                400,
                2,
                EventKind::Rejuvenated {
                    generation: 3,
                    from_version: evil.into(),
                    version: evil.into(),
                    pause_ms: 1.0,
                },
            ),
        ]);
        let html = html(evil, &records, None, evil);
        assert!(!html.contains("<script") && !html.contains("</pre><s") && !html.contains('\u{1b}'), "{html}");
        assert!(html.matches("&lt;script&gt;").count() >= 8, "{html}");
        assert_eq!(html.matches("<pre").count(), html.matches("</pre>").count());
    }

    #[test]
    fn every_figure_says_what_would_be_better() {
        for text in [RECOVERIES, PHASES, MEMORY, READS, PREDICTED, DISKS] {
            assert!(text.contains("Better:"), "{text}");
        }
    }

    #[test]
    fn machine_without_recoveries_has_a_page_that_says_so() {
        let page = html("web", &events(&[(0, 1, EventKind::Started { pid: 1, version: "1".into() })]), None, "now");
        assert!(page.contains("No keeper of web answers at the moment. Its events show no recovery."), "{page}");
        assert!(!page.contains("<svg") && !page.contains("<table"), "nothing is drawn from nothing");
    }

    #[test]
    fn memory_plot_ends_where_samples_end() {
        let sample = |second| Sample {
            second,
            living_bytes: 1 << 20,
            dead_bytes: 2 << 20,
            limit_bytes: 4 << 20,
            warm_bytes: 0,
            image_bytes: 0,
        };
        let dump =
            PastDump { complete_ms: Some(900_000.0), ..super::super::history::dump("web-1-x", DumpState::Complete) };
        let past = PastRecovery { samples: vec![sample(0.2), sample(1.2), sample(25.0)], dump: Some(dump), ..past() };
        let svg = memory(&past);
        assert!(svg.contains("guest runs") && !svg.contains("dump complete"), "{svg}");
    }

    #[test]
    fn a_row_of_reads_for_each_doubling_and_the_last() {
        let sample = |number: u32| Sample {
            second: f64::from(number),
            living_bytes: 0,
            dead_bytes: 0,
            limit_bytes: 0,
            warm_bytes: 3 << 20,
            image_bytes: 1 << 20,
        };
        let past = PastRecovery { samples: (1..=10).map(sample).collect(), ..past() };
        let html = reads(&past);
        for part in ["<td>1.0 s", "<td>2.0 s", "<td>4.0 s", "<td>8.0 s", "<td>10.0 s", "75.0 %"] {
            assert!(html.contains(part), "{part}: {html}");
        }
        assert!(!html.contains("<td>3.0 s"));
    }
}
