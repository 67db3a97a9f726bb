//! The page's server over TCP, with keepers that only answer.

use std::io::Read;

use serde_json::json;

use super::*;
use crate::cli::browser::Browser;
use crate::cli::survey::fake::Keepers;

struct Fixture {
    keepers: Keepers,
    address: SocketAddr,
}

fn fixture(names: &[&str]) -> Fixture {
    let keepers = Keepers::start(names);
    let listener = listen("127.0.0.1:0".parse().unwrap(), false).unwrap();
    let address = listener.local_addr().unwrap();
    let web = Web::new(Collector::new(keepers.root()), keepers.root());
    thread::spawn(move || web.serve(&listener));
    Fixture { keepers, address }
}

impl Fixture {
    fn ask(&self, text: &str) -> (String, String) {
        let mut stream = TcpStream::connect(self.address).unwrap();
        stream.write_all(text.as_bytes()).unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        let (head, body) = answer.split_once("\r\n\r\n").unwrap();
        (head.to_owned(), body.to_owned())
    }

    fn get(&self, path: &str) -> (String, String) {
        self.ask(&format!("GET {path} HTTP/1.1\r\nHost: {}\r\n\r\n", self.address))
    }
}

#[test]
fn only_requests_by_this_hosts_name_are_answered() {
    let fixture = fixture(&[]);
    let check = |host: &str, expect: &str| {
        let (head, _) = fixture.ask(&format!("GET / HTTP/1.1\r\n{host}\r\n"));
        assert!(head.starts_with(&format!("HTTP/1.1 {expect}")), "{host:?}: {head}");
    };
    let own = rustix::system::uname().nodename().to_string_lossy().into_owned();
    check("Host: 127.0.0.1:9180\r\n", "200");
    check("Host: [::1]:9180\r\n", "200");
    check("Host: LocalHost\r\n", "200");
    check(&format!("Host: {own}:9180\r\n"), "200");
    check("Host: rebound.example:9180\r\n", "421");
    check("Host: localhost.rebound.example\r\n", "421");
    check("", "421");
}

#[test]
fn page_can_only_be_read() {
    let fixture = fixture(&["web"]);
    for method in ["POST", "PUT", "DELETE", "OPTIONS"] {
        let (head, _) = fixture.ask(&format!("{method} /machines HTTP/1.1\r\nHost: localhost\r\n\r\n"));
        assert!(head.starts_with("HTTP/1.1 405"), "{method}: {head}");
    }
    assert!(fixture.get("/v1/reboot").0.starts_with("HTTP/1.1 404"));
}

#[test]
fn page_runs_only_its_own_script_and_style() {
    let fixture = fixture(&[]);
    let (head, page) = fixture.get("/");
    assert!(
        head.contains("Content-Security-Policy: default-src 'none'; script-src 'self'; style-src 'self';"),
        "{head}"
    );
    assert!(!head.contains("Access-Control"), "{head}");
    assert!(!page.contains("style=") && !page.contains(" on"), "{page}");
    assert_eq!(page.matches("<script").count(), page.matches("<script src=").count(), "{page}");
}

#[test]
fn machines_and_metrics_are_answered_without_configuration() {
    let fixture = fixture(&["db", "web"]);
    let (_, machines) = fixture.get("/machines");
    let view: serde_json::Value = serde_json::from_str(&machines).unwrap();
    assert_eq!(view["machines"][1]["name"], "web");
    assert!(machines.contains("accesses wait until it can be read: [address]: connection refused"), "{machines}");
    assert!(view["machines"][1]["snapshots"][0].as_str().is_some_and(|place| place.ends_with("  [address]")), "{view}");
    assert!(
        !machines.contains("secret") && !machines.contains("52:54:00") && !machines.contains("s3://"),
        "{machines}"
    );
    let (head, metrics) = fixture.get("/metrics");
    assert!(head.contains(metrics::MEDIA_TYPE) && metrics.contains("hearth_keeper_up{machine=\"db\"} 1"), "{metrics}");
}

