//! qcow2 images: the engine works, then stock qemu-img judges the file.

use std::time::SystemTime;

use rustix::fs::{FallocateFlags, fallocate};

use super::*;

/// Random operations on `image`, whose contents are `model`; after a flush stock QEMU must find both equal.
fn exercise(image: &Path, mut model: Vec<u8>, seed: u64, direct: bool) {
    let name = format!("{}, direct: {direct}", image.display());
    let opened = Image::open(&ImageOptions { direct, ..options(image, Format::Qcow2) }).unwrap();
    assert_eq!(opened.bytes(), model.len() as u64);
    assert_eq!(opened.describe().contains("O_DIRECT in units of"), direct, "{}", opened.describe());
    let pool = pool_of(1);
    let slot = pool.take(SLOT_BYTES).unwrap();
    let mut engine = opened.engine(pool.clone(), 8).unwrap();
    let mut noise = Noise(seed);
    for step in 0..300 {
        let sectors = [1, 8, 9, 128, 200][noise.below(5)];
        let start = noise.below(model.len() / 512 - sectors) * 512;
        let range = start..start + sectors * 512;
        let mut go = |operation| {
            run(&mut *engine, operation, start, sectors * 512)
                .unwrap_or_else(|error| panic!("{name}, step {step}: {operation:?}: {error}"));
        };
        match noise.below(8) {
            0..3 => {
                go(Operation::Read(slot));
                assert!(bytes_of(&pool, slot, range.len()) == &model[range], "{name}, step {step}: read differs");
            }
            3..6 => {
                let data = fill(&pool, slot, range.len(), &mut noise);
                go(Operation::Write(slot));
                model[range].copy_from_slice(&data);
            }
            6 => {
                go(Operation::WriteZeroes { unmap: step % 2 == 0 });
                model[range].fill(0);
            }
            _ if !opened.supports_discard() => go(Operation::Discard),
            _ => {
                go(Operation::Discard);
                model[range].fill(0);
            }
        }
    }
    run(&mut *engine, Operation::Flush, 0, 0).unwrap();
    // Beside the engine, which has the image.
    let (copy, expected) = (image.with_extension("copy"), image.with_extension("model"));
    fs::copy(image, &copy).unwrap();
    fs::write(&expected, &model).unwrap();
    crash::check_with_qemu(&name, &copy);
    qemu_img(&["compare", "-f", "qcow2", "-F", "raw", as_str(&copy), as_str(&expected)])
        .unwrap_or_else(|error| panic!("{name}: {error}"));
}

#[test]
fn qcow2_holds_what_was_written() {
    for (seed, arguments) in [
        &["-o", "cluster_size=64k"][..],
        &["-o", "cluster_size=4k,refcount_bits=1"],
        &["-o", "cluster_size=512"],
        &["-o", "compat=0.10"],
        &["-o", "preallocation=metadata"],
    ]
    .iter()
    .enumerate()
    {
        for direct in [true, false] {
            let folder = folder();
            let path = folder.path().join("disk.qcow2");
            let create = [&["create", "-q", "-f", "qcow2"], *arguments, &[as_str(&path), "8M"]].concat();
            qemu_img(&create).unwrap();
            exercise(&path, vec![0; DISK_BYTES], seed as u64, direct);
        }
    }
}

fn noise_file(path: &Path, bytes: usize) -> Vec<u8> {
    let mut noise = Noise(99);
    let data: Vec<u8> = (0..bytes).map(|_| noise.next() as u8).collect();
    fs::write(path, &data).unwrap();
    data
}

#[test]
fn backing_chain_is_read_and_never_written() {
    let folder = folder();
    let [base, middle, top] = ["base.raw", "middle.qcow2", "top.qcow2"].map(|name| folder.path().join(name));
    // Shorter than the disk: what lies past its end reads as zeroes.
    let mut model = noise_file(&base, DISK_BYTES / 2 + 512);
    let base_data = model.clone();
    model.resize(DISK_BYTES, 0);
    qemu_img(&["create", "-q", "-f", "qcow2", "-F", "raw", "-b", "base.raw", as_str(&middle), "8M"]).unwrap();
    qemu_img(&["create", "-q", "-f", "qcow2", "-F", "qcow2", "-b", "middle.qcow2", as_str(&top)]).unwrap();
    let middle_data = fs::read(&middle).unwrap();
    // Also while somebody else has them locked.
    let locked = Image::open(&options(&top, Format::Qcow2)).unwrap();
    assert_eq!(backing_images(&top).unwrap(), [(middle.clone(), Format::Qcow2), (base.clone(), Format::Raw)]);
    drop(locked);
    exercise(&top, model, 5, true);
    assert!(fs::read(&base).unwrap() == base_data && fs::read(&middle).unwrap() == middle_data);

    let told = Image::open(&options(&top, Format::Qcow2)).unwrap().describe();
    assert!(told.starts_with("qcow2, one worker thread, O_DIRECT") && told.ends_with(", 2 backing images"), "{told}");
}

