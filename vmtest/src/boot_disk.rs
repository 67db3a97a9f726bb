//! Disks with Linux for machines without a `kernel`, one layout for each firmware.
//!
//! ```text
//! UEFI   FAT: the shell's script, Linux as a program, initrd
//! BIOS   boot code and table | GRUB | 1 MiB: FAT with Linux and initrd | 48 MiB that a test may write: /dev/vda2
//! ```
//! GRUB copies code to where it runs. SYSLINUX lets the firmware read new code over code that has just run, and QEMU's emulator,
//! which does not notice when another process writes to the guest's memory, runs the old code again.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::Command;

use crate::artifacts::Boot;
use crate::error::{Result, at};
use crate::{fat, images};

/// GRUB's boot sector, which loads GRUB from the sectors behind it. Debian's package `grub-pc-bin` has it.
const BOOT_CODE: &str = "/usr/lib/grub/i386-pc/boot.img";
const TABLE_AT: u64 = 446;
/// Bytes of the boot sector that are code; the disk's signature follows.
const BOOT_CODE_BYTES: usize = 440;
const SECTOR_BYTES: u64 = 512;
const FIRST_AT: u64 = 1 << 20;
const SECOND_BYTES: u64 = 48 << 20;

const FAT16_LBA: u8 = 0x0e;
const LINUX: u8 = 0x83;

/// A disk for UEFI: the firmware's shell runs its `STARTUP.NSH`.
pub fn uefi(image: &Path, linux: &Boot) -> Result<()> {
    let script = format!("fs0:\r\nlinux.efi initrd=\\initrd {}\r\n", linux.cmdline);
    let (kernel, initrd) = (read(&linux.kernel)?, read(&linux.initrd)?);
    fat::image(image, &[("STARTUP.NSH", script.as_bytes()), ("LINUX.EFI", &kernel), ("INITRD", &initrd)])
}

/// A disk for BIOS: SeaBIOS starts GRUB from it, and reads Linux for GRUB.
pub fn bios(image: &Path, linux: &Boot) -> Result<()> {
    let volume = image.with_extension("fat");
    let (kernel, initrd) = (read(&linux.kernel)?, read(&linux.initrd)?);
    fat::image(&volume, &[("LINUX", &kernel), ("INITRD", &initrd)])?;
    let contents = read(&volume)?;
    at("remove", &volume, fs::remove_file(&volume))?;
    let (code, grub) = (read(Path::new(BOOT_CODE))?, grub(image, &linux.cmdline)?);
    assert!(SECTOR_BYTES + grub.len() as u64 <= FIRST_AT, "GRUB fits between the table and the first partition");

    let first_bytes = (contents.len() as u64).next_multiple_of(1 << 20);
    let second_at = FIRST_AT + first_bytes;
    let table = [partition(FAT16_LBA, FIRST_AT, first_bytes), partition(LINUX, second_at, SECOND_BYTES)];
    let disk = at("create", image, File::create(image))?;
    at("size", image, disk.set_len(second_at + SECOND_BYTES))?;
    let parts: [(u64, &[u8]); 5] = [
        (0, &code[..BOOT_CODE_BYTES]),
        (TABLE_AT, table.as_flattened()),
        (SECTOR_BYTES - 2, &[0x55, 0xaa]),
        (SECTOR_BYTES, &grub),
        (FIRST_AT, &contents),
    ];
    parts.into_iter().try_for_each(|(place, bytes)| at("write to", image, disk.write_all_at(bytes, place)))
}

/// GRUB with its modules and configuration built in, so that it needs no folder of modules.
fn grub(image: &Path, cmdline: &str) -> Result<Vec<u8>> {
    let (config, core) = (image.with_extension("cfg"), image.with_extension("grub"));
    let text = format!("linux (hd0,msdos1)/linux {cmdline}\ninitrd (hd0,msdos1)/initrd\nboot\n");
    at("write", &config, fs::write(&config, text))?;
    let mut command = Command::new("grub-mkimage");
    command.args(["-O", "i386-pc", "-p", "/", "-c"]).arg(&config).arg("-o").arg(&core);
    images::tool(command.args(["biosdisk", "part_msdos", "fat", "linux"]))?;
    let grub = read(&core)?;
    for file in [config, core] {
        at("remove", &file, fs::remove_file(&file))?;
    }
    Ok(grub)
}

/// An entry of the partition table. Cylinders and heads stay zero: nothing that reads larger disks uses them.
fn partition(kind: u8, first_byte: u64, bytes: u64) -> [u8; 16] {
    let sectors = |bytes: u64| ((bytes / SECTOR_BYTES) as u32).to_le_bytes();
    let mut entry = [0; 16];
    entry[4] = kind;
    entry[8..12].copy_from_slice(&sectors(first_byte));
    entry[12..].copy_from_slice(&sectors(bytes));
    entry
}

fn read(path: &Path) -> Result<Vec<u8>> {
    at("read", path, fs::read(path))
}
