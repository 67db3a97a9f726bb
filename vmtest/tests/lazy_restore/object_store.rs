//! Snapshots in an object store: saved to it and restored from it, over a wire that is slow, breaks, or is dead for a while.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use hearth_api::{MachineState, RestoreStatus};
use hearth_vmtest::{Disk, Drives, Result, TestVm, TestVmBuilder, event, patience, pattern};
use loopback_s3::{BUCKET, S3Server, Wire};
use serde_json::Value;

use super::dedup::{read_file, verify_file};
use super::{SEED, comes_whole, fill, verify, wait_restore};

const MIB: u64 = 1 << 20;

/// A store, with folders for its credentials, for the saving machine's staging and for the clones' caches.
pub(super) struct Stand {
    pub(super) server: S3Server,
    pub(super) folder: tempfile::TempDir,
}

impl Stand {
    pub(super) fn new() -> Self {
        let (server, folder) = (S3Server::start(), tempfile::tempdir().expect("a folder"));
        let lines = server.environment().into_iter().map(|(key, value)| format!("{key}={value}\n"));
        fs::write(folder.path().join("s3.env"), lines.collect::<String>()).expect("it can be written");
        Self { server, folder }
    }

    pub(super) fn path(&self, name: &str) -> String {
        self.folder.path().join(name).display().to_string()
    }

    pub(super) fn machine(&self, builder: TestVmBuilder) -> Result<TestVm> {
        let mut section = toml::Table::new();
        section.insert("credentials".to_owned(), self.path("s3.env").into());
        section.insert("folder".to_owned(), self.path("keeper").into());
        builder.setting("object_store", section).boot()
    }

    pub(super) fn clone(&self, vm: &TestVm, name: &str, cache: &str, options: &[&str]) -> Result<TestVm> {
        self.clone_of("one", vm, name, cache, options)
    }

    pub(super) fn clone_of(
        &self,
        saved: &str,
        vm: &TestVm,
        name: &str,
        cache: &str,
        options: &[&str],
    ) -> Result<TestVm> {
        let (credentials, cache) = (self.path("s3.env"), self.path(cache));
        let store = ["--credentials", &credentials, "--cache", &cache];
        vm.restore(Path::new(&address(saved)), name, &[&store, options].concat())
    }

    /// A machine with this much known memory that was saved to the store and stopped, and its nonce.
    pub(super) fn saved(&self, name: &str, mib: u64) -> Result<(TestVm, String)> {
        let vm = self.machine(TestVm::busybox(name).memory_mib(512))?;
        let nonce = vm.nonce()?;
        fill(&vm, mib)?;
        vm.save(Path::new(&address("one")))?;
        vm.stop_at_once()?;
        Ok((vm, nonce))
    }

    pub(super) fn object(&self, name: &str) -> PathBuf {
        self.server.file(&format!("one/{name}"))
    }

    /// Bytes of everything in a cache.
    fn cached_bytes(&self, cache: &str) -> u64 {
        let objects = fs::read_dir(self.folder.path().join(cache).join("cache/objects")).expect("there is one");
        let blocks = objects.flatten().flat_map(|object| fs::read_dir(object.path()).expect("a folder"));
        blocks.flatten().map(|block| block.metadata().expect("it is there").len()).sum()
    }
}

pub(super) fn address(name: &str) -> String {
    format!("s3://{BUCKET}/{name}")
}

/// Waits until all memory has arrived. Returns the number of pages that came before the guest ran.
fn wait_complete(vm: &TestVm) -> Result<u64> {
    vm.wait_event("all memory is there", event!(RestoreComplete { pages_prefetched, .. } => pages_prefetched))
}

