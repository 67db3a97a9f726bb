//! The trial guest: a firmware image of a few instructions, assembled by hand, so that it needs neither BIOS nor
//! kernel.
//!
//! reset vector -> real mode -> protected mode -> page tables -> long mode -> write, read back -> count against the
//! clock -> `out 0xf4` (exit code)
//!
//! Every x86-64 kernel takes these steps, and a KVM that does not really work fails in one of them. The counting
//! detects a KVM (that of PVM, for hosts that are virtual themselves) which passes all steps, but emulates one
//! instruction at a time. On it, a kernel that TCG boots in seconds was still decompressing itself after minutes.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;

use rustix::fs::{MemfdFlags, memfd_create};

/// QEMU device that ends QEMU with `2 * value + 1` when the guest writes to its port.
pub const EXIT_DEVICE: &str = "isa-debug-exit,iobase=0xf4,iosize=0x04";
const EXIT_VALUE: i32 = 0x2a;
/// Exit code of QEMU if the guest passed all steps. QEMU's own codes are 0 and 1.
pub const EXIT_CODE: i32 = 2 * EXIT_VALUE + 1;
/// Exit code if the guest passed all steps, but never counted to 10,000 within a million cycles. A processor takes 10
/// to 20 thousand, TCG about 50 thousand, an emulator of single instructions 100 million. The guest tries 16 times,
/// because other processes may use the host.
pub const EXIT_CODE_SLOW: i32 = 2 * (EXIT_VALUE + 1) + 1;

/// Size of the image. QEMU requires a multiple of 64 KiB and maps the firmware so that it ends at 4 GiB.
const IMAGE_BYTES: usize = 64 << 10;
/// Position of the code: the last 1024 bytes, at 0xfffffc00.
const CODE_OFFSET: usize = IMAGE_BYTES - 1024;
const SEGMENTS_OFFSET: usize = IMAGE_BYTES - 0x140;
const RESET_VECTOR_OFFSET: usize = IMAGE_BYTES - 16;

