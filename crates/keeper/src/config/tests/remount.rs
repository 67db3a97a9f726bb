//! `[remount]` and `[[nvram]]`.

use super::*;

#[test]
fn boot_set_has_limit_and_ready_time() {
    let remount = |more: &str| parse(&format!("{SMALL}[remount]\n{more}")).unwrap();
    let plain =
        |limit_bytes, ready_after_s| RemountConfig { limit_bytes, ready_after_s, ready_sign: None, persist_file: None };
    assert_eq!(remount("").remount, Some(plain((1 << 30) / 20, 120)));
    let config = remount("limit = \"64MiB\"\nready_after = \"30s\"\n");
    assert_eq!(config.remount, Some(plain(64 << 20, 30)));
    assert_eq!(config.most_memory_bytes() - parse(SMALL).unwrap().most_memory_bytes(), 64 << 20);
    check_with(
        "[remount]\nlimit = \"4KiB\"\nready_after = \"soon\"\n",
        &[
            "error: remount.limit: 4KiB is too small; give it 64KiB or more",
            "error: remount.ready_after: \"soon\" is not a time; write a number with s, m, h or d: \"30s\", \"5m\"",
        ],
    );
    let without_ember = SMALL.replace("memory =", "ember = \"off\"\nmemory =");
    check(
        &format!("{without_ember}[remount]\n"),
        &["error: remount: does not work with `ember = \"off\"`; remove one of them"],
    );
}

#[test]
fn ready_port_needs_a_forward() {
    let with = |port: &str, forward: &str| {
        format!("{SMALL}[remount]\nready = {{ {port} }}\n[[nets]]\nforward = [\"{forward}\"]\n")
    };
    let sign = parse(&with("port = 8080", "127.0.0.1:8080:80")).unwrap().remount.unwrap().ready_sign;
    assert!(matches!(sign, Some(ReadySign::Port(Forward { guest_port: 80, .. }))), "{sign:?}");
    check(
        &with("port = 81", "8080:80"),
        &[
            "error: remount.ready.port: port 81 is not forwarded into the guest; forward it to a guest port: forward = [\"127.0.0.1:8080:80\"] below [[nets]]",
        ],
    );
    check(
        &with("port = 8080", "8080:80/udp"),
        &[
            "error: remount.ready.port: port 8080 is not forwarded into the guest; forward it to a guest port: forward = [\"127.0.0.1:8080:80\"] below [[nets]]",
        ],
    );
    check(
        &with("", "8080:80"),
        &[
            "error: remount.ready.port: is missing; for example ready = { port = 8080 }, or ready = { unit = \"web.service\" }",
        ],
    );
    check(
        &with("port = 0", "8080:80"),
        &["error: remount.ready.port (line 6): 0 is not between 1 and 65535; for example port = 8080"],
    );
    check(&with("prot = 80", "8080:80"), &["error: remount.ready.prot (line 6): no such key; did you mean port?"]);
}

#[test]
fn ready_unit_needs_a_guest_agent() {
    let with = |unit: &str| {
        let text = SMALL.replace("memory =", "guest_agent = true\nmemory =");
        format!("{text}[remount]\nready = {{ {unit} }}\n")
    };
    let sign = parse(&with("unit = \"getty@tty1.service\"")).unwrap().remount.unwrap().ready_sign;
    assert_eq!(sign, Some(ReadySign::Unit("getty@tty1.service".into())));
    check(
        &with("unit = \"web.service\"").replace("guest_agent = true\n", ""),
        &[
            "error: remount.ready.unit: needs a channel to the guest agent; add guest_agent = true at the top of the file; qemu-guest-agent must run in the guest",
        ],
    );
    for name in ["", "-x", "web.service; reboot", "web*"] {
        let expect = format!(
            "error: remount.ready.unit: \"{name}\" is not a systemd unit name; write it as systemctl does, for example \"web.service\""
        );
        check(&with(&format!("unit = \"{name}\"")), &[&expect]);
    }
    check(
        &with("unit = \"web.service\", port = 8080"),
        &["error: remount.ready: has both a port and a unit; remove one of them"],
    );
    check(
        &with("unit = 80"),
        &["error: remount.ready.unit (line 7): is not a string in quotes; for example unit = \"web.service\""],
    );
}

#[test]
fn boot_set_is_saved_to_the_given_file() {
    let saved = |more: &str| parse(&format!("{SMALL}[remount]\n{more}")).unwrap().remount.unwrap().persist_file;
    assert_eq!(saved("persist = false\n"), None);
    assert!(saved("persist = true\n").unwrap().ends_with("web/boot-set"));
    assert_eq!(saved("persist = true\npersist_file = \"kept/set\"\n"), Some("/machines/kept/set".into()));
    check_with(
        "[remount]\npersist_file = \"kept\"\n",
        &["error: remount.persist_file: works only with persist = true; remove it, or set persist = true"],
    );
    check_with(
        "[remount]\npersist = \"yes\"\nready_after = \"0s\"\n",
        &[
            "error: remount.persist (line 6): is not true or false; for example persist = true",
            "error: remount.ready_after: \"0s\" is not a time; write a number with s, m, h or d: \"30s\", \"5m\"",
        ],
    );
    check_with("[remount]\nlimits = \"1MiB\"\n", &["error: remount.limits (line 6): no such key; did you mean limit?"]);
}