#[test]
fn live_page_gets_the_machines_again_and_again() {
    let fixture = fixture(&["web"]);
    let mut stream = TcpStream::connect(fixture.address).unwrap();
    stream.write_all(b"GET /live HTTP/1.1\r\nHost: localhost\r\n\r\n").unwrap();
    let mut text = String::new();
    while text.matches("\n\n").count() < 2 {
        let mut bytes = [0; 4096];
        let length = stream.read(&mut bytes).unwrap();
        assert!(length > 0, "{text}");
        text.push_str(&String::from_utf8_lossy(&bytes[..length]));
    }
    assert!(text.contains("Content-Type: text/event-stream"), "{text}");
    // The second one has rates.
    assert!(text.contains("\"rates\":null") && text.contains("\"rates\":{\"reads_per_s\":"), "{text}");
}

#[test]
fn address_that_others_reach_must_be_allowed() {
    let address = "0.0.0.0:0".parse().unwrap();
    let refused = listen(address, false).unwrap_err().to_string();
    assert!(refused.starts_with("other hosts can reach 0.0.0.0:0, and the page has no password"), "{refused}");
    assert!(listen(address, true).is_ok());
    assert!(listen("[::ffff:127.0.0.1]:0".parse().unwrap(), false).is_ok());
}

/// Opens each card, copies a command, and looks at phone width, light and dark.
#[test]
fn browser_shows_the_page_without_complaint() {
    let Some(mut browser) = Browser::start() else {
        eprintln!("not tested: there is no Chromium (Debian: apt install chromium)");
        return;
    };
    let fixture = fixture(&["db", "web"]);
    let origin = format!("http://{}", fixture.address);
    let grant = json!({"origin": origin, "permissions": ["clipboardReadWrite", "clipboardSanitizedWrite"]});
    browser.call("Browser.grantPermissions", grant);
    browser.size(1280, 900);
    browser.open(&origin);
    browser.wait_until("document.querySelectorAll('.machine.good').length === 2");
    browser.wait_until("document.getElementById('summary').textContent.startsWith('2 machines, 2 running')");
    for card in 0..2 {
        let part = |what: &str| format!("document.querySelectorAll('.machine')[{card}]{what}");
        browser.value(&part(".querySelector('summary').click()"));
        browser
            .wait_until(&format!("{}.textContent.includes('guest panicked')", part(".querySelector('.part-events')")));
        // Rates need two readings.
        browser.wait_until(&format!("{}.includes('100 %')", part(".querySelector('table').innerText")));
        browser.value(&part(".querySelector('button').click()"));
        browser.wait_until(&format!("{} === 'copied'", part(".querySelector('button').textContent")));
        browser.wait_until(&part(".querySelector('.bar i').getBoundingClientRect().width > 10"));
    }
    browser.must_fit_all_widths("page");
    fixture.keepers.hang("db");
    browser.wait_until("document.querySelector('.machine.bad .state')?.textContent === 'no answer'");
    browser.value("document.querySelector('.machine summary').click()");
    browser.wait_until("!document.querySelector('.machine .body').children.length");
    assert!(browser.complaints.is_empty(), "{:#?}", browser.complaints);
}

#[test]
fn refused_page_says_so_and_tries_again() {
    let Some(mut browser) = Browser::start() else {
        eprintln!("not tested: there is no Chromium (Debian: apt install chromium)");
        return;
    };
    let fixture = fixture(&["web"]);
    let follow = || {
        let mut stream = TcpStream::connect(fixture.address).unwrap();
        stream.write_all(b"GET /live HTTP/1.1\r\nHost: localhost\r\n\r\n").unwrap();
        let mut status = [0; 12];
        stream.read_exact(&mut status).unwrap();
        (status == *b"HTTP/1.1 200").then_some(stream)
    };
    let others: Vec<_> = std::iter::from_fn(follow).collect();
    browser.open(&format!("http://{}", fixture.address));
    browser.wait_until("document.getElementById('summary').textContent.startsWith('hearth host refuses this page')");
    drop(others);
    browser.wait_until("document.querySelectorAll('.machine.good').length === 1");
    browser.wait_until("document.getElementById('summary').textContent.startsWith('1 machines, 1 running')");
}