#[test]
fn guest_is_restored_from_store_in_each_mode() -> Result<()> {
    let stand = Stand::new();
    let vm = stand.machine(TestVm::busybox("far").disk(Disk::ext4(64)))?;
    let nonce = vm.nonce()?;
    read_file(&vm)?;
    vm.save_with(Path::new(&address("one")), &["--dedup-disk", "--scan", "200ms,2"])?;
    verify_file(&vm)?;
    verify(&vm)?;
    let refused = vm.cli_output(&["save", vm.name(), "-o", &address("one")])?;
    assert!(refused.status != 0 && refused.text().contains("exists already"), "{}", refused.text());
    vm.stop_at_once()?;
    assert_eq!(fs::read_dir(stand.path("keeper")).expect("it was used").count(), 0, "the staging folder is empty");

    for (name, mode, wire, cache) in [
        ("cut", "--lazy", Wire::Cut(3 * MIB), "first"),
        ("slow", "--working-set", Wire::Slow(8 * MIB), "second"),
        ("eager", "--eager", Wire::Whole, "third"),
        ("again", "--lazy", Wire::Whole, "third"),
    ] {
        let before = stand.server.answer_bytes();
        stand.server.set_wire(wire);
        let clone = stand.clone(&vm, name, cache, &[mode])?;
        clone.wait_running()?;
        assert_eq!(clone.nonce()?, nonce, "{name}: it is the same guest");
        verify_file(&clone)?;
        verify(&clone)?;
        assert_eq!(wait_complete(&clone)? > 0, mode != "--lazy", "{name}");
        clone.sh("probe drop-caches")?;
        verify_file(&clone)?;
        let came = stand.server.answer_bytes() - before;
        assert_eq!(came < MIB, name == "again", "{name}: {came} bytes came");
        clone.stop_at_once()?;
    }
    Ok(())
}

/// The web server serves the store's files.
#[test]
fn guest_is_restored_from_a_web_server() -> Result<()> {
    let stand = Stand::new();
    let vm = stand.machine(TestVm::busybox("web").disk(Disk::ext4(64)))?;
    let nonce = vm.nonce()?;
    read_file(&vm)?;
    vm.save_with(Path::new(&address("one")), &["--scan", "200ms,2"])?;
    let root = format!("http://{}", loopback_s3::web::serve(&stand.server.file("")));
    let refused = vm.cli_output(&["save", vm.name(), "-o", &format!("{root}/two")])?;
    assert!(refused.status != 0 && refused.text().contains("a web server is read-only"), "{}", refused.text());
    vm.stop_at_once()?;
    let one = format!("{root}/one");
    for (name, mode) in [("web-set", "--working-set"), ("web-lazy", "--lazy")] {
        let clone = vm.restore(Path::new(&one), name, &["--cache", &stand.path(name), mode])?;
        clone.wait_running()?;
        assert_eq!(clone.nonce()?, nonce, "{name}: it is the same guest");
        verify_file(&clone)?;
        verify(&clone)?;
        assert_eq!(wait_complete(&clone)? > 0, mode != "--lazy", "{name}");
        clone.sh("probe drop-caches")?;
        verify_file(&clone)?;
        clone.stop_at_once()?;
    }
    Ok(())
}

/// Run by hand with a real store's settings in the environment, like `houses` of hearth-store's tests.
#[test]
#[ignore = "needs a store: HEARTH_STORE=az://container/place, and its settings in the environment"]
fn guest_is_restored_from_any_vendors_store() -> Result<()> {
    let place = std::env::var("HEARTH_STORE").expect("HEARTH_STORE names a place in a store, as gs://bucket/place");
    let (folder, one) = (tempfile::tempdir().expect("a folder"), format!("{place}/guest-{}", std::process::id()));
    let path = |name: &str| folder.path().join(name).display().to_string();
    let section: toml::Table = [("folder".to_owned(), path("keeper").into())].into_iter().collect();
    let vm = TestVm::busybox("house").disk(Disk::ext4(64)).setting("object_store", section).boot()?;
    let nonce = vm.nonce()?;
    read_file(&vm)?;
    vm.save_with(Path::new(&one), &["--scan", "200ms,2"])?;
    vm.stop_at_once()?;
    for mode in ["--working-set", "--lazy"] {
        let clone = vm.restore(Path::new(&one), &mode[2..], &["--cache", &path(mode), mode])?;
        clone.wait_running()?;
        assert_eq!(clone.nonce()?, nonce, "{mode}: it is the same guest");
        verify_file(&clone)?;
        verify(&clone)?;
        wait_complete(&clone)?;
        clone.sh("probe drop-caches")?;
        verify_file(&clone)?;
        clone.stop_at_once()?;
    }
    Ok(())
}

