//! What the benches ask of the host: its facts, a slower disk for all sides alike, and what it keeps in memory.

pub mod facts;
pub mod profile;
pub mod scratch;
pub mod throttle;
