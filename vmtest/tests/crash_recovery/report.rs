//! `hearth report` after a panic: the page has the figures of the status, with a keeper and without one.

use hearth_vmtest::{Disk, Drives, Result, event};

use crate::dump::{dumping, wait_complete};

#[test]
fn report_after_a_panic_agrees_with_the_status() -> Result<()> {
    let vm = dumping("report").disk(Disk::empty(8)).running()?;
    vm.panic()?;
    vm.wait_incarnation(2)?;
    wait_complete(&vm, 1)?;
    vm.wait_event("a sample of the second guest's memory", |record| {
        event!(MemoryHeld)(record).filter(|record| record.incarnation == 2)
    })?;
    let recovery = vm.status()?.last_recovery.expect("the machine has recovered");
    let dump = recovery.dump.expect("the crash was dumped");
    let page = vm.cli(&["report", vm.name(), "-o", "-"])?;
    let down = match recovery.duration_ms {
        long if long >= 10_000.0 => format!("{:.1} s", long / 1e3),
        long if long >= 1000.0 => format!("{:.2} s", long / 1e3),
        short => format!("{short:.0} ms"),
    };
    for part in [
        "<td>guest panicked</td>",
        "1 → 2",
        &format!("<td>{down}</td><td>warm</td>"),
        &format!("Dump {}, complete", dump.file),
        "sysrq triggered crash",
        "line warm",
        "line cold",
        "guest runs",
        "share from memory",
    ] {
        assert!(page.contains(part), "{part}: {page}");
    }
    let phases = &recovery.phases;
    assert!(phases.iter().all(|phase| page.contains(&format!(">{}</span>", phase.phase))), "{phases:?}");
    vm.stop()?;
    let file = vm.dump_folder().join("report.html");
    let file = file.to_str().expect("the test's names are text");
    vm.cli(&["report", vm.name(), "-o", file])?;
    let left = std::fs::read_to_string(file).expect("the report is written");
    for part in ["No keeper of report answers at the moment.", "sysrq triggered crash", "line warm", &dump.file] {
        assert!(left.contains(part), "{part}: {left}");
    }
    Ok(())
}
