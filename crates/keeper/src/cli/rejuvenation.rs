//! `hearth rejuvenate`: one machine, or all of them.
//!
//! all: machines with a running QEMU -> queue -> N workers, each: request, then events until it is decided -> progress
//! -> table
//!
//! The first failure stops the queue by default; machines already in progress are finished.

use std::collections::VecDeque;
use std::path::PathBuf;
use std::sync::mpsc::{Sender, channel};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use clap::Args;
use hearth_api::{ApiError, EndCause, ErrorWord, EventKind, RejuvenateRequest};
use serde::Serialize;
use serde_json::json;

use super::plan::{self, History, Verdict};
use super::text::{Side, milliseconds, table};
use super::{CliError, Context, Exit, WaitArgument, absolute, order};
use crate::check::life;
use crate::client::{Client, ClientError};
use crate::config::seconds;
use crate::machine::GUEST_DIED_WITH_QEMU;
use crate::runtime_root::RuntimeRoot;

#[derive(Debug, Args)]
pub struct RejuvenateArguments {
    /// Name of the machine.
    #[arg(required_unless_present_any = ["all", "plan"], conflicts_with_all = ["all", "plan"])]
    #[arg(add = super::complete::machines())]
    name: Option<String>,
    /// QEMU program to switch to (default: the configured one).
    ///
    /// It stays in use until the keeper ends.
    #[arg(long, value_name = "PATH")]
    qemu: Option<PathBuf>,
    /// Rejuvenate all running machines that support it.
    ///
    /// With --json: one object per line as each machine finishes. If a plan could be made beforehand, the last line is
    /// a `verdict` on it.
    #[arg(long, conflicts_with = "no_wait")]
    all: bool,
    /// Maximum number of machines handled in parallel.
    #[arg(long, value_name = "N", default_value_t = 1, conflicts_with_all = ["name", "plan"], value_parser = clap::value_parser!(u16).range(1..=256))]
    parallel: u16,
    /// Minimum time between two starts, such as 30s, 5m or 1h.
    #[arg(long, value_name = "TIME", default_value = "0s", conflicts_with_all = ["name", "plan"], value_parser = time)]
    stagger: Duration,
    /// Continue with the other machines after a failure.
    #[arg(long, conflicts_with_all = ["name", "plan"])]
    keep_going: bool,
    /// Only predict the cost, from earlier hops and reboots here.
    #[arg(long, conflicts_with_all = ["all", "qemu", "no_wait"])]
    plan: bool,
    /// Boot time of a guest, for --plan.
    #[arg(long, value_name = "TIME", default_value = "0s", conflicts_with_all = ["all", "name"], value_parser = time)]
    boot: Duration,
    /// Elapsed share of a guest's reboot interval, for --plan.
    ///
    /// A number from 0 to 1: a reboot now saves this share of the next one.
    #[arg(long, default_value_t = 0.0, conflicts_with_all = ["all", "name"], value_parser = share)]
    alpha: f64,
    #[command(flatten)]
    wait: WaitArgument,
}

pub(super) fn time(text: &str) -> Result<Duration, String> {
    seconds(text).map(Duration::from_secs).ok_or_else(|| "write a number with s, m, h or d, for example 30s".to_owned())
}

fn share(text: &str) -> Result<f64, String> {
    text.parse().ok().filter(|share| (0.0..=1.0).contains(share)).ok_or_else(|| "write a number from 0 to 1".to_owned())
}

/// Outcome for one machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
enum Outcome {
    Rejuvenated,
    Failed,
    /// This machine does not support it.
    Skipped,
    /// Another machine had failed before.
    NotTried,
}

#[derive(Debug, Serialize)]
struct Decided {
    name: String,
    outcome: Outcome,
    from_version: Option<String>,
    version: Option<String>,
    pause_ms: Option<f64>,
    why: Option<String>,
}

