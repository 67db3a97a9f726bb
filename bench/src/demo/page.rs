//! The demo's report, from one crash of each way.

use hearth_api::{EmberStatus, QemuStatus, Recovery};
use hearth_page::milliseconds;

use super::Owner;
use super::life::{AFTER_S, Life};
use crate::host::facts::HostFacts;
use crate::host::profile::Profile;
use crate::report::{ByRun, Line, Phase, Report, Run, Series, Tile, Timeline};
use crate::stats::degradation_pct;
use crate::table::figure;

/// `before`: requests a second before the crashes.
pub fn report(
    lives: &[Life],
    before: f64,
    qemu: Option<&QemuStatus>,
    machine: &HostFacts,
    profile: Profile,
    owner: Owner,
) -> Report {
    let served = |run: Run| {
        let life = lives.iter().find(|life| life.run == run).expect("there is a crash of each way");
        Served { full_s: life.full_speed_s(before), lost_pct: degradation_pct(before, life.web_after()) }
    };
    Report {
        title: "A kernel crash, warm and cold".to_owned(),
        lead: lead(owner),
        verdict: verdict(&served(Run::Refill), &served(Run::Cold)),
        tiles: tiles(lives, before),
        series: lives.iter().map(series).collect(),
        lines: lines(lives, before),
        timelines: lives.iter().filter_map(timeline).collect(),
        notes: notes(qemu, machine, profile, owner),
        footer: format!("Hearth {}, {}", env!("CARGO_PKG_VERSION"), crate::host::facts::now_rfc3339()),
    }
}

fn lead(owner: Owner) -> String {
    let (server, cold) = match owner {
        Owner::Hearth => ("web server", "on its disk alone (cold)"),
        Owner::Libvirt => ("web server, a domain of libvirt,", "without Hearth (cold)"),
    };
    format!(
        "A Debian {server} with 512 files of 1 MiB in its file cache crashed under load. With Hearth it came back with that \
         file cache, read back from the memory of its dead kernel while it booted (refill); on that memory alone (warm); \
         and, for comparison, {cold}."
    )
}

fn by_run<T>(lives: &[Life], of: impl Fn(&Life) -> T) -> ByRun<T> {
    lives.iter().map(|life| (life.run, of(life))).collect()
}

/// Change that is more than scatter between two machines of one demo.
const DIFFERENCE: f64 = 0.1;

/// How the server served after a crash.
struct Served {
    /// Seconds from the crash until it served as before.
    full_s: Option<f64>,
    /// Requests lost in the seconds after its first answer, in percent of those before the crash.
    lost_pct: f64,
}

/// What a user of the web server would say of refill.
fn verdict(refill: &Served, cold: &Served) -> String {
    let Some(refill_s) = refill.full_s else {
        return format!(
            "Verdict: with refill the server did not serve as before within {AFTER_S:.0} s of its first answer. In these \
             it lost {:.0} % of its requests, and {:.0} % after the cold reboot.",
            refill.lost_pct, cold.lost_pct
        );
    };
    let with = format!("Verdict: with refill the server served as before {refill_s:.1} s after the crash");
    let Some(cold_s) = cold.full_s else {
        return format!("{with}; after the cold reboot not within {AFTER_S:.0} s of its first answer.");
    };
    if refill_s < cold_s * (1.0 - DIFFERENCE) {
        format!("{with}, {:.1} s sooner than after a cold reboot.", cold_s - refill_s)
    } else if refill_s > cold_s * (1.0 + DIFFERENCE) {
        format!("{with}, {:.1} s later than after a cold reboot: here it did harm.", refill_s - cold_s)
    } else {
        format!("{with}, no sooner than after a cold reboot ({cold_s:.1} s): here its users gained nothing.")
    }
}

fn tiles(lives: &[Life], before: f64) -> Vec<Tile> {
    let tile = |label: &str, note: &str, text: &dyn Fn(&Life) -> String| Tile {
        label: label.to_owned(),
        values: by_run(lives, text),
        note: note.to_owned(),
    };
    let loss = |life: &Life| degradation_pct(before, life.web_after());
    vec![
        tile("Serves as before", "from the crash until 95 % of the requests a second, for good", &|life| {
            life.full_speed_s(before).map_or("–".to_owned(), |full_s| format!("{full_s:.1} s"))
        }),
        tile("Web throughput lost", &format!("first {AFTER_S:.0} s of service, against before"), &|life| {
            format!("{:.0} %", loss(life))
        }),
        tile("Read from the disk", "from the crash to the end of the load", &|life| mib(life.from_disk_mib)),
        tile("Back in service", "from the crash to the first answer", &|life| format!("{:.1} s", life.outage_s())),
    ]
}

