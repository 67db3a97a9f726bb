//! The table of keys. It defines what a file may contain, `docs/config.md`, and `ConfigFile`, which holds the values as
//! typed, without defaults.

use serde::{Deserialize, Serialize};

use super::fields::Effect::{AtTakeOver, WithNextGuest, WithNextStart};
use super::fields::Kind::{Boolean, Choice, Integer, Path, Size, SizeOrPercent, Text, TextList, Time};
use super::fields::Trust::{Guest, Host, HostUnless, Replaced};
use super::fields::{
    ACCELERATORS, ADMISSION, COMPRESSIONS, DISK_FORMATS, DISK_TIMES, DISPLAYS, DUMP_FORMATS, Field, MIRRORS, NET_KINDS,
    NVRAM_DEVICES, ON_OFF, ON_PANIC, OWNERS, Section, WATCHDOG_ACTIONS, is_own_firmware, is_own_user, is_plain,
    is_true,
};

/// Rows are `key: type = trust, effect, kind, default in words, example, meaning`. After a `;` follow the subtables.
macro_rules! fields {
    ($($(#[$doc:meta])* $name:ident($section:expr) {
        $($key:ident: $type:ty = $trust:expr, $effect:expr, $kind:expr, $default:literal, $example:literal, $meaning:literal;)*
        $(; $($table:ident: $table_type:ty,)*)?
    })*) => {
        $(
            $(#[$doc])*
            #[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
            #[serde(default, deny_unknown_fields)]
            pub struct $name {
                $(pub $key: Option<$type>,)*
                $($(pub $table: $table_type,)*)?
            }
        )*

        /// All keys, in the order of the page.
        pub static FIELDS: &[Field] = &[$($(Field {
            trust: $trust,
            section: $section,
            key: stringify!($key),
            effect: $effect,
            kind: $kind,
            default: $default,
            example: $example,
            meaning: $meaning,
        },)*)*];
    };
}

fields! {
    /// The whole file.
    ConfigFile(Section::Machine) {
        name: String = Replaced, WithNextStart, Text, "", r#""web""#,
            "Name of the machine: 1 to 32 letters, digits, `-`, `_` or `.`, beginning with a letter or digit.";
        owner: String = Host, WithNextStart, Choice(OWNERS), "`hearth`", r#""libvirt""#,
            "Who starts and ends QEMU. `libvirt`: the machine is the domain of this name; `hearth attach` writes the file. \
             It then has no other keys than `name`, `memory`, `keep_memory`, `ember`, `refill`, `on_panic`, \
             `budget_slack`, `memory_folder`, `[crash]`, `[remount]`, `[object_store]` and `[[disks]]`: \
             libvirt's definition has the rest.";
        memory: String = Guest, WithNextGuest, Size, "", r#""2GiB""#,
            "Guest RAM: a multiple of 2 MiB, from 32MiB to 16TiB.";
        cpus: u32 = Guest, WithNextGuest, Integer { min: 1, max: 255 }, "1", "2",
            "Number of virtual processors.";
        cpu_model: String = Guest, WithNextGuest, Text,
            "`host` under KVM, `max,-erms,-fsrm,-cx16` under TCG", r#""Skylake-Server,-hle,-rtm""#,
            "CPU model for QEMU, with features.";
        accelerator: String = Guest, WithNextGuest, Choice(ACCELERATORS), "`auto`", r#""auto""#,
            "Accelerator for QEMU. `auto` uses KVM if a test guest runs on it, else TCG; `hearth status` shows which \
             and why.";
        machine_type: String = HostUnless(is_plain), WithNextGuest, Text,
            "the newest one of the first QEMU, then fixed", r#""pc-q35-7.2""#,
            "QEMU machine type, which fixes the guest's devices. It must be a versioned q35.";
        qemu: String = Host, AtTakeOver, Path, "`qemu-system-x86_64` on PATH", r#""/usr/bin/qemu-system-x86_64""#,
            "QEMU program, version 7.2 or later.";
        qemu_user: String = HostUnless(is_own_user), WithNextGuest, Text, "the keeper's own user", r#""nobody""#,
            "User that QEMU switches to once its files are open; the keeper must run as root. Recommended: `\"auto\"`, \
             a user id for this machine alone, 2013265920 or higher, without an entry in /etc/passwd.";
        runtime_folder: String = Host, WithNextStart, Path, "`/run/hearth/NAME`", r#""/run/hearth/web""#,
            "Folder for sockets, logs and the journal, which are small. Default without root: \
             `$XDG_RUNTIME_DIR/hearth/NAME`.";
        memory_folder: String = Host, WithNextStart, Path, "`/dev/shm/hearth/NAME`", r#""/dev/shm/hearth/web""#,
            "Folder for the guest's RAM files. If the folder does not have the machine's name, Hearth creates a \
             subfolder of that name, because machines cannot share one. It must be on a tmpfs or DAX file system with \
             space for the memory and the slack; on a tmpfs for restores other than `--eager`. Default without root: \
             `/dev/shm/hearth-UID/NAME`.";
        ember: String = Guest, WithNextGuest, Choice(ON_OFF), "`on`", r#""on""#,
            "Whether to keep a dead incarnation's memory as a source of disk blocks. With `off` every reboot is cold.";
        refill: String = Guest, WithNextStart, Choice(ON_OFF), "`off`", r#""on""#,
            "Whether the next guest gets a list of what the last one had in its file cache, to read it back at once (see \
             warm-reboot.md). `hearth-refill` must be installed in the guest. It is an extra disk. A stop keeps the list \
             in `/var/lib/hearth/NAME/cache-map` (without root: in `$XDG_STATE_HOME/hearth/NAME/`) for the next start.";
        on_panic: String = Guest, AtTakeOver, Choice(ON_PANIC),
            "`dump+recover`; `recover` if the dump folder cannot be used", r#""dump+recover""#,
            "What to do after a kernel panic or watchdog timeout. `dump+recover` boots the next incarnation at once \
             and writes the dump meanwhile. `dump` writes the dump and leaves the guest paused. `recover` boots \
             without a dump. `pause` leaves the guest paused. For a domain of libvirt, which has no `dump`, run \
             `hearth attach` again after a change.";
        budget_slack: String = Guest, AtTakeOver, SizeOrPercent, "`3%`", r#""3%""#,
            "Host memory that the machine's files may use beyond its RAM: a size, or percent of the RAM (0 to 100).";
        keep_memory: String = Host, AtTakeOver, Time, "`10m`", r#""1h""#,
            "How long to keep the memory of the last guest while its domain is off; only with `owner = \"libvirt\"`.";
        admission: String = Guest, AtTakeOver, Choice(ADMISSION), "`dump`", r#""always""#,
            "When page faults limit the guest's memory growth, so that dead and living memory together never exceed \
             the budget. `dump`: while a dump holds dead memory. `always`: also while there is only an ember. Without \
             `always`, a guest that grows faster than the ember is trimmed may exceed the budget, which is reported.";
        sandbox: bool = HostUnless(is_true), WithNextGuest, Boolean, "`true`", "true",
            "Whether to run QEMU in its seccomp sandbox, if the binary has one, and to let it open only its machine's \
             files (Landlock), if the kernel can. Not the latter with `extra_qemu_args` or a script as `qemu`.";
        guest_agent: bool = Guest, WithNextGuest, Boolean, "`false`", "true",
            "Adds a channel to qemu-guest-agent, which must run in the guest. `hearth save --freeze` (see \
             lazy-restore.md) and `remount.ready.unit` need it. It is an extra device.";
        display: String = Guest, WithNextGuest, Choice(DISPLAYS), "`none`", r#""vnc""#,
            "`vnc` gives the guest a graphics card (VGA), and QEMU a VNC server on a unix socket: `hearth view NAME`.";
        extra_qemu_args: Vec<String> = Host, WithNextGuest, TextList, "none", r#"["-device", "virtio-balloon-pci"]"#,
            "Arguments appended to QEMU's command line unchanged. Hearth does not check them, and they can break its \
             guarantees. If they contain `vmgenid`, Hearth adds no such device itself.";
        ;
        boot: Option<BootSection>,
        crash: Option<CrashSection>,
        watchdog: Option<WatchdogSection>,
        rejuvenate: Option<RejuvenateSection>,
        remount: Option<RemountSection>,
        object_store: Option<ObjectStoreSection>,
        disks: Vec<DiskSection>,
        nvram: Vec<NvramSection>,
        nets: Vec<NetSection>,
    }

    /// `[boot]`.
    BootSection(Section::Boot) {
        kernel: String = Host, WithNextGuest, Path, "none", r#""vmlinuz""#,
            "Linux kernel to boot directly. Give either this or `firmware`.";
        initrd: String = Host, WithNextGuest, Path, "none", r#""initrd.img""#,
            "Initial RAM disk; only with `kernel`.";
        cmdline: String = Guest, WithNextGuest, Text, "empty", r#""root=/dev/vda console=ttyS0""#,
            "Kernel command line; only with `kernel`.";
        firmware: String = HostUnless(is_own_firmware), WithNextGuest, Path, "`bios`, without `kernel`", r#""uefi""#,
            "`bios` (QEMU's SeaBIOS), `uefi` (the distribution's OVMF), or the path of a firmware image.";
        firmware_vars: String = Host, WithNextGuest, Path, "none", r#""web-vars.fd""#,
            "UEFI variable store: the machine's own, writable copy. Required with `uefi`; `hearth check` says how to make it.";
    }

    /// `[crash]`.
    CrashSection(Section::Crash) {
        dump_folder: String = Host, AtTakeOver, Path, "`/var/lib/hearth/NAME/dumps`", r#""/srv/dumps/web""#,
            "Folder for dumps, on a real disk rather than in host memory. Created when needed. Default without root: \
             `$XDG_STATE_HOME/hearth/NAME/dumps`.";
        level: u8 = Guest, AtTakeOver, Integer { min: 0, max: 31 }, "31", "17",
            "Pages that dumps leave out, as makedumpfile's level: the sum of 1 zero pages, 2 cache, 4 private cache, 8 \
             user data, 16 free pages.";
        format: String = Guest, AtTakeOver, Choice(DUMP_FORMATS), "`kdump`", r#""kdump""#,
            "Format of dumps: `kdump` is compressed, `elf` is an uncompressed core file.";
        compression: String = Guest, AtTakeOver, Choice(COMPRESSIONS), "`zstd`", r#""lzo""#,
            "Compression of `kdump` files. Debian's makedumpfile reads only `lzo` and `zlib`; crash 8 and drgn read \
             all.";
        keep_last: u32 = Guest, AtTakeOver, Integer { min: 1, max: 1000 }, "5", "5",
            "Number of complete dumps to keep. When another is complete, the oldest is removed.";
        min_free: String = Guest, AtTakeOver, Size, "`1GiB`", r#""10GiB""#,
            "Free space to preserve in the dump folder. A dump that would use it waits, and says so.";
        chunk: String = Guest, AtTakeOver, Size, "`4MiB`", r#""16MiB""#,
            "Step in which a dump releases memory, 2MiB to 4GiB. It is written in pieces of at most 4 MiB, which \
             together fit into half of `budget_slack`.";
        threads: u32 = Guest, AtTakeOver, Integer { min: 1, max: 64 }, "the host's processors, at most 4", "2",
            "Number of compression threads, which run at the lowest priority.";
        headroom: String = Guest, AtTakeOver, SizeOrPercent, "`0%`", r#""10%""#,
            "Host memory beyond the budget that a recovery may use while a dump is written: a size, or percent of the \
             RAM.";
        disk_time: String = Guest, AtTakeOver, Choice(DISK_TIMES), "`recovery-first`", r#""balanced""#,
            "Priority when dump and guest use the same disk. On different disks neither waits.";
        mib_per_second: u64 = Guest, AtTakeOver, Integer { min: 1, max: 1_000_000 }, "no limit", "70",
            "Maximum write rate of a dump, in MiB/s.";
        loop_count: u32 = Guest, AtTakeOver, Integer { min: 2, max: 1000 }, "5", "5",
            "Number of crashes within the window that make a crash loop. The machine then waits before it starts its \
             next guest.";
        loop_window_s: u64 = Guest, AtTakeOver, Integer { min: 1, max: 86_400 }, "60", "300",
            "Length of the window, in seconds of guest uptime.";
        loop_delay_s: u64 = Guest, AtTakeOver, Integer { min: 1, max: 86_400 }, "10", "30",
            "First wait in a crash loop, in seconds. It doubles with each further crash.";
        loop_delay_max_s: u64 = Guest, AtTakeOver, Integer { min: 1, max: 86_400 }, "300", "3600",
            "Longest wait in a crash loop, in seconds.";
    }

    /// `[watchdog]`.
    WatchdogSection(Section::Watchdog) {
        action: String = Guest, WithNextGuest, Choice(WATCHDOG_ACTIONS), "`crash`", r#""crash""#,
            "What to do when the guest stops feeding the watchdog. `crash` follows `on_panic`. `nmi` makes a prepared \
             guest panic by itself. `reset` reboots without a dump.";
    }

    /// `[rejuvenate]`.
    RejuvenateSection(Section::Rejuvenate) {
        every: String = Guest, AtTakeOver, Time, "never", r#""30d""#,
            "Maximum age of a QEMU: a number with `s`, `m`, `h` or `d`.";
        rss_growth_mib: u64 = Guest, AtTakeOver, Integer { min: 1, max: 1_000_000 }, "no limit", "256",
            "Maximum growth of QEMU's own memory since its start, in MiB, without the guest's RAM.";
        window: String = Guest, AtTakeOver, Text, "any time, at most once an hour", r#""02:00-05:00""#,
            "Daily time range for automatic rejuvenations, in the host's local time; at most one per day. It may span \
             midnight.";
    }

    /// `[remount]`.
    RemountSection(Section::Remount) {
        limit: String = Guest, AtTakeOver, SizeOrPercent, "`5%`", r#""64MiB""#,
            "Host memory for these blocks, beyond the RAM and its slack: a size, or percent of the RAM; at least \
             64KiB.";
        ready_after: String = Guest, AtTakeOver, Time, "`2m`", r#""30s""#,
            "Time after reset when the machine counts as ready at the latest: a number with `s`, `m`, `h` or `d`.";
        persist: bool = Guest, AtTakeOver, Boolean, "`false`", "true",
            "Whether to save these blocks when the machine stops, and load them at its next start if no image has \
             changed.";
        persist_file: String = Host, AtTakeOver, Path, "`/var/lib/hearth/NAME/boot-set`", r#""/srv/web.boot-set""#,
            "File for the saved blocks; only with `persist`. Default without root: \
             `$XDG_STATE_HOME/hearth/NAME/boot-set`.";
        ;
        ready: Option<ReadySection>,
    }

    /// `[object_store]`.
    ObjectStoreSection(Section::ObjectStore) {
        credentials: String = Host, AtTakeOver, Path, "the keeper's environment", r#""/etc/hearth/s3.env""#,
            "File with one setting per line, named as in AWS tools: `AWS_ACCESS_KEY_ID`, `AWS_SECRET_ACCESS_KEY`, \
             `AWS_SESSION_TOKEN`, `AWS_REGION`, `AWS_ENDPOINT_URL` for a store of another provider, \
             `AWS_ALLOW_HTTP=true` for one without TLS. For Google and Azure see object-store.md.";
        folder: String = Host, AtTakeOver, Path, "`/var/cache/hearth/objects`", r#""/srv/cache/hearth""#,
            "Cache folder for store data, on a disk; several machines may share it. A save is staged there \
             while it is uploaded. Default without root: `$XDG_CACHE_HOME/hearth/objects`.";
        cache_size: String = Host, AtTakeOver, Size, "`8GiB`", r#""50GiB""#,
            "Maximum size of the cache, at least 64MiB. The least recently used data is dropped first. A snapshot that \
             fits is fetched only once.";
    }

    /// `[remount.ready]`.
    ReadySection(Section::Ready) {
        port: u16 = Guest, AtTakeOver, Integer { min: 1, max: 65_535 }, "none", "8080",
            "Host TCP port forwarded into the guest (`forward` of a network). The guest is ready once it sends \
             anything there: a greeting, or an answer to `GET / HTTP/1.0`.";
        unit: String = Guest, AtTakeOver, Text, "none", r#""web.service""#,
            "Unit of the guest's systemd. The guest is ready once it is active: the keeper asks the guest agent once a \
             second (`guest-exec` of `systemctl is-active`). Only with `guest_agent = true`.";
    }

    /// One of `[[disks]]`.
    DiskSection(Section::Disk) {
        name: String = Guest, WithNextStart, Text, "`disk0`, `disk1`, ...", r#""root""#,
            "Name of the disk in commands and metrics.";
        path: String = Replaced, WithNextStart, Path, "", r#""root.img""#,
            "Disk image: a file or a block device. Hearth locks it while in use.";
        format: String = Replaced, WithNextStart, Choice(DISK_FORMATS), "raw", r#""raw""#,
            "Format of the image. If it is not named, a machine whose image begins with a qcow2 header does not start. A guest can write such a header to its raw disk.";
        read_only: bool = Guest, WithNextStart, Boolean, "`false`", "false",
            "Whether to refuse writes. Other readers may then open the image too.";
        serial: String = Guest, WithNextStart, Text, "the disk's name", r#""root""#,
            "Serial number shown to the guest: at most 20 printable characters.";
        queues: u16 = Guest, WithNextStart, Integer { min: 1, max: 16 }, "1", "1",
            "Number of virtqueues. More than one rarely helps, because one thread serves all.";
        mib_per_second: u64 = Guest, AtTakeOver, Integer { min: 1, max: 1_000_000 }, "no limit", "125",
            "Maximum rate of reads and writes of the image, in MiB/s.";
        iops: u64 = Guest, AtTakeOver, Integer { min: 1, max: 100_000_000 }, "no limit", "3000",
            "Maximum requests to the image per second.";
        direct: bool = Guest, AtTakeOver, Boolean, "`true`", "true",
            "Whether to bypass the host's page cache (`O_DIRECT`), if the file system supports it.";
    }

    /// One of `[[nvram]]`.
    NvramSection(Section::Nvram) {
        name: String = Guest, WithNextStart, Text, "`nvram0`, `nvram1`, ...", r#""journal""#,
            "Name of the device in commands.";
        size: String = Guest, WithNextStart, Size, "", r#""64MiB""#,
            "Size of the device: a multiple of 4 KiB, or of 2 MiB with `pmem`. All of this host memory, beyond RAM and \
             slack, is allocated at start.";
        device: String = Guest, WithNextStart, Choice(NVRAM_DEVICES), "`disk`", r#""pmem""#,
            "Device type: a `disk`, or `pmem` in the guest's address space (virtio-pmem, `/dev/pmem0`). A guest with \
             `pmem` cannot be rejuvenated.";
        mirror: String = Guest, WithNextStart, Choice(MIRRORS), "`none`", r#""sync""#,
            "How the content is mirrored. `none`: it is lost with the host's memory. `async`: it is written to \
             `mirror_file` within about a second. `sync`: a guest flush returns once everything before it is durable \
             in `mirror_file`. `pmem` supports `none` and `sync`.";
        mirror_file: String = Host, WithNextStart, Path, "none", r#""/srv/web-journal""#,
            "Mirror file on a real disk, created if missing. Required with `async` and `sync`.";
        serial: String = Guest, WithNextStart, Text, "the device's name", r#""journal""#,
            "Serial number of a `disk` shown to the guest: at most 20 printable characters.";
    }

    /// One of `[[nets]]`.
    NetSection(Section::Net) {
        kind: String = Guest, WithNextGuest, Choice(NET_KINDS), "`user`", r#""user""#,
            "Network type. `user`: built into QEMU, needs no privileges. `passt`: faster, needs no privileges. With both \
             the guest reaches what listens on the host's loopback address. `tap`: an interface of the host.";
        forward: Vec<String> = Host, WithNextGuest, TextList,
            "none", r#"["127.0.0.1:8080:80", "127.0.0.1:5353:53/udp"]"#,
            "Host ports forwarded into the guest: `HOSTIP:PORT:GUESTPORT` (`[::1]:PORT:GUESTPORT`), or \
             `PORT:GUESTPORT` on 127.0.0.1, with `/udp` for UDP. Only with `user` and `passt`.";
        isolated: bool = Guest, WithNextGuest, Boolean, "`false`", "true",
            "Whether to block all traffic except `forward`. Only with `user`.";
        ifname: String = Host, WithNextGuest, Text, "none", r#""tap0""#,
            "Name of an existing tap interface. Required with `tap`, and only used there.";
        mac: String = Guest, WithNextGuest, Text, "derived from the machine's name", r#""52:54:00:12:34:56""#,
            "MAC address of the device.";
    }
}
