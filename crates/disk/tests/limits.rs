//! A disk's limits hold whatever its guest and QEMU do: what passes is charged.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod common;

use std::collections::HashMap;
use std::os::fd::AsRawFd;
use std::time::{Duration, Instant};

use common::*;
use hearth_disk::limit::Limits;
use hearth_disk::server::DiskServer;

const QUEUES: usize = 2;
const REQUEST_BYTES: u32 = 64 << 10;
/// A request takes three descriptors.
const IN_A_QUEUE: u64 = QUEUE_SIZE as u64 / 3;
const PER_SECOND: u64 = 8 << 20;
/// All that can wait at the same time passes when the queues are stopped; beside that a request on debt, and what is saved up.
const BURST: u64 = QUEUES as u64 * IN_A_QUEUE * REQUEST_BYTES as u64 + REQUEST_BYTES as u64 + PER_SECOND / 100;

struct Run {
    place: Place,
    server: DiskServer,
    guest: Guest,
    random: Random,
    begun: Instant,
    /// Bytes that each request in flight will have moved.
    asked: HashMap<(usize, u16), u64>,
    served: u64,
}

impl Run {
    fn new(seed: u64) -> Self {
        let place = Place::new(16 << 20);
        let limits = Limits { bytes_per_second: Some(PER_SECOND), operations_per_second: None };
        let options = hearth_disk::server::DiskOptions { limits, ..place.options() };
        let server = DiskServer::start(options, place.open(), None).unwrap();
        let begun = Instant::now();
        let guest = Guest::connect(&place.socket(), QUEUES);
        Self { place, server, guest, random: Random(seed), begun, asked: HashMap::new(), served: 0 }
    }

    /// Fills a queue with requests of all kinds that move bytes.
    fn fill(&mut self, queue: usize) {
        let in_queue = self.asked.keys().filter(|(of, _)| *of == queue).count() as u64;
        for _ in in_queue..IN_A_QUEUE {
            let offset = self.random.below(255) * u64::from(REQUEST_BYTES);
            let kind = [READ, WRITE, WRITE_ZEROES][self.random.below(3) as usize];
            let address = DATA + self.random.below(64) * u64::from(REQUEST_BYTES);
            let head = match kind {
                WRITE_ZEROES => self.guest.submit_ranges(queue, kind, &[(offset / 512, REQUEST_BYTES / 512, 0)]),
                _ => self.guest.submit(queue, kind, offset, address, REQUEST_BYTES),
            };
            self.asked.insert((queue, head), u64::from(REQUEST_BYTES));
        }
    }

    /// Takes the answers that are there.
    fn take(&mut self, history: &str) {
        for queue in 0..QUEUES {
            while let Some(answer) = self.guest.poll(queue) {
                self.served += self.asked.remove(&(queue, answer.head)).unwrap();
            }
        }
        let allowed = BURST + (self.begun.elapsed().as_secs_f64() * PER_SECOND as f64) as u64;
        assert!(
            self.served <= allowed,
            "{} bytes were served where {allowed} are allowed, after {history}",
            self.served
        );
    }

    fn stop_all(&mut self) {
        for queue in 0..QUEUES {
            self.guest.stop_queue(queue);
        }
    }

    /// One action of a guest, its QEMU, or both on their queues.
    fn step(&mut self, history: &mut String) {
        (0..QUEUES).for_each(|queue| self.fill(queue));
        let step = ["toggle", "toggle", "toggle one", "reconnect", "hop", "wait"][self.random.below(6) as usize];
        history.push_str(step);
        history.push(' ');
        match step {
            "toggle" => {
                self.stop_all();
                (0..QUEUES).for_each(|queue| self.guest.start_queue(queue, false));
            }
            "toggle one" => {
                self.guest.stop_queue(1);
                self.guest.start_queue(1, false);
            }
            "reconnect" => {
                // SAFETY: the descriptor is the frontend's, which lives.
                assert_eq!(unsafe { libc::shutdown(self.guest.frontend.as_raw_fd(), libc::SHUT_RDWR) }, 0);
                self.guest.reconnect(&self.place.socket());
            }
            "hop" => {
                self.server.set_handover(true).unwrap();
                let successor = self.guest.successor(&self.place.socket());
                self.stop_all();
                drop(self.guest.hop(successor));
            }
            _ => std::thread::sleep(Duration::from_millis(20)),
        }
        self.take(history);
    }
}

#[test]
fn stops_and_reconnects_cannot_pass_the_limit() {
    for seed in 1..=3 {
        let mut run = Run::new(seed);
        let mut history = format!("(seed {seed}) ");
        for _ in 0..10 {
            run.step(&mut history);
        }
        // Nothing is held up for good.
        for queue in 0..QUEUES {
            while run.asked.keys().any(|(of, _)| *of == queue) {
                let answer = run.guest.wait(queue);
                run.served += run.asked.remove(&(queue, answer.head)).unwrap();
            }
        }
        run.take(&history);
        println!("{} bytes in {:?}: {history}", run.served, run.begun.elapsed());
    }
}

/// A hop, or a save, must not wait until a limited disk has done all that its guest has asked for.
#[test]
fn first_stop_does_not_wait_for_limit() {
    let mut run = Run::new(1);
    (0..QUEUES).for_each(|queue| run.fill(queue));
    wait_until("all requests are taken", || {
        let counters = run.server.counters();
        counters.reads + counters.writes + counters.discards == QUEUES as u64 * IN_A_QUEUE
    });
    let begun = Instant::now();
    run.stop_all();
    let took = begun.elapsed();
    run.take("one stop");
    assert_eq!(run.served, QUEUES as u64 * IN_A_QUEUE * u64::from(REQUEST_BYTES));
    let at_the_limit = Duration::from_secs_f64(run.served as f64 / PER_SECOND as f64);
    assert!(took < at_the_limit, "took {took:?}, as if it waited for the limit ({at_the_limit:?})");
}

#[test]
fn zeroes_and_discards_are_charged() {
    let mut run = Run::new(1);
    let begun = Instant::now();
    for _ in 0..5 {
        run.guest.submit_ranges(0, WRITE_ZEROES, &[(0, 1 << 11, 0)]);
        assert_eq!(run.guest.wait(0).status, 0);
    }
    // The last one is on debt.
    assert!(begun.elapsed() >= Duration::from_millis(450), "4 MiB of zeroes took {:?}", begun.elapsed());
}
