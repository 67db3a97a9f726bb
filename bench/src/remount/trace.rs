//! Every read of a boot as the guest saw it, by its own trace points: the same on all sides.

use crate::stats;

/// Begins to note what the guest reads.
pub const BEGIN: &str = "mount -t tracefs none /sys/kernel/tracing 2>/dev/null; cd /sys/kernel/tracing && \
     echo 8192 >buffer_size_kb && for e in issue complete; do echo 1 >events/block/block_rq_$e/enable || exit; done";

/// Ends it, and tells each read: when it was begun (s), how long it took (us).
pub const END: &str = "cd /sys/kernel/tracing && echo 0 >tracing_on && awk '/: block_rq_(issue|complete): / { \
     for (i = 1; i < NF; i++) { if ($i ~ /^block_rq_/) k = i; if ($i == \"+\") s = $(i - 1) } \
     if ($(k + 2) !~ /^R/) next; t = $(k - 1) + 0; id = $(k + 1) \" \" s; \
     if ($k == \"block_rq_issue:\") at[id] = t; \
     else if (id in at) { printf \"%.6f %.0f\\n\", at[id], (t - at[id]) * 1e6; delete at[id] } }' trace";

/// A read of the guest.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Read {
    /// From the first one on.
    pub second: f64,
    pub us: f64,
}

pub struct Trace {
    pub side: &'static str,
    pub reads: Vec<Read>,
}

impl Trace {
    pub fn parse(side: &'static str, said: &str) -> Self {
        let read = |line: &str| {
            let (second, us) = line.split_once(' ')?;
            Some(Read { second: second.parse().ok()?, us: us.parse().ok()? })
        };
        let mut reads: Vec<Read> = said.lines().filter_map(read).collect();
        reads.sort_by(|one, other| one.second.total_cmp(&other.second));
        let first = reads.first().map_or(0.0, |read| read.second);
        reads.iter_mut().for_each(|read| read.second -= first);
        Self { side, reads }
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
    fn reads_are_told_from_the_first_on() {
        let trace = Trace::parse("hearth", "12.500000 200\nnoise\n12.250000 100\n");
        assert_eq!(trace.reads, [Read { second: 0.0, us: 100.0 }, Read { second: 0.25, us: 200.0 }]);
        assert_eq!(trace.us(50.0), Some(100.0));
        assert_eq!(Trace::parse("hearth", "").us(50.0), None);
    }
}
