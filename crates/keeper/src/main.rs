//! The program `hearth`: the commands, and behind `hearth run` the keeper.

use std::process::ExitCode;

fn main() -> ExitCode {
    hearth_keeper::main()
}
