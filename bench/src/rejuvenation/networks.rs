//! The effect of a hop on a TCP connection into the guest, on each kind of network: its longest silence, and whether it is lost.

use std::net::{Ipv4Addr, SocketAddr};
use std::time::Instant;

use hearth_vmtest::echo::{self, Echo};
use hearth_vmtest::net::{Tap, free_port, passt_works};
use hearth_vmtest::{Drives, Result, TestVm, TestVmBuilder};

use super::{AFTERMATH, RejuvenationError};
use crate::record::Record;

const SIDE: &str = "tcp";
/// Networks whose connections survive. QEMU's own user network holds its connections itself, so they end with it.
const KEPT: [&str; 2] = ["passt", "tap"];

pub fn run(accelerator: &str, quick: bool, record: &mut Record) -> std::result::Result<(), RejuvenationError> {
    let failed = |source| RejuvenationError::Machine { side: SIDE, source };
    let hops = if quick { 2 } else { 20 };
    let builder = || TestVm::busybox("tcp").setting("accelerator", accelerator);
    for kind in ["user", "passt"] {
        if kind == "passt" && !passt_works() {
            record.left_out.push("tcp@passt: passt does not run here".into());
            continue;
        }
        let port = free_port();
        let forward = vec![format!("127.0.0.1:{port}:{}", echo::PORT)];
        let builder = builder().net([("kind", kind.into()), ("forward", forward.into())]);
        let address = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
        measure(builder, "net-up", address, kind, hops, record).map_err(failed)?;
    }
    match Tap::make() {
        Some(tap) => {
            let address = SocketAddr::from((tap.guest_address(), echo::PORT));
            let builder = builder().net([("kind", "tap".into()), ("ifname", tap.name().into())]);
            measure(builder, &tap.guest_set_up(), address, "tap", hops, record).map_err(failed)?;
        }
        None => record.left_out.push("tcp@tap: this user cannot make network interfaces here".into()),
    }
    summarise(record);
    Ok(())
}

fn case(kind: &str) -> String {
    format!("{SIDE}@{kind}")
}

fn measure(
    builder: TestVmBuilder,
    set_up: &str,
    address: SocketAddr,
    kind: &str,
    hops: u32,
    record: &mut Record,
) -> Result<()> {
    let vm = builder.boot()?;
    vm.sh(set_up)?;
    echo::serve(&vm)?;
    let talk = Echo::begin(address);
    for _ in 0..hops {
        let began = Instant::now();
        vm.rejuvenate()?;
        let ended = Instant::now();
        record.add(&case(kind), "tcp_gap_ms", "ms", talk.longest(began, ended).as_secs_f64() * 1e3);
        // As long again, with nothing happening.
        std::thread::sleep(AFTERMATH + (ended - began));
        let quiet = talk.longest(ended + AFTERMATH, Instant::now());
        record.add(&case(kind), "tcp_gap_without_ms", "ms", quiet.as_secs_f64() * 1e3);
        let pause_ms = vm.status()?.last_rejuvenation.and_then(|last| last.pause_ms);
        record.add(&case(kind), "pause_ms", "ms", pause_ms.unwrap_or(f64::NAN));
    }
    record.add(&case(kind), "tcp_lost", "", talk.lost().len() as f64);
    Ok(())
}

fn summarise(record: &mut Record) {
    for kind in ["user", "passt", "tap"] {
        let gaps = record.values(&case(kind), "tcp_gap_ms").to_vec();
        let (median, most) = (crate::stats::median(&gaps), gaps.iter().copied().reduce(f64::max));
        let lost = record.values(&case(kind), "tcp_lost").first().copied();
        record.summarise(&format!("tcp_gap_ms_median_{kind}"), median);
        record.summarise(&format!("tcp_gap_ms_max_{kind}"), most);
        record.summarise(&format!("tcp_lost_connections_{kind}"), lost);
        let without = crate::stats::median(record.values(&case(kind), "tcp_gap_without_ms"));
        record.summarise(&format!("tcp_gap_without_ms_median_{kind}"), without);
    }
    let of_kept = |metric: &str| -> Vec<f64> {
        KEPT.iter().flat_map(|kind| record.values(&case(kind), metric).to_vec()).collect()
    };
    let (gaps, lost) = (of_kept("tcp_gap_ms"), of_kept("tcp_lost"));
    record.summarise("tcp_gap_ms_median", crate::stats::median(&gaps));
    record.summarise("tcp_lost_connections", (!lost.is_empty()).then(|| lost.iter().sum()));
}
