//! Checks that a guest's boot files exist, are readable and can be booted.
//!
//! QEMU loads any file as a kernel, and a guest with a wrong one hangs silently. Of a firmware image QEMU checks only
//! the size.

use std::fs::{File, OpenOptions};
use std::io::{self, Read};
use std::path::Path;

use crate::config::{Boot, uefi_template};
use crate::problem::Problem;

/// Offset and magic of Linux's boot protocol (Documentation/arch/x86/boot.rst).
const BOOT_PROTOCOL: (usize, &[u8]) = (0x202, b"HdrS");
/// ELF's magic, and the offset of its machine field: i386 or x86-64.
const ELF: (usize, &[u8]) = (0, b"\x7fELF");
const ELF_MACHINE: usize = 0x12;
const ELF_MACHINES: [[u8; 2]; 2] = [[3, 0], [62, 0]];
/// A multiboot header begins with this, at a multiple of four in the head of the file.
const MULTIBOOT: [u8; 4] = 0x1bad_b002_u32.to_le_bytes();
const HEAD_BYTES: u64 = 8192;

/// QEMU maps firmware by pages, code and variables together below 4 GiB.
const FIRMWARE_STEP: u64 = 4096;
const FIRMWARE_BYTES_MAX: u64 = 8 << 20;

pub fn check(boot: &Boot, problems: &mut Vec<Problem>) {
    let read = OpenOptions::new().read(true).clone();
    match boot {
        Boot::Kernel { kernel, initrd, .. } => {
            let hint = "set it to a Linux kernel, for example /boot/vmlinuz";
            if let Some(file) = file(&read, "boot.kernel", kernel, hint, problems) {
                problems.extend(no_kernel(file, kernel, hint));
            }
            if let Some(initrd) = initrd {
                file(&read, "boot.initrd", initrd, "set it to an initial RAM disk, or remove the line", problems);
            }
        }
        Boot::Firmware { code, vars } => {
            let hint = "install OVMF (Debian: apt install ovmf), or set another image";
            let code_bytes = code.as_ref().map_or(0, |code| {
                let file = file(&read, "boot.firmware", code, hint, problems);
                file.map_or(0, |file| firmware_bytes(&file, "boot.firmware", code, hint, problems))
            });
            if let Some(vars) = vars {
                let (template, own) = (uefi_template().display().to_string(), vars.display());
                let hint =
                    &format!("copy the firmware's template there, for example `install -D -m 600 {template} {own}`");
                let (subject, write) = ("boot.firmware_vars", read.clone().write(true).clone());
                let file = file(&write, subject, vars, hint, problems);
                let vars_bytes = file.map_or(0, |file| firmware_bytes(&file, subject, vars, hint, problems));
                if code_bytes + vars_bytes > FIRMWARE_BYTES_MAX {
                    let message = format!(
                        "is too large: {code_bytes} bytes plus {vars_bytes} bytes of variables exceed QEMU's limit of \
                         {FIRMWARE_BYTES_MAX}"
                    );
                    problems.push(Problem::error("boot.firmware", message, "choose a smaller image"));
                }
            }
        }
    }
}

/// Opens a regular file, or reports why that fails.
fn file(how: &OpenOptions, subject: &str, path: &Path, hint: &str, problems: &mut Vec<Problem>) -> Option<File> {
    let problem = match how.open(path).and_then(|file| Ok((file.metadata()?.is_file(), file))) {
        Ok((true, file)) => return Some(file),
        Ok((false, _)) => Problem::error(subject, format!("{} is not a file", path.display()), hint),
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            Problem::missing(subject, format!("{} does not exist", path.display()), hint)
        }
        Err(error) => {
            let hint = "change its owner or mode, or choose another file";
            Problem::missing(subject, format!("{} cannot be opened: {error}", path.display()), hint)
        }
    };
    problems.push(problem);
    None
}

