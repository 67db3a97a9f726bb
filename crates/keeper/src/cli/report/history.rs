//! A machine's recoveries, read from its events. Pure: events -> recoveries.
//!
//! a guest ends -> its recovery is open -> the next incarnation starts, and is sampled -> that one ends too
//!
//! A stop, a failure or a new keeper before the next start closes it as well: how long the machine then stood still says nothing of
//! Hearth. A domain that libvirt has ended is off until somebody starts it, so its clock starts then, as the keeper's own does.
//!
//! The newest recovery is also in the keeper's status, with exact times; `refine` takes them from there.

use hearth_api::{DumpState, EndCause, EventKind, EventRecord, MachineState, PhaseTime, Recovery, milliseconds_of};
use hearth_page::memory_plot::Held;
use hearth_recovery::rejuvenation;

use crate::cli::plan::median;

/// How one incarnation followed another.
#[derive(Clone, Debug, PartialEq)]
pub struct PastRecovery {
    /// The incarnation that ended.
    pub dead: u32,
    pub cause: EndCause,
    /// Crash message in its dump.
    pub panic: Option<String>,
    /// When it ended. RFC 3339.
    pub ended_at: String,
    /// The same, since 1970; of a domain that was off: when its next start began.
    pub ended_ms: f64,
    /// Time until the next guest ran. None: none did before a stop, a failure or another keeper.
    pub downtime_ms: Option<f64>,
    /// Whether the machine waited before that start: in a crash loop, or for what it lacked.
    pub waited: bool,
    pub warm: Option<bool>,
    /// In the order in which they ended.
    pub phases: Vec<PhaseTime>,
    pub kept_bytes: Option<u64>,
    pub released_bytes: Option<u64>,
    pub dump: Option<PastDump>,
    /// Time from the end until the next guest was ready, and the share of its boot's reads that came from memory.
    pub ready: Option<(f64, Option<f64>)>,
    pub samples: Vec<Sample>,
}

/// A dump, as far as it has come.
#[derive(Clone, Debug, PartialEq)]
pub struct PastDump {
    pub file: String,
    pub state: DumpState,
    /// Why it waits or is incomplete.
    pub why: Option<String>,
    /// Bytes in the file, if it is complete.
    pub bytes: Option<u64>,
    /// Time from the incarnation's end until the file was complete.
    pub complete_ms: Option<f64>,
}

/// Memory and reads at one moment of the living incarnation.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sample {
    /// Seconds from the end of the dead incarnation.
    pub second: f64,
    pub living_bytes: u64,
    pub dead_bytes: u64,
    pub limit_bytes: u64,
    /// Bytes read from memory and from the images since this recovery.
    pub warm_bytes: u64,
    pub image_bytes: u64,
}

/// A guest's pause for a move to another QEMU.
#[derive(Clone, Debug, PartialEq)]
pub struct Hop {
    pub at: String,
    pub from_version: String,
    pub version: String,
    pub pause_ms: f64,
}

#[derive(Clone, Debug, Default, PartialEq)]
pub struct History {
    pub recoveries: Vec<PastRecovery>,
    pub hops: Vec<Hop>,
}

impl PastRecovery {
    fn begin(record: &EventRecord, cause: EndCause, at_ms: f64) -> Self {
        Self {
            dead: record.incarnation,
            cause,
            panic: None,
            ended_at: record.time.clone(),
            ended_ms: at_ms,
            downtime_ms: None,
            waited: false,
            warm: None,
            phases: Vec::new(),
            kept_bytes: None,
            released_bytes: None,
            dump: None,
            ready: None,
            samples: Vec::new(),
        }
    }

    /// Downtime without a wait, by which recoveries are compared. None: there was a wait, or no next guest.
    pub fn downtime_without_wait_ms(&self) -> Option<f64> {
        self.downtime_ms.filter(|_| !self.waited)
    }

    /// The median downtime of earlier recoveries with the same cause and warmth.
    fn expected(&self, earlier: &[PastRecovery]) -> Option<f64> {
        let like = earlier.iter().filter(|one| (one.cause, one.warm) == (self.cause, self.warm));
        median(like.filter_map(Self::downtime_without_wait_ms).collect())
    }

    pub fn points(&self) -> Vec<Held> {
        let mib = |bytes: u64| bytes as f64 / (1 << 20) as f64;
        let held = |sample: &Sample| Held {
            second: sample.second,
            dead: mib(sample.dead_bytes),
            living: mib(sample.living_bytes),
        };
        self.samples.iter().map(held).collect()
    }
}

