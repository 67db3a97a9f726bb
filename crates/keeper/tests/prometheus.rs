//! Alert rules and dashboard: Prometheus' own `promtool` reads them, and each metric that they name exists.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;

fn packaging(file: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../packaging").join(file)
}

fn read(file: &str) -> String {
    std::fs::read_to_string(packaging(file)).expect("it is committed")
}

/// None: there is no promtool.
fn promtool(arguments: &[&str]) -> Option<()> {
    let output = match Command::new("promtool").args(arguments).output() {
        Ok(output) => output,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            eprintln!("not tested: there is no promtool (Debian: package prometheus)");
            return None;
        }
        Err(error) => panic!("{error}"),
    };
    let said = [output.stdout, output.stderr].concat();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&said));
    Some(())
}

/// Expressions of the dashboard's panels, with values for Grafana's variables.
fn dashboard_expressions() -> Vec<String> {
    let dashboard: Value = serde_json::from_str(&read("grafana/hearth.json")).expect("it is JSON");
    let panels = dashboard["panels"].as_array().expect("it has panels").iter();
    let targets = panels.flat_map(|panel| panel["targets"].as_array().expect("each panel has targets"));
    let expression = |target: &Value| target["expr"].as_str().expect("each target has an expression").to_owned();
    targets.map(expression).map(|it| it.replace("$machine", ".*").replace("$__rate_interval", "5m")).collect()
}

/// Names of metrics in a text.
fn metrics_in(text: &str) -> BTreeSet<String> {
    let words = text.split(|c: char| !(c.is_ascii_alphanumeric() || c == '_'));
    words.filter(|word| word.starts_with("hearth_")).map(str::to_owned).collect()
}

#[test]
fn named_metrics_exist() {
    let known = metrics_in(&hearth_keeper::metrics_page());
    let named = metrics_in(&[read("prometheus/hearth-rules.yml"), dashboard_expressions().join("\n")].join("\n"));
    let unknown: Vec<_> = named.difference(&known).collect();
    assert!(named.len() > 20 && unknown.is_empty(), "{unknown:?}");
}

#[test]
fn dashboard_shows_what_alerts_are_about() {
    let rules = read("prometheus/hearth-rules.yml");
    let shown = metrics_in(&dashboard_expressions().join("\n"));
    let unseen: Vec<_> = metrics_in(&rules).into_iter().filter(|metric| !shown.contains(metric)).collect();
    assert!(unseen.is_empty(), "{unseen:?}");
}

/// An empty panel looks like one that is broken.
#[test]
fn numbers_of_the_dashboard_are_never_missing() {
    let dashboard: Value = serde_json::from_str(&read("grafana/hearth.json")).expect("it is JSON");
    let stats = dashboard["panels"].as_array().expect("it has panels").iter().filter(|panel| panel["type"] == "stat");
    for target in stats.flat_map(|panel| panel["targets"].as_array().expect("each panel has targets")) {
        let expression = target["expr"].as_str().expect("each target has an expression");
        let counts = expression.starts_with("sum(") || expression.starts_with("count(");
        assert!(!counts || expression.ends_with(" or vector(0)"), "{expression}");
    }
}

#[test]
fn each_alert_fires_when_it_should_and_only_then() {
    let path = |file| packaging(file).display().to_string();
    let rules = read("prometheus/hearth-rules.yml");
    let tests = read("prometheus/hearth-rules.test.yml");
    let alerts = rules.lines().filter_map(|line| line.trim().strip_prefix("- alert: "));
    let untested: Vec<_> = alerts.filter(|alert| !tests.contains(&format!("alertname: {alert},"))).collect();
    assert!(untested.is_empty(), "{untested:?}");
    promtool(&["check", "rules", &path("prometheus/hearth-rules.yml")]);
    promtool(&["test", "rules", &path("prometheus/hearth-rules.test.yml")]);
}

#[test]
fn dashboard_expressions_are_understood() {
    let rule = |(number, expression): (usize, &String)| {
        format!("      - {{record: 'panel:{number}', expr: '{expression}'}}\n")
    };
    let rules: String = dashboard_expressions().iter().enumerate().map(rule).collect();
    let file = tempfile::NamedTempFile::new().expect("a folder for temporary files");
    std::fs::write(file.path(), format!("groups:\n  - name: dashboard\n    rules:\n{rules}")).expect("our own file");
    promtool(&["check", "rules", &file.path().display().to_string()]);
}
