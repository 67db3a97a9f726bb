//! Checks that an NVRAM device's memory and mirror match it.

use hearth_disk::nvram::NvramError;

use super::Life;
use crate::config::Config;
use crate::problem::Problem;

pub fn check(config: &Config, life: Life, problems: &mut Vec<Problem>) {
    if life.holds_resources() {
        return;
    }
    let folder = &config.folders.memory;
    let disks = config.devices.nvram.iter().map(|device| device.options(folder));
    for options in disks.chain(config.devices.pmem.iter().map(|device| device.options(folder))) {
        if let Err(error) = options.check() {
            let make = match error {
                NvramError::OtherSize { .. } | NvramError::NoFile { .. } | NvramError::Unmirrored { .. } => {
                    Problem::error
                }
                _ => Problem::for_now,
            };
            problems.push(make("nvram", crate::chain(&error), ""));
        }
    }
}
