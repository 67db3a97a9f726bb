//! Configurations as operators write them, and every word they read when it is wrong.

use std::path::Path;

use hearth_api::EmberMode;

use super::*;
use crate::home::Home;

mod living;
mod remount;
mod shown;

const SMALL: &str = "name = \"web\"\nmemory = \"1GiB\"\n[boot]\nkernel = \"vmlinuz\"\n";

fn parse(text: &str) -> Result<Config, Vec<Problem>> {
    Config::parse(text, Path::new("/machines/web.toml"), &RuntimeRoot::new("/run/hearth"))
}

/// Every line that the operator reads.
fn check(text: &str, expect: &[&str]) {
    let problems = parse(text).expect_err("the text is wrong");
    let lines: Vec<String> = problems.iter().map(Problem::to_string).collect();
    assert_eq!(lines, expect, "for\n{text}");
}

/// `SMALL` with more lines at the end.
fn check_with(more: &str, expect: &[&str]) {
    check(&format!("{SMALL}{more}"), expect);
}

#[test]
fn the_smallest_file_gets_every_default() {
    let config = parse(SMALL).unwrap();
    let expect = Config {
        name: "web".into(),
        file: "/machines/web.toml".into(),
        owner: Owner::Hearth,
        guest: GuestConfig {
            memory_bytes: 1 << 30,
            cpus: 1,
            cpu_model: None,
            accelerator: Wanted::Auto,
            machine_type: None,
            boot: Boot::Kernel { kernel: "/machines/vmlinuz".into(), initrd: None, cmdline: String::new() },
            watchdog: None,
            agent: false,
            screen: false,
            refill: None,
        },
        devices: DevicesConfig { disks: vec![], nvram: vec![], pmem: vec![], nets: vec![] },
        qemu: QemuConfig { program: None, user: None, sandbox: true, extra_args: vec![] },
        folders: FoldersConfig {
            runtime: "/run/hearth/web".into(),
            memory: super::meaning::default_memory_folder("web"),
        },
        memory: MemoryConfig {
            ember: EmberMode::On,
            slack_bytes: ((1_u64 << 30) as f64 * 0.03) as u64,
            admission: AdmissionMode::Dump,
            keep_memory_s: None,
        },
        on_panic: OnPanic::DumpAndRecover,
        crash: CrashConfig {
            dump_folder: super::meaning::default_dump_folder("web"),
            level: 31,
            format: DumpFormat::Kdump,
            compression: DumpCompression::Zstd,
            keep_last: 5,
            min_free_bytes: 1 << 30,
            chunk_bytes: 4 << 20,
            threads: super::meaning::default_dump_threads(),
            headroom_bytes: 0,
            disk_time: DiskTime::RecoveryFirst,
            mib_per_second: None,
            crash_loop: CrashLoopConfig { loop_count: 5, loop_window_s: 60, loop_delay_s: 10, loop_delay_max_s: 300 },
        },
        rejuvenate: None,
        remount: None,
        object_store: Config::default_object_store(),
    };
    assert_eq!(config, expect);
}

/// The table of keys names the defaults for the page, and `meaning` applies them.
#[test]
fn an_explicit_default_equals_an_absent_key() {
    let defaults = FIELDS.iter().filter_map(|field| Some((field, field.default_value()?)));
    for (field, default) in defaults {
        let compared = every_key::with_and_without(field, &default);
        assert!(!compared.is_empty(), "no file can contain {} = {default}", field.key);
        for (with, without) in compared {
            assert_eq!(with, without, "{} = {default}", field.key);
        }
    }
}

#[test]
fn headroom_needs_dump_and_recover() {
    let most_mib = |on_panic: &str| {
        let text = SMALL.replace("memory =", &format!("on_panic = \"{on_panic}\"\nbudget_slack = \"0%\"\nmemory ="));
        parse(&format!("{text}\n[crash]\nheadroom = \"64MiB\"\n")).unwrap().most_memory_bytes() >> 20
    };
    assert_eq!(most_mib("dump+recover"), 1024 + 64);
    assert_eq!(most_mib("recover"), 1024);
}