fn series(life: &Life) -> Series {
    Series { run: life.run, points: life.series(), back_s: life.outage_s() }
}

fn lines(lives: &[Life], before: f64) -> Vec<Line> {
    let line = |measure: &str, before: String, text: &dyn Fn(&Life) -> String| Line {
        measure: measure.to_owned(),
        before,
        values: by_run(lives, text),
    };
    let nothing = || "–".to_owned();
    let pages = |of: fn(&EmberStatus) -> u64| {
        move |life: &Life| life.ember.as_ref().map_or_else(|| "–".to_owned(), |ember| of(ember).to_string())
    };
    vec![
        line("web requests per second", figure(before), &|life| figure(life.web_after())),
        line("crash to first answer, s", nothing(), &|life| figure(life.outage_s())),
        line("crash to 95 % of the requests, s", nothing(), &|life| {
            life.full_speed_s(before).map_or_else(nothing, figure)
        }),
        line("read from the disk, MiB", nothing(), &|life| figure(life.from_disk_mib)),
        line("pages kept of the dead kernel", nothing(), &pages(|ember| ember.pages_kept)),
        line("pages served from them", nothing(), &pages(|ember| ember.pages_served)),
        line("pages refused: not what the disk holds", nothing(), &pages(|ember| ember.refused.tag_mismatch)),
        line("pages void: overwritten since", nothing(), &pages(|ember| ember.refused.overwritten)),
        line("pages given up for the budget", nothing(), &pages(|ember| ember.refused.trimmed)),
    ]
}

fn timeline(life: &Life) -> Option<Timeline> {
    let phase = |phase: &hearth_api::PhaseTime| Phase {
        name: phase.phase.replace('_', " "),
        start_ms: phase.started_ms,
        duration_ms: phase.duration_ms,
    };
    let recovery: &Recovery = life.recovery.as_ref()?;
    let way = match life.run {
        Run::Refill => "Refill reboot",
        Run::Warm => "Warm reboot",
        Run::Cold => "Cold reboot",
    };
    let (recovery_ms, outage_ms) = (milliseconds(recovery.duration_ms), milliseconds(life.outage_s() * 1e3));
    Some(Timeline {
        title: format!("{way}: {recovery_ms} of {outage_ms} without service"),
        run: life.run,
        phases: recovery.phases.iter().map(phase).collect(),
    })
}

fn notes(qemu: Option<&QemuStatus>, machine: &HostFacts, profile: Profile, owner: Owner) -> Vec<String> {
    let limits = match owner {
        Owner::Hearth => "Hearth's own limits",
        Owner::Libvirt => "libvirt's iotune, which `hearth attach` turned into limits of Hearth's own",
    };
    let mut notes = vec![
        format!("{}; QEMU {}.", machine.describe(), qemu.map_or("", |qemu| &qemu.version)),
        format!("The disk was limited to {} by {limits}, in all ways alike.", profile.describe()),
    ];
    if let Some(qemu) = qemu.filter(|qemu| qemu.accelerator == "tcg") {
        notes.push(format!(
            "The guest ran on TCG, QEMU's emulation ({}). It makes all that the guest's processor does slow, a boot \
             above all, and reads from memory too; so warm and cold differ less here than on a real processor.",
            qemu.accelerator_why
        ));
    }
    notes.push(
        "One client asks for the files in turn, one request at a time. \"Before\" is the median before all crashes."
            .to_owned(),
    );
    notes
}

fn mib(mib: f64) -> String {
    format!("{} MiB", if mib >= 10.0 { format!("{mib:.0}") } else { format!("{mib:.1}") })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn verdict_is_also_told_when_it_is_against_refill() {
        for (refill, cold, says) in [
            (Some(10.0), Some(14.0), "4.0 s sooner"),
            (Some(10.0), None, "not within"),
            (Some(10.0), Some(10.5), "gained nothing"),
            (Some(14.0), Some(10.0), "4.0 s later"),
            (None, Some(10.0), "did not serve as before"),
            (None, None, "lost 20 % of its requests, and 20 % after the cold"),
        ] {
            let [refill, cold] = [refill, cold].map(|full_s| Served { full_s, lost_pct: 20.4 });
            let verdict = verdict(&refill, &cold);
            assert!(verdict.contains(says), "{verdict}");
        }
    }
}