fn no_kernel(file: File, path: &Path, hint: &str) -> Option<Problem> {
    let mut head = Vec::new();
    let (subject, path) = ("boot.kernel", path.display());
    match file.take(HEAD_BYTES).read_to_end(&mut head) {
        Ok(_) if is_kernel(&head) => None,
        Ok(_) => {
            Some(Problem::error(subject, format!("{path} is not an x86 kernel (bzImage, ELF or multiboot)"), hint))
        }
        Err(error) => Some(Problem::missing(subject, format!("{path} cannot be read: {error}"), hint)),
    }
}

fn is_kernel(head: &[u8]) -> bool {
    let has = |(at, magic): (usize, &[u8])| head.get(at..at + magic.len()) == Some(magic);
    let is_elf = || has(ELF) && ELF_MACHINES.iter().any(|machine| has((ELF_MACHINE, machine)));
    has(BOOT_PROTOCOL) || is_elf() || head.chunks_exact(MULTIBOOT.len()).any(|word| word == MULTIBOOT)
}

fn firmware_bytes(file: &File, subject: &str, path: &Path, hint: &str, problems: &mut Vec<Problem>) -> u64 {
    let bytes = file.metadata().map_or(0, |metadata| metadata.len());
    if bytes == 0 || !bytes.is_multiple_of(FIRMWARE_STEP) {
        let message = format!("{} is not a firmware image: it has {bytes} bytes", path.display());
        problems.push(Problem::error(subject, message, hint));
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    fn told(boot: &Boot) -> Vec<String> {
        let mut problems = Vec::new();
        check(boot, &mut problems);
        problems.iter().map(ToString::to_string).collect()
    }

    #[test]
    fn only_a_kernel_is_taken_for_one() {
        let at = |at: usize, magic: &[u8]| [&vec![0; at], magic, &[0; 64]].concat();
        let elf = |machine: u8| [b"\x7fELF\x02\x01\x01\0\0\0\0\0\0\0\0\0\x02\0", &[machine, 0][..], &[0; 64]].concat();
        let kernels = [at(0x202, b"HdrS"), elf(3), elf(62), at(0, &MULTIBOOT), at(8180, &MULTIBOOT)];
        let others = [
            b"text\n".to_vec(),
            Vec::new(),
            at(0x200, b"HdrS"),
            // A kernel for AArch64.
            elf(183),
            at(2, &MULTIBOOT),
            at(8192, &MULTIBOOT),
        ];
        let folder = tempfile::tempdir().unwrap();
        let kernel = folder.path().join("vmlinuz");
        let boot = Boot::Kernel { kernel: kernel.clone(), initrd: None, cmdline: String::new() };
        for (bytes, is_kernel) in kernels.iter().map(|one| (one, true)).chain(others.iter().map(|one| (one, false))) {
            std::fs::write(&kernel, bytes).unwrap();
            let found = told(&boot);
            assert_eq!(found.is_empty(), is_kernel, "{bytes:?}: {found:?}");
            assert!(is_kernel || found[0].contains("is not an x86 kernel"), "{found:?}");
        }
    }

    #[test]
    fn firmware_size_is_checked() {
        let folder = tempfile::tempdir().unwrap();
        let (code, vars) = (folder.path().join("code.fd"), folder.path().join("vars.fd"));
        let boot = Boot::Firmware { code: Some(code.clone()), vars: Some(vars.clone()) };
        let check = |code_bytes: u64, vars_bytes: u64, expect: &[&str]| {
            File::create(&code).unwrap().set_len(code_bytes).unwrap();
            File::create(&vars).unwrap().set_len(vars_bytes).unwrap();
            let found = told(&boot);
            assert_eq!(found.len(), expect.len(), "{found:?}");
            assert!(found.iter().zip(expect).all(|(found, expect)| found.contains(expect)), "{found:?}");
        };
        check(3 << 20, 1 << 20, &[]);
        check(4 << 20, 4 << 20, &[]);
        check(4 << 20, 5 << 20, &["boot.firmware: is too large: 4194304 bytes plus 5242880"]);
        check(0, 5, &["code.fd is not a firmware image: it has 0 bytes", "vars.fd is not a firmware image: it has 5 "]);
    }
}
