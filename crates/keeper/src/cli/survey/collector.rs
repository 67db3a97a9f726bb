//! The collector: looks at all machines when somebody asks, and keeps what it needs for rates and events.
//!
//! survey -> one thread a machine, never two -> wait a little -> all machines, those that do not answer with their last status
//!
//! Nothing is asked of a keeper while nobody asks for a survey. Ten readers cost as much as one: a survey that is young enough
//! is given to the next one, too.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use hearth_api::{EventKind, EventRecord, rfc3339};

use super::rates::{Rates, Reading};
use super::{Listed, PATIENCE, attached, look, names};
use crate::client::Client;
use crate::host_reload::Record;
use crate::runtime_root::RuntimeRoot;

/// A survey that is younger than this is good for another reader.
const FRESH: Duration = Duration::from_millis(900);
/// Time that a survey waits for keepers. They answer within milliseconds, but those of a busy host may take a second.
const SURVEY_PATIENCE: Duration = Duration::from_millis(500);
/// A look that takes longer will not come back: it asks for status and events.
const LOOK_PATIENCE: Duration = PATIENCE.saturating_mul(2);
/// Events of a machine that are kept.
const EVENTS_KEPT: usize = 20;
/// Snapshots of a machine that are kept.
const SNAPSHOTS_KEPT: usize = 5;

pub struct Collector {
    root: RuntimeRoot,
    known: Mutex<BTreeMap<String, Known>>,
    /// A thread has looked at its machine.
    looked: Condvar,
    /// The last survey. One is made at a time.
    last: Mutex<Option<(Instant, Arc<Survey>)>>,
}

/// All machines at one moment.
#[derive(Clone, Debug)]
pub struct Survey {
    /// RFC 3339, UTC.
    pub taken_at: String,
    pub machines: Vec<Machine>,
}

/// One machine at the moment of a survey.
#[derive(Clone, Debug)]
pub struct Machine {
    pub listed: Listed,
    /// Present if its keeper did not answer in time; `listed` is then older.
    pub silent_for: Option<Duration>,
    /// Whether it is a domain of libvirt.
    pub attached: bool,
    /// Rates of its disks, by name.
    pub rates: BTreeMap<String, Rates>,
    /// Its last events, oldest first.
    pub events: Vec<EventRecord>,
    /// Its last saves: time and place, oldest first.
    pub snapshots: Vec<(String, String)>,
}

/// What is known of a machine.
#[derive(Default)]
struct Known {
    /// None: it was not looked at yet.
    listed: Option<Listed>,
    /// When its keeper last answered, or was found not to be there.
    answered: Option<Instant>,
    /// A thread looks at it since then.
    looking_since: Option<Instant>,
    /// The last look found a keeper that does not answer.
    silent: bool,
    before: Option<Reading>,
    now: Option<Reading>,
    log: Log,
}

/// A machine's events, as far as they were read.
#[derive(Clone, Debug, Default)]
struct Log {
    /// The keeper that was asked.
    keeper: u32,
    sequence: u64,
    events: VecDeque<EventRecord>,
    snapshots: VecDeque<(String, String)>,
}

impl Collector {
    pub fn new(root: RuntimeRoot) -> Arc<Self> {
        Arc::new(Self { root, known: Mutex::default(), looked: Condvar::new(), last: Mutex::default() })
    }