impl History {
    pub fn of(records: &[EventRecord]) -> Self {
        let mut reader = Reader::default();
        records.iter().for_each(|record| reader.take(record));
        reader.history
    }

    /// Takes the exact figures of the newest recovery from the status.
    pub fn refine(&mut self, known: &Recovery) {
        let Some(past) = self.recoveries.iter_mut().rfind(|past| past.dead + 1 == known.incarnation) else { return };
        past.downtime_ms = (known.duration_ms > 0.0).then_some(known.duration_ms);
        past.warm = Some(known.warm);
        past.phases.clone_from(&known.phases);
        past.kept_bytes = known.warm.then_some(known.kept_bytes);
        past.released_bytes = known.warm.then_some(known.released_bytes);
        if known.panic.is_some() {
            past.panic.clone_from(&known.panic);
        }
        if let Some(dump) = &known.dump {
            let bytes = (dump.state == DumpState::Complete).then_some(dump.written_bytes);
            let complete_ms = past.dump.as_ref().and_then(|past| past.complete_ms);
            past.dump = Some(PastDump {
                file: dump.file.clone(),
                state: dump.state,
                why: dump.why.clone(),
                bytes,
                complete_ms,
            });
        }
    }

    /// Expected and measured downtime of each recovery that has both ends and no wait between them.
    pub fn predictions(&self) -> Vec<(&PastRecovery, Option<f64>, f64)> {
        let past = self.recoveries.iter().enumerate();
        past.filter_map(|(number, past)| {
            Some((past, past.expected(&self.recoveries[..number]), past.downtime_without_wait_ms()?))
        })
        .collect()
    }

    /// Expected and measured pause of each hop: the median of the earlier ones.
    pub fn hop_predictions(&self) -> Vec<(&Hop, Option<f64>)> {
        let earlier = |number: usize| median(self.hops[..number].iter().map(|hop| hop.pause_ms).collect());
        self.hops.iter().enumerate().map(|(number, hop)| (hop, earlier(number))).collect()
    }
}

#[derive(Default)]
struct Reader {
    history: History,
    /// Whether later events may belong to the last recovery.
    is_open: bool,
    /// A crash's message precedes the name of its dump.
    crash_reason: Option<String>,
    /// Counters of the reads when the last incarnation began.
    read_before: (u64, u64),
}

impl Reader {
    fn take(&mut self, record: &EventRecord) {
        let Some(at_ms) = milliseconds_of(&record.time).map(|at| at as f64) else { return };
        self.take_dump(record, at_ms);
        match &record.event {
            EventKind::IncarnationEnded { cause } => self.ended(record, *cause, at_ms),
            EventKind::Rejuvenated { from_version, version, pause_ms, .. } => self.history.hops.push(Hop {
                at: record.time.clone(),
                from_version: from_version.clone(),
                version: version.clone(),
                pause_ms: *pause_ms,
            }),
            EventKind::Started { .. } => {
                // A new keeper's disks count from zero.
                self.read_before = (0, 0);
                // It may have been started at any time.
                self.is_open &= self.history.recoveries.last().is_some_and(|past| past.downtime_ms.is_some());
            }
            EventKind::StateChanged { to, .. } => self.state_changed(*to, at_ms),
            event => {
                if let Some(past) = self.history.recoveries.last_mut().filter(|_| self.is_open) {
                    past.take(event, record.incarnation, at_ms, &mut self.read_before);
                }
            }
        }
    }

    fn ended(&mut self, record: &EventRecord, cause: EndCause, at_ms: f64) {
        // No guest follows these.
        self.is_open = !matches!(cause, EndCause::OperatorStop | EndCause::GuestShutdown);
        if self.is_open {
            self.history.recoveries.push(PastRecovery::begin(record, cause, at_ms));
        }
    }

    fn state_changed(&mut self, to: MachineState, at_ms: f64) {
        let Some(past) = self.history.recoveries.last_mut().filter(|_| self.is_open) else { return };
        let is_off = past.cause == EndCause::QemuEnded && past.downtime_ms.is_none();
        match to {
            MachineState::Stopped if is_off => {}
            MachineState::Starting if is_off => past.ended_ms = at_ms,
            MachineState::Stopped | MachineState::Failed => self.is_open = false,
            _ => {}
        }
    }

