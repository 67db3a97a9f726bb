//! Many volumes, mounted at boot. All are being written to when their guest crashes, and again when the next one does.
//! Acknowledged data is there, no file system is damaged, and the last boot finds nearly all that it reads in memory.

use std::collections::BTreeMap;
use std::iter::repeat_n;

use hearth_api::RemountPlan;
use hearth_vmtest::images::{self, XFS_MIB_MIN};
use hearth_vmtest::{Disk, Drives, Result, TestVm, TestVmBuilder, Volumes, event, patience};

use super::{machine, ready};

/// Number of parallel writers, each with a share of the volumes.
const WRITERS: usize = 4;
/// Lines that each volume acknowledges before a crash.
const LINES: usize = 2;
/// Share of the last boot's reads that memory must answer, in percent.
const HIT_PCT: f64 = 98.0;

#[test]
fn a_hundred_volumes_come_back_whole() -> Result<()> {
    come_back_whole(Kinds { ext4: 100, xfs_disks: 2, xfs_partitions: 0 })
}

#[test]
fn volumes_of_xfs_come_back_whole_beside_others() -> Result<()> {
    come_back_whole(Kinds { ext4: 20, xfs_disks: 0, xfs_partitions: 20 })
}

/// Takes minutes; run by `make soak NAME=volumes`.
#[test]
#[ignore = "takes minutes under emulation"]
fn four_hundred_volumes_come_back_whole() -> Result<()> {
    come_back_whole(Kinds { ext4: 400, xfs_disks: 4, xfs_partitions: 0 })
}

/// Numbers of volumes.
struct Kinds {
    ext4: usize,
    /// Whole disks with XFS, behind the other disks.
    xfs_disks: usize,
    /// Partitions of one disk with XFS, behind the disks with ext4.
    xfs_partitions: usize,
}

impl Kinds {
    fn all(&self) -> usize {
        self.ext4 + self.xfs_disks + self.xfs_partitions
    }

    /// The guest's names of the XFS volumes. `first` is the number of the first disk with XFS.
    fn xfs_names(&self, first: usize) -> Vec<String> {
        let letter = |disk: usize| char::from(b'a' + disk as u8);
        let partitions = (5..5 + self.xfs_partitions).map(|partition| format!("{}{partition}", letter(first)));
        let disks = first + usize::from(self.xfs_partitions > 0);
        partitions.chain((disks..disks + self.xfs_disks).map(|disk| letter(disk).to_string())).collect()
    }
}

fn come_back_whole(kinds: Kinds) -> Result<()> {
    let volumes = Volumes::make(kinds.ext4)?;
    let partitions = (kinds.xfs_partitions > 0).then(|| Volumes::make_xfs(kinds.xfs_partitions)).transpose()?;
    let first = volumes.images().len();
    let of_xfs = partitions.iter().flat_map(Volumes::copies);
    let of_xfs = of_xfs.chain(repeat_n(Disk::xfs(XFS_MIB_MIN), kinds.xfs_disks));
    let builder = of_xfs.fold(machine("many", &volumes), TestVmBuilder::disk);
    let mount_xfs = "mkdir -p /v/$x && mount -t xfs -o nouuid /dev/vd$x /v/$x || exit";
    let at_boot =
        format!("for x in {}; do {mount_xfs}; done; {}", kinds.xfs_names(first).join(" "), volumes.mount_script());
    let vm = builder.boot_script(&at_boot).boot()?;
    let all_are_mounted = || -> Result<()> {
        let mounted = vm.sh("grep -c ' /v/' /proc/mounts; true")?;
        assert_eq!(mounted.trim(), kinds.all().to_string(), "{:#?}", vm.guest().kernel_log());
        Ok(())
    };
    all_are_mounted()?;
    ready(&vm)?;
    let mut lines = Lines::new();
    for life in 1..=2 {
        let acknowledged = write_until_crash(&vm, life, kinds.all())?;
        vm.wait_incarnation(life + 1)?;
        all_are_mounted()?;
        let found = read(&vm)?;
        compare(life, &lines, &acknowledged, &found);
        lines = found;
    }
    let plan = ready(&vm)?;
    assert!(plan.hit_pct >= Some(HIT_PCT), "{:?}", plan.missed);
    vm.sh_within("umount /v/*", patience(60))?;
    vm.stop()?;
    check_partitions(&vm, &plan, &kinds, first)?;
    let disks = first + usize::from(kinds.xfs_partitions > 0);
    (disks..disks + kinds.xfs_disks)
        .try_for_each(|disk| images::check_xfs(&vm.folder().join(format!("disk{disk}.img"))))
}

