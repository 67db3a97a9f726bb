//! Tests that need root: loop devices and a frozen file system. Run with `--ignored`.

use super::*;

/// A loop device over a file, gone with this value.
struct Loop(String);

impl Loop {
    fn over(path: &Path, sector_bytes: &str) -> Self {
        let arguments = ["--find", "--show", "--direct-io=on", "--sector-size", sector_bytes, as_str(path)];
        let output = Command::new("losetup").args(arguments).output().expect("losetup is installed");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        Self(String::from_utf8(output.stdout).unwrap().trim().into())
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        let _ = Command::new("losetup").args(["--detach", &self.0]).status();
    }
}

#[test]
#[ignore = "needs root and loop devices"]
fn block_devices_match_model_with_any_sector_size() {
    for sector_bytes in ["512", "4096"] {
        for direct in [true, false] {
            let folder = folder();
            let device = Loop::over(&raw_image(&folder, DISK_BYTES as u64), sector_bytes);
            let path = PathBuf::from(&device.0);
            let image = Image::open(&ImageOptions { direct, ..options(&path, Format::Raw) }).unwrap();
            assert_eq!((image.bytes(), image.supports_discard()), (DISK_BYTES as u64, true));
            let told = image.describe();
            let cache = match direct {
                true => format!("O_DIRECT in units of {sector_bytes} bytes"),
                false => "through the page cache (as configured)".into(),
            };
            assert!(told.ends_with(&cache), "{told}");
            exercise_raw(&image, &format!("sectors of {sector_bytes}, {told}"));
        }
    }
}

fn exercise_raw(image: &Image, name: &str) {
    let pool = pool_of(1);
    let slot = pool.take(SLOT_BYTES).unwrap();
    let mut engine = image.engine(pool.clone(), 8).unwrap();
    let (mut noise, mut model) = (Noise(11), vec![0; DISK_BYTES]);
    for step in 0..300 {
        let sectors = [1, 8, 9, 128, 200][noise.below(5)];
        let start = noise.below(model.len() / 512 - sectors) * 512;
        let range = start..start + sectors * 512;
        let mut go = |operation| {
            run(&mut *engine, operation, start, sectors * 512)
                .unwrap_or_else(|error| panic!("{name}, step {step}: {operation:?}: {error}"));
        };
        match noise.below(8) {
            0..4 => {
                let data = fill(&pool, slot, range.len(), &mut noise);
                go(Operation::Write(slot));
                model[range.clone()].copy_from_slice(&data);
            }
            4..6 => {
                go(Operation::WriteZeroes { unmap: step % 2 == 0 });
                model[range.clone()].fill(0);
            }
            _ => {
                go(Operation::Discard);
                // The device may return any bytes for a discarded range.
                go(Operation::Read(slot));
                model[range.clone()].copy_from_slice(bytes_of(&pool, slot, range.len()));
            }
        }
        go(Operation::Read(slot));
        assert!(bytes_of(&pool, slot, range.len()) == &model[range], "{name}, step {step}: read differs");
    }
    run(&mut *engine, Operation::Flush, 0, 0).unwrap();
    let mut read = vec![0; 65536];
    for (start, expected) in (0..).step_by(65536).zip(model.chunks(65536)) {
        run(&mut *engine, Operation::Read(slot), start, 65536).unwrap();
        read.copy_from_slice(bytes_of(&pool, slot, 65536));
        assert!(read == expected, "{name}: differs at {start}");
    }
}

/// A file system of its own, so that it can be frozen.
struct Mount(PathBuf);

impl Mount {
    fn ext4_over(device: &Loop, place: PathBuf) -> Self {
        fs::create_dir(&place).unwrap();
        succeed("mkfs.ext4", &["-q", &device.0]);
        succeed("mount", &[&device.0, as_str(&place)]);
        Self(place)
    }

    fn freeze(&self) {
        succeed("fsfreeze", &["--freeze", as_str(&self.0)]);
    }

    fn thaw(&self) {
        succeed("fsfreeze", &["--unfreeze", as_str(&self.0)]);
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        let _ = Command::new("fsfreeze").args(["--unfreeze", as_str(&self.0)]).stderr(Stdio::null()).status();
        let _ = Command::new("umount").arg(&self.0).status();
    }
}

fn succeed(program: &str, arguments: &[&str]) {
    let status = Command::new(program).args(arguments).status().unwrap_or_else(|error| panic!("{program}: {error}"));
    assert!(status.success(), "{program} {arguments:?}");
}

#[test]
#[ignore = "needs root, loop devices and mounts"]
fn pending_write_of_killed_keeper_excludes_next() {
    let folder = folder();
    let device = Loop::over(&raw_image(&folder, 64 << 20), "512");
    let mount = Mount::ext4_over(&device, folder.path().join("mount"));
    let path = mount.0.join("disk.raw");
    fs::write(&path, vec![1; 1 << 20]).unwrap();
    let mut holder = Holder::hearth(&path, false);
    mount.freeze();
    // The write now waits inside the kernel for the file system.
    holder.ask("write", "started");
    holder.0.kill().unwrap();
    let next = Image::open(&ImageOptions { read_only: true, ..options_at_once(&path, Format::Raw) });
    mount.thaw();
    assert!(matches!(next, Err(ImageError::InUse { .. })), "{next:?}");
    Image::open(&options(&path, Format::Raw)).unwrap();
}
