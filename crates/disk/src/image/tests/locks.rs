//! Locks that outlive a keeper: inherited by its QEMU, passed by its machine's next keeper, and by nobody else.

use super::*;

/// A writable image over which QEMU lives on: what it is, and which of its files are only read.
struct Case {
    folder: TempDir,
    path: PathBuf,
    format: Format,
    base: Option<PathBuf>,
}

fn cases() -> Vec<Case> {
    let (raw, chain) = (folder(), folder());
    let path = raw_image(&raw, 1 << 20);
    let base = raw_image(&chain, 1 << 20);
    let top = chain.path().join("top.qcow2");
    qemu_img(&["create", "-q", "-f", "qcow2", "-F", "raw", "-b", "disk.raw", as_str(&top)]).unwrap();
    vec![
        Case { folder: raw, path, format: Format::Raw, base: None },
        Case { folder: chain, path: top, format: Format::Qcow2, base: Some(base) },
    ]
}

impl Case {
    fn owner(&self, name: &str, qemu_lives: bool) -> Option<LockOwner> {
        let folder = self.folder.path().join(name);
        fs::create_dir_all(&folder).unwrap();
        Some(LockOwner::with_folder(&folder).unwrap().with_living_qemu(qemu_lives))
    }

    fn open(&self, owner: Option<LockOwner>) -> Result<Image, ImageError> {
        Image::open(&ImageOptions { owner, ..options_at_once(&self.path, self.format) })
    }

    #[track_caller]
    fn is_in_use_by_us(&self, owner: Option<LockOwner>, who: &str) {
        let error = self.open(owner).expect_err(who).to_string();
        assert!(names_holder(&error, std::process::id()), "{who}: {error}");
    }

    fn check_survival(&self) {
        let patient = |owner| Image::open(&ImageOptions { owner, ..options(&self.path, self.format) }).unwrap();
        let first = self.open(self.owner("web", false)).unwrap();
        let inherited = first.inheritable_locks().unwrap();
        assert_eq!(inherited.len(), 1 + usize::from(self.base.is_some()));
        self.is_in_use_by_us(self.owner("web", true), "a next keeper, while the last requests are in flight");
        drop(first);
        drop(patient(self.owner("web", true)));
        for (owner, who) in [
            (None, "somebody without a machine"),
            (self.owner("db", false), "another machine"),
            (self.owner("db", true), "another machine whose own QEMU lives"),
            (self.owner("web", false), "the same machine, to boot a second guest"),
        ] {
            self.is_in_use_by_us(owner, who);
        }
        let format = if self.format == Format::Raw { "raw" } else { "qcow2" };
        let error = qemu_img(&["resize", "-q", "-f", format, as_str(&self.path), "2M"]).unwrap_err();
        assert!(error.contains("Is another process using the image"), "{error}");
        if let Some(base) = &self.base {
            assert!(matches!(Image::open(&options_at_once(base, Format::Raw)), Err(ImageError::InUse { .. })));
            Image::open(&ImageOptions { read_only: true, ..options(base, Format::Raw) }).unwrap();
        }
        // The next keeper hands its own to the next QEMU, beside the first one.
        let next = patient(self.owner("web", true));
        let second = next.inheritable_locks().unwrap();
        drop((next, inherited));
        self.is_in_use_by_us(self.owner("db", false), "another machine, after a hop");
        drop(second);
        drop(patient(self.owner("db", false)));
    }
}

#[test]
fn an_inherited_lock_outlives_its_keeper() {
    cases().iter().for_each(Case::check_survival);
}

/// A copy whose storage hangs may end much later.
#[test]
fn a_copy_of_a_closed_image_holds_no_lock() {
    for case in cases() {
        let image = case.open(None).unwrap();
        let frozen = image.freeze(tempfile::tempfile().unwrap()).unwrap();
        drop(image);
        let _next = case.open(None).unwrap();
        assert_eq!(frozen.copy(|_| true).unwrap_err().kind(), std::io::ErrorKind::NotConnected);
    }
}

#[test]
fn image_shared_by_two_disks_is_taken_over() {
    let case = &cases()[0];
    let open = |owner| Image::open(&ImageOptions { read_only: true, owner, ..options(&case.path, case.format) });
    let dead: Vec<Image> = (0..2).map(|_| open(case.owner("web", false)).unwrap()).collect();
    let _inherited: Vec<_> = dead.iter().map(|image| image.inheritable_locks().unwrap()).collect();
    drop(dead);
    let _next: Vec<Image> = (0..2).map(|_| open(case.owner("web", true)).unwrap()).collect();
}

#[test]
fn inherited_lock_belongs_to_open_file() {
    let case = &cases()[0];
    let image = case.open(case.owner("web", false)).unwrap();
    fs::rename(&case.path, case.folder.path().join("moved")).unwrap();
    fs::write(&case.path, [0; 4096]).unwrap();
    let _inherited = image.inheritable_locks().unwrap();
    Image::open(&options(&case.path, Format::Raw)).unwrap();
    let moved = options_at_once(&case.folder.path().join("moved"), Format::Raw);
    assert!(matches!(Image::open(&moved), Err(ImageError::InUse { .. })));
}
