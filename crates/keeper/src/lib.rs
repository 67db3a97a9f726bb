//! The keeper: the process that looks after one machine, and the commands an operator gives it.
//!
//! command line -> `cli` -> run: config -> check -> the machine's event loop, with `http`, `console`, `event_log` beside it
//!                       -> any other: `client` -> unix socket -> `http` -> `control` -> event loop

pub mod age;
pub mod check;
pub mod cli;
pub mod client;
pub mod config;
pub mod console;
pub mod control;
mod drill;
pub mod event;
pub mod event_log;
pub mod fleet_lock;
pub mod folders;
pub mod host_reload;
pub mod http;
pub mod in_force;
pub mod machine;
pub mod metrics;
pub mod notify;
mod object_store;
mod parked_guest;
pub mod problem;
pub mod run;
pub mod runtime_root;
#[cfg(test)]
mod sample;
pub mod unix_socket;
pub mod upgrade;
pub mod watchdog;

/// An error with all its causes, on one line: `what: why: why that`.
pub fn chain(error: &dyn std::error::Error) -> String {
    std::iter::successors(Some(error), |error| error.source()).map(ToString::to_string).collect::<Vec<_>>().join(": ")
}