#[test]
fn nvram_has_size_and_optional_mirror() {
    let nvram = |more: &str| parse(&format!("{SMALL}[[nvram]]\nsize = \"8KiB\"\n{more}")).unwrap();
    let plain = NvramConfig { name: "nvram0".into(), bytes: 8192, serial: "nvram0".into(), mirror: None };
    assert_eq!(nvram("").devices.nvram, std::slice::from_ref(&plain));
    assert_eq!(nvram("mirror = \"none\"\n").devices.nvram, [plain]);
    assert_eq!(nvram("").most_memory_bytes() - parse(SMALL).unwrap().most_memory_bytes(), 8192);
    let mirror = Some(NvramMirror { file: "/machines/m".into(), policy: MirrorPolicy::Sync });
    assert_eq!(
        nvram("name = \"log\"\nserial = \"L1\"\nmirror = \"sync\"\nmirror_file = \"m\"\n").devices.nvram,
        [NvramConfig { name: "log".into(), bytes: 8192, serial: "L1".into(), mirror }]
    );
    check_with("[[nvram]]\n", &["error: nvram[0].size: is missing; for example size = \"64MiB\""]);
    check_with(
        "[[nvram]]\nsize = \"5KiB\"\n[[nvram]]\nsize = \"0MiB\"\n[[nvram]]\nsize = \"8\"\n",
        &[
            "error: nvram[0].size: 5KiB is not a multiple of 4 KiB; round it",
            "error: nvram[1].size: 0MiB is not a multiple of 4 KiB; round it",
            "error: nvram[2].size: \"8\" is not a size; write a number with a unit of 1024: \"512MiB\", \"2GiB\"",
        ],
    );
    check_with(
        "[[nvram]]\nsize = \"4KiB\"\nmirror = \"async\"\n[[nvram]]\nsize = \"4KiB\"\nmirror_file = \"m\"\n",
        &[
            "error: nvram[0].mirror_file: is missing; for example mirror_file = \"/srv/journal\"",
            "error: nvram[1].mirror_file: works only with a mirror; set mirror = \"async\" or \"sync\", or remove it",
        ],
    );
    check_with(
        "[[nvram]]\nsize = \"4KiB\"\nmirror = \"often\"\nsise = 1\n",
        &[
            "error: nvram[0].mirror (line 7): \"often\" is not one of \"none\", \"async\", \"sync\"; for example mirror = \"sync\"",
            "error: nvram[0].sise (line 8): no such key; did you mean size?",
        ],
    );
}

#[test]
fn nvram_shares_neither_names_nor_mirrors() {
    check_with(
        "[[disks]]\nname = \"log\"\npath = \"a\"\n[[nvram]]\nname = \"log\"\nsize = \"4KiB\"\n",
        &["error: nvram: two devices are named log; give each a name of its own"],
    );
    let mirrored = "[[nvram]]\nsize = \"4KiB\"\nmirror = \"sync\"\nmirror_file = \"m\"\n";
    check_with(
        &format!("{mirrored}{mirrored}"),
        &["error: nvram: two devices mirror to /machines/m; give each a mirror of its own"],
    );
    check_with(
        "[[nvram]]\nname = \"../log\"\nsize = \"4KiB\"\n",
        &[
            "error: nvram[0].name: \"../log\" is not a valid name; use 1 to 32 letters, digits, \"-\", \"_\" or \".\", beginning with a letter or digit",
        ],
    );
}

#[test]
fn nvram_may_be_persistent_memory() {
    let pmem = |more: &str| parse(&format!("{SMALL}[[nvram]]\ndevice = \"pmem\"\nsize = \"4MiB\"\n{more}")).unwrap();
    let taken = |config: &Config| config.most_memory_bytes() - parse(SMALL).unwrap().most_memory_bytes();
    let plain = pmem("[[nvram]]\nsize = \"8KiB\"\n");
    assert_eq!(plain.devices.pmem, [PmemConfig { name: "nvram0".into(), bytes: 4 << 20, mirror_file: None }]);
    assert_eq!((plain.devices.nvram.len(), plain.devices.nvram[0].name.as_str()), (1, "nvram1"));
    assert_eq!(taken(&plain), (4 << 20) + 8192);
    let mirrored = pmem("name = \"log\"\nmirror = \"sync\"\nmirror_file = \"m\"\n");
    assert_eq!(
        mirrored.devices.pmem,
        [PmemConfig { name: "log".into(), bytes: 4 << 20, mirror_file: Some("/machines/m".into()) }]
    );
    assert_eq!(taken(&mirrored), 0, "the host can have its page cache of it back");
    check_with(
        "[[nvram]]\ndevice = \"pmem\"\nsize = \"3MiB\"\nserial = \"L1\"\n\
         [[nvram]]\ndevice = \"pmem\"\nsize = \"2MiB\"\nmirror = \"async\"\nmirror_file = \"m\"\n",
        &[
            "error: nvram[0].serial: does not work with device = \"pmem\"; remove it",
            "error: nvram[0].size: is not a multiple of 2 MiB, as pmem requires; round it",
            "error: nvram[1].mirror: cannot be \"async\" with device = \"pmem\"; use \"sync\", or device = \"disk\"",
        ],
    );
    let mirrored = "size = \"2MiB\"\nmirror = \"sync\"\nmirror_file = \"m\"\n";
    check_with(
        &format!("[[nvram]]\n{mirrored}[[nvram]]\ndevice = \"pmem\"\n{mirrored}"),
        &["error: nvram: two devices mirror to /machines/m; give each a mirror of its own"],
    );
    check_with(
        "[rejuvenate]\nevery = \"30d\"\n[[nvram]]\ndevice = \"pmem\"\nsize = \"2MiB\"\n",
        &[
            "error: rejuvenate: does not work with persistent memory, which another QEMU cannot take over; remove it, or set device = \"disk\"",
        ],
    );
}
