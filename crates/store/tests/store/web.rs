//! A folder on a web server: it is read like a store and never written to.

use std::fs;
use std::sync::Arc;

use hearth_store::{Cache, Object, Parts, Replaced, Settings, StoreError, UploadError, Urgency};

use super::{MIB, open, pattern};

#[test]
fn web_server_is_readable_but_never_written() {
    let folder = tempfile::tempdir().unwrap();
    let (place, sent) = (folder.path().join("place"), pattern(3 * MIB));
    fs::create_dir(&place).unwrap();
    fs::write(place.join("ram"), &sent).unwrap();
    fs::write(place.join("manifest"), "little").unwrap();
    let server = loopback_s3::web::serve(folder.path());
    let store = open(&format!("http://{server}/place"), &Settings::default());
    assert_eq!(store.read("manifest", 100).unwrap().as_deref(), Some(&b"little"[..]));
    assert_eq!(store.read("none", 100).unwrap(), None);
    let cache = Cache::open(&folder.path().join("cache"), 0).unwrap();
    let object = Object::open(&store, &cache, &Arc::default(), "ram").unwrap().expect("it is there");
    let mut bytes = vec![0; MIB];
    for at in [5, 2 * MIB, MIB / 2] {
        object.read_at(&mut bytes, at as u64, Urgency::Demand).unwrap();
        assert!(bytes == sent[at..at + MIB], "at {at}");
    }
    let before = store.meta("manifest").unwrap().expect("it is there");
    fs::write(place.join("manifest"), "another").unwrap();
    assert_ne!(store.meta("manifest").unwrap().expect("it is there").version, before.version);

    let is_read_only = |error: &StoreError| error.to_string().contains("a web server is read-only");
    assert!(is_read_only(&store.must_be_writable().unwrap_err()));
    assert!(is_read_only(&store.remove("ram").unwrap_err()));
    assert!(matches!(store.replace("ram", vec![7], None), Replaced::Unknown(error) if is_read_only(&error)));
    for refused in [store.put("ram", vec![7], &mut |_| true).err(), Parts::begin(&store, "ram", &mut |_| true).err()] {
        assert!(matches!(&refused, Some(UploadError::Store(error)) if is_read_only(error)), "{refused:?}");
    }
    assert!(fs::read(place.join("ram")).unwrap() == sent);
}