#[test]
fn qemu_accepts_our_overlay() {
    let folder = folder();
    let [base, middle, top] = ["base.raw", "middle.qcow2", "top.qcow2"].map(|name| folder.path().join(name));
    let model = noise_file(&base, DISK_BYTES);
    create_overlay(&middle, &base, "raw").unwrap();
    create_overlay(&top, &middle, "qcow2").unwrap();
    for image in [&middle, &top] {
        assert_eq!(qemu_img(&["check", "-q", "-f", "qcow2", as_str(image)]), Ok(String::new()));
    }
    exercise(&top, model.clone(), 8, true);
    assert!(fs::read(&base).unwrap() == model, "what lies below is never written");
    assert!(create_overlay(&top, &base, "raw").unwrap_err().to_string().ends_with("top.qcow2: cannot be made"));
    let large = folder.path().join("large.raw");
    fs::File::create(&large).unwrap().set_len(6 << 40).unwrap();
    let over = folder.path().join("over.qcow2");
    create_overlay(&over, &large, "raw").unwrap();
    assert_eq!(qemu_img(&["check", "-q", "-f", "qcow2", as_str(&over)]), Ok(String::new()));
}

#[test]
fn overlay_refuses_another_backing_file() {
    let folder = folder();
    let [base, top, copy, elsewhere] =
        ["base.raw", "top.qcow2", "copy.raw", "elsewhere.raw"].map(|name| folder.path().join(name));
    let made = SystemTime::UNIX_EPOCH + Duration::new(1_700_000_000, 123_456_789);
    let put = |contents: &[u8], modified| {
        fs::write(&copy, contents).unwrap();
        File::options().write(true).open(&copy).unwrap().set_modified(modified).unwrap();
        fs::rename(&copy, &base).unwrap();
    };
    let model = noise_file(&elsewhere, DISK_BYTES);
    put(&model, made);
    create_overlay(&top, &base, "raw").unwrap();
    let top_options = options(&top, Format::Qcow2);
    let is_opened = || drop(Image::open(&top_options).unwrap());
    is_opened();
    put(&model, made);
    is_opened();
    // As tar keeps it.
    put(&model, SystemTime::UNIX_EPOCH + Duration::from_secs(1_700_000_000));
    is_opened();
    let is_refused = || {
        refused(
            &top_options,
            "cannot open the backing image of DIR/top.qcow2: qcow2 image DIR/top.qcow2 was made over DIR/base.raw as that was at \
             @1700000000.123456789; it has been changed since, or is another file; put the right one back (cp -a), or if only its \
             time is another, give it that one (touch -d)",
        );
    };
    put(&model[512..], made);
    is_refused();
    put(&model, made + Duration::from_nanos(1));
    is_refused();
    let touched = Command::new("touch").args(["-d", "@1700000000.123456789"]).arg(&base).status().unwrap();
    assert!(touched.success());
    is_opened();
    // A user who names another backing file does so on purpose.
    put(&model, SystemTime::now());
    is_refused();
    qemu_img(&["rebase", "-u", "-f", "qcow2", "-F", "raw", "-b", as_str(&elsewhere), as_str(&top)]).unwrap();
    exercise(&top, model, 10, true);
}

/// As in the disk of a snapshot whose guest never wrote there.
#[test]
fn base_with_leading_hole_is_read_directly() {
    let folder = folder();
    let [base, top] = ["base.raw", "top.qcow2"].map(|name| folder.path().join(name));
    let mut model = noise_file(&base, DISK_BYTES);
    punch(&base, &mut model, 64 << 10);
    create_overlay(&top, &base, "raw").unwrap();
    exercise(&top, model, 9, true);
}

/// Its first bytes become a hole.
fn punch(path: &Path, model: &mut [u8], bytes: usize) {
    let file = fs::File::options().write(true).open(path).unwrap();
    fallocate(&file, FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, 0, bytes as u64).unwrap();
    model[..bytes].fill(0);
}

