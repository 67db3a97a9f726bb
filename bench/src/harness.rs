//! The part that all benches share: their list, their options, and the output at the end.

use std::error::Error;
use std::path::{Path, PathBuf};

use crate::host::facts::{self, Accelerator, HostFacts};
use crate::record::Record;
use crate::table::Table;
use crate::{crash_recovery, disk, lazy_restore, libvirt, rejuvenation, remount, warm_reboot};

/// Makes a table of a bench's record.
pub type ToTable = fn(&Record) -> Table;

/// A bench, by the name of its record.
pub struct Bench {
    pub name: &'static str,
    pub table: ToTable,
    /// A second table with its heading, if the bench has one.
    pub second_table: Option<(&'static str, ToTable)>,
}

pub const BENCHES: [Bench; 7] = [
    Bench { name: warm_reboot::NAME, table: warm_reboot::table, second_table: None },
    Bench { name: crash_recovery::NAME, table: crash_recovery::table, second_table: None },
    Bench {
        name: disk::NAME,
        table: disk::table,
        second_table: Some(("Image formats, in microseconds", disk::formats_table)),
    },
    Bench { name: rejuvenation::NAME, table: rejuvenation::table, second_table: None },
    Bench { name: lazy_restore::NAME, table: lazy_restore::table, second_table: None },
    Bench { name: remount::NAME, table: remount::table, second_table: None },
    Bench { name: libvirt::NAME, table: libvirt::table, second_table: None },
];

/// Options that all benches have.
#[derive(clap::Args)]
pub struct Common {
    /// Run for a minute or two, for a look rather than a result
    #[arg(long)]
    quick: bool,
    /// Folder for images and records, on the disk to be measured
    #[arg(long, default_value_os_t = crate::target().join("bench"))]
    pub folder: PathBuf,
    /// Accelerator of the guests
    #[arg(long, default_value = "tcg")]
    pub accelerator: Accelerator,
}

impl Common {
    pub fn is_quick(&self) -> bool {
        self.quick || std::env::var_os("QUICK").is_some_and(|quick| quick == "1")
    }
}

/// Runs the bench `name`, writes its record and prints its tables.
pub fn measure<E: Error + 'static>(
    name: &str,
    common: &Common,
    run: impl FnOnce(&mut Record) -> Result<(), E>,
) -> Result<(), Box<dyn Error>> {
    let qemu =
        hearth_vmtest::artifacts::qemu().map_or_else(|error| error.to_string(), |path| facts::qemu_version(&path));
    let machine = HostFacts::gather(common.accelerator);
    let record = Record::new(name, common.is_quick(), machine, qemu, hearth_vmtest::artifacts::CPU_MODEL);
    let mut record = record.keep_in(&common.folder);
    run(&mut record)?;
    finish(&record, &common.folder)
}

fn finish(record: &Record, folder: &Path) -> Result<(), Box<dyn Error>> {
    let path = record.write(folder)?;
    let bench = BENCHES.iter().find(|bench| bench.name == record.bench).expect("a record has the name of a bench");
    println!("{}\n{}, CPU model {}", record.machine.describe(), record.qemu, record.cpu_model);
    println!("disk profiles by: {}\n\n{}", record.profile_by, (bench.table)(record).text());
    for (metric, value) in &record.summary {
        println!("{metric:40} {value}");
    }
    for left_out in &record.left_out {
        println!("left out: {left_out}");
    }
    if let Some((heading, table)) = bench.second_table {
        println!("\n{heading}\n\n{}", table(record).text());
    }
    eprintln!("values: {}", path.display());
    Ok(())
}
