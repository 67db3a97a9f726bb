//! Drill: a keeper that kills itself after a given step, so that a test sees what the next keeper makes of it.

/// Environment variable with the name of the step: a phase, or `commit`, which lies within one.
const DRILL: &str = "HEARTH_DRILL_DIE_AFTER";

/// Kills this process if the drill names this step.
pub fn drill(step: &str) {
    if std::env::var_os(DRILL).is_some_and(|wanted| wanted == step) {
        // Fails for no process that lives.
        let _ = rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL);
    }
}