    fn take_dump(&mut self, record: &EventRecord, at_ms: f64) {
        match &record.event {
            EventKind::CrashReason { message } => self.crash_reason = Some(message.clone()),
            EventKind::DumpStarted { file, .. } => {
                let panic = self.crash_reason.take();
                if let Some(past) = self.dumped_in(&record.machine, file) {
                    past.panic = panic;
                    past.dump = Some(dump(file, DumpState::Writing));
                }
            }
            EventKind::DumpComplete { file, bytes, .. } => {
                if let Some(past) = self.dumped_in(&record.machine, file) {
                    let complete_ms = Some(at_ms - past.ended_ms);
                    past.dump = Some(PastDump { complete_ms, bytes: Some(*bytes), ..dump(file, DumpState::Complete) });
                }
            }
            EventKind::DumpWaits { file, why } | EventKind::DumpIncomplete { file, why } => {
                if let Some(past) = self.dumped_in(&record.machine, file) {
                    let is_waiting = matches!(record.event, EventKind::DumpWaits { .. });
                    let state = if is_waiting { DumpState::Waiting } else { DumpState::Incomplete };
                    past.dump = Some(PastDump { why: Some(why.clone()), ..dump(file, state) });
                }
            }
            _ => {}
        }
    }

    /// The recovery from the guest whose dump is in this file, which has the machine's and the incarnation's number in its name:
    /// dumps queue, so it may be an earlier one.
    fn dumped_in(&mut self, machine: &str, file: &str) -> Option<&mut PastRecovery> {
        let name = file.rsplit('/').next()?.strip_prefix(machine)?.strip_prefix('-')?;
        let dead: u32 = name.split('-').next()?.parse().ok()?;
        self.history.recoveries.iter_mut().rfind(|past| past.dead == dead)
    }
}

pub(super) fn dump(file: &str, state: DumpState) -> PastDump {
    PastDump { file: file.to_owned(), state, why: None, bytes: None, complete_ms: None }
}

impl PastRecovery {
    /// Takes an event of the time in which this recovery is open.
    fn take(&mut self, event: &EventKind, incarnation: u32, at_ms: f64, read_before: &mut (u64, u64)) {
        let next = self.dead + 1;
        match event {
            EventKind::IncarnationStarted { warm, .. } if incarnation == next && self.downtime_ms.is_none() => {
                self.downtime_ms = Some(at_ms - self.ended_ms);
                self.warm = Some(*warm);
            }
            EventKind::CrashLoop { .. } | EventKind::StartWaits { .. } => self.waited = true,
            EventKind::Phase { phase, duration_ms } if !self.is_of_hop(phase) => self.phases.push(PhaseTime {
                phase: phase.clone(),
                started_ms: (at_ms - duration_ms - self.ended_ms).max(0.0),
                duration_ms: *duration_ms,
            }),
            EventKind::EmberKept { bytes, .. } => self.kept_bytes = Some(*bytes),
            EventKind::EmberSettled { released_bytes, .. } if self.released_bytes.is_none() => {
                self.released_bytes = Some(*released_bytes);
            }
            EventKind::Ready { hit_pct, .. } if self.ready.is_none() && incarnation == next => {
                self.ready = Some((at_ms - self.ended_ms, *hit_pct));
            }
            EventKind::MemoryHeld {
                living,
                resident_bytes,
                dead_bytes,
                limit_bytes,
                read_warm_bytes,
                read_image_bytes,
            } if *living == next => {
                let read = (*read_warm_bytes, *read_image_bytes);
                // The first sample of an incarnation is taken before its guest has read anything.
                if self.samples.is_empty() {
                    *read_before = read;
                }
                self.samples.push(Sample {
                    second: (at_ms - self.ended_ms) / 1e3,
                    living_bytes: *resident_bytes,
                    dead_bytes: *dead_bytes,
                    limit_bytes: *limit_bytes,
                    warm_bytes: read.0.saturating_sub(read_before.0),
                    image_bytes: read.1.saturating_sub(read_before.1),
                });
            }
            _ => {}
        }
    }

