//! The guest of every side: its memory in use by a large process and a file cache, of which its web server serves a part.

use std::net::{Ipv4Addr, SocketAddr};

use hearth_vmtest::{Drives, Result};

use super::Shape;
use crate::load::Targets;

/// So often is each file asked for: more than in any run.
const TURNS: usize = 1000;

/// Fills the file cache, and anonymous memory for as long as the guest lives.
pub fn fill(guest: &impl Drives, shape: Shape) -> Result<()> {
    let files = format!("probe read-all $(ls /var/www/html/files/*.bin | head -n {})", shape.web_files);
    guest.sh(&files)?;
    hog(guest, shape)
}

pub fn hog(guest: &impl Drives, shape: Shape) -> Result<()> {
    let hog = format!(
        "(probe hog {} >/tmp/hog 2>&1 &) ; until grep -q hogging= /tmp/hog; do sleep 0.1; done",
        shape.anonymous_mib
    );
    guest.sh(&hog).map(drop)
}

/// A process that writes to 160 MiB of memory, 5 MiB at a time: some 50 MiB/s, and how much it was is counted.
pub fn start_writer(guest: &impl Drives) -> Result<()> {
    let write = "probe fill /tmp/seed 5242880 1; (n=0; while :; do n=$((n+1)); \
                 dd if=/tmp/seed of=/tmp/dirty.$((n % 32)) bs=1M conv=notrunc; \
                 echo $n >/tmp/written.new; mv /tmp/written.new /tmp/written; usleep 50000; done) >/dev/null 2>&1 &";
    guest.sh(write)?;
    guest.sh("while [ ! -s /tmp/written ] || [ $(cat /tmp/written) -lt 40 ]; do sleep 0.1; done").map(drop)
}

pub fn written_mib(guest: &impl Drives) -> Result<f64> {
    let count = guest.sh("cat /tmp/written")?;
    Ok(5.0 * count.trim().parse::<f64>().expect("the writer writes numbers"))
}

/// The same files for every seed, all of them in each turn, in an order that no other seed has.
pub fn targets(port: u16, shape: Shape, seed: u64) -> Targets {
    let mut word = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut below = |bound: usize| {
        // xorshift64
        word ^= word << 13;
        word ^= word >> 7;
        word ^= word << 17;
        (word % bound as u64) as usize
    };
    let mut turn: Vec<usize> = (0..shape.hot_files).collect();
    let mut files = Vec::with_capacity(TURNS * turn.len());
    for _ in 0..TURNS {
        for last in (1..turn.len()).rev() {
            turn.swap(last, below(last + 1));
        }
        files.extend(turn.iter().map(|number| format!("/files/{number:03}.bin")));
    }
    Targets { address: SocketAddr::from((Ipv4Addr::LOCALHOST, port)), probe: "/".to_owned(), files }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn requests_differ_in_their_order_and_not_in_what_they_ask_for() {
        let shape = Shape::of(true);
        let [one, other] = [1, 2].map(|seed| targets(80, shape, seed).files[..2 * shape.hot_files].to_vec());
        assert_ne!(one, other);
        let [one, other] = [one, other].map(|files| BTreeSet::from_iter(files.into_iter().take(shape.hot_files)));
        assert_eq!((one.len(), &one), (shape.hot_files, &other));
    }
}
