//! Drill: a keeper that kills itself after a given step, so that a test sees what the next keeper makes of it; and one whose
//! watchdog does not take minutes.

/// Environment variable with the name of the step: a phase, or `commit`, which lies within one.
const DRILL: &str = "HEARTH_DRILL_DIE_AFTER";
/// Environment variable with the number by which the watchdog's limits are divided.
const HASTE: &str = "HEARTH_DRILL_HASTE";

/// Kills this process if the drill names this step.
pub fn drill(step: &str) {
    if std::env::var_os(DRILL).is_some_and(|wanted| wanted == step) {
        // Fails for no process that lives.
        let _ = rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL);
    }
}

/// By how much the watchdog's limits are shorter than usual; 1 without a drill.
pub fn haste() -> u32 {
    let asked = std::env::var(HASTE).ok().and_then(|number| number.parse().ok());
    asked.unwrap_or(1).max(1)
}
