//! `host`: the daemon of a host. It serves page and metrics of all machines (`web`, `textfile`), follows libvirt's events for the
//! keepers of attached domains, and does with libvirt what a keeper cannot:
//!
//! - A guest was reset: its keeper is told. Without that, blocks are copied as far as the budget allows, and with it they are moved.
//! - A guest has crashed, and libvirt keeps its QEMU: `recovery`. Without that, it stands still until somebody ends it.
//! - A QEMU does not notice that its disks have a new keeper: `silence`. Without that, its guest waits for them for ever.
//!
//! Events are lost while libvirt's daemon is away, and a way back can end early. So it also looks at all domains: at its start, when the
//! events were interrupted, and from time to time. That is one question to each keeper, and one to libvirt only where it is needed.

mod pipe;
mod recovery;
mod silence;
pub mod textfile;
pub mod web;

use std::collections::HashMap;
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::sync::mpsc::{self, Receiver};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use hearth_api::DomainReset;
use hearth_libvirt::virsh::{DomainEvent, Virsh, VirshError};

use super::survey::Collector;
use super::{CliError, Context, Exit};
use crate::attachment::Attachment;
use crate::client::{Client, ClientError};
use crate::runtime_root::RuntimeRoot;
use recovery::Recovery;
use silence::Silences;

/// Pause before virsh is started again, which ends when libvirt's daemon does. It doubles up to `PAUSE_MAX` while that is away.
const PAUSE: Duration = Duration::from_secs(1);
/// Events are lost meanwhile, and the looks at all domains find what they told of.
const PAUSE_MAX: Duration = LOOK_EVERY;
/// A virsh that lived for this long was connected to libvirt's daemon.
const CONNECTED_AFTER: Duration = Duration::from_secs(10);
/// Time between two looks at all domains.
const LOOK_EVERY: Duration = Duration::from_secs(30);
/// Pause before an address that could not be had is tried again.
const LISTEN_AGAIN: Duration = Duration::from_secs(5);
/// Number of such attempts from one warning to the next: five minutes.
const WARN_EACH: u32 = 60;

/// What the daemon's threads share.
struct Host {
    root: RuntimeRoot,
    /// Domains that a thread is busy with because of such an event, and whether there was another one since.
    busy: Mutex<HashMap<(String, DomainEvent), bool>>,
    silences: Silences,
}

#[derive(Debug, clap::Args)]
pub struct HostArguments {
    /// Serve a page and /metrics of all machines at this address.
    ///
    /// Such as 127.0.0.1:9180; with port 0 a free one is chosen. The address is printed. There is no password: every user of this
    /// host can read both.
    #[arg(long, value_name = "ADDRESS")]
    web: Option<SocketAddr>,
    /// Allow an address for --web that other hosts can reach.
    #[arg(long, requires = "web")]
    allow_remote: bool,
    /// Write the metrics of all machines to this file, for node_exporter.
    ///
    /// The name must end in .prom. The file is replaced every 15 seconds.
    #[arg(long, value_name = "FILE")]
    textfile: Option<PathBuf>,
}

/// Runs until it is killed.
pub fn run(context: &mut Context<'_>, arguments: &HostArguments) -> Result<Exit, CliError> {
    let (root, collector) = (context.root.clone(), Collector::new(context.root.clone()));
    if let Some(path) = &arguments.textfile {
        textfile::start(path, &collector)?;
    }
    if let Some(address) = arguments.web {
        let web = web::Web::new(collector, root.clone());
        let listener = match web::listen(address, arguments.allow_remote) {
            Ok(listener) => {
                context.write_line(&url_of(&listener, address))?;
                Some(listener)
            }
            // Domains must not wait for that.
            Err(error) if error.may_pass() => {
                tracing::warn!(error = crate::chain(&error), "no page yet; trying again");
                None
            }
            Err(error) => return Err(error.into()),
        };
        let allow_remote = arguments.allow_remote;
        thread::Builder::new().name("web".to_owned()).spawn(move || {
            web.serve(&listener.unwrap_or_else(|| listen_until_it_works(address, allow_remote)));
        })?;
    }
    let missing = follow(&root);
    if arguments.web.is_none() && arguments.textfile.is_none() {
        return Err(missing.into());
    }
    tracing::info!("there is no virsh: libvirt's domains are not looked after");
    loop {
        thread::park();
    }
}

/// The page's address. With port 0, the listener knows the real one.
fn url_of(listener: &TcpListener, address: SocketAddr) -> String {
    format!("http://{}/", listener.local_addr().unwrap_or(address))
}

fn listen_until_it_works(address: SocketAddr, allow_remote: bool) -> TcpListener {
    let mut attempts = 0;
    loop {
        thread::sleep(LISTEN_AGAIN);
        attempts += 1;
        match web::listen(address, allow_remote) {
            Ok(listener) => {
                let url = url_of(&listener, address);
                tracing::info!(url, "the page is served");
                // The main thread has the lock of `Stdout`. Whoever waited for this line may be gone.
                let _ = rustix::io::write(io::stdout(), format!("{url}\n").as_bytes());
                return listener;
            }
            Err(error) if attempts % WARN_EACH == 0 => {
                tracing::warn!(error = crate::chain(&error), "still no page; trying again");
            }
            Err(_) => {}
        }
    }
}

/// Looks after the attached domains. Returns only if there is no virsh.
fn follow(root: &RuntimeRoot) -> VirshError {
    let host = Arc::new(Host { root: root.clone(), busy: Mutex::default(), silences: Silences::default() });
    let (interrupted, interruptions) = mpsc::channel();
    let (resets, looks) = (host.clone(), host.clone());
    // The other follower says why there are no events, too.
    thread::spawn(move || drop(resets.follow(DomainEvent::Reset, |_| {})));
    thread::spawn(move || looks.look_at_all(&interruptions));
    host.follow(DomainEvent::Crashed, |news| {
        if let Some(why) = news {
            tracing::warn!(why, "libvirt's events are not followed; trying again");
        }
        // Fails only when that thread has ended.
        let _ = interrupted.send(());
    })
}

