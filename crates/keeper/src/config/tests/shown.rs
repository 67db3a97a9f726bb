//! The configuration as `hearth config` and the API show it.

use std::collections::BTreeSet;

use serde_json::{Value, json};

use super::{SMALL, parse};
use crate::config::every_key::{FILES, configured};

fn shown() -> Value {
    json!({
        "name": "web",
        "file": "/machines/web.toml",
        "owner": "hearth",
        "memory_bytes": 256 << 20,
        "cpus": 2,
        "cpu_model": "max",
        "accelerator": "tcg",
        "machine_type": "pc-q35-7.2",
        "qemu": "/machines/bin/qemu",
        "qemu_user": "nobody",
        "runtime_folder": "/tmp/runtime",
        "memory_folder": "/machines/memory/web",
        "ember": "on",
        "refill": "off",
        "on_panic": "dump",
        "crash": {
            "dump_folder": "/machines/dumps",
            "level": 1,
            "format": "kdump",
            "compression": "zstd",
            "keep_last": 2,
            "min_free_bytes": 1 << 20,
            "chunk_bytes": 4 << 20,
            "threads": 2,
            "headroom_bytes": 26_843_545,
            "disk_time": "balanced",
            "mib_per_second": 70,
            "loop_count": 4,
            "loop_window_s": 600,
            "loop_delay_s": 2,
            "loop_delay_max_s": 20,
        },
        "watchdog": "crash",
        "rejuvenate": {
            "every_s": 2_592_000,
            "rss_growth_mib": 256,
            "window": { "from_minute": 1380, "to_minute": 300 },
        },
        "remount": {
            "limit_bytes": 16_106_127,
            "ready_after_s": 180,
            "ready_sign": { "unit": "web.service" },
            "persist_file": "/machines/boot-set",
        },
        "object_store": { "credentials": "/machines/s3.env", "folder": "/machines/objects", "cache_bytes": 1 << 30 },
        "budget_slack_bytes": 13_421_772,
        "admission": "always",
        "keep_memory_s": null,
        "sandbox": true,
        "guest_agent": true,
        "display": "vnc",
        "boot": {
            "kernel": { "kernel": "/machines/vmlinuz", "initrd": "/machines/initrd", "cmdline": "quiet" },
        },
        "disks": [{
            "name": "root",
            "path": "/machines/root.img",
            "format": "raw",
            "read_only": false,
            "serial": "root",
            "queues": 2,
            "mib_per_second": 100,
            "iops": 1000,
            "direct": false,
        }],
        "nvram": [{
            "name": "journal",
            "bytes": 16 << 20,
            "serial": "journal",
            "mirror": { "file": "/machines/mirror", "policy": "sync" },
        }],
        "pmem": [],
        "nets": [{
            "backend": {
                "kind": "user",
                "forward": [{ "protocol": "tcp", "host": "127.0.0.1", "host_port": 8080, "guest_port": 80 }],
                "isolated": false,
            },
            "mac": "52:54:00:12:34:56",
        }],
        "extra_qemu_args": ["-device", "virtio-balloon-pci"],
    })
}

/// Keepers of other versions read it, and operators' scripts.
#[test]
fn shown_configuration_keeps_its_form() {
    let config = configured(FILES[0]).expect("the file is good").config;
    assert_eq!(serde_json::to_value(config).unwrap(), shown());
}

#[test]
fn absent_keys_are_shown_as_null() {
    let keys = |value: &Value| value.as_object().unwrap().keys().cloned().collect::<BTreeSet<_>>();
    let small = serde_json::to_value(parse(SMALL).unwrap()).unwrap();
    assert_eq!(keys(&small), keys(&shown()));
    let nulls = small.as_object().unwrap().iter().filter(|(_, value)| value.is_null()).map(|(key, _)| key.as_str());
    let expect =
        ["cpu_model", "keep_memory_s", "machine_type", "qemu", "qemu_user", "rejuvenate", "remount", "watchdog"];
    assert_eq!(nulls.collect::<Vec<_>>(), expect);
}
