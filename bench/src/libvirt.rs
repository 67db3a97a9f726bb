//! Bench `libvirt`: a web server that is a domain of libvirt, as libvirt runs it and attached to Hearth.
//!
//! for each disk profile, both sides in turn: the session of bench `warm-reboot`, with `virsh reboot` and with a panic, after
//! both of which libvirt resets the guest in its QEMU. Then the speed of the disk itself, with all caches dropped.

use std::path::{Path, PathBuf};

use hearth_vmtest::libvirt::{DomainDisk, LibvirtVm};

use crate::disk::image;
use crate::disk::in_guest::{self, InGuestError, Read};
use crate::host::profile::Profile;
use crate::host::scratch::Scratch;
use crate::record::{BUDGET_PEAKS, Record};
use crate::sides::{Guest, Rig, Stack, Way};
use crate::stats::{self, degradation_pct};
use crate::table::{Columns, Table};
use crate::warm_reboot::{Shape, WarmRebootError, session};

pub const NAME: &str = "libvirt";
const SIDES: [(Stack, &str); 2] = [(Stack::Domain, "plain"), (Stack::AttachedDomain, "attached")];
const WAYS: [(Way, &str); 2] = [(Way::Reboot, "reboot"), (Way::Warm, "panic")];
const IMAGE_BYTES: u64 = 256 << 20;
const RANDOM_READS: u32 = 4000;

