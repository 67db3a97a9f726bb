//! `hearth rejuvenate --plan`: predicts the cost of rejuvenating n machines at a time from earlier hops and reboots on
//! this host.
//!
//! events of all machines -> hops and reboots, each with the number that ran in parallel -> terms of the model ->
//! prediction and measurement
//!
//! A keeper knows when a guest starts to boot, but not when it serves again. The operator gives the boot time.

use std::num::NonZero;
use std::time::Duration;

use hearth_api::{EventKind, EventRecord, milliseconds_of};
use hearth_recovery::rejuvenation::downtime::{Contended, Line, Model, Span, by_company, error_pct};
use serde::Serialize;

use super::text::{Side, milliseconds, table};
use super::{CliError, Context, Exit, report};
use crate::event_log::read_file;
use crate::runtime_root::RuntimeRoot;

/// Downtimes of hops and reboots on this host, each with the number that ran in parallel.
#[derive(Debug, Default)]
pub struct History {
    hops: Vec<(f64, f64)>,
    reboots: Vec<(f64, f64)>,
}

#[derive(Debug, Serialize)]
struct Plan {
    hops: usize,
    reboots: usize,
    boot_ms: f64,
    alpha: f64,
    /// Number of guests that boot without competing; `reboot_os` is constant up to it.
    processors: usize,
    resume: Term,
    reboot_os: Option<Term>,
    predictions: Vec<Prediction>,
}

/// `start_ms` + `slope_ms` * n.
#[derive(Clone, Copy, Debug, Serialize)]
struct Term {
    start_ms: f64,
    slope_ms: f64,
}

#[derive(Debug, Serialize)]
struct Prediction {
    n: usize,
    d_w_ms: f64,
    d_w_measured_ms: Option<f64>,
    d_c_ms: Option<f64>,
    d_c_measured_ms: Option<f64>,
    r_ms: Option<f64>,
}

impl History {
    /// `boot`: time from a guest's first instruction to its service.
    pub fn of(root: &RuntimeRoot, boot: Duration) -> Self {
        let (mut hops, mut reboots) = (Vec::new(), Vec::new());
        for name in root.names() {
            // A machine whose events cannot be read is skipped.
            let records = read_file(&root.machine(&name)).unwrap_or_default();
            add(&records, boot.as_secs_f64() * 1e3, &mut hops, &mut reboots);
        }
        Self { hops: by_company(&hops), reboots: by_company(&reboots) }
    }

    /// Predicted pause of each guest if n hop at a time; none if unknown.
    pub fn warm_ms(&self, n: usize) -> Option<f64> {
        Line::through(&self.hops).map(|resume| resume.at(n as f64))
    }

    fn plan(&self, machines: usize, processors: usize, boot: Duration, alpha: f64) -> Option<Plan> {
        let resume = Line::through(&self.hops)?;
        let reboot_os = Contended::through(&self.reboots, processors as f64);
        let model = reboot_os.map(|reboot_os| Model { resume, reboot_os, alpha });
        let predict = |n: usize| Prediction {
            n,
            d_w_ms: resume.at(n as f64),
            d_w_measured_ms: measured(&self.hops, n),
            d_c_ms: model.map(|model| model.cold_ms(n as f64)),
            d_c_measured_ms: measured(&self.reboots, n),
            r_ms: model.map(|model| model.gained_ms(n as f64)),
        };
        Some(Plan {
            hops: self.hops.len(),
            reboots: self.reboots.len(),
            boot_ms: boot.as_secs_f64() * 1e3,
            alpha,
            processors,
            resume: resume.into(),
            reboot_os: reboot_os.map(|reboot_os| reboot_os.line.into()),
            predictions: counts(machines).into_iter().map(predict).collect(),
        })
    }
}

impl From<Line> for Term {
    fn from(line: Line) -> Self {
        Self { start_ms: line.start, slope_ms: line.slope }
    }
}

/// 1, 2, 4 and so on, and all of them.
fn counts(machines: usize) -> Vec<usize> {
    let mut counts: Vec<usize> =
        std::iter::successors(Some(1), |n| Some(n * 2)).take_while(|&n| n < machines.max(1)).collect();
    counts.push(machines.max(1));
    counts
}

/// The median of those with the same number in parallel.
fn measured(points: &[(f64, f64)], n: usize) -> Option<f64> {
    median(points.iter().filter(|point| point.0 == n as f64).map(|point| point.1).collect())
}

