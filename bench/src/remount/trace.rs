//! Every read of a boot as the guest saw it, from its kernel's first one on, by the kernel's trace points, which are the same on
//! all sides.
//!
//! The guest's clock begins with its kernel. When the guest is ready, both clocks are read, and times count from its reset.

use crate::stats;

/// Kernel arguments that record reads from the start of the kernel on.
pub const CMDLINE: &str = "trace_event=block:block_rq_issue,block:block_rq_complete trace_buf_size=8192k";

/// Command of a ready guest: writes a mark to the trace and stops recording.
pub const READY: &str = "mount -t tracefs none /sys/kernel/tracing 2>/dev/null; cd /sys/kernel/tracing && \
     echo ready >trace_marker && echo 0 >tracing_on";

/// Command that prints the mark's time (s), and for each read its start (s) and duration (us).
pub const TELL: &str = "awk '/: tracing_mark_write: ready/ { \
     for (i = 2; i <= NF; i++) if ($i == \"tracing_mark_write:\") printf \"ready %.6f\\n\", $(i - 1) + 0; next } \
     /: block_rq_(issue|complete): / { \
     for (i = 1; i < NF; i++) { if ($i ~ /^block_rq_/) k = i; if ($i == \"+\") s = $(i - 1) } \
     if ($(k + 2) !~ /^R/) next; t = $(k - 1) + 0; id = $(k + 1) \" \" s; \
     if ($k == \"block_rq_issue:\") at[id] = t; \
     else if (id in at) { printf \"%.6f %.0f\\n\", at[id], (t - at[id]) * 1e6; delete at[id] } }' /sys/kernel/tracing/trace";

/// A read of the guest.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Read {
    /// Seconds from the guest's reset.
    pub second: f64,
    pub us: f64,
}

pub struct Trace {
    pub side: &'static str,
    /// Seconds from the guest's reset.
    pub ready_s: f64,
    pub reads: Vec<Read>,
}

impl Trace {
    /// Parses the output. `None` without the mark, since the times of the reads are then unknown.
    pub fn parse(side: &'static str, said: &str, ready_s: f64) -> Option<Self> {
        let numbers = |line: &str| -> Option<(String, f64)> {
            let (first, second) = line.split_once(' ')?;
            Some((first.to_owned(), second.parse().ok()?))
        };
        let said: Vec<(String, f64)> = said.lines().filter_map(numbers).collect();
        let mark = said.iter().find_map(|(word, second)| (word == "ready").then_some(*second))?;
        let read = |(second, us): &(String, f64)| {
            let second: f64 = second.parse().ok()?;
            Some(Read { second: second - mark + ready_s, us: *us })
        };
        let mut reads: Vec<Read> = said.iter().filter_map(read).collect();
        reads.sort_by(|one, other| one.second.total_cmp(&other.second));
        Some(Self { side, ready_s, reads })
    }

    pub fn us(&self, percent: f64) -> Option<f64> {
        let times: Vec<f64> = self.reads.iter().map(|read| read.us).collect();
        stats::percentile(&times, percent)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn read_times_count_from_the_reset() {
        let said = "12.500000 200\nnoise\nready 13.75\n12.250000 100\n";
        let trace = Trace::parse("hearth", said, 15.0).unwrap();
        assert_eq!(trace.reads, [Read { second: 13.5, us: 100.0 }, Read { second: 13.75, us: 200.0 }]);
        assert_eq!((trace.ready_s, trace.us(50.0)), (15.0, Some(100.0)));
        assert!(Trace::parse("hearth", "12.5 200", 15.0).is_none(), "the mark is missing");
    }
}
