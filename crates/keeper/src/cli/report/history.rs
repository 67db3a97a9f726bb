//! A machine's recoveries, read from its events. Pure: events -> recoveries.
//!
//! The newest recovery is also in the keeper's status, with exact times; `refine` takes them from there.

use hearth_api::{DumpState, EndCause, EventKind, EventRecord, PhaseTime, Recovery, milliseconds_of};
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
    pub(super) ended_ms: f64,
    /// Time until the next guest ran. None: it did not, or no event says so.
    pub downtime_ms: Option<f64>,
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
    /// The median downtime of earlier recoveries with the same cause and warmth.
    fn expected(&self, earlier: &[PastRecovery]) -> Option<f64> {
        let like = earlier.iter().filter(|one| (one.cause, one.warm) == (self.cause, self.warm));
        median(like.filter_map(|one| one.downtime_ms).collect())
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

    /// Expected and measured downtime of each recovery that has both ends.
    pub fn predictions(&self) -> Vec<(&PastRecovery, Option<f64>, f64)> {
        let past = self.recoveries.iter().enumerate();
        past.filter_map(|(number, past)| Some((past, past.expected(&self.recoveries[..number]), past.downtime_ms?)))
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
            // A new keeper's disks count from zero.
            EventKind::Started { .. } => self.read_before = (0, 0),
            event => {
                let read_before = &mut self.read_before;
                if let Some(past) = self.history.recoveries.last_mut() {
                    past.take(event, record.incarnation, at_ms, read_before);
                } else if let EventKind::MemoryHeld { read_warm_bytes, read_image_bytes, .. } = event {
                    *read_before = (*read_warm_bytes, *read_image_bytes);
                }
            }
        }
    }

    fn ended(&mut self, record: &EventRecord, cause: EndCause, at_ms: f64) {
        // No guest follows these.
        if matches!(cause, EndCause::OperatorStop | EndCause::GuestShutdown) {
            return;
        }
        self.history.recoveries.push(PastRecovery {
            dead: record.incarnation,
            cause,
            panic: None,
            ended_at: record.time.clone(),
            ended_ms: at_ms,
            downtime_ms: None,
            warm: None,
            phases: Vec::new(),
            kept_bytes: None,
            released_bytes: None,
            dump: None,
            ready: None,
            samples: Vec::new(),
        });
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
    fn take(&mut self, event: &EventKind, incarnation: u32, at_ms: f64, read_before: &mut (u64, u64)) {
        match event {
            EventKind::IncarnationStarted { warm, .. } if self.downtime_ms.is_none() => {
                self.downtime_ms = Some(at_ms - self.ended_ms);
                self.warm = Some(*warm);
            }
            EventKind::Phase { phase, duration_ms } if !self.is_of_hop(phase) => self.phases.push(PhaseTime {
                phase: phase.clone(),
                started_ms: (at_ms - duration_ms - self.ended_ms).max(0.0),
                duration_ms: *duration_ms,
            }),
            EventKind::EmberKept { bytes, .. } => self.kept_bytes = Some(*bytes),
            EventKind::EmberSettled { released_bytes, .. } if self.released_bytes.is_none() => {
                self.released_bytes = Some(*released_bytes);
            }
            EventKind::Ready { hit_pct, .. } if self.ready.is_none() && incarnation > self.dead => {
                self.ready = Some((at_ms - self.ended_ms, *hit_pct));
            }
            EventKind::MemoryHeld {
                living,
                resident_bytes,
                dead_bytes,
                limit_bytes,
                read_warm_bytes,
                read_image_bytes,
            } => {
                let read = (*read_warm_bytes, *read_image_bytes);
                // The first sample of an incarnation is taken before its guest has read anything.
                if *living <= self.dead || self.samples.is_empty() {
                    *read_before = read;
                }
                if *living > self.dead {
                    self.samples.push(Sample {
                        second: (at_ms - self.ended_ms) / 1e3,
                        living_bytes: *resident_bytes,
                        dead_bytes: *dead_bytes,
                        limit_bytes: *limit_bytes,
                        warm_bytes: read.0.saturating_sub(read_before.0),
                        image_bytes: read.1.saturating_sub(read_before.1),
                    });
                }
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

    #[test]
    fn a_stop_is_no_recovery() {
        let stop = EventKind::IncarnationEnded { cause: EndCause::OperatorStop };
        assert_eq!(History::of(&[record(0, 1, stop)]), History::default());
    }
}