/// How often virsh is started while libvirt's daemon is away, and what is worth a line in the log.
#[derive(Default)]
struct Absence {
    pause: Option<Duration>,
    why: Option<String>,
}

impl Absence {
    /// A virsh that lived for this long has ended, for this reason. Returns the pause before the next one, and the reason if it was not
    /// told yet.
    fn goes_on(&mut self, lived: Duration, why: String) -> (Duration, Option<String>) {
        if lived >= CONNECTED_AFTER {
            *self = Self::default();
        }
        let pause = self.pause.map_or(PAUSE, |pause| (pause * 2).min(PAUSE_MAX));
        self.pause = Some(pause);
        let is_news = self.why.as_ref() != Some(&why);
        self.why = Some(why.clone());
        (pause, is_news.then_some(why))
    }
}

impl Host {
    /// Calls `interrupted` each time that events may have been lost, with the reason if that is news. Returns only if there is no virsh.
    fn follow(self: &Arc<Self>, event: DomainEvent, interrupted: impl Fn(Option<String>)) -> VirshError {
        let mut absence = Absence::default();
        loop {
            let begun = Instant::now();
            let why = match Virsh::system().follow(event, |domain| self.handle(domain, event)) {
                Err(error @ VirshError::Missing) => return error,
                Err(error) => crate::chain(&error),
                Ok(()) => "virsh has ended".to_owned(),
            };
            let (pause, news) = absence.goes_on(begun.elapsed(), why);
            interrupted(news);
            thread::sleep(pause);
        }
    }

    /// Looks after the domains whose keepers say that they need it, once virsh has had time to follow their events.
    fn look_at_all(self: &Arc<Self>, interruptions: &Receiver<()>) {
        thread::sleep(PAUSE);
        // A killed daemon may have left a pipe that libvirt waits for, or a start that nobody has made.
        for domain in Attachment::names() {
            pipe::let_go(&self.root.machine(&domain));
            self.handle(&domain, DomainEvent::Crashed);
        }
        loop {
            if interruptions.recv_timeout(LOOK_EVERY).is_ok() {
                // virsh follows again after one pause, and needs a moment to begin.
                thread::sleep(PAUSE * 2);
                while interruptions.try_recv().is_ok() {}
            }
            for domain in Attachment::names() {
                if Recovery::of(&self.root, &domain).may_be_needed() {
                    self.handle(&domain, DomainEvent::Crashed);
                }
            }
        }
    }

    /// Has a thread do what follows from an event, because any step may take long. One at a time for each domain and kind of event.
    fn handle(self: &Arc<Self>, domain: &str, event: DomainEvent) {
        if !Attachment::of(domain).file().exists() {
            return;
        }
        let key = (domain.to_owned(), event);
        let mut busy = self.busy();
        if let Some(again) = busy.get_mut(&key) {
            *again = true;
            return;
        }
        busy.insert(key.clone(), false);
        drop(busy);
        let (host, of_thread) = (self.clone(), key.clone());
        let begun = thread::Builder::new().spawn(move || {
            loop {
                let (domain, event) = &of_thread;
                // A panic has said why.
                let _ = catch_unwind(AssertUnwindSafe(|| host.act(domain, *event)));
                if !host.is_needed_again(&of_thread) {
                    return;
                }
            }
        });
        if let Err(error) = begun {
            tracing::warn!(domain, %error, "cannot start a thread");
            self.busy().remove(&key);
        }
    }

    fn act(&self, domain: &str, event: DomainEvent) {
        match event {
            // The keeper answers when the guest goes on.
            DomainEvent::Reset => match Client::new(self.root.api_socket(domain)).send(&DomainReset {}) {
                Ok(_) | Err(ClientError::NotRunning { .. }) => {}
                Err(error) => tracing::warn!(domain, error = crate::chain(&error), "cannot tell the keeper of a reset"),
            },
            DomainEvent::Crashed => {
                if let Err(error) = Recovery::of(&self.root, domain).run() {
                    tracing::warn!(domain, error = crate::chain(&error), "cannot bring the domain back");
                }
                if let Err(error) = self.silences.end(&self.root, domain) {
                    tracing::warn!(domain, error = crate::chain(&error), "cannot make QEMU use its disks");
                }
            }
        }
    }

    /// Whether there was another such event since the thread has begun. If not, the thread ends.
    fn is_needed_again(&self, key: &(String, DomainEvent)) -> bool {
        let mut busy = self.busy();
        let again = busy.get_mut(key).is_some_and(std::mem::take);
        if !again {
            busy.remove(key);
        }
        again
    }

    fn busy(&self) -> MutexGuard<'_, HashMap<(String, DomainEvent), bool>> {
        self.busy.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn absent_libvirt_is_asked_rarely_and_told_once() {
        let mut absence = Absence::default();
        let mut ended = |lived_s, why: &str| {
            let (pause, news) = absence.goes_on(Duration::from_secs(lived_s), why.to_owned());
            (pause.as_secs(), news.is_some())
        };
        assert_eq!(ended(0, "no socket"), (1, true));
        assert_eq!([2, 4, 8, 16, 30, 30].map(|pause| (pause, false)), [(); 6].map(|()| ended(0, "no socket")));
        assert_eq!(ended(0, "no permission"), (30, true));
        assert_eq!(ended(60, "no permission"), (1, true), "it was there again");
    }
}
