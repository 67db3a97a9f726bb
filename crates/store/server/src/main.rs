//! `loopback-s3 FOLDER`: the server as a program, for users that do not link it. It ends with its standard input.
//!
//! It prints the environment for clients, one variable per line, and an empty line. Then it answers each line with a
//! line: `line BYTES_PER_S REQUEST_MS` (the wire from now on) -> `ok`; `answer-bytes` -> bytes of all answers so far.

use std::io::{self, BufRead, Write};
use std::process::ExitCode;
use std::time::Duration;

use loopback_s3::{S3Server, Wire};

fn main() -> ExitCode {
    let Some(folder) = std::env::args_os().nth(1) else {
        eprintln!("usage: loopback-s3 FOLDER");
        return ExitCode::FAILURE;
    };
    let server = S3Server::start_in(folder.as_ref());
    let environment = server.environment().into_iter().map(|(key, value)| format!("{key}={value}\n"));
    let say = |text: String| writeln!(io::stdout(), "{text}").is_ok();
    let mut hears = say(environment.collect());
    for line in io::stdin().lock().lines().map_while(Result::ok) {
        hears = hears && say(answer(&server, &line));
        if !hears {
            break;
        }
    }
    ExitCode::SUCCESS
}

fn answer(server: &S3Server, line: &str) -> String {
    let words: Vec<&str> = line.split(' ').collect();
    match words[..] {
        ["answer-bytes"] => server.answer_bytes().to_string(),
        ["line", bytes_per_s, request_ms] => match (bytes_per_s.parse(), request_ms.parse()) {
            (Ok(bytes_per_s), Ok(request_ms)) => {
                server.set_wire(Wire::Line { bytes_per_s, request: Duration::from_millis(request_ms) });
                "ok".to_owned()
            }
            _ => "not numbers".to_owned(),
        },
        _ => format!("{line:?} is no command"),
    }
}