#[test]
fn everything_that_can_be_said_is_understood() {
    let config = parse(
        r#"
        name = "db"
        memory = "512MiB"
        cpus = 4
        accelerator = "tcg"
        ember = "off"
        on_panic = "pause"
        budget_slack = "16MiB"
        admission = "always"
        sandbox = false
        guest_agent = true
        qemu = "bin/qemu"
        runtime_folder = "/tmp/r"
        memory_folder = "m"
        extra_qemu_args = ["-s"]
        [crash]
        dump_folder = "dumps"
        level = 17
        format = "elf"
        compression = "lzo"
        keep_last = 2
        min_free = "10GiB"
        chunk = "16MiB"
        threads = 3
        headroom = "10%"
        disk_time = "balanced"
        mib_per_second = 70
        loop_count = 3
        loop_window_s = 600
        loop_delay_s = 2
        loop_delay_max_s = 20
        [watchdog]
        action = "nmi"
        [rejuvenate]
        every = "30d"
        rss_growth_mib = 256
        window = "23:00-05:00"
        [boot]
        firmware = "fw.fd"
        firmware_vars = "vars.fd"
        [[disks]]
        path = "/images/a.qcow2"
        format = "qcow2"
        read_only = true
        serial = "S1"
        queues = 2
        mib_per_second = 125
        iops = 3000
        direct = false
        [[disks]]
        name = "data"
        path = "data.img"
        [[nets]]
        forward = ["127.0.0.1:8080:80", "[::1]:53:53/udp"]
        [[nets]]
        kind = "tap"
        ifname = "tap0"
        mac = "52:54:00:AA:bb:02"
        "#,
    )
    .unwrap();
    assert_eq!((config.memory.slack_bytes, config.memory.admission), (16 << 20, AdmissionMode::Always));
    assert_eq!(
        config.guest.boot,
        Boot::Firmware { code: Some("/machines/fw.fd".into()), vars: Some("/machines/vars.fd".into()) }
    );
    assert_eq!((config.memory.ember, config.on_panic), (EmberMode::Off, OnPanic::Pause));
    let crash = config.crash;
    assert_eq!((crash.dump_folder, crash.level, crash.format), ("/machines/dumps".into(), 17, DumpFormat::Elf));
    assert_eq!((crash.compression, crash.keep_last, crash.threads), (DumpCompression::Lzo, 2, 3));
    assert_eq!((crash.min_free_bytes, crash.chunk_bytes, crash.headroom_bytes), (10 << 30, 16 << 20, (512 << 20) / 10));
    assert_eq!((crash.disk_time, crash.mib_per_second), (DiskTime::Balanced, Some(70)));
    let expect = CrashLoopConfig { loop_count: 3, loop_window_s: 600, loop_delay_s: 2, loop_delay_max_s: 20 };
    assert_eq!(crash.crash_loop, expect);
    assert_eq!(config.guest.watchdog, Some(WatchdogAction::Nmi));
    assert!(config.guest.agent);
    let window = Some(DailyWindow { from_minute: 1380, to_minute: 300 });
    let rejuvenate = RejuvenateConfig { every_s: Some(2_592_000), rss_growth_mib: Some(256), window };
    assert_eq!(config.rejuvenate, Some(rejuvenate));
    assert_eq!(
        (config.qemu.program, config.folders.memory),
        (Some("/machines/bin/qemu".into()), "/machines/m/db".into())
    );
    assert_eq!(
        config.devices.disks[0],
        DiskConfig {
            name: "disk0".into(),
            path: "/images/a.qcow2".into(),
            format: DiskFormat::Qcow2,
            is_format_named: true,
            read_only: true,
            serial: "S1".into(),
            queues: 2,
            mib_per_second: Some(125),
            iops: Some(3000),
            direct: false,
        }
    );
    assert_eq!((config.devices.disks[1].serial.as_str(), config.devices.disks[1].direct), ("data", true));
    assert_eq!(config.devices.nets[0].backend.forward().len(), 2);
    assert!(config.devices.nets[0].mac.starts_with("52:54:00:"));
    assert_eq!(config.devices.nets[1].backend, NetBackend::Tap { ifname: "tap0".into() });
    assert_eq!(config.devices.nets[1].mac, "52:54:00:aa:bb:02");
}