/// Checks the file systems of all partitions in the plan.
fn check_partitions(vm: &TestVm, plan: &RemountPlan, kinds: &Kinds, first_xfs: usize) -> Result<()> {
    let (mut ext4, mut xfs) = (0, 0);
    for volume in plan.volumes.iter().filter(|volume| volume.partition.is_some()) {
        let disk = &volume.disk;
        let image = vm.folder().join(format!("{disk}.img"));
        let start = volume.offset;
        if *disk == format!("disk{first_xfs}") && kinds.xfs_partitions > 0 {
            let part = vm.folder().join("part.img");
            images::cut_out(&image, start..start + volume.bytes, &part)?;
            images::check_xfs(&part)?;
            std::fs::remove_file(part).expect("our own file");
            xfs += 1;
        } else {
            images::check_ext4(&image, start)?;
            ext4 += 1;
        }
    }
    assert_eq!((ext4, xfs), (kinds.ext4, kinds.xfs_partitions), "{:?}", plan.volumes);
    Ok(())
}

/// Lines by volume, in order.
type Lines = BTreeMap<String, Vec<String>>;

/// Appends lines `LIFE-1`, `LIFE-2` and so on to every volume and acknowledges each once it is on the disk. When every volume has
/// some, crashes the guest in the middle of writing.
fn write_until_crash(vm: &TestVm, life: u64, volumes: usize) -> Result<Lines> {
    // A process's line in the kernel log differs from the kernel's own by its priority only, and reaches the console at once.
    let line = format!(
        "echo {life}-$i >>$d/lines && sync $d/lines && echo \"<3>acknowledged ${{d#/v/}} {life}-$i\" >/dev/kmsg"
    );
    let share =
        format!("k=0; for d in /v/*; do k=$((k+1)); [ $((k%{WRITERS})) = $w ] || continue; {line} || exit; done");
    let writer = format!("(i=0; while :; do i=$((i+1)); {share}; done) &");
    let writers: Vec<String> = (0..WRITERS).map(|writer| writer.to_string()).collect();
    let all = format!("for w in {}; do {writer} done; wait", writers.join(" "));
    vm.guest().start(&format!("echo on >/proc/sys/kernel/printk_devkmsg; {all}"))?;
    vm.wait_console("lines in each volume", patience(60), |heard| {
        let acknowledged = acknowledged(heard.kernel(), life);
        let is_enough = acknowledged.len() == volumes && acknowledged.values().all(|lines| lines.len() >= LINES);
        is_enough.then_some(())
    })?;
    vm.crash()?;
    // Lines that the guest acknowledged just before it died count too.
    let started = event!(|event| IncarnationStarted if u64::from(event.incarnation) == life + 1);
    vm.wait_event("the next incarnation", started)?;
    Ok(acknowledged(&vm.guest().kernel_log(), life))
}

fn acknowledged(kernel: &[String], life: u64) -> Lines {
    let mut lines = Lines::new();
    for message in kernel {
        let words: Vec<&str> = message.split_whitespace().rev().take(3).collect();
        if let [line, volume, "acknowledged"] = words[..]
            && line.starts_with(&format!("{life}-"))
        {
            lines.entry(volume.to_owned()).or_default().push(line.to_owned());
        }
    }
    lines
}

fn read(vm: &TestVm) -> Result<Lines> {
    let said = vm.sh_within("awk '{ print FILENAME, $0 }' /v/*/lines", patience(60))?;
    let mut lines = Lines::new();
    for line in said.lines() {
        let (file, line) = line.split_once(' ').unwrap_or_else(|| panic!("a line without a file: {line}"));
        let volume = file.trim_start_matches("/v/").trim_end_matches("/lines");
        lines.entry(volume.to_owned()).or_default().push(line.to_owned());
    }
    Ok(lines)
}

/// Asserts that each volume holds the earlier lines, then all acknowledged ones, and perhaps further ones, but nothing else.
fn compare(life: u64, before: &Lines, acknowledged: &Lines, found: &Lines) {
    for (volume, acknowledged) in acknowledged {
        let found = found.get(volume).map_or(&[][..], Vec::as_slice);
        let old = before.get(volume).map_or(&[][..], Vec::as_slice);
        let new = found.strip_prefix(old).unwrap_or_else(|| panic!("{volume} held {old:?} and now holds {found:?}"));
        let expected: Vec<String> = (1..=new.len()).map(|number| format!("{life}-{number}")).collect();
        assert_eq!(new, expected, "{volume}");
        assert!(new.starts_with(acknowledged), "{volume} acknowledged {acknowledged:?} and holds {new:?}");
    }
}