pub(super) fn median(mut values: Vec<f64>) -> Option<f64> {
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    let upper = *values.get(middle)?;
    Some(if values.len() % 2 == 1 { upper } else { (values[middle - 1] + upper) / 2.0 })
}

/// The history in one machine's events.
fn add(records: &[EventRecord], boot_ms: f64, hops: &mut Vec<Span>, reboots: &mut Vec<Span>) {
    let mut phases_ms = 0.0;
    for record in records {
        let Some(at_ms) = milliseconds_of(&record.time).map(|at| at as f64) else { continue };
        match &record.event {
            EventKind::Phase { duration_ms, .. } => phases_ms += duration_ms,
            EventKind::Rejuvenated { pause_ms, .. } => {
                hops.push(Span { from_ms: at_ms - phases_ms, to_ms: at_ms, downtime_ms: *pause_ms });
                phases_ms = 0.0;
            }
            EventKind::Request { .. }
            | EventKind::RejuvenationDue { .. }
            | EventKind::RejuvenationFailed { .. }
            | EventKind::IncarnationStarted { .. } => phases_ms = 0.0,
            _ => {}
        }
    }
    reboots.extend(report::recoveries(records).iter().filter_map(|past| {
        let downtime_ms = past.downtime_without_wait_ms()? + boot_ms;
        Some(Span { from_ms: past.ended_ms, to_ms: past.ended_ms + downtime_ms, downtime_ms })
    }));
}

pub fn show(context: &mut Context<'_>, boot: Duration, alpha: f64) -> Result<Exit, CliError> {
    let machines = context.root.names().len();
    let processors = std::thread::available_parallelism().map_or(1, NonZero::get);
    let Some(plan) = History::of(&context.root, boot).plan(machines, processors, boot, alpha) else {
        return Err(CliError::NoHistory { root: context.root.path().to_owned() });
    };
    if context.json {
        context.write_json(&plan)?;
    } else {
        context.write_line(&page(&plan))?;
    }
    Ok(Exit::Done)
}

fn page(plan: &Plan) -> String {
    let term = |term: Term| format!("{:.1} ms {:+.1} ms * n", term.start_ms, term.slope_ms);
    let mut lines = vec![
        format!("from {} hops and {} reboots on this host", plan.hops, plan.reboots),
        format!("  resume(n)     {}", term(plan.resume)),
    ];
    lines.extend(
        plan.reboot_os.map(|reboot_os| {
            format!("  reboot_os(n)  {}, n at least {} (processors)", term(reboot_os), plan.processors)
        }),
    );
    lines.push(String::new());
    let head = ["N", "PAUSE", "MEASURED", "IF REBOOTED", "MEASURED", "GAINED"].map(str::to_owned).to_vec();
    let cell = |value: Option<f64>| value.map_or_else(|| "-".to_owned(), milliseconds);
    let rows = plan.predictions.iter().map(|prediction| {
        let Prediction { n, d_w_ms, d_w_measured_ms, d_c_ms, d_c_measured_ms, r_ms } = *prediction;
        let numbers = [Some(d_w_ms), d_w_measured_ms, d_c_ms, d_c_measured_ms, r_ms];
        std::iter::once(n.to_string()).chain(numbers.map(cell)).collect()
    });
    let rows: Vec<Vec<String>> = std::iter::once(head).chain(rows).collect();
    lines.extend(table(&[Side::Right; 6], &rows));
    if plan.boot_ms == 0.0 && plan.reboots > 0 {
        lines.push(String::new());
        lines.push("reboots are counted until the guest begins to boot; add its boot time with --boot TIME".to_owned());
    }
    lines.join("\n")
}

/// A finished run, compared with its prediction.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Verdict {
    at_a_time: usize,
    predicted_ms: f64,
    /// The median.
    measured_ms: f64,
    error_pct: f64,
}

impl Verdict {
    /// None if no guest was paused, or there was no prediction.
    pub fn of(at_a_time: usize, predicted_ms: Option<f64>, pauses_ms: Vec<f64>) -> Option<Self> {
        let (predicted_ms, measured_ms) = (predicted_ms?, median(pauses_ms)?);
        Some(Self { at_a_time, predicted_ms, measured_ms, error_pct: error_pct(predicted_ms, measured_ms) })
    }

    pub fn sentence(&self) -> String {
        format!(
            "median pause {}; the plan predicted {}, {:.0} % off",
            milliseconds(self.measured_ms),
            milliseconds(self.predicted_ms),
            self.error_pct
        )
    }
}