/// Each clone's disk is an image over its snapshot's, which is in a folder or fetched from the store.
#[test]
fn cloned_clones_save_all_base_images() -> Result<()> {
    let stand = Stand::new();
    let vm = stand.machine(TestVm::busybox("chain").disk(Disk::ext4(64)))?;
    let (nonce, folder) = (vm.nonce()?, vm.folder().join("snapshot"));
    read_file(&vm)?;
    vm.save(&folder)?;
    vm.stop_at_once()?;
    let disk_has = |clone: &TestVm, lines: &str| -> Result<()> {
        verify_file(clone)?;
        clone.sh("probe drop-caches")?;
        verify_file(clone)?;
        assert_eq!(clone.sh("cat /d/lines")?.trim(), lines);
        clone.sh("rm -r /d/old && mkdir /d/old").map(drop)
    };
    // A machine restored from a folder can be saved to a store.
    let (credentials, keeper) = (stand.path("s3.env"), stand.path("keeper"));
    let first = vm.restore(&folder, "first", &["--credentials", &credentials, "--cache", &keeper])?;
    first.wait_running()?;
    wait_complete(&first)?;
    first.sh("mkdir /d/old && echo one >/d/lines && sync")?;
    first.save_with(Path::new(&address("one")), &["--dedup-disk"])?;
    first.stop_at_once()?;
    // Its own snapshot is removed.
    fs::remove_dir_all(&folder).expect("it was saved there");
    let second = stand.clone(&vm, "second", "cache", &["--eager"])?;
    second.wait_running()?;
    assert_eq!(second.nonce()?, nonce);
    disk_has(&second, "one")?;
    second.sh("echo two >>/d/lines && sync")?;
    second.save(Path::new(&address("two")))?;
    second.stop_at_once()?;
    let third = stand.clone_of("two", &vm, "third", "cache", &[])?;
    third.wait_running()?;
    assert_eq!(third.nonce()?, nonce);
    disk_has(&third, "one\ntwo")?;
    verify(&third)
}

/// Starts a command that reads all pages of the pattern, and waits until some have arrived.
fn begin_verifying(clone: &TestVm) -> Result<u64> {
    let verifying = clone.guest().start(&format!("probe verify /tmp/memory {SEED}"))?;
    wait_restore(clone, "touched pages", |restore| restore.pages_lazy > 1000)?;
    Ok(verifying)
}

#[test]
fn guest_waits_for_a_lost_store_and_continues() -> Result<()> {
    let stand = Stand::new();
    let (vm, nonce) = stand.saved("gone", 64)?;
    stand.server.set_wire(Wire::Slow(4 * MIB));
    // A trace prevents the backfill, so that some memory is always missing.
    let clone = stand.clone(&vm, "waits", "cache", &["--trace", "600"])?;
    clone.wait_running()?;
    let verifying = begin_verifying(&clone)?;
    stand.server.set_wire(Wire::Dead);
    let waits = |restore: &RestoreStatus| !restore.waits.is_empty();
    let why = wait_restore(&clone, "a waiting guest", waits)?.waits.swap_remove(0);
    assert!(why.contains("of the guest's memory cannot be fetched") && why.contains(&address("one/ram")), "{why}");
    clone.wait_event("an event about the waiting guest", event!(RestoreWaits))?;
    assert!(clone.guest().take_answer(verifying).is_none(), "the verification waits for missing pages");
    // The store is back, but answers with errors.
    stand.server.set_wire(Wire::Failing);
    wait_restore(&clone, "a guest that still waits", waits)?;
    stand.server.set_wire(Wire::Whole);
    let verified =
        clone.wait_console("the end of the verification", patience(60), |heard| heard.take_answer(verifying))?;
    assert_eq!((verified.status, clone.nonce()?), (0, nonce));
    Ok(())
}

