//! Good and bad agents at the other end of a socket.

use std::io::{BufRead, BufReader};
use std::os::unix::net::UnixStream;
use std::thread::JoinHandle;

use super::*;

const SHORT: Patience<'_> = Patience { time: Duration::from_millis(300), stop: &|| false };
/// Limit for what should happen at once.
const LONG: Patience<'_> = Patience { time: Duration::from_secs(60), stop: &|| false };

/// Starts an agent that answers each command with `says`, given the command and the `id` in its arguments.
fn agent(mut says: impl FnMut(&str, i64) -> Vec<u8> + Send + 'static) -> (UnixStream, JoinHandle<Vec<String>>) {
    let (ours, mut theirs) = UnixStream::pair().unwrap();
    let work = move || {
        let mut asked = Vec::new();
        for line in BufReader::new(theirs.try_clone().unwrap()).split(b'\n') {
            let Ok(line) = line else { break };
            let line = line.strip_prefix(&[DELIMITER]).unwrap_or(&line);
            let command: Value = serde_json::from_slice(line).unwrap();
            let name = command["execute"].as_str().unwrap().to_owned();
            let said = says(&name, command["arguments"]["id"].as_i64().unwrap_or(0));
            asked.push(name);
            // The other side may have closed the connection.
            if theirs.write_all(&said).is_err() {
                break;
            }
        }
        asked
    };
    (ours, std::thread::spawn(work))
}

fn synced(id: i64) -> Vec<u8> {
    [&[DELIMITER][..], format!("{{\"return\": {id}}}\n").as_bytes()].concat()
}

/// Result of a freeze by an agent that synchronises and then answers `says`.
#[track_caller]
fn check_freeze(says: &'static [u8], expect: &str) {
    let (stream, agent) =
        agent(move |name, id| if name == "guest-sync-delimited" { synced(id) } else { says.to_vec() });
    let mut reached = Agent::begin(stream.into(), &LONG).unwrap();
    let frozen = match reached.freeze(&SHORT) {
        Ok(count) => count.to_string(),
        Err(error) => error.to_string(),
    };
    assert_eq!(frozen, expect);
    drop(reached);
    assert_eq!(agent.join().unwrap(), ["guest-sync-delimited", "guest-fsfreeze-freeze"]);
}

#[test]
fn answers_and_wrong_answers_are_reported() {
    let odd = "the guest agent's answer is invalid (guest-fsfreeze-freeze): ";
    check_freeze(b"{\"return\": 2}\n", "2");
    check_freeze(b"\r\n\n{\"return\": 0}\r\n", "0");
    check_freeze(
        b"{\"error\": {\"class\": \"GenericError\", \"desc\": \"no\\u001b[31m\\nway\"}}\n",
        "the guest agent refuses (guest-fsfreeze-freeze): no?[31m?way",
    );
    check_freeze(b"{\"error\": 5}\n", "the guest agent refuses (guest-fsfreeze-freeze): without a reason");
    check_freeze(b"{\"return\": -1}\n", &format!("{odd}{{\"return\": -1}}"));
    check_freeze(b"{\"return\": \"2\"}\n", &format!("{odd}{{\"return\": \"2\"}}"));
    check_freeze(b"{}\n", &format!("{odd}{{}}"));
    check_freeze(b"\x1b[2J \xfe rubbish\n", &format!("{odd}?[2J ? rubbish"));
    check_freeze(b"", "the guest agent did not answer within 300ms (guest-fsfreeze-freeze)");
    check_freeze(b"{\"return\": 2}", "the guest agent did not answer within 300ms (guest-fsfreeze-freeze)");
}