#[test]
fn all_problems_are_told_at_once() {
    check(
        "name = \"../web\"\nmemroy = \"1GiB\"\ncpus = 0\nember = \"maybe\"\n[[disks]]\nread_only = \"yes\"\n[[nets]]\nforward = [\"80\"]\n",
        &[
            "error: cpus (line 3): 0 is not between 1 and 255; for example cpus = 2",
            "error: disks[0].read_only (line 6): is not true or false; for example read_only = false",
            "error: ember (line 4): \"maybe\" is not one of \"on\", \"off\"; for example ember = \"on\"",
            "error: memroy (line 2): no such key; did you mean memory?",
            "error: name: \"../web\" is not a valid name; use 1 to 32 letters, digits, \"-\", \"_\" or \".\", beginning with a letter or digit",
            "error: disks[0].path: is missing; for example path = \"root.img\"",
            "error: nets[0].forward: \"80\" is not a forward; write HOSTIP:PORT:GUESTPORT, for example \"127.0.0.1:8080:80\", with /udp for UDP",
        ],
    );
}

#[test]
fn toml_errors_name_the_line() {
    let problems = parse("name = \"web\"\nmemory = 1GiB\n").unwrap_err();
    assert_eq!(problems.len(), 1);
    assert!(problems[0].to_string().starts_with("error: line 2: "), "{}", problems[0]);
}

#[test]
fn misplaced_keys_are_told_their_section() {
    check_with(
        "ember = \"off\"\n",
        &["error: boot.ember (line 5): no such key; it belongs at the top of the file, before any [heading]"],
    );
    check_with("banana = 1\n", &["error: boot.banana (line 5): no such key; see docs/config.md for all keys"]);
    check(
        "iops = 3\nname = \"web\"\nmemory = \"1GiB\"\n[boot]\nkernel = \"k\"\n",
        &["error: iops (line 1): no such key; it belongs below [[disks]]"],
    );
    let heading = "is not a section; write [[disks]] on its own line, with its keys below it";
    check(
        "name = \"web\"\nmemory = \"1GiB\"\n[disks]\npath = \"a\"\n",
        &[&format!("error: disks (line 3): {heading}")],
    );
    check_with("[disks]\npath = \"a\"\n", &[&format!("error: disks (line 5): {heading}")]);
}

#[test]
fn a_policy_says_when() {
    check_with(
        "[rejuvenate]\nwindow = \"02:00-05:00\"\n",
        &["error: rejuvenate: has neither every nor rss_growth_mib; set every, for example \"30d\", or rss_growth_mib"],
    );
    check_with(
        "[rejuvenate]\nevery = \"monthly\"\nwindow = \"night\"\n",
        &[
            "error: rejuvenate.every: \"monthly\" is not a time; write a number with s, m, h or d: \"12h\", \"30d\"",
            "error: rejuvenate.window: \"night\" is not a time range; write FROM-TO, for example \"02:00-05:00\"",
        ],
    );
    check_with(
        "[rejuvenate]\nevery = 30\n",
        &["error: rejuvenate.every (line 6): is not a time in quotes; for example every = \"30d\""],
    );
}