    /// All machines now, or within the last second.
    pub fn survey(self: &Arc<Self>) -> Arc<Survey> {
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, survey)) = last.as_ref().filter(|(at, _)| at.elapsed() < FRESH) {
            return survey.clone();
        }
        let survey = Arc::new(self.look_at_all());
        *last = Some((Instant::now(), survey.clone()));
        survey
    }

    /// The same, with all of `PATIENCE` for each keeper: for readers that come too seldom to see the answer in the next survey.
    pub fn patient_survey(self: &Arc<Self>) -> Survey {
        let survey = self.survey();
        let is_pending = |known: &mut BTreeMap<String, Known>| known.values().any(Known::may_answer);
        let waited = self.looked.wait_timeout_while(self.known(), LOOK_PATIENCE, is_pending);
        let (known, _) = waited.unwrap_or_else(PoisonError::into_inner);
        let machine = |it: &Machine| Some(known.get(&it.listed.name)?.shown(&it.listed.name, it.attached));
        Survey { taken_at: rfc3339(SystemTime::now()), machines: survey.machines.iter().filter_map(machine).collect() }
    }

    fn look_at_all(self: &Arc<Self>) -> Survey {
        let (record, attached) = (Arc::new(Record::of_this_host()), attached(&self.root));
        let names: BTreeSet<_> = names(&self.root, record.as_ref().as_ref()).union(&attached).cloned().collect();
        let begun = Instant::now();
        let mut known = self.known();
        known.retain(|name, known| names.contains(name) || known.looking_since.is_some());
        for name in &names {
            let machine = known.entry(name.clone()).or_default();
            if machine.looking_since.is_none() {
                machine.looking_since = Some(begun);
                self.begin_look(machine, name, &record);
            }
        }
        // Only those whose look began now: one that hangs is waited for once in its whole patience.
        let is_pending = |known: &mut BTreeMap<String, Known>| {
            names.iter().any(|name| known.get(name).is_some_and(|it| it.looking_since == Some(begun)))
        };
        let waited = self.looked.wait_timeout_while(known, SURVEY_PATIENCE, is_pending);
        let (known, _) = waited.unwrap_or_else(PoisonError::into_inner);
        let machine = |name: &String| known.get(name).map(|it| it.shown(name, attached.contains(name)));
        Survey { taken_at: rfc3339(SystemTime::now()), machines: names.iter().filter_map(machine).collect() }
    }

    fn begin_look(self: &Arc<Self>, machine: &mut Known, name: &str, record: &Arc<Option<Record>>) {
        let (collector, name, record) = (self.clone(), name.to_owned(), record.clone());
        let mut log = machine.log.clone();
        let look = move || {
            let listed = look(&collector.root, record.as_ref().as_ref(), name.clone());
            if let Some(status) = &listed.status {
                log.read(&Client::new(collector.root.api_socket(&name)).with_patience(PATIENCE), status.keeper.pid);
            }
            if let Some(known) = collector.known().get_mut(&name) {
                known.found(listed, log);
            }
            collector.looked.notify_all();
        };
        if let Err(error) = std::thread::Builder::new().name("look".to_owned()).spawn(look) {
            tracing::warn!(%error, "cannot start a thread to look at a machine");
            machine.looking_since = None;
        }
    }

    fn known(&self) -> MutexGuard<'_, BTreeMap<String, Known>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Known {
    fn found(&mut self, listed: Listed, log: Log) {
        let now = Instant::now();
        self.looking_since = None;
        self.log = log;
        self.silent = listed.silent;
        if listed.silent && self.listed.is_some() {
            // What it said last is more than nothing.
            return;
        }
        self.answered = Some(now);
        let reading = listed.status.clone().map(|status| Reading { at: now, status });
        self.before = std::mem::replace(&mut self.now, reading);
        self.listed = Some(listed);
    }

    /// A look is under way that has not taken too long.
    fn may_answer(&self) -> bool {
        self.looking_since.is_some_and(|since| since.elapsed() < LOOK_PATIENCE)
    }

    fn shown(&self, name: &str, attached: bool) -> Machine {
        let unseen = || Listed {
            name: name.to_owned(),
            why: Some("the keeper has not answered yet".to_owned()),
            silent: true,
            ..Listed::default()
        };
        let listed = self.listed.clone().unwrap_or_else(unseen);
        let is_late = self.silent || self.looking_since.is_some() && !self.may_answer();
        Machine {
            silent_for: is_late.then(|| self.answered.map_or(SURVEY_PATIENCE, |at| at.elapsed())),
            attached,
            rates: self.rates(),
            events: self.log.events.iter().cloned().collect(),
            snapshots: self.log.snapshots.iter().cloned().collect(),
            listed,
        }
    }

    fn rates(&self) -> BTreeMap<String, Rates> {
        let (Some(before), Some(now)) = (&self.before, &self.now) else { return BTreeMap::new() };
        if !before.leads_to(now) {
            return BTreeMap::new();
        }
        let disks = now.status.disks.iter();
        disks.filter_map(|disk| Some((disk.name.clone(), before.rates(now, &disk.name)?))).collect()
    }
}