#[cfg(test)]
mod tests {
    use hearth_api::EndCause;

    use super::*;

    fn record(second: u32, event: EventKind) -> EventRecord {
        record_of(1, second, event)
    }

    fn record_of(incarnation: u32, second: u32, event: EventKind) -> EventRecord {
        let time = format!("2026-03-01T12:00:{second:02}.000Z");
        EventRecord { sequence: 1, time, machine: "web".into(), incarnation, event }
    }

    fn hop(second: u32, took_ms: f64, pause_ms: f64) -> [EventRecord; 3] {
        let (from_version, version) = ("7.2.0".to_owned(), "10.0.2".to_owned());
        [
            record(second, EventKind::Request { verb: "rejuvenate".into() }),
            record(second, EventKind::Phase { phase: "launch".into(), duration_ms: took_ms }),
            record(second, EventKind::Rejuvenated { generation: 2, from_version, version, pause_ms }),
        ]
    }

    fn history(machines: &[Vec<EventRecord>], boot_ms: f64) -> History {
        let (mut hops, mut reboots) = (Vec::new(), Vec::new());
        machines.iter().for_each(|records| add(records, boot_ms, &mut hops, &mut reboots));
        History { hops: by_company(&hops), reboots: by_company(&reboots) }
    }

    #[test]
    fn hops_at_the_same_time_are_company() {
        let one = [hop(10, 500.0, 3.0), hop(20, 500.0, 4.0)].concat();
        let other = hop(20, 2000.0, 6.0).to_vec();
        let history = history(&[one, other], 0.0);
        assert_eq!(history.hops, [(1.0, 3.0), (2.0, 4.0), (2.0, 6.0)]);
        assert_eq!([1, 4].map(|n| history.warm_ms(n).unwrap().round()), [3.0, 9.0]);
        assert_eq!(history.plan(2, 1, Duration::ZERO, 0.0).unwrap().reboot_os.map(|term| term.start_ms), None);
    }

    #[test]
    fn plan_counts_reboots_outside_crash_loops() {
        let ended = |number, second| record_of(number, second, EventKind::IncarnationEnded { cause: EndCause::Panic });
        let started =
            |number, second| record_of(number, second, EventKind::IncarnationStarted { generation: 2, warm: true });
        let waits = record_of(2, 21, EventKind::CrashLoop { delay_s: 9, next_start: String::new() });
        let records = vec![started(1, 1), ended(1, 10), started(2, 12), ended(2, 20), waits, started(3, 30)];
        let history = history(&[[records, hop(40, 1.0, 4.0).to_vec()].concat()], 5000.0);
        assert_eq!(history.reboots, [(1.0, 7000.0)]);
        let plan = history.plan(4, 2, Duration::from_secs(5), 0.5).unwrap();
        let words = "from 1 hops and 1 reboots on this host
  resume(n)     4.0 ms +0.0 ms * n
  reboot_os(n)  7000.0 ms +0.0 ms * n, n at least 2 (processors)

N   PAUSE  MEASURED  IF REBOOTED  MEASURED  GAINED
1  4.0 ms    4.0 ms       3.50 s    7.00 s  3.50 s
2  4.0 ms         -       3.50 s         -  3.50 s
4  4.0 ms         -       3.50 s         -  3.50 s";
        assert_eq!(page(&plan), words, "\n{}", page(&plan));
    }

    #[test]
    fn nothing_is_planned_from_nothing() {
        assert!(History::default().plan(3, 1, Duration::ZERO, 0.0).is_none());
        assert_eq!(History::default().warm_ms(1), None);
    }

    #[test]
    fn a_run_is_held_against_its_plan() {
        assert_eq!(Verdict::of(2, Some(3.0), Vec::new()), None);
        assert_eq!(Verdict::of(2, None, vec![4.0]), None);
        let verdict = Verdict::of(2, Some(3.0), vec![4.0, 9.0, 2.0]).unwrap();
        assert_eq!(verdict, Verdict { at_a_time: 2, predicted_ms: 3.0, measured_ms: 4.0, error_pct: 25.0 });
        let words = "median pause 4.0 ms; the plan predicted 3.0 ms, 25 % off";
        assert_eq!(verdict.sentence(), words);
    }

    #[test]
    fn counts_double_up_to_all() {
        assert_eq!([0, 1, 3, 8].map(counts), [vec![1], vec![1], vec![1, 2, 3], vec![1, 2, 4, 8]]);
    }
}