#[test]
fn memory_and_slack() {
    let with = |memory: &str| format!("name = \"web\"\nmemory = {memory}\n[boot]\nkernel = \"k\"\n");
    check(&with("2048"), &["error: memory (line 2): is not a size in quotes; for example memory = \"2GiB\""]);
    check(
        &with("\"2GB\""),
        &[
            "error: memory: \"2GB\" is not a size; units of 1000 are not used for memory; write a number with a unit of 1024: \"512MiB\", \"2GiB\"",
        ],
    );
    check(&with("\"1MiB\""), &["error: memory: 1MiB is out of range; give the guest 32MiB to 16TiB"]);
    check(&with("\"33MiB\""), &["error: memory: 33MiB is not a multiple of 2 MiB; round it"]);
    check(
        &with("\"64MiB\"\nbudget_slack = \"200%\""),
        &["error: budget_slack: \"200%\" is not a size or percentage; write a percentage from \"0%\" to \"100%\""],
    );
    check(
        "[boot]\nkernel = \"k\"\n",
        &[
            "error: name: is missing; for example name = \"web\"",
            "error: memory: is missing; for example memory = \"2GiB\"",
        ],
    );
}

#[test]
fn boot_is_by_kernel_or_by_firmware() {
    let vars = Home::of("web").variables().display().to_string();
    let with = |boot: &str| format!("name = \"web\"\nmemory = \"1GiB\"\n{boot}");
    check(
        &with(""),
        &[
            "error: boot: has nothing to boot from; add a [boot] section with a kernel, or a [[disks]] section to boot from",
        ],
    );
    check(
        &with("[boot]\nkernel = \"k\"\nfirmware = \"uefi\"\n"),
        &["error: boot: has both a kernel and firmware; remove one of them"],
    );
    check(
        &with("[boot]\ninitrd = \"i\"\n[[disks]]\npath = \"a\"\n"),
        &["error: boot.initrd: works only with boot.kernel; add boot.kernel"],
    );
    check(
        &with("[boot]\nfirmware = \"uefi\"\n[[disks]]\npath = \"a\"\n"),
        &[&format!(
            "error: boot.firmware_vars: is missing; copy the firmware's variables for this machine: `install -D -m 600 {} {vars}`, and \
             set firmware_vars = \"{vars}\"",
            uefi_template().display()
        )],
    );
    check(
        &with("[boot]\nfirmware = \"bios\"\nfirmware_vars = \"v\"\n[[disks]]\npath = \"a\"\n"),
        &["error: boot.firmware_vars: works only with UEFI firmware; set firmware = \"uefi\""],
    );
}

#[test]
fn disks_get_unique_names_and_serials() {
    check_with(
        "[[disks]]\nname = \"a\"\npath = \"1\"\n[[disks]]\nname = \"a\"\npath = \"2\"\n",
        &["error: disks: two disks are named a; give each a name of its own"],
    );
    check_with(
        "[[disks]]\npath = \"1\"\nserial = \"123456789012345678901\"\n",
        &[
            "error: disks[0].serial: \"123456789012345678901\" is not a valid serial number; use at most 20 printable ASCII characters",
        ],
    );
    check_with(
        "[[disks]]\npath = \"1\"\nformat = \"vmdk\"\n",
        &["error: disks[0].format (line 7): \"vmdk\" is not one of \"raw\", \"qcow2\"; for example format = \"raw\""],
    );
}

#[test]
fn devices_have_places() {
    let disks = |count: usize| (0..count).map(|disk| format!("[[disks]]\npath = \"{disk}\"\n")).collect::<String>();
    let nvram = "[[nvram]]\nsize = \"8MiB\"\n[[nvram]]\nsize = \"8MiB\"\ndevice = \"pmem\"\n";
    let nets = |count: usize| "[[nets]]\nkind = \"user\"\n".repeat(count);
    assert!(parse(&format!("{SMALL}{}{nvram}{}", disks(14), nets(7))).is_ok());
    check_with(
        &format!("{}{nvram}{}", disks(15), nets(8)),
        &[
            "error: disks: 15 disks and 2 NVRAM devices exceed the limit of 16; use fewer, larger ones with partitions",
            "error: nets: 8 networks exceed the limit of 7; remove some",
        ],
    );
}

