//! The demo's report, from the measurements of both machines.

use hearth_api::{EmberStatus, Recovery};

use super::life::{AFTER_S, Life};
use crate::host::facts::HostFacts;
use crate::host::profile::Profile;
use crate::report::{BarGroup, Line, Phase, Report, Run, Series, Tile, Timeline};
use crate::stats::degradation_pct;
use crate::table::figure;

pub fn report(warm: &Life, cold: &Life, machine: &HostFacts, profile: Profile) -> Report {
    Report {
        title: "A kernel panic, warm and cold".to_owned(),
        lead:
            "A Debian web server with 512 files of 1 MiB in its file cache panicked under load. Hearth brought it back \
               on the memory of its dead kernel (warm); for comparison it then came back on its disk alone (cold)."
                .to_owned(),
        tiles: tiles(warm, cold),
        series: vec![series(Run::Warm, warm), series(Run::Cold, cold)],
        bars: bars(warm, cold),
        lines: lines(warm, cold),
        timelines: [(Run::Warm, warm), (Run::Cold, cold)].into_iter().filter_map(|(r, l)| timeline(r, l)).collect(),
        notes: notes(warm, machine, profile),
        footer: format!("Hearth {}, {}", env!("CARGO_PKG_VERSION"), crate::host::facts::now_rfc3339()),
    }
}

fn tiles(warm: &Life, cold: &Life) -> Vec<Tile> {
    let tile = |label: &str, note: &str, text: &dyn Fn(&Life) -> String| Tile {
        label: label.to_owned(),
        warm: text(warm),
        cold: text(cold),
        note: note.to_owned(),
    };
    let loss = |life: &Life| degradation_pct(life.web_before, life.web_after);
    vec![
        tile("Web throughput lost", &format!("first {AFTER_S:.0} s of service, against before"), &|life| {
            format!("{:.0} %", loss(life))
        }),
        tile("Read from the disk", "to boot and to read every file", &|life| mib(life.from_disk_mib)),
        tile("Back in service", "from the panic to the first answer", &|life| format!("{:.1} s", life.boot_s)),
    ]
}

fn series(run: Run, life: &Life) -> Series {
    Series { run, points: life.series.clone(), back_s: life.boot_s }
}

fn bars(warm: &Life, cold: &Life) -> Vec<BarGroup> {
    let group =
        |label: &str, of: fn(&Life) -> f64| BarGroup { label: label.to_owned(), warm: of(warm), cold: of(cold) };
    vec![
        group("before the panic", |life| life.read_before),
        group("first read after", |life| life.read_first),
        group("second read after", |life| life.read_second),
    ]
}

fn lines(warm: &Life, cold: &Life) -> Vec<Line> {
    let line = |measure: &str, before: String, text: &dyn Fn(&Life) -> String| Line {
        measure: measure.to_owned(),
        before,
        warm: text(warm),
        cold: text(cold),
    };
    let nothing = || "–".to_owned();
    let before = |of: fn(&Life) -> f64| figure((of(warm) + of(cold)) / 2.0);
    let (read, web) = (before(|life| life.read_before), before(|life| life.web_before));
    let pages = |of: fn(&EmberStatus) -> u64| move |life: &Life| of(&life.ember).to_string();
    vec![
        line("file read, first time, MiB/s", read.clone(), &|life| figure(life.read_first)),
        line("file read, second time, MiB/s", read, &|life| figure(life.read_second)),
        line("web requests per second", web, &|life| figure(life.web_after)),
        line("panic to first answer, s", nothing(), &|life| figure(life.boot_s)),
        line("read from the disk, MiB", nothing(), &|life| figure(life.from_disk_mib)),
        line("pages kept of the dead kernel", nothing(), &pages(|ember| ember.pages_kept)),
        line("pages served from them", nothing(), &pages(|ember| ember.pages_served)),
        line("pages refused: not what the disk holds", nothing(), &pages(|ember| ember.refused.tag_mismatch)),
        line("pages void: overwritten since", nothing(), &pages(|ember| ember.refused.overwritten)),
        line("pages given up for the budget", nothing(), &pages(|ember| ember.refused.trimmed)),
    ]
}

fn timeline(run: Run, life: &Life) -> Option<Timeline> {
    let phase = |phase: &hearth_api::PhaseTime| Phase {
        name: phase.phase.replace('_', " "),
        start_ms: phase.started_ms,
        duration_ms: phase.duration_ms,
    };
    let recovery: &Recovery = life.recovery.as_ref()?;
    Some(Timeline {
        run,
        recovery_ms: recovery.duration_ms,
        outage_ms: life.boot_again_s * 1e3,
        phases: recovery.phases.iter().map(phase).collect(),
    })
}

fn notes(life: &Life, machine: &HostFacts, profile: Profile) -> Vec<String> {
    let mut notes = vec![
        format!("{}; {}.", machine.describe(), qemu(life)),
        format!("The disk was limited to {} by Hearth's own limits, in both lives alike.", profile.describe()),
    ];
    if life.accelerator == "tcg" {
        notes.push(format!(
            "The guest ran on TCG, QEMU's emulation ({}). It makes all that the guest's processor does slow, a boot \
             above all, and reads from memory too; so warm and cold differ less here than on a real processor.",
            life.accelerator_why
        ));
    }
    notes.push(
        "One client asks for the files in turn, one request at a time. File reads are the guest's own, all 512 files in \
         order, in a guest that served none of them since its boot. \"Before\" is the mean of both machines."
            .to_owned(),
    );
    notes
}

fn qemu(life: &Life) -> String {
    format!("QEMU {}", life.qemu)
}

fn mib(mib: f64) -> String {
    format!("{} MiB", if mib >= 10.0 { format!("{mib:.0}") } else { format!("{mib:.1}") })
}
