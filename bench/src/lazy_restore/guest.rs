//! The guest of every side. Its memory is in use by a large process, a file cache, of which its web server serves a part, and a
//! database's buffers. Without a database it is busybox with its web server.

use std::path::Path;

use hearth_vmtest::artifacts::Debian;
use hearth_vmtest::images::{self, File};
use hearth_vmtest::{Disk, Drives, PlainVm, PlainVmBuilder, Result, TestVm, TestVmBuilder};

use super::{RestoreError, Shape, WINDOW_REQUESTS};
use crate::load::{Database, Query, Targets};
use crate::sides::Ports;

/// Number of requests for each file, more than any run uses.
const TURNS: usize = 1000;
/// Rows of the database's table, which `guest/debian/database` makes.
const ROWS: u64 = 1_600_000;
/// Rows of each query: a third of a MiB of the table. It is not a multiple of the thousand different balances, so that answers
/// differ.
const QUERY_ROWS: u64 = 2900;

/// Makes the disk image with the web server's files and the database.
pub fn make_image(shape: Shape, image: &Path) -> std::result::Result<(), RestoreError> {
    let made = if shape.has_database() {
        Debian::Database.root().and_then(|root| images::copy(&root, image))
    } else {
        let page = File { path: "index.html".to_owned(), contents: b"here\n".to_vec() };
        let files = (0..shape.web_files as u64)
            .map(|number| File::pattern(&format!("files/{number:03}.bin"), shape.file_kib << 10, number))
            .chain([page]);
        images::ext4_for_good(image, shape.web_files_mib() * 2, &files.collect::<Vec<_>>())
    };
    made.map_err(|source| RestoreError::Machine { side: "image", source })
}

pub fn machine(shape: Shape, name: &str, image: &Path) -> TestVmBuilder {
    let disk = Disk::in_place(image);
    if shape.has_database() {
        TestVm::debian_with(name, Debian::Database).root(disk)
    } else {
        TestVm::busybox(name).disk(disk)
    }
}

/// The plain machine; its image must be its first drive.
pub fn plain(shape: Shape, name: &str) -> PlainVmBuilder {
    if shape.has_database() { PlainVm::debian(name, Debian::Database) } else { PlainVm::busybox(name) }
}

/// Fills the file cache, the database's buffers, and anonymous memory for as long as the guest lives.
pub fn fill(guest: &impl Drives, shape: Shape) -> Result<()> {
    let read = |folder: &str| guest.sh(&format!("probe read-all $(ls {folder}/*.bin | head -n {})", shape.web_files));
    if !shape.has_database() {
        guest.sh("mkdir -p /d && mount /dev/vda /d && net-up && httpd -h /d -p 80")?;
        read("/d/files")?;
        return hog(guest, shape);
    }
    read("/var/www/html/files")?;
    let last =
        format!("(select relpages::bigint * {} / {ROWS} - 1 from pg_class where relname = 'accounts')", shape.rows);
    let warm = format!("select pg_prewarm('accounts_pkey'), pg_prewarm('accounts', 'buffer', 'main', 0, {last})");
    guest.sh(&format!(
        "until pg_isready -q -h 127.0.0.1; do sleep 0.2; done; psql -qAt -h 127.0.0.1 -U postgres -c \"{warm}\""
    ))?;
    hog(guest, shape)
}

pub fn hog(guest: &impl Drives, shape: Shape) -> Result<()> {
    let hog = format!(
        "(probe hog {} >/tmp/hog 2>&1 &) ; until grep -q hogging= /tmp/hog; do sleep 0.1; done",
        shape.anonymous_mib
    );
    guest.sh(&hog).map(drop)
}

/// Starts a process that writes to 160 MiB of memory, which it has when this returns, 5 MiB at a time: about 50 MiB/s. It counts
/// what it has written.
pub fn start_writer(guest: &impl Drives) -> Result<()> {
    let write = "probe fill /tmp/seed 5242880 1; for n in $(seq 0 31); do cp /tmp/seed /tmp/dirty.$n; done; echo 0 >/tmp/written; \
                 (n=0; while :; do n=$((n+1)); \
                 dd if=/tmp/seed of=/tmp/dirty.$((n % 32)) bs=1M conv=notrunc; \
                 echo $n >/tmp/written.new; mv /tmp/written.new /tmp/written; usleep 50000; done) >/dev/null 2>&1 &";
    guest.sh(write).map(drop)
}

pub fn written_mib(guest: &impl Drives) -> Result<f64> {
    let count = guest.sh("cat /tmp/written")?;
    Ok(5.0 * count.trim().parse::<f64>().expect("the writer writes numbers"))
}

/// Targets that are the same files and parts of the table for every seed. Each turn has all of them, in an order of the seed's own.
pub fn targets(ports: Ports, shape: Shape, seed: u64) -> Targets {
    let mut word = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut below = |bound: usize| {
        // xorshift64
        word ^= word << 13;
        word ^= word >> 7;
        word ^= word << 17;
        (word % bound as u64) as usize
    };
    let mut turn: Vec<usize> = (0..shape.hot_files).collect();
    let (mut files, mut queries) = (Vec::new(), Vec::new());
    for _ in 0..TURNS {
        shuffle(&mut turn, &mut below);
        files.extend(turn.iter().map(|number| format!("/files/{number:03}.bin")));
        shuffle(&mut turn, &mut below);
        queries.extend(turn.iter().map(|&number| query(1 + number as u64 * shape.rows / shape.hot_files as u64)));
    }
    // A new client comes after as many requests as a window has, so that each window includes one.
    let database = Database { address: ports.database(), queries, per_client: WINDOW_REQUESTS / 2 };
    let database = Some(database).filter(|_| shape.has_database());
    Targets { address: ports.web(), probe: "/".to_owned(), files, database }
}

fn shuffle(turn: &mut [usize], below: &mut impl FnMut(usize) -> usize) {
    for last in (1..turn.len()).rev() {
        turn.swap(last, below(last + 1));
    }
}

fn query(first: u64) -> Query {
    let last = first + QUERY_ROWS - 1;
    let sum: u64 = (first..=last).map(|id| id % 1000).sum();
    Query {
        text: format!(
            "select count(*), sum(balance), max(length(filler)) from accounts where id between {first} and {last}"
        ),
        expect: vec![QUERY_ROWS.to_string(), sum.to_string(), "80".to_owned()],
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn requests_of_two_seeds_differ_only_in_order() {
        let shape = Shape::of(false);
        let ports = Ports::free();
        let asked = |seed| {
            let Targets { files, database, .. } = targets(ports, shape, seed);
            let queries = database.into_iter().flat_map(|database| database.queries).map(|query| query.text);
            [files, queries.collect()].map(|all: Vec<String>| all[..2 * shape.hot_files].to_vec())
        };
        for (one, other) in asked(1).into_iter().zip(asked(2)) {
            assert_ne!(one, other);
            let [one, other] = [one, other].map(|all| BTreeSet::from_iter(all.into_iter().take(shape.hot_files)));
            assert_eq!((one.len(), &one), (shape.hot_files, &other));
        }
    }

    #[test]
    fn answers_of_the_database_differ() {
        let sums = [1, 33334, 66667].map(|first| query(first).expect[1].clone());
        assert_eq!(BTreeSet::from_iter(&sums).len(), 3, "{sums:?}");
    }
}
