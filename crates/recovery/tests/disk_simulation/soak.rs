//! Soak: as many schedules as fit into an hour.

use crate::{number, run_seeds};

const SEEDS: u64 = 1_000_000;

#[test]
#[ignore = "takes an hour; make soak runs it"]
fn a_million_schedules() {
    run_seeds(number("SEEDS").unwrap_or(SEEDS));
}