    /// A hop's phases are recorded like those of a recovery, but only while the guest runs.
    fn is_of_hop(&self, phase: &str) -> bool {
        self.downtime_ms.is_some() && rejuvenation::Phase::ALL.iter().any(|step| step.name() == phase)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(millis: u32, incarnation: u32, event: EventKind) -> EventRecord {
        let time = format!("2026-03-01T12:00:{:02}.{:03}Z", millis / 1000, millis % 1000);
        EventRecord { sequence: 1, time, machine: "web".into(), incarnation, event }
    }

    fn phase(phase: &str, duration_ms: f64) -> EventKind {
        EventKind::Phase { phase: phase.into(), duration_ms }
    }

    fn held(living: u32, resident_bytes: u64, warm: u64, image: u64) -> EventKind {
        EventKind::MemoryHeld {
            living,
            resident_bytes,
            dead_bytes: 7,
            limit_bytes: 100,
            read_warm_bytes: warm,
            read_image_bytes: image,
        }
    }

    fn panicked(at: u32, dead: u32) -> EventRecord {
        record(at, dead, EventKind::IncarnationEnded { cause: EndCause::Panic })
    }

    fn runs(at: u32, incarnation: u32) -> EventRecord {
        record(at, incarnation, EventKind::IncarnationStarted { generation: incarnation, warm: true })
    }

    #[test]
    fn one_recovery_has_its_phases_and_samples() {
        let (from_version, version) = ("7.2".to_owned(), "10".to_owned());
        let history = History::of(&[
            record(0, 1, held(1, 5, 0, 40)),
            panicked(10_000, 1),
            record(10_010, 1, phase("drain", 4.0)),
            record(10_200, 2, phase("launch", 150.0)),
            record(10_240, 2, held(2, 0, 0, 50)),
            runs(10_250, 2),
            record(11_250, 2, held(2, 9, 30, 60)),
            record(12_000, 2, phase("launch", 150.0)),
            record(12_500, 2, EventKind::Rejuvenated { generation: 3, from_version, version, pause_ms: 4.0 }),
        ]);
        let past = &history.recoveries[0];
        assert_eq!((past.dead, past.downtime_ms, past.warm), (1, Some(250.0), Some(true)));
        let phases: Vec<_> = past.phases.iter().map(|phase| (phase.phase.as_str(), phase.started_ms)).collect();
        assert_eq!(phases, [("drain", 6.0), ("launch", 50.0)], "the hop's launch is not the recovery's");
        let samples: Vec<_> = past
            .samples
            .iter()
            .map(|sample| (sample.second, sample.living_bytes, sample.warm_bytes, sample.image_bytes))
            .collect();
        assert_eq!(samples, [(0.24, 0, 0, 0), (1.25, 9, 30, 10)]);
        assert_eq!(history.hops.len(), 1);
    }

    /// In a crash loop the first guest's dump starts when the third one runs already.
    #[test]
    fn queued_dump_belongs_to_the_guest_that_it_shows() {
        let file = |dead: u32| format!("/srv/web-{dead}-2026.vmcore");
        let started = |dead| EventKind::DumpStarted { file: file(dead), level: 31, ram_pages: 9, pages: 3 };
        let reason = |message: &str| EventKind::CrashReason { message: message.into() };
        let history = History::of(&[
            panicked(1000, 1),
            runs(1200, 2),
            panicked(2000, 2),
            runs(2200, 3),
            record(3000, 3, reason("first")),
            record(3001, 3, started(1)),
            record(4000, 3, EventKind::DumpComplete { file: file(1), pages: 3, bytes: 12, duration_ms: 999.0 }),
            record(4500, 3, reason("second")),
            record(4501, 3, started(2)),
            record(5000, 3, EventKind::DumpWaits { file: file(2), why: "no space".into() }),
        ]);
        let past: Vec<_> = history
            .recoveries
            .iter()
            .map(|past| (past.panic.as_deref().unwrap(), past.dump.as_ref().unwrap()))
            .map(|(panic, dump)| (panic, dump.state, dump.why.as_deref(), dump.bytes, dump.complete_ms))
            .collect();
        let first = ("first", DumpState::Complete, None, Some(12), Some(3000.0));
        assert_eq!(past, [first, ("second", DumpState::Waiting, Some("no space"), None, None)]);
    }

    #[test]
    fn downtime_is_expected_from_earlier_recoveries_of_its_kind() {
        let reset = record(7000, 3, EventKind::IncarnationEnded { cause: EndCause::GuestReset });
        let history = History::of(&[
            panicked(1000, 1),
            runs(1200, 2),
            panicked(3000, 2),
            runs(3400, 3),
            reset,
            runs(7100, 4),
            panicked(9000, 4),
            runs(9250, 5),
        ]);
        let past: Vec<_> = history.predictions().iter().map(|(_, expected, measured)| (*expected, *measured)).collect();
        assert_eq!(past, [(None, 200.0), (Some(200.0), 400.0), (None, 100.0), (Some(300.0), 250.0)]);
    }

    fn state(at: u32, incarnation: u32, from: MachineState, to: MachineState) -> EventRecord {
        record(at, incarnation, EventKind::StateChanged { from, to })
    }

    fn keeper(at: u32, incarnation: u32) -> EventRecord {
        record(at, incarnation, EventKind::Started { pid: 1, version: "1".into() })
    }

    fn ready(at: u32, incarnation: u32) -> EventRecord {
        let event = EventKind::Ready { why: "probe".into(), blocks: 9, held_blocks: 9, hit_pct: None };
        record(at, incarnation, event)
    }

    #[test]
    fn recovery_ends_with_a_stop_a_failure_or_its_keeper() {
        use MachineState::{Failed, Recovering, Starting, Stopped};
        let check = |end: Vec<EventRecord>| {
            let before = vec![panicked(1000, 1), state(1001, 1, MachineState::Running, Recovering)];
            let later = vec![
                record(50_000, 2, phase("launch", 150.0)),
                record(50_100, 2, held(2, 9, 30, 60)),
                runs(50_200, 2),
                ready(51_000, 2),
            ];
            let history = History::of(&[before, end.clone(), later].concat());
            let past = &history.recoveries[0];
            let found = (past.downtime_ms, past.phases.len(), past.samples.len(), past.ready);
            assert_eq!(found, (None, 0, 0, None), "{end:?}");
            assert_eq!(history.predictions().len(), 0);
        };
        let waits = record(1002, 1, EventKind::CrashLoop { delay_s: 9, next_start: String::new() });
        check(vec![waits, state(2000, 1, Recovering, Stopped), keeper(49_000, 1)]);
        check(vec![state(2000, 1, Recovering, Failed), keeper(49_000, 1)]);
        check(vec![keeper(49_000, 1)]);
        check(vec![state(2000, 1, Recovering, Stopped), state(49_000, 1, Stopped, Starting)]);
    }

    #[test]
    fn only_the_next_incarnation_counts() {
        let ended = |at, incarnation, cause| record(at, incarnation, EventKind::IncarnationEnded { cause });
        let history = History::of(&[
            panicked(1000, 1),
            runs(1200, 2),
            record(1300, 2, held(2, 9, 0, 0)),
            // Another keeper takes it over.
            keeper(2000, 2),
            record(2300, 2, held(2, 9, 0, 0)),
            ended(3000, 2, EndCause::OperatorStop),
            keeper(40_000, 2),
            runs(41_000, 3),
            record(41_100, 3, held(3, 9, 30, 60)),
            ready(42_000, 3),
        ]);
        let past = &history.recoveries[0];
        assert_eq!((past.downtime_ms, past.samples.len(), past.ready), (Some(200.0), 2, None));
        assert_eq!(history.recoveries.len(), 1);
        let lost = History::of(&[panicked(1000, 1), runs(9000, 3)]);
        assert_eq!(lost.recoveries[0].downtime_ms, None, "the start of incarnation 2 is missing");
    }

    /// `virsh shutdown` on Friday, `virsh start` on Monday.
    #[test]
    fn time_in_which_a_domain_is_off_is_no_downtime() {
        use MachineState::{Running, Starting, Stopped};
        let history = History::of(&[
            record(1000, 1, EventKind::IncarnationEnded { cause: EndCause::QemuEnded }),
            record(1010, 1, phase("drain", 4.0)),
            state(1020, 1, Running, Stopped),
            state(50_000, 1, Stopped, Starting),
            record(50_300, 2, phase("attach", 200.0)),
            runs(50_400, 2),
            ready(52_000, 2),
        ]);
        let past = &history.recoveries[0];
        assert_eq!((past.downtime_ms, past.ready), (Some(400.0), Some((2000.0, None))));
        assert_eq!(past.phases.iter().map(|phase| phase.started_ms).collect::<Vec<_>>(), [6.0, 100.0]);
    }

    #[test]
    fn waits_are_not_predicted() {
        let waits = record(3001, 2, EventKind::CrashLoop { delay_s: 9, next_start: String::new() });
        let history = History::of(&[
            panicked(1000, 1),
            runs(1200, 2),
            panicked(3000, 2),
            waits,
            runs(12_000, 3),
            panicked(20_000, 3),
            runs(20_300, 4),
        ]);
        assert_eq!(history.recoveries[1].downtime_ms, Some(9000.0));
        let past: Vec<_> = history.predictions().iter().map(|(_, expected, measured)| (*expected, *measured)).collect();
        assert_eq!(past, [(None, 200.0), (Some(200.0), 300.0)]);
    }

    #[test]
    fn a_stop_is_no_recovery() {
        let stop = EventKind::IncarnationEnded { cause: EndCause::OperatorStop };
        assert_eq!(History::of(&[record(0, 1, stop)]), History::default());
    }
}