#[rustfmt::skip]
const CODE: &[u8] = &[
    // Real mode, at F000:FC00: enter protected mode, with flat segments.
    0xfa, // cli
    0x2e, 0x66, 0x0f, 0x01, 0x16, 0xe0, 0xfe, // lgdtd cs:0xfee0
    0x0f, 0x20, 0xc0, // mov eax,cr0
    0x0c, 0x01, // or al,0x1
    0x0f, 0x22, 0xc0, // mov cr0,eax
    0x66, 0xea, 0x18, 0xfc, 0xff, 0xff, 0x08, 0x00, // jmp 0x8:0xfffffc18
    // Protected mode: page tables for the low 4 GiB in 2 MiB pages, then long mode.
    0x66, 0xb8, 0x10, 0x00, // mov ax,0x10
    0x8e, 0xd8, // mov ds,eax
    0xbf, 0x00, 0x20, 0x01, 0x00, // mov edi,0x12000
    0xb8, 0x83, 0x00, 0x00, 0x00, // mov eax,0x83
    0xb9, 0x00, 0x08, 0x00, 0x00, // mov ecx,0x800
    0x89, 0x07, // mov DWORD PTR [edi],eax
    0x05, 0x00, 0x00, 0x20, 0x00, // add eax,0x200000
    0x83, 0xc7, 0x08, // add edi,0x8
    0xe2, 0xf4, // loop 0x2d
    0xc7, 0x05, 0x00, 0x00, 0x01, 0x00, 0x03, 0x10, 0x01, 0x00, // mov DWORD PTR ds:0x10000,0x11003
    0xc7, 0x05, 0x00, 0x10, 0x01, 0x00, 0x03, 0x20, 0x01, 0x00, // mov DWORD PTR ds:0x11000,0x12003
    0xc7, 0x05, 0x08, 0x10, 0x01, 0x00, 0x03, 0x30, 0x01, 0x00, // mov DWORD PTR ds:0x11008,0x13003
    0xc7, 0x05, 0x10, 0x10, 0x01, 0x00, 0x03, 0x40, 0x01, 0x00, // mov DWORD PTR ds:0x11010,0x14003
    0xc7, 0x05, 0x18, 0x10, 0x01, 0x00, 0x03, 0x50, 0x01, 0x00, // mov DWORD PTR ds:0x11018,0x15003
    0xb8, 0x20, 0x00, 0x00, 0x00, // mov eax,0x20
    0x0f, 0x22, 0xe0, // mov cr4,eax
    0xb8, 0x00, 0x00, 0x01, 0x00, // mov eax,0x10000
    0x0f, 0x22, 0xd8, // mov cr3,eax
    0xb9, 0x80, 0x00, 0x00, 0xc0, // mov ecx,0xc0000080
    0x0f, 0x32, // rdmsr
    0x80, 0xcc, 0x01, // or ah,0x1
    0x0f, 0x30, // wrmsr
    0x0f, 0x20, 0xc0, // mov eax,cr0
    0x0d, 0x00, 0x00, 0x00, 0x80, // or eax,0x80000000
    0x0f, 0x22, 0xc0, // mov cr0,eax
    0xea, 0x99, 0xfc, 0xff, 0xff, 0x18, 0x00, // jmp 0x18:0xfffffc99
    // Long mode: write and read back a value that needs all 64 bits.
    0x48, 0xb8, 0x00, 0x00, 0x00, 0x00, 0x2a, 0x00, 0x00, 0x00, // movabs rax,0x2a00000000
    0x48, 0x89, 0x04, 0x25, 0x00, 0x00, 0x02, 0x00, // mov QWORD PTR ds:0x20000,rax
    0x31, 0xc0, // xor eax,eax
    0x48, 0x8b, 0x04, 0x25, 0x00, 0x00, 0x02, 0x00, // mov rax,QWORD PTR ds:0x20000
    0x48, 0xc1, 0xe8, 0x20, // shr rax,0x20
    0x89, 0xc3, // mov ebx,eax
    // Count, at most 16 times.
    0xbe, 0x10, 0x00, 0x00, 0x00, // mov esi,0x10
    0x0f, 0x31, // rdtsc
    0x89, 0xc7, // mov edi,eax
    0xb9, 0x10, 0x27, 0x00, 0x00, // mov ecx,0x2710
    0xff, 0xc9, // dec ecx
    0x75, 0xfc, // jne 0xc9
    0x0f, 0x31, // rdtsc
    0x29, 0xf8, // sub eax,edi
    0x3d, 0x40, 0x42, 0x0f, 0x00, // cmp eax,0xf4240
    0x72, 0x06, // jb 0xde
    0xff, 0xce, // dec esi
    0x75, 0xe4, // jne 0xc0
    0xff, 0xc3, // inc ebx
    // Write the result to the port.
    0x89, 0xd8, // mov eax,ebx
    0xe6, 0xf4, // out 0xf4,al
    0xf4, // hlt
    0xeb, 0xfd, // jmp 0xe2
];

/// Null, 32-bit code, data and 64-bit code descriptors; then the operand of `lgdt`: limit and address.
#[rustfmt::skip]
const SEGMENTS: &[u8] = &[
    0, 0, 0, 0, 0, 0, 0, 0,
    0xff, 0xff, 0, 0, 0, 0x9b, 0xcf, 0,
    0xff, 0xff, 0, 0, 0, 0x93, 0xcf, 0,
    0xff, 0xff, 0, 0, 0, 0x9b, 0xaf, 0,
    0x1f, 0, 0xc0, 0xfe, 0xff, 0xff,
];

/// `jmp near 0xfc00`
const RESET_VECTOR: &[u8] = &[0xe9, 0x0d, 0xfc];

const _: () = assert!(CODE_OFFSET + CODE.len() <= SEGMENTS_OFFSET);
const _: () = assert!(SEGMENTS_OFFSET + SEGMENTS.len() <= RESET_VECTOR_OFFSET);

/// The image as a file, until this is dropped.
pub struct Image {
    file: File,
}

impl Image {
    /// Writes the image to an unnamed file in memory, which needs no folder and leaves nothing behind.
    pub fn write() -> io::Result<Self> {
        let file = File::from(memfd_create("trial-guest", MemfdFlags::CLOEXEC)?);
        file.write_all_at(&bytes(), 0)?;
        Ok(Self { file })
    }

    /// Path under which QEMU, a child of this process, can open the image.
    pub fn path(&self) -> PathBuf {
        format!("/proc/{}/fd/{}", std::process::id(), self.file.as_raw_fd()).into()
    }
}

fn bytes() -> Vec<u8> {
    let mut image = vec![0; IMAGE_BYTES];
    for (offset, part) in [(CODE_OFFSET, CODE), (SEGMENTS_OFFSET, SEGMENTS), (RESET_VECTOR_OFFSET, RESET_VECTOR)] {
        image[offset..offset + part.len()].copy_from_slice(part);
    }
    image
}