#[test]
fn a_snapshot_inside_the_image_keeps_its_contents() {
    let folder = folder();
    let (path, source) = (folder.path().join("disk.qcow2"), folder.path().join("source.raw"));
    let model = noise_file(&source, DISK_BYTES);
    qemu_img(&["convert", "-q", "-O", "qcow2", as_str(&source), as_str(&path)]).unwrap();
    qemu_img(&["snapshot", "-q", "-c", "before", as_str(&path)]).unwrap();
    exercise(&path, model, 6, true);
    let copy = path.with_extension("copy");
    qemu_img(&["snapshot", "-q", "-a", "before", as_str(&copy)]).unwrap();
    qemu_img(&["compare", "-f", "qcow2", "-F", "raw", as_str(&copy), as_str(&source)]).unwrap();
}

#[test]
fn compressed_clusters_are_read_and_overwritten() {
    let folder = folder();
    let (path, source) = (folder.path().join("disk.qcow2"), folder.path().join("source.raw"));
    let mut model = noise_file(&source, DISK_BYTES);
    model[DISK_BYTES / 4..].fill(0x11);
    fs::write(&source, &model).unwrap();
    qemu_img(&["convert", "-q", "-c", "-O", "qcow2", as_str(&source), as_str(&path)]).unwrap();
    exercise(&path, model, 7, true);
}

#[test]
fn qcow2_image_has_one_engine_at_once() {
    let folder = folder();
    let path = folder.path().join("disk.qcow2");
    qemu_img(&["create", "-q", "-f", "qcow2", as_str(&path), "1M"]).unwrap();
    let image = Image::open(&options(&path, Format::Qcow2)).unwrap();
    let pool = pool_of(1);
    let engine = image.engine(pool.clone(), 4).unwrap();
    assert!(matches!(image.engine(pool.clone(), 4).err(), Some(ImageError::HasEngine { .. })));
    drop(engine);
    image.engine(pool, 4).unwrap();
    let error = qemu_img(&["info", as_str(&path)]).unwrap_err();
    assert!(error.contains("Is another process using the image"), "{error}");
}

#[test]
fn opening_an_image_does_not_write_to_it() {
    let folder = folder();
    let path = folder.path().join("disk.qcow2");
    qemu_img(&["create", "-q", "-f", "qcow2", as_str(&path), "1M"]).unwrap();
    let note = || ImageNote::of(&path).unwrap().unwrap();
    let before = note();
    // A write within one step of the file system's clock would not show.
    while !before.is_settled(SystemTime::now()) {
        std::thread::sleep(Duration::from_millis(10));
    }
    let image = Image::open(&options(&path, Format::Qcow2)).unwrap();
    let engine = image.engine(pool_of(1), 4).unwrap();
    assert!(image.describe().contains("O_DIRECT"), "{}", image.describe());
    assert_eq!(note(), before);
    drop(engine);
    drop(image);
    assert_eq!(note(), before);
}

#[test]
fn a_backing_image_is_locked_against_writers() {
    let folder = folder();
    let (base, top) = (folder.path().join("base.raw"), folder.path().join("top.qcow2"));
    noise_file(&base, 1 << 20);
    qemu_img(&["create", "-q", "-f", "qcow2", "-F", "raw", "-b", "base.raw", as_str(&top)]).unwrap();
    let _image = Image::open(&options(&top, Format::Qcow2)).unwrap();
    assert!(matches!(Image::open(&options_at_once(&base, Format::Raw)), Err(ImageError::InUse { .. })));
    Image::open(&ImageOptions { read_only: true, ..options(&base, Format::Raw) }).unwrap();
}

/// An image made by qemu-img and then changed at one place of its header.
#[track_caller]
fn damaged(create: &[&str], at: u64, bytes: &[u8], expect: &str) {
    let folder = folder();
    let path = folder.path().join("disk");
    qemu_img(&[&["create", "-q", "-f", "qcow2"], create, &[as_str(&path), "1M"]].concat()).unwrap();
    fs::File::options().write(true).open(&path).unwrap().write_all_at(bytes, at).unwrap();
    refused(&options(&path, Format::Qcow2), expect);
}