#[derive(Debug, thiserror::Error)]
pub enum LibvirtError {
    #[error("libvirt's daemons need root: run this bench as root")]
    NotRoot,
    #[error(transparent)]
    Session(#[from] WarmRebootError),
    #[error("cannot prepare {path}")]
    Prepare { path: PathBuf, source: std::io::Error },
    #[error("domain")]
    Domain(#[from] hearth_vmtest::Error),
    #[error("reading the disk")]
    Reading(#[from] InGuestError),
}

pub struct Options {
    pub quick: bool,
    pub folder: PathBuf,
    pub profiles: Vec<Profile>,
}

pub fn run(options: &Options, record: &mut Record) -> Result<(), LibvirtError> {
    if !rustix::process::geteuid().is_root() {
        return Err(LibvirtError::NotRoot);
    }
    let shape = Shape { guest: if options.quick { Guest::Busybox } else { Guest::Debian }, ..Shape::of(options.quick) };
    let rig = Rig::prepare(&options.folder, record.machine.accelerator).map_err(WarmRebootError::from)?;
    record.profile_by = "libvirt's iotune, which `hearth attach` turns into limits of Hearth's own".to_owned();
    for &profile in &options.profiles {
        for (stack, _) in SIDES {
            session::measure(&rig, stack, profile, shape, record)?;
        }
    }
    read_disks(options, record)?;
    summarise(record, &options.profiles);
    Ok(())
}

/// Reads a disk at its full speed, in two domains that run side by side, one after the other. The side that goes first alternates.
fn read_disks(options: &Options, record: &mut Record) -> Result<(), LibvirtError> {
    let (turns, rounds) = if options.quick { (1, 4) } else { (3, 8) };
    let failed = |source| LibvirtError::Prepare { path: options.folder.clone(), source };
    let folder = Scratch::new(&options.folder, NAME).map_err(failed)?;
    folder.let_others_in().map_err(failed)?;
    let images = SIDES.map(|(_, side)| folder.path().join(format!("{side}.img")));
    for image in &images {
        image::write(image, IMAGE_BYTES).map_err(failed)?;
    }
    for turn in 0..turns {
        eprintln!("{NAME}: reads of the disk, turn {} of {turns}", turn + 1);
        let vms = [started(&images[0], SIDES[0].0)?, started(&images[1], SIDES[1].0)?];
        for round in 0..rounds {
            let order = if round % 2 == 0 { [0, 1] } else { [1, 0] };
            for read in Read::BOTH {
                let mut figures = [0.0; 2];
                for side in order {
                    figures[side] = in_guest::read_disk(&vms[side], "vda", read, RANDOM_READS)?;
                    record.add(&disk_case(SIDES[side].0), read.word(), read.unit(), figures[side]);
                }
                let [plain, attached] = figures;
                record.add(&disk_case(Stack::AttachedDomain), &over_plain(read), "ratio", attached / plain);
            }
        }
    }
    Ok(())
}

fn over_plain(read: Read) -> String {
    format!("{}_over_plain", read.word())
}

fn started(image: &Path, stack: Stack) -> Result<LibvirtVm, LibvirtError> {
    let disk = DomainDisk { target: "vda", image, format: "raw", limits: None };
    let vm = LibvirtVm::define(NAME, Guest::Busybox.memory_mib(), &[disk])?.expect("this bench runs as root");
    if stack == Stack::AttachedDomain {
        vm.hearth(&["attach", NAME, "--yes"])?;
    }
    vm.start()?;
    Ok(vm)
}

fn disk_case(stack: Stack) -> String {
    format!("{}-disk@asis", stack.name())
}

fn summarise(record: &mut Record, profiles: &[Profile]) {
    for &profile in profiles {
        for ((stack, side), (way, ending)) in SIDES.into_iter().flat_map(|side| WAYS.map(|way| (side, way))) {
            let case = format!("{}@{}", stack.side(way), profile.name());
            let of = |record: &Record, metric: &str| record.median(&case, metric);
            let first = of(record, "read_first_mib_s");
            let lost = of(record, "read_before_mib_s").zip(first).map(|(before, after)| degradation_pct(before, after));
            let figures = [
                ("read_first", "mib_s", first),
                ("read_degradation", "pct", lost),
                ("web_degradation", "pct", of(record, "web_degradation_pct")),
                ("boot", "s", of(record, "boot_s")),
                ("disk_read_after", "mib", of(record, "disk_read_after_mib")),
            ];
            let key = |(figure, unit, value)| (profile.key(&format!("{figure}_{side}_{ending}_{unit}")), value);
            record.summarise_all(figures.map(key));
        }
    }
    let [pauses, per_page] = ["reset_pause_ms", "reset_pause_us_per_page"].map(|metric| record.of_all_cases(metric));
    record.summarise("reset_pause_ms_p50", stats::median(&pauses));
    record.summarise("reset_pause_ms_max", pauses.iter().copied().reduce(f64::max));
    record.summarise("reset_pause_us_per_page", stats::median(&per_page));
    record.summarise("budget_peak_pct", record.highest(&BUDGET_PEAKS));
    // The slower of the two ways of reading.
    let ratios = Read::BOTH.map(|read| record.median(&disk_case(Stack::AttachedDomain), &over_plain(read)));
    record.summarise("attached_over_plain_io_ratio", ratios.into_iter().flatten().reduce(f64::min));
}

/// One table for all profiles, and the reads of the disk.
pub fn table(record: &Record) -> Table {
    const COLUMNS: &Columns<'_> = &[
        ("read before MiB/s", "read_before_mib_s"),
        ("first after", "read_first_mib_s"),
        ("web 1/s", "web_before_rps"),
        ("web after", "web_after_rps"),
        ("full speed s", "full_speed_s"),
        ("loss %", "web_degradation_pct"),
        ("boot s", "boot_s"),
        ("files read MiB", "disk_read_after_mib"),
        ("disk MiB/s", "seq"),
        ("disk 4 KiB 1/s", "rand4k"),
    ];
    let cases: Vec<String> = record.cases().into_iter().map(str::to_owned).collect();
    Table::of_cases(record, "side@profile", COLUMNS, cases.into_iter().map(|case| (case.clone(), case)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_follow_from_the_rows() {
        let rows = [
            ("attached-panic@paper", "read_before_mib_s", 1000.0),
            ("attached-panic@paper", "read_first_mib_s", 400.0),
            ("attached-panic@paper", "boot_s", 9.0),
            ("attached-panic@paper", "reset_pause_ms", 300.0),
            ("attached-panic@paper", "keeper_peak_pct", 101.0),
            ("attached-reboot@cloud", "boot_s", 11.0),
            ("attached-disk@asis", "seq_over_plain", 0.95),
            ("attached-disk@asis", "rand4k_over_plain", 1.1),
        ];
        let mut record = Record::of(NAME, rows);
        record.add("attached-panic@paper", "reset_pause_ms", "ms", 500.0);
        summarise(&mut record, &Profile::ALL);
        for (key, value) in [
            ("read_first_attached_panic_mib_s", 400.0),
            ("read_degradation_attached_panic_pct", 60.0),
            ("boot_attached_reboot_s_cloud", 11.0),
            ("reset_pause_ms_p50", 400.0),
            ("reset_pause_ms_max", 500.0),
            ("budget_peak_pct", 101.0),
            ("attached_over_plain_io_ratio", 0.95),
        ] {
            assert_eq!(record.summary[key], value, "{key}");
        }
        assert!(!record.summary.contains_key("boot_plain_panic_s"), "not measured");
    }
}
