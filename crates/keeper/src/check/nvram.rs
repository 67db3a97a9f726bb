//! NVRAM: do memory and mirror fit the device?

use super::Life;
use crate::config::Config;
use crate::problem::Problem;

pub fn check(config: &Config, life: Life, problems: &mut Vec<Problem>) {
    if life.holds_resources() {
        return;
    }
    for (index, device) in config.nvram.iter().enumerate() {
        if let Err(error) = device.options(&config.memory_folder).check() {
            problems.push(Problem::error(format!("nvram[{index}]"), crate::chain(&error), ""));
        }
    }
}