impl Log {
    /// Reads what is new. A keeper that does not answer has nothing new.
    fn read(&mut self, client: &Client, keeper: u32) {
        if self.keeper != keeper {
            // The log goes on under the next keeper, unless its folder was removed.
            *self = Self { keeper, ..Self::default() };
        }
        let Ok(records) = client.events(self.sequence) else { return };
        for record in records {
            self.sequence = self.sequence.max(record.sequence);
            if let EventKind::Saved { folder, .. } = &record.event {
                push(&mut self.snapshots, SNAPSHOTS_KEPT, (record.time.clone(), folder.clone()));
            }
            push(&mut self.events, EVENTS_KEPT, record);
        }
    }
}

fn push<T>(list: &mut VecDeque<T>, limit: usize, item: T) {
    if list.len() == limit {
        list.pop_front();
    }
    list.push_back(item);
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;

    use super::*;
    use crate::cli::host::web::metrics_text;
    use crate::cli::survey::fake::Keepers;

    #[test]
    fn machine_that_hangs_holds_up_no_other() {
        let keepers = Keepers::start(&["db", "web"]);
        let root = keepers.root();
        let folder = root.machine("hung");
        std::fs::create_dir(&folder).unwrap();
        let _listener = UnixListener::bind(folder.join("api.sock")).unwrap();
        let lock = std::fs::File::create(folder.join("keeper.lock")).unwrap();
        lock.lock().unwrap();
        let collector = Collector::new(root);
        for round in 0..4 {
            let begun = Instant::now();
            let survey = collector.survey();
            assert!(begun.elapsed() < SURVEY_PATIENCE * 3, "{:?}", begun.elapsed());
            let names: Vec<_> = survey.machines.iter().map(|machine| machine.listed.name.as_str()).collect();
            assert_eq!(names, ["db", "hung", "web"]);
            let answers: Vec<_> = survey.machines.iter().map(|machine| machine.listed.status.is_some()).collect();
            assert_eq!(answers, [true, false, true]);
            assert!(survey.machines[0].silent_for.is_none() && (round < 3 || survey.machines[1].silent_for.is_some()));
            std::thread::sleep(FRESH);
        }
    }

    #[test]
    fn keeper_that_stops_answering_is_shown_with_its_last_status() {
        let keepers = Keepers::start(&["web"]);
        let collector = Collector::new(keepers.root());
        assert!(collector.survey().machines[0].silent_for.is_none());
        keepers.hang("web");
        std::thread::sleep(FRESH);
        let machine = collector.patient_survey().machines[0].clone();
        assert!(machine.silent_for.is_some() && machine.listed.status.is_some());
    }

    #[test]
    fn slow_keeper_is_not_silent() {
        let keepers = Keepers::start(&["web"]);
        keepers.delay("web", SURVEY_PATIENCE * 3 / 2);
        let collector = Collector::new(keepers.root());
        assert!(collector.survey().machines[0].silent_for.is_none());
        for _ in 0..2 {
            let asked_before = Instant::now();
            let metrics = metrics_text(&collector);
            assert!(metrics.contains("hearth_keeper_up{machine=\"web\"} 1\n"), "{metrics}");
            assert!(metrics.contains("hearth_keeper_silent{machine=\"web\"} 0\n"), "{metrics}");
            assert!(collector.known()["web"].answered > Some(asked_before), "what it said last may be old");
            std::thread::sleep(FRESH);
        }
    }

    #[test]
    fn readers_within_a_second_share_a_survey() {
        let keepers = Keepers::start(&["web"]);
        let collector = Collector::new(keepers.root());
        assert!(Arc::ptr_eq(&collector.survey(), &collector.survey()));
    }
}