/// A worker's result.
enum Word {
    Begins(String),
    Decided(Decided),
}

/// Machines that wait for a worker.
pub(super) struct Queue {
    waiting: Mutex<Waiting>,
    news: Condvar,
    stagger: Duration,
}

struct Waiting {
    names: VecDeque<String>,
    last_began: Option<Instant>,
    stopped: bool,
}

pub fn perform(context: &mut Context<'_>, arguments: RejuvenateArguments) -> Result<Exit, CliError> {
    let RejuvenateArguments { name, qemu, all: everybody, parallel, stagger, keep_going, plan, boot, alpha, wait } =
        arguments;
    if plan {
        return plan::show(context, boot, alpha);
    }
    let request = RejuvenateRequest { qemu: qemu.map(absolute) };
    match name {
        Some(name) if !everybody => order::rejuvenate(context, &name, request, !wait.no_wait),
        _ => all(context, &request, parallel.into(), stagger, keep_going),
    }
}

fn all(
    context: &mut Context<'_>,
    request: &RejuvenateRequest,
    parallel: usize,
    stagger: Duration,
    keep_going: bool,
) -> Result<Exit, CliError> {
    let root = context.root.clone();
    let names: VecDeque<String> = root.names().into_iter().filter(|name| lives(&root, name)).collect();
    if names.is_empty() && !context.json {
        context.write_line(&format!("no machine runs in {}", root.path().display()))?;
    }
    let at_a_time = parallel.min(names.len());
    let predicted_ms = History::of(&root, Duration::ZERO).warm_ms(at_a_time);
    let mut progress = Progress { count: names.len(), begun: 0, decided: Vec::new(), at_a_time, predicted_ms };
    let queue = Queue::new(names, stagger);
    let told = std::thread::scope(|scope| {
        let (say, words) = channel();
        for _ in 0..at_a_time {
            let (queue, root, say) = (&queue, &root, say.clone());
            scope.spawn(move || work(queue, root, request, keep_going, &say));
        }
        drop(say);
        let told = words.into_iter().try_for_each(|word| progress.take(context, word));
        // The output is closed, so no further machine is started.
        if told.is_err() {
            queue.stop();
        }
        told
    });
    told?;
    for name in queue.left() {
        let why = Some("another machine failed earlier".to_owned());
        progress.take(context, Word::Decided(Decided::new(name, Outcome::NotTried, why)))?;
    }
    progress.finish(context)
}

/// Whether it has a running QEMU, with or without a keeper.
fn lives(root: &RuntimeRoot, name: &str) -> bool {
    let folder = root.machine(name);
    life::has_keeper(&folder) || life::orphaned_qemu(&folder).is_some()
}

fn work(queue: &Queue, root: &RuntimeRoot, request: &RejuvenateRequest, keep_going: bool, say: &Sender<Word>) {
    while let Some(name) = queue.next() {
        // A receiver that is gone has stopped the queue.
        let _ = say.send(Word::Begins(name.clone()));
        let decided = hop(root, &name, request);
        if decided.outcome == Outcome::Failed && !keep_going {
            queue.stop();
        }
        let _ = say.send(Word::Decided(decided));
    }
}