#[test]
fn next_keeper_fetches_missing_memory_from_a_store() -> Result<()> {
    let stand = Stand::new();
    let (vm, nonce) = stand.saved("orphaned", 64)?;
    let clone = stand.clone(&vm, "orphan", "cache", &["--trace", "600"])?;
    clone.wait_running()?;
    let verifying = begin_verifying(&clone)?;
    clone.restart_keeper()?;
    comes_whole(&clone, verifying, &nonce)
}

#[test]
fn cache_keeps_its_limit_and_the_restore_completes() -> Result<()> {
    let stand = Stand::new();
    let (vm, nonce) = stand.saved("limited", 150)?;
    let clone = stand.clone(&vm, "small", "cache", &["--lazy", "--cache-size", "64MiB"])?;
    clone.wait_running()?;
    wait_complete(&clone)?;
    assert_eq!(clone.nonce()?, nonce);
    verify(&clone)?;
    let cached = stand.cached_bytes("cache");
    assert!((32 * MIB..=64 * MIB).contains(&cached), "{cached} bytes");
    Ok(())
}

#[test]
fn incomplete_objects_are_named_and_refused_or_awaited() -> Result<()> {
    let stand = Stand::new();
    let vm = stand.machine(TestVm::busybox("altered").memory_mib(512).disk(Disk::empty(16)))?;
    let nonce = vm.nonce()?;
    fill(&vm, 64)?;
    vm.sh("dd if=/tmp/memory of=/dev/vda bs=64k count=64 conv=fsync 2>&1")?;
    vm.save(Path::new(&address("one")))?;
    vm.stop_at_once()?;
    let refused = |what: &str, mode: &str, expect: &str| -> Result<()> {
        let clone = stand.clone(&vm, "never", "cache", &[mode])?;
        assert_eq!(clone.wait_keeper_end()?.code(), Some(1), "{what}");
        assert!(clone.keeper_log().contains(expect), "{what}: {}", clone.keeper_log());
        Ok(())
    };
    let disk = format!("disk-{}", disk_name(&stand));
    for (name, expect) in [
        ("manifest", "it has no manifest"),
        ("state", "state: cannot be read"),
        ("disk-root", "disk-root: is damaged: it has 0 bytes"),
        ("disk-root.index", "disk-root.index: is damaged: it is not there"),
    ] {
        let name = name.replace("disk-root", &disk);
        let (path, away) = (stand.object(&name), stand.folder.path().join("away"));
        fs::rename(&path, &away).expect("it is there");
        refused(&name, "--lazy", &expect.replace("disk-root", &disk))?;
        fs::rename(&away, &path).expect("it is there");
    }
    let flip = |name: &str, place: u64| {
        let file = File::options().read(true).write(true).open(stand.object(name)).expect("it is there");
        let mut byte = [0];
        file.read_exact_at(&mut byte, place).expect("it is that long");
        file.write_all_at(&[byte[0] ^ 1], place).expect("it can be written");
    };
    for (name, place, expect) in [
        ("state", 100, "state: is damaged: its checksum is wrong: it was altered, or is of another moment".to_owned()),
        (
            disk.as_str(),
            3 * MIB + 5,
            format!("{disk}: is damaged: bytes 3145728 to 4194303 of the disk are not what was saved"),
        ),
    ] {
        flip(name, place);
        refused(name, "--eager", &expect)?;
        flip(name, place);
    }
    let whole = fs::read(stand.object("ram")).expect("it can be read");
    let first = pattern::bytes("memory", 4096, SEED);
    let place = whole.chunks_exact(4096).position(|page| page == first).expect("it is there") as u64 * 4096;
    flip("ram", place);
    let clone = stand.clone(&vm, "mended", "cache", &["--lazy"])?;
    clone.wait_running()?;
    let why = clone.wait_event("an event about the damage", event!(RestoreWaits { why } => why))?;
    assert!(why.starts_with(&address("one/ram: pages ")) && why.contains("of the guest's memory are damaged"), "{why}");
    let verifying = clone.guest().start(&format!("probe verify /tmp/memory {SEED}"))?;
    wait_restore(&clone, "only the damaged pages missing", |restore| restore.pages_missing <= 16)?;
    assert!(clone.guest().take_answer(verifying).is_none(), "the verification waits for the damaged page");
    flip("ram", place);
    comes_whole(&clone, verifying, &nonce)
}

