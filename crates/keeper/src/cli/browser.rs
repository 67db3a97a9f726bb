//! A headless Chromium, for tests of pages: commands of its DevTools protocol over a pair of pipes, as JSON with a zero after each.

use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};

use serde_json::{Value, json};
use tempfile::TempDir;

const PROGRAMS: [&str; 2] = ["chromium", "google-chrome"];

pub struct Browser {
    child: Child,
    commands: File,
    answers: BufReader<File>,
    session: Option<String>,
    number: u64,
    /// Messages of the console, warnings and errors of the page.
    pub complaints: Vec<String>,
    _profile: TempDir,
}

impl Browser {
    /// None if there is no Chromium.
    pub fn start() -> Option<Self> {
        let on_path = |program: &&&str| {
            std::env::split_paths(&std::env::var_os("PATH").unwrap_or_default())
                .any(|folder| folder.join(program).exists())
        };
        let program = PROGRAMS.iter().find(on_path)?;
        let profile = tempfile::tempdir().unwrap();
        let (its_commands, commands) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).unwrap();
        let (answers, its_answers) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).unwrap();
        let mut command = Command::new(program);
        command.args([
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--remote-debugging-pipe",
        ]);
        command.arg(format!("--user-data-dir={}", profile.path().display())).arg("about:blank");
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let ends: [OwnedFd; 2] = [its_commands, its_answers];
        // SAFETY: only calls that are allowed between fork and exec. Both ends get numbers above 4 before one of them becomes 3.
        unsafe {
            command.pre_exec(move || {
                let high = ends.each_ref().map(|end| libc::fcntl(end.as_raw_fd(), libc::F_DUPFD, 10));
                libc::dup2(high[0], 3);
                libc::dup2(high[1], 4);
                Ok(())
            });
        }
        let child = command.spawn().unwrap();
        drop(command);
        let mut browser = Self {
            child,
            commands: commands.into(),
            answers: BufReader::new(answers.into()),
            session: None,
            number: 0,
            complaints: Vec::new(),
            _profile: profile,
        };
        let target = browser.call("Target.createTarget", json!({"url": "about:blank"}));
        let attach = json!({"targetId": target["targetId"], "flatten": true});
        browser.session = browser.call("Target.attachToTarget", attach)["sessionId"].as_str().map(str::to_owned);
        for domain in ["Page.enable", "Runtime.enable", "Log.enable"] {
            browser.call(domain, json!({}));
        }
        Some(browser)
    }

    /// The result of a command of the protocol, which must succeed.
    pub fn call(&mut self, method: &str, parameters: Value) -> Value {
        self.number += 1;
        let mut command = json!({"id": self.number, "method": method, "params": parameters});
        if let Some(session) = &self.session {
            command["sessionId"] = json!(session);
        }
        self.commands.write_all(format!("{command}\0").as_bytes()).unwrap();
        loop {
            let mut bytes = Vec::new();
            self.answers.read_until(0, &mut bytes).unwrap();
            let message: Value = serde_json::from_slice(bytes.strip_suffix(&[0]).expect("Chromium lives")).unwrap();
            match message["method"].as_str() {
                Some("Log.entryAdded" | "Runtime.consoleAPICalled" | "Runtime.exceptionThrown") => {
                    self.complaints.push(message["params"].to_string());
                }
                _ if message["id"] == self.number => {
                    assert!(message["error"].is_null(), "{method}: {message}");
                    return message["result"].clone();
                }
                _ => {}
            }
        }
    }

    /// Opens a page, and waits until all of it is there.
    pub fn open(&mut self, url: &str) {
        self.call("Page.navigate", json!({"url": url}));
        self.wait_until("location.href !== 'about:blank' && document.readyState === 'complete'");
    }

    /// The value of an expression in the page; of a promise, what it resolves to.
    pub fn value(&mut self, expression: &str) -> Value {
        let parameters = json!({"expression": expression, "awaitPromise": true, "returnByValue": true});
        let answer = self.call("Runtime.evaluate", parameters);
        assert!(answer["exceptionDetails"].is_null(), "{expression}: {answer}");
        answer["result"]["value"].clone()
    }

    /// Waits until the expression is true in the page.
    pub fn wait_until(&mut self, expression: &str) {
        let wait = format!(
            "new Promise((done) => {{ let tries = 0; const look = () => ({expression}) ? done(true) : \
             ++tries > 600 ? done(false) : setTimeout(look, 50); look(); }})"
        );
        assert_eq!(self.value(&wait), true, "{expression}; the page: {}", self.value("document.body.innerText"));
    }

    pub fn size(&mut self, width: u32, height: u32) {
        let size = json!({"width": width, "height": height, "deviceScaleFactor": 1, "mobile": false});
        self.call("Emulation.setDeviceMetricsOverride", size);
    }

    fn scheme(&mut self, scheme: &str) {
        let features = json!({"features": [{"name": "prefers-color-scheme", "value": scheme}]});
        self.call("Emulation.setEmulatedMedia", features);
    }

    /// The page must not scroll sideways, in light and dark, on a screen and on a phone. `name`: of its pictures.
    #[track_caller]
    pub fn must_fit_all_widths(&mut self, name: &str) {
        for scheme in ["light", "dark"] {
            self.scheme(scheme);
            for width in [1280, 360] {
                self.size(width, 900);
                let over = self.value("document.documentElement.scrollWidth - document.documentElement.clientWidth");
                assert_eq!(over, 0, "{over} pixels wider than {width}");
                self.picture(&format!("{name}-{scheme}-{width}"));
            }
        }
    }

    /// Writes a picture of the page into the folder that the variable HEARTH_SCREENSHOTS names, if it is set.
    fn picture(&mut self, name: &str) {
        let Some(folder) = std::env::var_os("HEARTH_SCREENSHOTS") else { return };
        let picture = self.call("Page.captureScreenshot", json!({"format": "png"}));
        let base64 = picture["data"].as_str().unwrap().to_owned();
        let file = std::path::Path::new(&folder).join(name);
        std::fs::write(file.with_extension("base64"), base64).unwrap();
    }
}

impl Drop for Browser {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
