//! Log: to standard error, one line per event for systemd's journal.
//!
//! A guest or a failing disk can cause the same warning for as long as it likes. So each place in the code writes a limited
//! number of warnings and errors a minute, and then one line that says so. What is not a warning has no limit: the guest
//! causes it only by what takes seconds, such as a reboot.

use std::collections::HashMap;
use std::io;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use tracing::callsite::Identifier;
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::EnvFilter;
use tracing_subscriber::layer::{Context, Layer, SubscriberExt};
use tracing_subscriber::util::SubscriberInitExt;

/// Maximum number of warnings from one place within `WINDOW`. More than a host's failing disk needs to be noticed, and 200
/// places write 5 MiB a minute at most.
const WARNINGS_MAX: u32 = 100;
const WINDOW: Duration = Duration::from_secs(60);

/// Starts the log. HEARTH_LOG has the syntax of `tracing` filters.
pub fn start() {
    let filter = EnvFilter::try_from_env("HEARTH_LOG").unwrap_or_else(|_| EnvFilter::new("info"));
    let ansi = rustix::termios::isatty(io::stderr());
    let lines = tracing_subscriber::fmt().with_env_filter(filter).with_writer(io::stderr).with_ansi(ansi).finish();
    // Fails only if a log was set up before, as in tests.
    let _ = lines.with(WarningLimit::default()).try_init();
}

/// Leaves out warnings that one place in the code repeats too often.
#[derive(Debug, Default)]
struct WarningLimit(Mutex<HashMap<Identifier, Window>>);

/// The warnings of one place since the first one.
#[derive(Debug)]
struct Window {
    since: Instant,
    count: u32,
}

impl Window {
    /// Counts a warning. Returns the number within the window, from 1.
    fn count(&mut self, now: Instant) -> u32 {
        if now.duration_since(self.since) >= WINDOW {
            *self = Self { since: now, count: 0 };
        }
        self.count = self.count.saturating_add(1);
        self.count
    }
}

impl<S: Subscriber> Layer<S> for WarningLimit {
    fn event_enabled(&self, event: &Event<'_>, _: Context<'_, S>) -> bool {
        let metadata = event.metadata();
        if *metadata.level() > Level::WARN {
            return true;
        }
        let now = Instant::now();
        let mut windows = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let window = windows.entry(metadata.callsite()).or_insert(Window { since: now, count: 0 });
        let number = window.count(now);
        drop(windows);
        if number == WARNINGS_MAX + 1 {
            let (target, seconds) = (metadata.target(), WINDOW.as_secs());
            eprintln!(
                "hearth: {target}: {WARNINGS_MAX} warnings of one kind in {seconds} s; more of them are left out"
            );
        }
        number <= WARNINGS_MAX
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    /// Lines of a log, by their message.
    #[derive(Clone, Default)]
    struct Lines(Arc<Mutex<Vec<u8>>>);

    impl Lines {
        fn count(&self, message: &str) -> usize {
            String::from_utf8(self.0.lock().unwrap().clone()).unwrap().matches(message).count()
        }
    }

    impl io::Write for Lines {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap().write(bytes)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn endless_warnings_are_cut_off() {
        let lines = Lines::default();
        let writer = lines.clone();
        let log = tracing_subscriber::fmt().with_writer(move || writer.clone()).finish().with(WarningLimit::default());
        tracing::subscriber::with_default(log, || {
            for _ in 0..10_000 {
                tracing::warn!("broken again");
                tracing::error!("failed again");
            }
            (0..1000).for_each(|_| tracing::info!("rebooted"));
            tracing::warn!("another place");
        });
        let counts = ["broken again", "failed again", "rebooted", "another place"].map(|message| lines.count(message));
        assert_eq!(counts, [100, 100, 1000, 1]);
    }

    #[test]
    fn warnings_count_anew_after_a_minute() {
        let since = Instant::now();
        let mut window = Window { since, count: WARNINGS_MAX };
        assert_eq!(window.count(since + WINDOW / 2), WARNINGS_MAX + 1);
        assert_eq!(window.count(since + WINDOW), 1);
        assert_eq!(window.count(since + WINDOW + WINDOW / 2), 2);
    }
}
