//! Hundreds of reboots in a row with refill: `make soak NAME=reboots`.

use hearth_vmtest::processes;
use hearth_vmtest::{Drives, Result, TestVm, event};

use crate::shelf::{SHELF, mount};

/// More than this is a leak.
const GROWTH_KIB_MAX: u64 = 16 << 10;

/// Each guest reads its files back, and they are right; neither the keeper nor the memory folder grows.
#[test]
#[ignore = "takes minutes: REBOOTS=200, unless said otherwise"]
fn hundreds_of_reboots_do_not_grow() -> Result<()> {
    let reboots = std::env::var("REBOOTS").ok().and_then(|text| text.parse().ok()).unwrap_or(200);
    let builder = TestVm::busybox("reboots").memory_mib(512).setting("refill", "on").disk(SHELF.ext4());
    // So many panics would be a crash loop, which waits.
    let vm = builder.crash_setting("loop_count", 1000).boot()?;
    SHELF.verify(&vm)?;
    let mut first_kib = None;
    for number in 2..=reboots + 1 {
        match number % 3 {
            0 => vm.panic()?,
            1 => vm.kill_qemu()?,
            _ => drop(vm.guest().start("reboot -f")?),
        }
        vm.wait_incarnation(number)?;
        mount(&vm, "rw")?;
        vm.sh("hearth-refill")?;
        SHELF.verify(&vm)?;
        let mapped = event!(|record| CacheMapRead { pages, .. } if u64::from(record.incarnation) == number => pages);
        let pages = vm.wait_event("the cache map", mapped)?;
        assert!(pages >= SHELF.pages(), "reboot {number}: {pages} pages in the map");
        let keeper = vm.keeper_pid().expect("a keeper runs");
        let kib = processes::figure(keeper, "RssAnon");
        // The first reboots fill what is kept once.
        let first_kib = *first_kib.get_or_insert(kib);
        assert!(kib <= first_kib + GROWTH_KIB_MAX, "reboot {number}: the keeper has {kib} KiB, after {first_kib}");
        let memory = vm.status()?.memory;
        let kept_mib = (memory.resident_bytes + memory.ember_bytes) >> 20;
        eprintln!("reboot {number}: {pages} pages, keeper {kib} KiB, guest and ember {kept_mib} MiB");
    }
    Ok(())
}
