//! The keeper: the process that looks after one machine, and the commands an operator gives it.
//!
//! command line -> `cli` -> run: config -> check -> the machine's event loop, with `http`, `console`, `event_log` beside it
//!                       -> any other: `client` -> unix socket -> `http` -> `control` -> event loop
//!
//! Only what the program and this crate's tests need is public; all modules are private.

#![warn(missing_docs)]

use std::process::ExitCode;

mod age;
mod attachment;
mod check;
mod cli;
mod client;
mod config;
mod console;
mod control;
mod drill;
mod event;
mod event_log;
mod failure;
mod fleet_lock;
mod folders;
mod home;
mod host_reload;
mod http;
mod in_force;
mod machine;
mod metrics;
mod notify;
mod object_store;
mod parked_guest;
mod peer;
mod problem;
mod run;
mod runtime_root;
#[cfg(test)]
mod sample;
mod unix_socket;
mod upgrade;
mod watchdog;

pub use cli::reference as commands_page;
pub use config::page as config_page;
pub use console::{Hub, Place};
pub(crate) use error_text::chain;
pub use event_log::{EventLog, read_file as read_events};
pub use folders::own_user::claim as claim_user;
pub use folders::prepare as prepare_folders;
pub use host_reload::Record;
pub use metrics::page as metrics_page;

/// The program `hearth`: the commands, and behind `hearth run` the keeper.
pub fn main() -> ExitCode {
    cli::main(run::run)
}