/// Result of a program in the guest, whose agent synchronises and then gives these answers, repeating the last one.
#[track_caller]
fn check_program(says: &'static [&str], patience: &Patience<'_>, expect: &str, asked: usize) {
    let mut next = says.iter();
    let mut last = "";
    let (stream, agent) = agent(move |name, id| {
        if name == "guest-sync-delimited" {
            return synced(id);
        }
        last = next.next().copied().unwrap_or(last);
        format!("{last}\n").into_bytes()
    });
    let mut reached = Agent::begin(stream.into(), &LONG).unwrap();
    let ended = match reached.succeeds("systemctl", &["is-active", "web.service"], patience) {
        Ok(is_well) => is_well.to_string(),
        Err(error) => error.to_string(),
    };
    assert_eq!(ended, expect);
    drop(reached);
    let heard = agent.join().unwrap();
    assert!(heard.len() > asked && heard[1] == "guest-exec", "{heard:?}");
    assert!(heard[2..].iter().all(|name| name == "guest-exec-status"), "{heard:?}");
}

#[test]
fn guest_program_is_awaited() {
    const PID: &str = r#"{"return": {"pid": 71}}"#;
    const RUNS: &str = r#"{"return": {"exited": false}}"#;
    check_program(&[PID, RUNS, RUNS, r#"{"return": {"exited": true, "exitcode": 0}}"#], &LONG, "true", 4);
    check_program(&[PID, r#"{"return": {"exited": true, "exitcode": 3}}"#], &LONG, "false", 2);
    check_program(&[PID, r#"{"return": {"exited": true, "signal": 9}}"#], &LONG, "false", 2);
    check_program(&[PID, RUNS], &SHORT, "systemctl has not ended in the guest within 300ms", 3);
    check_program(
        &[r#"{"error": {"class": "CommandNotFound", "desc": "Command guest-exec has been disabled"}}"#],
        &LONG,
        "the guest agent refuses (guest-exec): Command guest-exec has been disabled",
        1,
    );
    check_program(
        &[r#"{"return": 71}"#],
        &LONG,
        r#"the guest agent's answer is invalid (guest-exec): {"return": 71}"#,
        1,
    );
    check_program(
        &[PID, r#"{"return": {}}"#],
        &LONG,
        r#"the guest agent's answer is invalid (guest-exec-status): {"return": {}}"#,
        2,
    );
    check_program(&[PID, ""], &SHORT, "the guest agent did not answer within 300ms (guest-exec-status)", 2);
}

#[test]
fn answers_to_others_are_skipped() {
    let (stream, agent) = agent(|name, id| match name {
        // A late answer, nonsense, and the synchronisation of another connection.
        "guest-sync-delimited" => {
            [&b"{\"return\": 7}\n{\"retu"[..], &synced(id ^ 1), &[0, 1, DELIMITER, b'\n'], &synced(id)].concat()
        }
        "guest-fsfreeze-freeze" => b"{\"return\": 3}\n".to_vec(),
        _ => b"{\"return\": 4}\n".to_vec(),
    });
    let mut reached = Agent::begin(stream.into(), &LONG).unwrap();
    assert_eq!(reached.freeze(&LONG).unwrap(), 3);
    assert_eq!(reached.thaw(&LONG).unwrap(), 4);
    drop(reached);
    assert_eq!(agent.join().unwrap().len(), 3);
}

#[test]
fn silent_endless_and_closed_channels_are_told_apart() {
    let fails = |says: Vec<u8>, patience: &Patience<'_>| {
        let (stream, _agent) = agent(move |_, _| says.clone());
        Agent::begin(stream.into(), patience).unwrap_err()
    };
    assert!(matches!(fails(Vec::new(), &SHORT), AgentError::Silent { .. }));
    assert!(matches!(fails(vec![b'x'; HEARD_BYTES_MAX + 1], &LONG), AgentError::Endless { .. }));
    assert!(matches!(fails(b"{\"return\": 1}\n".repeat(HEARD_BYTES_MAX), &LONG), AgentError::Endless { .. }));
    let stopped = Patience { stop: &|| true, ..LONG };
    assert!(matches!(fails(Vec::new(), &stopped), AgentError::Stopped));
    let (stream, other) = UnixStream::pair().unwrap();
    drop(other);
    assert!(matches!(Agent::begin(stream.into(), &LONG), Err(AgentError::Broken(_) | AgentError::Closed)));
    let error = Agent::reach(&Endpoint::unchecked("/no/such.sock"), &LONG).unwrap_err().to_string();
    assert_eq!(error, "/no/such.sock: no connection to the guest agent's channel");
}
