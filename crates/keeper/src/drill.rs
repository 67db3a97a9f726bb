//! Drill: for tests, a keeper that kills itself after a given step, so that the next keeper must cope with what it
//! left; and a keeper whose watchdog has short limits.

/// Environment variable with the name of the step: a phase, or `commit`, which lies within one.
const DRILL: &str = "HEARTH_DRILL_DIE_AFTER";
/// Environment variable with the number by which the watchdog's limits are divided.
const HASTE: &str = "HEARTH_DRILL_HASTE";

/// Kills this process if the drill names this step.
pub fn drill(step: &str) {
    if std::env::var_os(DRILL).is_some_and(|wanted| wanted == step) {
        // Fails only if the process does not exist.
        let _ = rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL);
    }
}

/// Divisor of the watchdog's limits; 1 without a drill.
pub fn watchdog_divisor() -> u32 {
    let asked = std::env::var(HASTE).ok().and_then(|number| number.parse().ok());
    asked.unwrap_or(1).max(1)
}
