//! Hearth's requirements of the store of any provider: parts in any order, ranges, conditions, removal.
//!
//! Every run tests the store on loopback. Any other store, or an emulator of it, is tested by hand, with its settings
//! in the environment: `HEARTH_STORE=az://container/place cargo test --workspace --test store -- --ignored any_house`.

use std::sync::Arc;

use hearth_store::{Cache, Object, Parts, Settings, Store, Urgency, part_bytes};

use super::{MIB, Stand, open, pattern};

#[test]
fn loopback_store_meets_all_requirements() {
    keeps_its_word(&Stand::new().store);
}

#[test]
#[ignore = "needs a store: HEARTH_STORE=az://container/place, and its settings in the environment"]
fn store_of_any_house_meets_all_requirements() {
    let address = std::env::var("HEARTH_STORE").expect("HEARTH_STORE names a place in a store, as gs://bucket/place");
    keeps_its_word(&open(&address, &Settings::from_environment()));
}

fn keeps_its_word(store: &Arc<Store>) {
    store.must_be_writable().expect("objects can be sent there");
    let [ram, small, empty, given_up] =
        ["ram", "small", "empty", "given-up"].map(|name| format!("{name}-{}", std::process::id()));
    in_parts(store, &ram);
    conditions(store, &small);
    store.put(&empty, Vec::new(), &mut |_| true).expect("the store answers");
    assert_eq!(store.read(&empty, 100).expect("the store answers").as_deref(), Some(&b""[..]));
    let mut parts = Parts::begin(store, &given_up, &mut |_| true).expect("the store answers");
    parts.send(0, vec![7; part_bytes(0) as usize], &mut |_| true).expect("the store answers");
    drop(parts);
    assert_eq!(store.meta(&given_up).expect("the store answers"), None);
    for name in [&ram, &small, &empty] {
        store.remove(name).expect("the store answers");
        store.remove(name).expect("the store answers");
        assert_eq!(store.meta(name).expect("the store answers"), None, "{name}");
    }
}

/// An upload in which parts change while it is in flight.
fn in_parts(store: &Arc<Store>, name: &str) {
    let (sent, part) = (pattern(21 * MIB), part_bytes(0) as usize);
    let mut parts = Parts::begin(store, name, &mut |_| true).expect("the store answers");
    parts.send(1, vec![7; part], &mut |_| true).expect("the store answers");
    for number in [2, 0, 1] {
        let end = sent.len().min((number + 1) * part);
        parts.send(number, sent[number * part..end].to_vec(), &mut |_| true).expect("the store answers");
    }
    parts.complete(&mut |_| true).expect("the store answers");
    assert_eq!(store.meta(name).expect("the store answers").expect("it was sent").bytes, sent.len() as u64);
    let folder = tempfile::tempdir().expect("a folder");
    let cache = Cache::open(folder.path(), 0).expect("a folder");
    let object = Object::open(store, &cache, &Arc::default(), name).expect("the store answers").expect("it was sent");
    let mut bytes = vec![0; 3 * MIB / 2];
    for at in [5, 20 * MIB - MIB / 2, 7 * MIB] {
        object.read_at(&mut bytes, at as u64, Urgency::Demand).expect("the store answers");
        assert!(bytes == sent[at..at + bytes.len()], "at {at}");
    }
}

fn conditions(store: &Store, name: &str) {
    let meta = || store.meta(name).expect("the store answers");
    let replace = |bytes: &[u8], over: Option<&_>| format!("{:?}", store.replace(name, bytes.to_vec(), over));
    assert_eq!(meta(), None);
    assert_eq!(replace(b"first", None), "Done");
    let first = meta().expect("it was sent");
    assert_eq!(replace(b"too late", None), "Changed");
    assert_eq!(replace(b"second", Some(&first)), "Done");
    assert_eq!(replace(b"too late", Some(&first)), "Changed");
    assert_ne!(meta().expect("it was sent").version, first.version);
    assert_eq!(store.read(name, 100).expect("the store answers").as_deref(), Some(&b"second"[..]));
}
