//! Makes ELF dumps from QEMU's `dump-guest-memory` readable for makedumpfile.
//!
//! QEMU puts section headers where makedumpfile expects the program headers, and gives its ELF header's size as 8 bytes. So
//! makedumpfile finds no memory in the unchanged file.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;

use crate::error::{Result, at};

const EHDR_BYTES: u64 = 64;
const PHDR_BYTES: usize = 56;

/// Moves the program headers to the end of the ELF header, and drops the section headers.
pub fn move_program_headers(dump: &Path) -> Result<()> {
    let moved = (|| {
        // QEMU makes the file read-only.
        fs::set_permissions(dump, std::os::unix::fs::PermissionsExt::from_mode(0o600))?;
        let file = File::options().read(true).write(true).open(dump)?;
        let mut head = [0; EHDR_BYTES as usize];
        file.read_exact_at(&mut head, 0)?;
        let table = u64::from_le_bytes(head[32..40].try_into().expect("a slice of eight"));
        let count = u16::from_le_bytes(head[56..58].try_into().expect("a slice of two"));
        if !head.starts_with(b"\x7fELF") || table < EHDR_BYTES {
            return Err(io::Error::other("not an ELF dump by QEMU"));
        }
        let mut headers = vec![0; usize::from(count) * PHDR_BYTES];
        file.read_exact_at(&mut headers, table)?;
        file.write_all_at(&headers, EHDR_BYTES)?;
        head[32..40].copy_from_slice(&EHDR_BYTES.to_le_bytes());
        head[40..48].fill(0);
        head[52..54].copy_from_slice(&(EHDR_BYTES as u16).to_le_bytes());
        head[58..64].fill(0);
        file.write_all_at(&head, 0)
    })();
    at("move the program headers of", dump, moved)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn program_headers_follow_the_elf_header() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("dump");
        let mut dump = vec![0u8; 512];
        dump[..4].copy_from_slice(b"\x7fELF");
        dump[32] = 192;
        dump[40] = 64;
        dump[52] = 8;
        dump[56] = 2;
        dump[192..192 + 112].fill(7);
        fs::write(&path, dump).unwrap();
        move_program_headers(&path).unwrap();
        let moved = fs::read(&path).unwrap();
        assert_eq!((moved[32], moved[40], moved[52], moved[56]), (64, 0, 64, 2));
        assert_eq!(moved[64..64 + 112], [7; 112]);
    }

    #[test]
    fn other_files_are_left_unchanged() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("dump");
        fs::write(&path, [1u8; 256]).unwrap();
        assert!(move_program_headers(&path).unwrap_err().to_string().starts_with("move the program headers of"));
        assert_eq!(fs::read(&path).unwrap(), [1u8; 256]);
    }
}
