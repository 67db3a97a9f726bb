//! The report's file, and the page of a machine with many events, also in a browser.

use std::os::unix::fs::PermissionsExt;

use hearth_api::{EndCause, EventKind, EventRecord};

use super::*;
use crate::cli::browser::Browser;

/// Text that a guest or a file name could contain.
const HOSTILE: &str = "</pre><script>console.error('x')</script><img src=x onerror=alert(1)>";

/// Events of a machine that crashes once a minute, each time with a dump and samples.
fn crashes(count: u32) -> Vec<EventRecord> {
    (1..=count).flat_map(crash).collect()
}

fn crash(dead: u32) -> Vec<EventRecord> {
    let living = dead + 1;
    let file = format!("/srv/dumps/web-{dead}-20260301T120000.vmcore");
    let mib = |count: u64| count << 20;
    let phase = |phase: &str, duration_ms: f64| EventKind::Phase { phase: phase.into(), duration_ms };
    let held = |second: u64| EventKind::MemoryHeld {
        living,
        resident_bytes: mib(620 * second / (second + 6)),
        dead_bytes: mib(900 / (second + 1)),
        limit_bytes: mib(1100),
        read_warm_bytes: mib(300 * u64::from(dead) + 280 * second / (second + 4)),
        read_image_bytes: mib(20 * u64::from(dead) + 19 * second / (second + 8)),
    };
    let message = format!(
        "Kernel panic - not syncing: sysrq triggered crash\n{HOSTILE}\nCPU: 0 PID: 1 Comm: {}",
        "x".repeat(200)
    );
    let mut events = vec![
        (0, dead, EventKind::IncarnationEnded { cause: EndCause::Panic }),
        (40, dead, phase("harvest", 35.0)),
        (44, dead, phase("drain", 4.0)),
        (45, living, EventKind::EmberKept { pages: 90_000, bytes: mib(351) }),
        (47, living, EventKind::EmberSettled { released_bytes: mib(120), remaining_pages: 90_000 }),
        (48, living, held(0)),
        (175 + dead % 9, living, phase("launch", 128.0)),
        (176 + dead % 9, living, EventKind::IncarnationStarted { generation: living, warm: true }),
        (200, living, EventKind::CrashReason { message }),
        (201, living, EventKind::DumpStarted { file: file.clone(), level: 31, ram_pages: 262_144, pages: 70_000 }),
    ];
    events.extend((1..8).map(|second| (second as u32 * 1000, living, held(second))));
    events.push((3300, living, phase("write", 3090.0)));
    events.push((3301, living, EventKind::DumpComplete { file, pages: 70_000, bytes: mib(93), duration_ms: 3100.0 }));
    events.push((
        7500,
        living,
        EventKind::Ready { why: "probe".into(), blocks: 9000, held_blocks: 9000, hit_pct: Some(93.2) },
    ));
    events.sort_by_key(|event| event.0);
    let record = |(at_ms, incarnation, event): (u32, u32, EventKind)| EventRecord {
        sequence: 1,
        time: format!("2026-03-01T{:02}:{:02}:{:02}.{:03}Z", 12 + dead / 60, dead % 60, at_ms / 1000, at_ms % 1000),
        machine: "web".into(),
        incarnation,
        event,
    };
    events.into_iter().map(record).collect()
}

#[test]
fn hundreds_of_crashes_make_a_page_of_bounded_size() {
    let records = crashes(300);
    assert!(records.len() > 5000);
    let page = page::html("web", &records, None, "now");
    assert!(page.contains("Its events show 300 recoveries."), "{page}");
    assert_eq!(page.matches("class=\"line warm\"").count(), 2 * page::DETAILED, "a plot for two widths each");
    assert_eq!(page.matches("<td>guest panicked</td>").count(), page::LISTED);
    assert!(page.contains(&format!("The tables list the {} newest", page::LISTED)));
    assert!(page.contains("<td>300 → 301</td>") && page.len() < 200_000, "{}", page.len());
}

#[test]
fn browser_shows_the_page_without_complaint() {
    let Some(mut browser) = Browser::start() else {
        eprintln!("not tested: there is no Chromium (Debian: apt install chromium)");
        return;
    };
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("web.html");
    fs::write(&file, page::html("web", &crashes(7), None, "now")).unwrap();
    browser.open(&format!("file://{}", file.display()));
    browser.wait_until("document.querySelectorAll('pre').length === 5");
    assert_eq!(browser.value("document.scripts.length + document.images.length"), 0);
    // Without its policy's consent the style would not apply.
    assert_eq!(browser.value("getComputedStyle(document.querySelector('svg.narrow')).display"), "none");
    browser.must_fit_all_widths("report");
    assert!(browser.complaints.is_empty(), "{:#?}", browser.complaints);
}

#[test]
fn only_a_report_or_an_empty_file_is_replaced() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("web.html");
    let check = |text: Option<&str>, expect: bool| {
        let _ = fs::remove_file(&file);
        if let Some(text) = text {
            fs::write(&file, text).unwrap();
        }
        assert_eq!(must_be_replaceable(&file).is_ok(), expect, "{text:?}");
    };
    check(None, true);
    check(Some(""), true);
    check(Some(&page::html("web", &[], None, "now")), true);
    check(Some("<!doctype html><p>mine</p>"), false);
    check(Some(&format!("{}{}", " ".repeat(2000), hearth_page::GENERATOR)), false);
    let error = must_be_replaceable(folder.path()).unwrap_err();
    let expect = format!("{} exists and is not a Hearth report; choose another file with -o", folder.path().display());
    assert_eq!(crate::chain(&error), expect);
}

#[test]
fn replaced_whole_and_private() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("web.html");
    fs::write(&file, "old").unwrap();
    replace(&file, "new").unwrap();
    assert_eq!(fs::read_to_string(&file).unwrap(), "new");
    assert_eq!(fs::metadata(&file).unwrap().permissions().mode() & 0o777, 0o600);
    assert!(replace(&folder.path().join("none/web.html"), "new").is_err());
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1, "nothing else is left");
}
