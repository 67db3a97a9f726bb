//! Database load: one client that asks for single rows at random, one by one, as `pgbench -S` does.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use hearth_vmtest::Random;

use super::LoadError;
use super::sql::{Client, SqlError};

/// Time limit for a row.
const PATIENCE: Duration = Duration::from_secs(10);
const RETRY_INTERVAL: Duration = Duration::from_millis(20);

/// A table of `guest/debian/database`.
#[derive(Clone, Copy, Debug)]
pub struct Rows {
    pub address: SocketAddr,
    pub count: usize,
}

/// Waits until the database answers, and returns the rows a second that it gives from then on. Other rows are asked for with another
/// `seed`.
pub fn rows_per_second(rows: Rows, window: Duration, patience: Duration, seed: u64) -> Result<f64, LoadError> {
    let (address, mut client) = (rows.address, Client::new(rows.address));
    let mut random = Random(seed);
    let mut ask = move || -> Result<(), SqlError> {
        let id = 1 + random.below(rows.count);
        let row = client.row(&format!("select balance from accounts where id = {id}"), PATIENCE, &|| false)?;
        if row == [(id % 1000).to_string()] {
            Ok(())
        } else {
            Err(SqlError::Malformed { address, what: "another row" })
        }
    };
    let asked = Instant::now();
    while let Err(error) = ask() {
        if asked.elapsed() >= patience {
            return Err(LoadError::NotBack { address, after: patience, last: Some(error.to_string()) });
        }
        std::thread::sleep(RETRY_INTERVAL);
    }
    let (begun, mut answers) = (Instant::now(), 0_u32);
    while begun.elapsed() < window {
        ask().map_err(|source| LoadError::Query { address, source })?;
        answers += 1;
    }
    Ok(f64::from(answers) / begun.elapsed().as_secs_f64())
}