#[test]
fn nets_are_consistent() {
    check_with(
        "[[nets]]\nkind = \"tap\"\nforward = [\"80:80\"]\n",
        &[
            "error: nets[0].forward: does not work with kind = \"tap\"; remove it: the host's own network decides",
            "error: nets[0].ifname: is missing; for example ifname = \"tap0\"",
        ],
    );
    check_with(
        "[[nets]]\nifname = \"tap0\"\nmac = \"1\"\n",
        &[
            "error: nets[0].mac: \"1\" is not a hardware address; for example \"52:54:00:12:34:56\"; the first pair must be even",
            "error: nets[0].ifname: works only with kind = \"tap\"; remove it, or set kind = \"tap\"",
        ],
    );
    check_with(
        "[[nets]]\nforward = [\"81:80\", \"127.0.0.1:81:90\", \"81:80/udp\"]\n",
        &["error: nets: two forwards use host port 127.0.0.1:81:90; choose another port"],
    );
}

/// The table of fields and `ConfigFile` cannot part ways: a file made of every field's example is understood by both,
/// and holds as many keys as `ConfigFile` has.
#[test]
fn the_table_of_fields_is_the_file() {
    let mut text = String::new();
    for section in Section::ALL {
        text += &format!("{}\n", section.heading());
        for field in Field::of_section(section) {
            text += &format!("{} = {}\n", field.key, field.example);
        }
    }
    let shaped = shape::read(&text).unwrap();
    assert_eq!(shaped.problems, []);
    let typed: toml::Table = toml::from_str(&text).unwrap();
    // Optional fields that were not given are not written: an equal table means that each key arrived.
    assert_eq!(toml::Table::try_from(&shaped.typed).unwrap(), typed);
    let strict: ConfigFile = toml::from_str(&text).unwrap();
    let debug = format!("{strict:?}");
    assert!(!debug.contains("None"), "ConfigFile has a field that is not in the table: {debug}");
}

#[test]
fn missing_file_is_named() {
    let problems = Config::load(Path::new("/nowhere/web.toml"), &RuntimeRoot::new("/run/hearth")).unwrap_err();
    assert_eq!(
        problems[0].to_string(),
        "error: /nowhere/web.toml: No such file or directory (os error 2); give the machine's configuration file, for example web.toml"
    );
}

#[test]
fn domain_of_libvirt_has_only_its_own_keys() {
    let of_domain = |more: &str| {
        parse(&format!(
            "name = \"web\"\nowner = \"libvirt\"\nmemory = \"1GiB\"\n{more}\n[[disks]]\npath = \"root.img\"\n"
        ))
    };
    let config = of_domain("refill = \"on\"").unwrap();
    assert_eq!((config.owner, config.memory.keep_memory_s), (Owner::Libvirt, Some(600)));
    assert_eq!(of_domain("keep_memory = \"1h\"").unwrap().memory.keep_memory_s, Some(3600));
    let config = of_domain("object_store.credentials = \"/etc/hearth/s3.env\"").unwrap();
    assert_eq!(config.object_store.credentials, Some("/etc/hearth/s3.env".into()));
    let refused = |more: &str| of_domain(more).unwrap_err().iter().map(ToString::to_string).collect::<Vec<_>>();
    let hint = "does not work with `owner = \"libvirt\"`; remove it; `virsh edit` changes the domain";
    assert_eq!(
        refused("cpus = 2\nadmission = \"always\""),
        [format!("error: admission: {hint}"), format!("error: cpus: {hint}")]
    );
    assert_eq!(refused("[watchdog]"), [format!("error: watchdog: {hint}")]);
    assert_eq!(
        refused("runtime_folder = \"/r\""),
        [format!("error: runtime_folder: {hint}")],
        "its sockets are in its definition"
    );
    assert!(refused("on_panic = \"dump\"")[0].contains("use \"pause\""));
    let config = of_domain("on_panic = \"pause\"\ncrash.level = 1").unwrap();
    assert_eq!((config.on_panic, config.crash.level), (OnPanic::Pause, 1));
    assert_eq!(refused("keep_memory = \"long\"").len(), 1);
    check(
        &format!("keep_memory = \"1h\"\n{SMALL}"),
        &["error: keep_memory: works only with `owner = \"libvirt\"`; remove it"],
    );
}
