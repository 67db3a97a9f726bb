//! Response times of a keeper while it works: the bench requests its status every 10 ms, as a dashboard might, and the keeper
//! reports the longest time that its main loop spent on one event.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use hearth_api::MachineStatus;
use hearth_vmtest::Api;

use crate::record::Record;
use crate::stats;

const ASK_EVERY: Duration = Duration::from_millis(10);

/// A thread that polls one keeper until `end`.
pub struct Responsiveness {
    over: Arc<AtomicBool>,
    thread: JoinHandle<Answers>,
}

#[derive(Default)]
struct Answers {
    status_ms: Vec<f64>,
    last: Option<MachineStatus>,
}

impl Responsiveness {
    /// Starts polling the keeper behind this API.
    pub fn watch(api: Api) -> Self {
        let over = Arc::new(AtomicBool::new(false));
        let is_over = over.clone();
        let poll = move || {
            let mut answers = Answers::default();
            while !is_over.load(Relaxed) {
                let asked = Instant::now();
                if let Some(status) = api.status() {
                    answers.status_ms.push(asked.elapsed().as_secs_f64() * 1e3);
                    answers.last = Some(status);
                }
                std::thread::sleep(ASK_EVERY);
            }
            // One more request after the work, since an answer includes only earlier events.
            answers.last = api.status().or(answers.last);
            answers
        };
        Self { over, thread: std::thread::spawn(poll) }
    }

    /// Adds the measurements to the case's rows.
    pub fn end(self, case: &str, record: &mut Record) {
        self.over.store(true, Relaxed);
        let answers = self.thread.join().expect("a panic was printed when it happened");
        if let Some(p99) = stats::percentile(&answers.status_ms, 99.0) {
            record.add(case, "status_ms_p99", "ms", p99);
        }
        if let Some(status) = answers.last {
            record.add(case, "loop_stall_ms_max", "ms", status.keeper.loop_stall_ms_max);
        }
    }
}

/// Adds the longest stall, and the median of the response times over all cases.
pub fn summarise(record: &mut Record) {
    let stall = record.highest(&["loop_stall_ms_max"]);
    record.summarise("loop_stall_ms_max", stall);
    let rows = record.rows.iter().filter(|row| row.metric == "status_ms_p99");
    let answers: Vec<f64> = rows.flat_map(|row| row.values.iter().copied()).collect();
    record.summarise("status_ms_p99", stats::median(&answers));
}
