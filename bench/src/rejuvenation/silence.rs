//! The longest silence, heard from outside, of a guest that prints all the time.

use std::time::{Duration, Instant};

use hearth_vmtest::{Drives, Guest, Result, patience};

/// Script that writes to the console all the time, with shell built-ins only, until the word `still` is typed.
const TALKS: &str = "rm -f /tmp/still
{ read -r word </dev/ttyS0; : >/tmp/still; } &
until [ -e /tmp/still ]; do echo tick; done >/dev/ttyS0
wait";

/// A guest that prints all the time. Its agent is busy with that until `end`.
pub struct Silence {
    command: u64,
}

impl Silence {
    pub fn listen(guest: &Guest) -> Result<Self> {
        guest.watch_arrivals();
        let command = guest.start(TALKS)?;
        let deadline = Instant::now() + patience(10);
        while guest.arrivals().len() < 100 && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(1));
        }
        Ok(Self { command })
    }

    /// The longest silence, in milliseconds, that overlaps the time from `from` to `to`. `guests` are the consoles on which the
    /// one guest was heard.
    pub fn longest(&self, guests: &[&Guest], from: Instant, to: Instant) -> f64 {
        let deadline = to + patience(10);
        loop {
            let mut heard: Vec<Instant> = guests.iter().flat_map(|guest| guest.arrivals()).collect();
            heard.sort();
            if heard.last().is_some_and(|&last| last > to) {
                let touching = heard.windows(2).filter(|pair| pair[1] >= from && pair[0] <= to);
                let longest = touching.map(|pair| pair[1] - pair[0]).max().unwrap_or_default();
                return longest.as_secs_f64() * 1e3;
            }
            if Instant::now() > deadline {
                return f64::NAN;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    pub fn end(self, vm: &impl Drives) -> Result<()> {
        vm.guest().type_line("still")?;
        vm.wait_console("the end of the printing", patience(20), |heard| heard.take_answer(self.command)).map(drop)
    }
}