#[test]
fn unusable_qcow2_images_are_refused_with_reason() {
    damaged(&[], 0, b"x", "DIR/disk is not a qcow2 image; set format = \"raw\" if it is a raw image");
    damaged(&[], 7, &[9], "qcow2 image DIR/disk has the unknown version 9; rewrite it with qemu-img convert");
    damaged(&[], 35, &[2], "qcow2 image DIR/disk is encrypted; rewrite it with qemu-img convert");
    damaged(
        &["-o", "compression_type=zstd"],
        0,
        b"Q",
        "qcow2 image DIR/disk is compressed with zstd; rewrite it with qemu-img convert",
    );
    damaged(
        &["-o", "extended_l2=on"],
        0,
        b"Q",
        "qcow2 image DIR/disk has extended L2 entries; rewrite it with qemu-img convert",
    );
    damaged(&[], 79, &[2], "qcow2 image DIR/disk is marked corrupt; repair it with qemu-img check -r all");
    damaged(
        &[],
        79,
        &[1],
        "qcow2 image DIR/disk was not closed cleanly (lazy refcounts); repair it with qemu-img check -r all",
    );
    damaged(&[], 72, &[1], "qcow2 image DIR/disk needs the unknown feature 56; rewrite it with qemu-img convert");
    damaged(&[], 23, &[40], "qcow2 image DIR/disk has clusters of 2^40 bytes; restore it from a copy");
}

/// A qcow2 image over a base that it names in this way.
#[track_caller]
fn badly_backed(name: &str, format: &[&str], expect: &str) {
    let folder = folder();
    let path = folder.path().join("disk");
    let create = [&["create", "-q", "-u", "-f", "qcow2", "-b", name], format, &[as_str(&path), "1M"]].concat();
    qemu_img(&create).unwrap();
    refused(&options(&path, Format::Qcow2), &format!("cannot open the backing image of DIR/disk: {expect}"));
}

#[test]
fn unusable_backing_images_are_refused_with_reason() {
    badly_backed("gone.raw", &["-F", "raw"], "disk image DIR/gone.raw does not exist");
    badly_backed(
        "nbd://host/export",
        &["-F", "raw"],
        "qcow2 image DIR/disk has the backing image \"nbd://host/export\", which is not a file; rewrite it with \
         qemu-img convert",
    );
    badly_backed(
        "base.vmdk",
        &["-F", "vmdk"],
        "qcow2 image DIR/disk has a backing image of format vmdk; rewrite it with qemu-img convert",
    );
    // Its own backing image: the writer on top excludes the reader below.
    let folder = folder();
    let path = folder.path().join("disk");
    qemu_img(&["create", "-q", "-u", "-f", "qcow2", "-F", "qcow2", "-b", "disk", as_str(&path), "1M"]).unwrap();
    let error = Image::open(&options_at_once(&path, Format::Qcow2)).unwrap_err();
    let cause = error.source().unwrap().to_string().replace(as_str(folder.path()), "DIR");
    assert!(cause.starts_with("disk image DIR/disk") && names_holder(&cause, std::process::id()), "{cause}");
    let error = Image::open(&ImageOptions { read_only: true, ..options(&path, Format::Qcow2) }).unwrap_err();
    let cause = error.source().unwrap().to_string();
    assert!(cause.contains("has more than 64 images in its backing chain"), "{cause}");
    let cause = backing_images(&path).unwrap_err().to_string();
    assert!(cause.contains("has more than 64 images in its backing chain"), "{cause}");
}

#[test]
fn a_backing_image_without_a_format_is_refused() {
    let folder = folder();
    let path = folder.path().join("disk");
    qemu_img(&["create", "-q", "-u", "-f", "qcow2", "-F", "raw", "-b", "base", as_str(&path), "1M"]).unwrap();
    // The name of the extension that holds the format becomes one that nobody knows.
    let mut data = fs::read(&path).unwrap();
    let at = data.windows(4).position(|window| window == 0xe279_2acau32.to_be_bytes()).unwrap();
    data[at] = 1;
    fs::write(&path, data).unwrap();
    refused(
        &options(&path, Format::Qcow2),
        "cannot open the backing image of DIR/disk: qcow2 image DIR/disk does not say the format of its backing image \
         \"base\"; name it with qemu-img rebase -u -b FILE -F raw (or qcow2)",
    );
}

#[test]
fn a_damaged_table_is_told_at_opening() {
    let problem = "has an L1 table that does not lie in the file; restore it from a copy";
    damaged(&[], 40, &[0xff; 8], &format!("qcow2 image DIR/disk {problem}"));
    // The first entry of the L1 table, as qemu-img places it.
    let problem = "its L1 table leads out of the file (entry 0); restore it from a copy";
    damaged(&[], 3 << 16, &[0x80, 1, 0, 0, 0, 0, 0, 0], &format!("cannot read disk image DIR/disk: {problem}"));
}
