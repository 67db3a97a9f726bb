//! A flipped bit in a qcow2 image: the image is refused, or it works, but it fills neither memory nor the disk below.

use super::*;

/// Far more than any image here takes.
const MEMORY_BYTES_MAX: u64 = 2 << 30;
const FILE_BYTES_MAX: u64 = 128 << 20;

/// Where the bits are: header and extensions, and the first entries of each table.
fn places(image: &[u8]) -> Vec<usize> {
    let u64_at = |at: usize| u64::from_be_bytes(image[at..at + 8].try_into().unwrap()) as usize;
    let (l1, refcounts, snapshots) = (u64_at(40), u64_at(48), u64_at(64));
    let l2 = u64_at(l1) & 0x00ff_ffff_ffff_fe00;
    let tables = [l1, refcounts, l2, snapshots].into_iter().filter(|table| *table > 0);
    (0..160).chain(tables.flat_map(|table| table..table + 8)).filter(|at| *at < image.len()).collect()
}

/// The work of `flipped_bit_costs_only_an_error`, under limits.
#[test]
fn flips_bits_for_another_test() {
    let Some(path) = std::env::var_os("FLIPPED_IMAGE").map(PathBuf::from) else { return };
    for (what, bytes) in [(libc::RLIMIT_AS, MEMORY_BYTES_MAX), (libc::RLIMIT_FSIZE, FILE_BYTES_MAX)] {
        let limit = libc::rlimit { rlim_cur: bytes, rlim_max: bytes };
        // SAFETY: the limit lives for the time of the call.
        assert_eq!(unsafe { libc::setrlimit(what, &limit) }, 0);
    }
    let image = fs::read(&path).unwrap();
    let (pool, over, mut refused) = (pool_of(1), path.with_extension("over"), 0);
    let slot = pool.take(SLOT_BYTES).unwrap();
    let flips: Vec<_> = places(&image).into_iter().flat_map(|at| (0..8).map(move |bit| (at, bit))).collect();
    for (at, bit) in &flips {
        let mut flipped = image.clone();
        flipped[*at] ^= 1 << bit;
        fs::write(&path, &flipped).unwrap();
        println!("byte {at} bit {bit}");
        if create_overlay(&over, &path, "qcow2").is_ok() {
            fs::remove_file(&over).unwrap();
        }
        let opened = Image::open(&ImageOptions { direct: false, ..options(&path, Format::Qcow2) });
        let engine = opened.and_then(|image| image.engine(pool.clone(), 8).map(|engine| (image.bytes(), engine)));
        let Ok((bytes, mut engine)) = engine else {
            refused += 1;
            continue;
        };
        for start in [0, 64 << 10, bytes.saturating_sub(4096)] {
            let length = 4096.min(bytes.saturating_sub(start)) as usize / 512 * 512;
            for operation in [Operation::Read(slot), Operation::Write(slot), Operation::Discard, Operation::Flush] {
                // An error is an answer too.
                let _ = run(&mut *engine, operation, start as usize, length);
            }
        }
    }
    println!("all {} flips, {refused} refused", flips.len());
}

fn check(path: &Path) {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "image::tests::damage::flips_bits_for_another_test", "--nocapture", "-q"]);
    let output = command.env("FLIPPED_IMAGE", path).output().unwrap();
    let told = String::from_utf8_lossy(&output.stdout);
    let end = told.lines().rfind(|line| line.starts_with("all") || line.starts_with("byte"));
    let end = end.unwrap_or_default();
    let refused = end.split_once("flips, ").and_then(|(_, rest)| rest.strip_suffix(" refused")?.parse().ok());
    assert!(output.status.success() && refused.is_some_and(|count: u32| count > 300), "{end}: {output:?}");
}

#[test]
fn flipped_bit_costs_only_an_error() {
    // Where a write that the image's tables lead astray would be seen.
    let folder = tempfile::tempdir_in("/dev/shm").unwrap();
    let [base, ours, source, theirs] = ["base", "ours", "source", "theirs"].map(|name| folder.path().join(name));
    fs::write(&base, vec![1; 1 << 20]).unwrap();
    create_overlay(&ours, &base, "raw").unwrap();
    let image = Image::open(&ImageOptions { direct: false, ..options(&ours, Format::Qcow2) }).unwrap();
    let pool = pool_of(1);
    let slot = pool.take(SLOT_BYTES).unwrap();
    run(&mut *image.engine(pool, 8).unwrap(), Operation::Write(slot), 0, 4096).unwrap();
    drop(image);
    check(&ours);
    fs::write(&source, vec![2; 1 << 20]).unwrap();
    qemu_img(&["convert", "-O", "qcow2", "-o", "cluster_size=4k", as_str(&source), as_str(&theirs)]).unwrap();
    qemu_img(&["snapshot", "-q", "-c", "before", as_str(&theirs)]).unwrap();
    check(&theirs);
}

/// A disk that no qcow2 image can have, over which none is made; and a disk that is no qcow2 image at all.
#[test]
fn overlay_of_too_large_disk_is_refused() {
    let folder = folder();
    let (base, top) = (folder.path().join("base"), folder.path().join("top"));
    fs::File::create(&base).unwrap().set_len((2 << 50) + 512).unwrap_or_default();
    if fs::metadata(&base).unwrap().len() > 0 {
        let error = create_overlay(&top, &base, "raw").unwrap_err().to_string();
        assert!(error.contains("too many for a qcow2 image over it"), "{error}");
    }
    fs::write(&base, vec![0x7f; 1 << 20]).unwrap();
    let error = create_overlay(&top, &base, "qcow2").unwrap_err();
    assert!(
        error
            .source()
            .unwrap()
            .to_string()
            .ends_with("is not a qcow2 image; set format = \"raw\" if it is a raw image")
    );
    assert!(!top.exists());
}
