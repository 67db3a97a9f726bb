//! A writer of FAT, the one file system that every UEFI firmware reads; it needs no tool.
//!
//! ```text
//! boot sector | table | table | root folder | clusters from number 2 on
//! ```
//! The image is FAT16 as a whole. Its files follow each other, and all are in the root folder with names of 8 + 3 characters.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

use crate::error::{Result, at};

const SECTOR_BYTES: usize = 512;
const CLUSTER_BYTES: usize = 4096;
const ROOT_ENTRIES: usize = 512;
const ENTRY_BYTES: usize = 32;
/// Fewer clusters would make it FAT12, more FAT32.
const CLUSTERS: std::ops::Range<usize> = 4085..65525;
const END_OF_FILE: u16 = 0xffff;

/// Writes an image with these files. A file's name is like `STARTUP.NSH`.
pub fn image(path: &Path, files: &[(&str, &[u8])]) -> Result<()> {
    let used: usize = files.iter().map(|(_, contents)| clusters_of(contents)).sum();
    let clusters = used.max(CLUSTERS.start);
    assert!(CLUSTERS.contains(&clusters), "{used} clusters are too many for FAT16");
    let table_sectors = ((clusters + 2) * 2).div_ceil(SECTOR_BYTES);
    let root = (1 + 2 * table_sectors) * SECTOR_BYTES;
    let data = root + ROOT_ENTRIES * ENTRY_BYTES;
    let sectors = (data + clusters * CLUSTER_BYTES) / SECTOR_BYTES;

    let image = at("create", path, File::create(path))?;
    at("size", path, image.set_len((sectors * SECTOR_BYTES) as u64))?;
    let put = |place: usize, bytes: &[u8]| at("write to", path, image.write_all_at(bytes, place as u64));
    put(0, &boot_sector(table_sectors as u16, sectors as u32))?;
    let (mut table, mut next) = (vec![0xfff8, END_OF_FILE], 2_usize);
    for (index, (name, contents)) in files.iter().enumerate() {
        put(root + index * ENTRY_BYTES, &entry(name, next as u16, contents.len() as u32))?;
        put(data + (next - 2) * CLUSTER_BYTES, contents)?;
        let end = next + clusters_of(contents);
        table.extend((next + 1..end).map(|follows| follows as u16).chain([END_OF_FILE]));
        next = end;
    }
    let table: Vec<u8> = table.iter().flat_map(|follows| follows.to_le_bytes()).collect();
    (0..2).try_for_each(|copy| put((1 + copy * table_sectors) * SECTOR_BYTES, &table))
}

/// The number of clusters of a file. Even an empty file has one.
fn clusters_of(contents: &[u8]) -> usize {
    contents.len().div_ceil(CLUSTER_BYTES).max(1)
}

fn boot_sector(table_sectors: u16, sectors: u32) -> [u8; SECTOR_BYTES] {
    let mut sector = [0; SECTOR_BYTES];
    let mut put = |place: usize, bytes: &[u8]| sector[place..place + bytes.len()].copy_from_slice(bytes);
    put(0, b"\xeb\x3c\x90HEARTH  ");
    put(11, &(SECTOR_BYTES as u16).to_le_bytes());
    put(13, &[(CLUSTER_BYTES / SECTOR_BYTES) as u8, 1, 0, 2]);
    put(17, &(ROOT_ENTRIES as u16).to_le_bytes());
    // The media descriptor of a fixed disk.
    put(21, &[0xf8]);
    put(22, &table_sectors.to_le_bytes());
    put(24, &[63, 0, 255, 0]);
    put(32, &sectors.to_le_bytes());
    put(36, b"\x80\0\x29hrthNO NAME    FAT16   ");
    put(510, &[0x55, 0xaa]);
    sector
}

fn entry(name: &str, cluster: u16, bytes: u32) -> [u8; ENTRY_BYTES] {
    let (stem, ending) = name.split_once('.').unwrap_or((name, ""));
    let mut entry = [0; ENTRY_BYTES];
    entry[..11].copy_from_slice(format!("{stem:<8}{ending:<3}").as_bytes());
    // The archive attribute.
    entry[11] = 0x20;
    entry[26..28].copy_from_slice(&cluster.to_le_bytes());
    entry[28..].copy_from_slice(&bytes.to_le_bytes());
    entry
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Follows the table, as a reader would.
    fn read(image: &[u8], name: &str) -> Vec<u8> {
        let word = |place: usize| u16::from_le_bytes(image[place..place + 2].try_into().unwrap()) as usize;
        let root = (1 + 2 * word(22)) * SECTOR_BYTES;
        let entries = image[root..root + ROOT_ENTRIES * ENTRY_BYTES].chunks(ENTRY_BYTES);
        let found = entries.into_iter().find(|entry| entry.starts_with(name.as_bytes())).unwrap();
        let bytes = u32::from_le_bytes(found[28..].try_into().unwrap()) as usize;
        let mut cluster = usize::from(u16::from_le_bytes(found[26..28].try_into().unwrap()));
        let mut contents = Vec::new();
        while cluster != usize::from(END_OF_FILE) {
            let place = root + ROOT_ENTRIES * ENTRY_BYTES + (cluster - 2) * CLUSTER_BYTES;
            contents.extend_from_slice(&image[place..place + CLUSTER_BYTES]);
            cluster = word(SECTOR_BYTES + cluster * 2);
        }
        contents.truncate(bytes);
        contents
    }

    #[test]
    fn files_read_back_unchanged() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("fat.img");
        let long = crate::pattern::bytes("long", 3 * CLUSTER_BYTES + 7, 1);
        image(&path, &[("STARTUP.NSH", b"fs0:"), ("INITRD", &long), ("EMPTY", b""), ("LAST.EFI", b"last")]).unwrap();
        let image = std::fs::read(&path).unwrap();
        assert_eq!((&image[510..512], &image[54..62]), (&[0x55, 0xaa][..], &b"FAT16   "[..]));
        let check = |name: &str, expect: &[u8]| assert!(read(&image, name) == expect, "{name}");
        check("STARTUP NSH", b"fs0:");
        check("INITRD     ", &long);
        check("EMPTY      ", b"");
        check("LAST    EFI", b"last");
        let tables = image[512..].split_at(usize::from(image[22]) * SECTOR_BYTES);
        assert!(tables.1.starts_with(tables.0), "both tables are equal");
    }
}
