//! What the benches ask of the host: its facts, a slower disk for all sides alike, a file system, and what it keeps in memory.

pub mod facts;
pub mod file_system;
pub mod profile;
pub mod scratch;
pub mod throttle;
