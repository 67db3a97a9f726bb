//! Random bytes from the kernel, for keys and for names that nobody else has.

use rustix::rand::{GetRandomFlags, getrandom};

/// Returns `N` random bytes, 256 at most.
pub fn bytes<const N: usize>() -> [u8; N] {
    let mut bytes = [0; N];
    let length = getrandom(&mut bytes, GetRandomFlags::empty()).expect("Linux gives 256 bytes or fewer at once");
    assert_eq!(length, N, "all of them");
    bytes
}