fn hop(root: &RuntimeRoot, name: &str, request: &RejuvenateRequest) -> Decided {
    let failed = |why| Decided::new(name.to_owned(), Outcome::Failed, Some(why));
    if let Some(qemu_pid) = life::orphaned_qemu(&root.machine(name)) {
        return failed(format!("its keeper has died but its QEMU (pid {qemu_pid}) still runs"));
    }
    match decide(&Client::new(root.api_socket(name)), request) {
        Ok(EventKind::Rejuvenated { from_version, version, pause_ms, .. }) => Decided {
            from_version: Some(from_version),
            version: Some(version),
            pause_ms: Some(pause_ms),
            ..Decided::new(name.to_owned(), Outcome::Rejuvenated, None)
        },
        Ok(EventKind::RejuvenationFailed { phase, why, guest_lost }) => {
            let lost = if guest_lost { format!("; {GUEST_DIED_WITH_QEMU}") } else { String::new() };
            failed(format!("{phase}: {why}{lost}"))
        }
        Ok(EventKind::IncarnationEnded { cause: EndCause::QemuDied }) => failed(GUEST_DIED_WITH_QEMU.to_owned()),
        Ok(EventKind::IncarnationEnded { cause }) => failed(format!("its guest ended: {}", cause.words())),
        Ok(_) => failed("its keeper ended".to_owned()),
        Err(ClientError::Refused(ApiError { error: ErrorWord::NotPossible, message, .. })) => {
            Decided::new(name.to_owned(), Outcome::Skipped, Some(message))
        }
        Err(error) => failed(crate::chain(&error)),
    }
}

/// The event that decides the outcome; another event if the keeper ended without one.
fn decide(client: &Client, request: &RejuvenateRequest) -> Result<EventKind, ClientError> {
    let accepted = client.send(request)?;
    let mut last = EventKind::Gap { missed: 0 };
    for record in client.follow(accepted.since)? {
        last = record?.event;
        let decides = matches!(
            last,
            EventKind::Rejuvenated { .. } | EventKind::RejuvenationFailed { .. } | EventKind::IncarnationEnded { .. }
        );
        if decides {
            break;
        }
    }
    Ok(last)
}

impl Queue {
    pub(super) fn new(names: VecDeque<String>, stagger: Duration) -> Self {
        let waiting = Waiting { names, last_began: None, stopped: false };
        Self { waiting: Mutex::new(waiting), news: Condvar::new(), stagger }
    }

