//! The host of the benches: its facts, disk limits for all sides, a file system, and scratch folders.

pub mod facts;
pub mod file_system;
pub mod profile;
pub mod scratch;
pub mod throttle;