/// The name of the snapshot's disk.
fn disk_name(stand: &Stand) -> String {
    let names = fs::read_dir(stand.object("")).expect("a folder").flatten();
    let names = names.filter_map(|entry| Some(entry.file_name().to_str()?.strip_prefix("disk-")?.to_owned()));
    names.min_by_key(String::len).expect("there is one")
}

#[test]
fn failed_upload_leaves_guest_and_store_clean() -> Result<()> {
    let stand = Stand::new();
    let vm = stand.machine(TestVm::busybox("unsent").memory_mib(512))?;
    let nonce = vm.nonce()?;
    fill(&vm, 64)?;
    let is_as_it_was = |what: &str| -> Result<()> {
        vm.wait_status(what, |status| status.save.is_none() && status.state == MachineState::Running)?;
        stand.server.await_empty();
        assert_eq!(fs::read_dir(stand.path("keeper")).expect("it was used").count(), 0, "{what}");
        assert_eq!(vm.nonce()?, nonce, "{what}");
        verify(&vm)
    };
    stand.server.set_wire(Wire::Slow(4 * MIB));
    vm.cli(&["save", vm.name(), "-o", &address("one"), "--stop", "--no-wait"])?;
    vm.wait_status("part of the upload", |status| {
        status.save.as_ref().is_some_and(|save| save.upload_bytes_done > 8 * MIB)
    })?;
    vm.cli_output(&["save", vm.name(), "--cancel"])?;
    vm.wait_event("a cancelled save", event!(SaveFailed))?;
    is_as_it_was("cancelled")?;
    stand.server.set_wire(Wire::Dead);
    let refused = vm.cli_output(&["save", vm.name(), "-o", &address("one")])?;
    assert!(refused.status != 0 && refused.text().contains("the store gave no valid answer"), "{}", refused.text());
    stand.server.set_wire(Wire::Whole);
    is_as_it_was("a store that is gone")?;
    let refused = vm.cli_output(&["save", vm.name(), "-o", "s3://bucket"])?;
    assert!(refused.status != 0 && refused.text().contains("name a place in the bucket"), "{}", refused.text());
    let refused = vm.cli_output(&["save", vm.name(), "-o", "ftp://bucket/one"])?;
    assert!(refused.status != 0 && refused.text().contains("it must begin with s3://, gs://"), "{}", refused.text());
    vm.save(Path::new(&address("one")))?;
    assert!(stand.server.files().iter().any(|name| name == "bucket/one/manifest"), "{:?}", stand.server.files());
    verify(&vm)
}

#[test]
fn rehearsal_notes_the_working_set_in_the_store() -> Result<()> {
    let stand = Stand::new();
    let (vm, nonce) = stand.saved("rehearsed", 16)?;
    let [credentials, cache, scratch] = ["s3.env", "cache", "scratch"].map(|name| stand.path(name));
    fs::create_dir(&scratch).expect("a folder");
    let (one, store) = (address("one"), ["--credentials", &credentials, "--cache", &cache]);
    let show = |what: &str| -> Result<Value> {
        let shown = vm.cli(&[&["working-set", &one, "--json"], &store[..]].concat())?;
        Ok(serde_json::from_str(&shown).expect(what))
    };
    assert!(show("none so far")?["working_set"].is_null());
    let rehearse = ["rehearse", &one, "--scratch", &scratch, "--for", "600", "--until", "sleep 3"];
    let said = vm.cli(&[&rehearse, &store[..]].concat())?;
    let shown = show("one")?;
    let pages = shown["working_set"]["pages"].as_u64().expect("a set was noted");
    assert!(pages > 0 && said.contains(&format!("{pages} pages in the working set")), "{said}");
    let clone = stand.clone(&vm, "ahead", "cache", &[])?;
    clone.wait_running()?;
    assert_eq!(wait_complete(&clone)?, pages);
    assert_eq!(clone.nonce()?, nonce);
    verify(&clone)
}