    /// The next machine, after the stagger time; none if the queue is empty or stopped.
    pub(super) fn next(&self) -> Option<String> {
        let mut waiting = self.waiting();
        loop {
            if waiting.stopped || waiting.names.is_empty() {
                return None;
            }
            let left = waiting.last_began.map_or(Duration::ZERO, |began| self.stagger.saturating_sub(began.elapsed()));
            if left.is_zero() {
                waiting.last_began = Some(Instant::now());
                return waiting.names.pop_front();
            }
            waiting = self.news.wait_timeout(waiting, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    pub(super) fn stop(&self) {
        self.waiting().stopped = true;
        self.news.notify_all();
    }

    pub(super) fn left(&self) -> VecDeque<String> {
        std::mem::take(&mut self.waiting().names)
    }

    fn waiting(&self) -> MutexGuard<'_, Waiting> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Decided {
    fn new(name: String, outcome: Outcome, why: Option<String>) -> Self {
        Self { name, outcome, from_version: None, version: None, pause_ms: None, why }
    }

    fn row(&self) -> Vec<String> {
        let text = |text: &Option<String>| text.clone().unwrap_or_default();
        let pause = self.pause_ms.map(milliseconds).unwrap_or_default();
        let outcome = self.outcome.words().to_owned();
        vec![self.name.clone(), outcome, text(&self.from_version), text(&self.version), pause, text(&self.why)]
    }
}

impl Outcome {
    fn words(self) -> &'static str {
        match self {
            Self::Rejuvenated => "rejuvenated",
            Self::Failed => "failed",
            Self::Skipped => "skipped",
            Self::NotTried => "not tried",
        }
    }
}

struct Progress {
    count: usize,
    begun: usize,
    decided: Vec<Decided>,
    at_a_time: usize,
    /// Predicted pause of each guest; none if unknown.
    predicted_ms: Option<f64>,
}

impl Progress {
    fn take(&mut self, context: &mut Context<'_>, word: Word) -> Result<(), CliError> {
        match word {
            Word::Begins(name) => {
                self.begun += 1;
                if context.json {
                    return Ok(());
                }
                context.write_line(&format!("{}/{}  {name}: started", self.begun, self.count))
            }
            Word::Decided(decided) => {
                if context.json {
                    context.write_json(&decided)?;
                } else if decided.outcome != Outcome::NotTried {
                    context.write_line(&format!("{}/{}  {}", self.begun, self.count, sentence(&decided)))?;
                }
                self.decided.push(decided);
                Ok(())
            }
        }
    }

    fn finish(mut self, context: &mut Context<'_>) -> Result<Exit, CliError> {
        let exit = if self.count_of(Outcome::Failed) > 0 { Exit::Failed } else { Exit::Done };
        let pauses_ms = self.decided.iter().filter_map(|decided| decided.pause_ms).collect();
        let verdict = Verdict::of(self.at_a_time, self.predicted_ms, pauses_ms);
        if context.json {
            verdict.map_or(Ok(()), |verdict| context.write_json(&json!({ "verdict": verdict })))?;
            return Ok(exit);
        }
        if self.decided.is_empty() {
            return Ok(exit);
        }
        self.decided.sort_by(|one, other| one.name.cmp(&other.name));
        let head = ["NAME", "OUTCOME", "FROM", "TO", "PAUSE", "WHY"].map(str::to_owned).to_vec();
        let rows: Vec<Vec<String>> = std::iter::once(head).chain(self.decided.iter().map(Decided::row)).collect();
        context.write_line("")?;
        for line in table(&[Side::Left, Side::Left, Side::Left, Side::Left, Side::Right, Side::Left], &rows) {
            context.write_line(&line)?;
        }
        context.write_line(&self.summary())?;
        verdict.map_or(Ok(()), |verdict| context.write_line(&verdict.sentence()))?;
        Ok(exit)
    }

    fn count_of(&self, outcome: Outcome) -> usize {
        self.decided.iter().filter(|decided| decided.outcome == outcome).count()
    }

    fn summary(&self) -> String {
        let count = |outcome: Outcome| format!("{} {}", self.count_of(outcome), outcome.words());
        let mut counts = vec![count(Outcome::Rejuvenated), count(Outcome::Failed), count(Outcome::NotTried)];
        if self.count_of(Outcome::Skipped) > 0 {
            counts.push(count(Outcome::Skipped));
        }
        counts.join(", ")
    }
}

fn sentence(decided: &Decided) -> String {
    match (decided.outcome, &decided.why) {
        (Outcome::Rejuvenated, _) => {
            let pause = milliseconds(decided.pause_ms.unwrap_or_default());
            format!("{}: rejuvenated, paused for {pause}", decided.name)
        }
        (outcome, why) => format!("{}: {}, {}", decided.name, outcome.words(), why.as_deref().unwrap_or_default()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn queue(names: &[&str], stagger: Duration) -> Queue {
        Queue::new(names.iter().map(|&name| name.to_owned()).collect(), stagger)
    }

    #[test]
    fn stopped_queue_keeps_remaining_names() {
        let queue = queue(&["a", "b", "c"], Duration::ZERO);
        assert_eq!(queue.next().as_deref(), Some("a"));
        queue.stop();
        assert_eq!(queue.next(), None);
        assert_eq!(queue.left(), ["b", "c"]);
    }

    #[test]
    fn stop_ends_a_worker_that_waits() {
        let queue = queue(&["a", "b"], Duration::from_secs(3600));
        assert!(queue.next().is_some());
        std::thread::scope(|scope| {
            let waits = scope.spawn(|| queue.next());
            queue.stop();
            assert_eq!(waits.join().unwrap(), None);
        });
        assert_eq!(queue.left(), ["b"]);
    }

    #[test]
    fn turns_are_no_closer_than_asked() {
        let stagger = Duration::from_millis(20);
        let queue = queue(&["a", "b", "c"], stagger);
        let began = Instant::now();
        while queue.next().is_some() {}
        assert!(began.elapsed() >= 2 * stagger);
    }
}
