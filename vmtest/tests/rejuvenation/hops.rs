//! What goes on over a hop: memory, processes, disks under load, console, clock, several processors, both QEMU versions.

use hearth_vmtest::web::{fetch, serve};
use hearth_vmtest::{Disk, Drives, Output, Result, TestVm, artifacts, patience};
use serde_json::Value;

/// Each block is read again and compared; larger than what a hop could hide.
const FIO: &str = "fio --name=load --filename=/dev/vda --rw=randwrite --bsrange=4k-64k --size=32m --loops=4 \
    --ioengine=io_uring --iodepth=16 --direct=1 --thread --verify=crc32c --verify_backlog=64 --verify_fatal=1";

#[test]
fn a_guest_under_load_goes_through_both_versions_and_back() -> Result<()> {
    let vm = TestVm::busybox_with_fio("hops").cpus(2).disk(Disk::empty(48)).boot()?;
    let nonce = vm.nonce()?;
    vm.sh(&format!("({FIO} >/tmp/fio.log 2>&1; echo $? >/tmp/fio.status) &"))?;
    let (old, new) = (artifacts::installed_qemu()?, artifacts::qemu_10()?);
    for (round, qemu) in [&new, &old, &old, &new, &new, &old].into_iter().enumerate() {
        let before = vm.qemu_pid()?;
        let hop = vm.rejuvenate_to(qemu)?;
        assert_eq!(hop.status, 0, "hop {round}: {}", hop.text());
        assert_ne!(vm.qemu_pid()?, before);
        assert_eq!(vm.nonce()?, nonce, "hop {round}: it is the same guest");
    }
    let going_on = vm.sh("[ -e /tmp/fio.status ] && echo over || echo going on")?;
    assert_eq!(going_on.trim(), "going on", "the load was too short");
    let ended = "while [ ! -e /tmp/fio.status ]; do sleep 1; done; cat /tmp/fio.log; exit $(cat /tmp/fio.status)";
    let fio = vm.run_within(ended, patience(60))?;
    assert_eq!(fio.status, 0, "{}", fio.text());
    assert!(!fio.text().contains("verify:"), "{}", fio.text());
    let status = vm.status()?;
    assert_eq!((&status["incarnation"], &status["qemu"]["generation"]), (&Value::from(1), &Value::from(7)), "{status}");
    let disk = &status["disks"][0];
    assert_eq!((&disk["io_errors"], &disk["bad_requests"]), (&Value::from(0), &Value::from(0)), "{disk}");
    let complaints: Vec<_> = vm.guest().kernel_log().into_iter().filter(|line| line.contains("error")).collect();
    assert!(complaints.is_empty(), "{complaints:?}");
    let pauses: Vec<_> = vm.events().iter().filter_map(|event| event["pause_ms"].as_f64()).collect();
    eprintln!("pauses: {pauses:?}");
    Ok(())
}

/// Reads words from the console and says each, and counts lines on it meanwhile, until the word is `enough`. At the end: how
/// far it counted, and the words.
const TALKS: &str = "rm -f /tmp/typed; : >/tmp/typed
while read -r word; do echo $word >>/tmp/typed; echo got $word >/dev/ttyS0; [ $word = enough ] && break; done </dev/ttyS0 &
i=0; until grep -q enough /tmp/typed; do i=$((i+1)); echo line $i >/dev/ttyS0; usleep 2000; done
wait; echo $i; cat /tmp/typed";

/// Types `word` and waits until the guest has said that it read it: so there is never more on its way than the serial
/// port's own 16 bytes, and nothing that a guest without processor time could leave behind.
fn talk(vm: &TestVm, word: &str) -> Result<()> {
    vm.guest().type_line(word)?;
    let said = format!("got {word}");
    vm.wait_console(&said, patience(20), |heard| heard.lines().contains(&said).then_some(()))
}

#[test]
fn a_console_loses_nothing_in_either_direction() -> Result<()> {
    let vm = TestVm::busybox("console").boot()?;
    let talk_id = vm.guest().start(TALKS)?;
    let mut typed = Vec::new();
    for qemu in [artifacts::qemu_10()?, artifacts::installed_qemu()?, artifacts::installed_qemu()?] {
        let hop = std::thread::scope(|scope| -> Result<Output> {
            let hop = scope.spawn(|| vm.rejuvenate_to(&qemu));
            while !hop.is_finished() {
                typed.push(format!("word{}", typed.len()));
                talk(&vm, &typed[typed.len() - 1])?;
            }
            hop.join().expect("it does not panic")
        })?;
        assert_eq!(hop.status, 0, "{}", hop.text());
    }
    typed.push("enough".to_owned());
    talk(&vm, "enough")?;
    let said = vm.wait_console("its end", patience(20), |heard| heard.take_answer(talk_id))?;
    let said = String::from_utf8_lossy(&said.output).into_owned();
    let mut words = said.lines();
    let count: usize = words.next().and_then(|count| count.parse().ok()).expect("it counted");
    assert_eq!(words.collect::<Vec<_>>(), typed, "each word was read once");
    let lines = vm.guest().lines();
    let lines: Vec<_> = lines.iter().filter(|line| line.starts_with("line ")).collect();
    assert_eq!(lines.len(), count);
    assert!(lines.iter().enumerate().all(|(index, line)| **line == format!("line {}", index + 1)), "in order");
    Ok(())
}

#[test]
fn a_forwarded_port_leads_into_the_guest_again_after_a_hop() -> Result<()> {
    let vm = TestVm::busybox("ports").http().boot()?;
    let address = format!("127.0.0.1:{}", vm.http_port().expect("it was asked for"));
    vm.sh("net-up")?;
    serve(&vm, "before")?;
    assert!(fetch(&address).ends_with("\r\n\r\nbefore\n"));
    for qemu in [artifacts::qemu_10()?, artifacts::installed_qemu()?] {
        let hop = vm.rejuvenate_to(&qemu)?;
        assert_eq!(hop.status, 0, "{}", hop.text());
        assert!(fetch(&address).ends_with("\r\n\r\nbefore\n"), "{}", qemu.display());
    }
    // The guest reaches the network through the new QEMU as well.
    vm.sh("net-up").map(drop)
}
