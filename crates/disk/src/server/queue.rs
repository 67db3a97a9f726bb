//! One virtqueue of a connection, from its set-up in small steps to its stop.
//!
//! addresses, size, base -> kick descriptor: starts -> enabled: served -> GET_VRING_BASE: stops, drains, reports its base
//!
//! A queue is looked at once when it starts and when it is enabled: kicks before that went to nobody.
//!
//! A queue that stops still takes the requests that it resumes, even before it was enabled: a base is one number, and can
//! only say that everything before it was answered.

use std::rc::Rc;

use super::chain::{Descriptor, Table, walk};
use super::foreign::EventCounter;
use super::inflight::Inflight;
use super::memory::GuestMap;
use super::poller::Watched;
use super::ring::{ENTRIES_MAX, Ring, RingFault, RingPlace, part_bytes};
use super::signaller::Signaller;
use super::wire::RingAddresses;
use crate::fault_point;

#[derive(Debug, thiserror::Error)]
pub enum QueueError {
    #[error("queue {queue} has size {size}; it must be a power of two up to {ENTRIES_MAX}")]
    Size { queue: u16, size: u32 },
    #[error("queue {queue}: its rings are not in guest memory")]
    Unmapped { queue: u16 },
    #[error("queue {queue} is started before its size and addresses are set")]
    Incomplete { queue: u16 },
    #[error("queue {queue} is being served")]
    Running { queue: u16 },
    #[error("queue {queue} is not covered by the inflight region")]
    Inflight { queue: u16 },
    #[error("queue {queue} has no kick descriptor; polling is not supported")]
    Polling { queue: u16 },
    #[error("queue {queue} does not exist")]
    Missing { queue: u32 },
}

/// The part of the negotiation that matters to a queue.
#[derive(Clone, Copy)]
pub struct Agreed {
    pub event_index: bool,
    pub indirect: bool,
    /// Without protocol features queues are enabled from the start.
    pub enabled_at_start: bool,
    /// Descriptors a chain may have, whatever the size of the queue.
    pub chain_limit: usize,
}

/// A request taken off a queue.
pub struct Taken {
    pub head: u16,
    /// A server before us had it.
    pub resumed: bool,
}

pub struct Queue {
    index: u16,
    size: u16,
    signaller: Rc<Signaller>,
    base: u16,
    addresses: Option<RingAddresses>,
    kick: Option<Watched<EventCounter>>,
    call: Option<EventCounter>,
    error: Option<EventCounter>,
    enabled: bool,
    ring: Option<Ring>,
    stopping: bool,
    broken: bool,
    /// Guest memory changed and the rings are not in it (now).
    unmapped: bool,
    /// Heads that a server before us took and did not answer, newest first.
    resume: Vec<u16>,
    /// Requests taken and not answered.
    in_flight: u32,
    /// Something may be waiting in the ring.
    ready: bool,
    /// Something was answered since the guest was last woken.
    answered: bool,
}

impl Queue {
    pub fn new(index: u16, signaller: &Rc<Signaller>) -> Self {
        Self {
            index,
            size: 0,
            signaller: Rc::clone(signaller),
            base: 0,
            addresses: None,
            kick: None,
            call: None,
            error: None,
            enabled: false,
            ring: None,
            stopping: false,
            broken: false,
            unmapped: false,
            resume: Vec::new(),
            in_flight: 0,
            ready: false,
            answered: false,
        }
    }

    pub fn set_size(&mut self, size: u32) -> Result<(), QueueError> {
        self.refuse_while_running()?;
        match u16::try_from(size) {
            Ok(checked) if checked.is_power_of_two() && checked <= ENTRIES_MAX => self.size = checked,
            _ => return Err(QueueError::Size { queue: self.index, size }),
        }
        Ok(())
    }

    pub fn set_base(&mut self, base: u32) -> Result<(), QueueError> {
        self.refuse_while_running()?;
        self.base = base as u16;
        Ok(())
    }

    /// May come while the queue is served: QEMU switches the log of the used ring this way.
    pub fn set_addresses(&mut self, addresses: RingAddresses, memory: &GuestMap) -> Result<(), QueueError> {
        self.addresses = Some(addresses);
        if self.ring.is_some() { self.translate_again(memory) } else { Ok(()) }
    }

    /// After a change of guest memory.
    pub fn translate_again(&mut self, memory: &GuestMap) -> Result<(), QueueError> {
        let Some(ring) = &mut self.ring else { return Ok(()) };
        let place = self.addresses.and_then(|addresses| place(addresses, self.size, memory));
        match place {
            Some(place) => {
                ring.place = place;
                self.unmapped = false;
                Ok(())
            }
            None => {
                self.unmapped = true;
                Err(QueueError::Unmapped { queue: self.index })
            }
        }
    }

    pub fn set_call(&mut self, call: Option<EventCounter>) {
        self.call = call;
        // A frontend that gives a new descriptor may have missed signals on the old one.
        if let Some(ring) = &mut self.ring {
            ring.wake_in_any_case();
            self.answered = true;
        }
    }

    pub fn set_error(&mut self, error: Option<EventCounter>) {
        self.error = error;
    }

    pub fn set_enabled(&mut self, on: bool) {
        self.enabled = on;
        self.ready |= on;
    }

    /// The kick descriptor starts the queue.
    pub fn start(
        &mut self,
        kick: Option<Watched<EventCounter>>,
        memory: &GuestMap,
        inflight: Option<&mut Inflight>,
        agreed: Agreed,
    ) -> Result<(), QueueError> {
        let kick = kick.ok_or(QueueError::Polling { queue: self.index })?;
        self.kick = Some(kick);
        self.ready = true;
        if self.ring.is_some() {
            return Ok(());
        }
        let addresses = self.addresses.filter(|_| self.size > 0).ok_or(QueueError::Incomplete { queue: self.index })?;
        let unmapped = QueueError::Unmapped { queue: self.index };
        let place = place(addresses, self.size, memory).ok_or(unmapped)?;
        let used = Ring::published_used(memory, &place).map_err(|_| QueueError::Unmapped { queue: self.index })?;
        let mut available = self.base;
        if let Some(inflight) = inflight {
            if !inflight.covers(self.index, self.size) {
                return Err(QueueError::Inflight { queue: self.index });
            }
            self.resume = inflight.resume(self.index, used);
            self.resume.reverse();
            available = used.wrapping_add(self.resume.len() as u16);
        }
        self.ring = Some(Ring::new(self.size, place, agreed.event_index, available, used));
        self.enabled |= agreed.enabled_at_start;
        (self.stopping, self.broken, self.unmapped) = (false, false, false);
        // A server before us may have died with the answer in the ring and the guest not yet woken.
        self.answered = true;
        Ok(())
    }

    /// No more requests are taken.
    pub fn stop(&mut self) {
        self.stopping = true;
        self.kick = None;
    }

    /// Nothing is taken any more, and QEMU waits for what was.
    pub fn is_stopping(&self) -> bool {
        self.stopping
    }

    /// Started, and not yet stopped with everything answered.
    pub fn is_started(&self) -> bool {
        self.ring.is_some()
    }

    /// After `stop`: has everything been answered that can be?
    pub fn is_drained(&self) -> bool {
        self.in_flight == 0 && !self.can_resume()
    }

    /// Do requests of the server before us wait to be taken from a ring that can be used?
    pub fn can_resume(&self) -> bool {
        !self.resume.is_empty() && self.is_usable()
    }

    fn is_usable(&self) -> bool {
        self.ring.is_some() && !self.broken && !self.unmapped
    }

    /// The end of a stopped queue: where the next server of this ring begins.
    pub fn retire(&mut self) -> u16 {
        if let Some(ring) = self.ring.take() {
            self.base = ring.next_available();
        }
        (self.kick, self.call, self.error) = (None, None, None);
        (self.enabled, self.stopping, self.ready) = (false, false, false);
        self.resume.clear();
        self.base
    }

    pub fn kicked(&mut self) -> std::io::Result<()> {
        self.ready = true;
        self.kick.as_ref().map_or(Ok(()), |kick| kick.get().clear())
    }

    pub fn is_ready(&self) -> bool {
        if self.stopping { self.can_resume() } else { self.ready && self.enabled && self.is_usable() }
    }

    /// Whether something is in the ring that nobody kicked for (yet).
    pub fn look(&mut self, memory: &GuestMap) -> bool {
        if let Some(ring) = self.ring.as_ref().filter(|_| self.enabled && !self.unmapped) {
            // A ring that cannot be read is found broken by who takes from it.
            self.ready |= ring.has_news(memory).unwrap_or(true);
        }
        self.is_ready()
    }

    /// The next request: first those of the server before us. None: nothing waits, and the guest will kick.
    pub fn take(&mut self, memory: &GuestMap, inflight: Option<&mut Inflight>) -> Option<Taken> {
        if let Some(head) = self.resume.pop() {
            self.in_flight += 1;
            return Some(Taken { head, resumed: true });
        }
        let ring = self.ring.as_mut().filter(|_| !self.stopping)?;
        let taken = match ring.pop(memory) {
            Ok(None) => ring.enable_kicks(memory).and_then(|more| if more { ring.pop(memory) } else { Ok(None) }),
            taken => taken,
        };
        match taken {
            // More than it has places for at a time: what is held for each would be memory without end.
            Ok(Some(_)) if self.in_flight >= u32::from(self.size) => {
                self.fail(RingFault::Overrun);
                None
            }
            Ok(Some(head)) => {
                self.in_flight += 1;
                if let Some(inflight) = inflight {
                    inflight.begin(self.index, head);
                }
                Some(Taken { head, resumed: false })
            }
            Ok(None) => {
                self.ready = false;
                None
            }
            Err(fault) => {
                self.fail(fault);
                None
            }
        }
    }

    /// Whether there is memory for the used ring.
    pub fn may_answer(&self, memory: &GuestMap) -> bool {
        let (_, _, used_bytes) = part_bytes(self.size);
        self.ring.as_ref().is_none_or(|ring| memory.admit(ring.place.used, used_bytes))
    }

    /// While requests are taken, kicks are a waste.
    pub fn begin_round(&mut self, memory: &GuestMap) {
        if let Some(ring) = self.ring.as_mut().filter(|_| !self.stopping)
            && let Err(fault) = ring.disable_kicks(memory)
        {
            self.fail(fault);
        }
    }

    /// Appends the descriptors of a request.
    pub fn descriptors(
        &self,
        head: u16,
        memory: &GuestMap,
        agreed: Agreed,
        out: &mut Vec<Descriptor>,
    ) -> Result<(), super::chain::ChainFault> {
        let address = self.ring.as_ref().map_or(0, |ring| ring.place.descriptors);
        let table = Table { address, entries: self.size, indirect_allowed: agreed.indirect, limit: agreed.chain_limit };
        walk(table, head, &|address, out: &mut [u8]| memory.read(address, out).is_ok(), out)
    }

    /// Answers a request; the guest sees it now and is woken later.
    pub fn answer(&mut self, memory: &GuestMap, inflight: Option<&Inflight>, head: u16, bytes: u32) {
        self.in_flight = self.in_flight.saturating_sub(1);
        let Some(ring) = self.ring.as_mut().filter(|_| !self.broken) else { return };
        if let Some(inflight) = inflight {
            inflight.ending(self.index, head);
        }
        fault_point::reach();
        if let Err(fault) = ring.push(memory, head, bytes) {
            return self.fail(fault);
        }
        fault_point::reach();
        if let Some(inflight) = inflight {
            inflight.ended(self.index, head, ring.next_used());
        }
        self.answered = true;
    }

    /// Wakes the guest for what was answered, if it wants that.
    pub fn wake_guest(&mut self, memory: &GuestMap) {
        if !self.answered {
            return;
        }
        self.answered = false;
        let Some(ring) = &mut self.ring else { return };
        let wanted = ring.wants_wake(memory);
        self.wake_if(wanted);
    }

    /// Wakes the guest if it sleeps over something that was answered ([`Ring::overslept`]).
    pub fn wake_overslept(&mut self, memory: &GuestMap) {
        let Some(ring) = &mut self.ring else { return };
        let overslept = ring.overslept(memory);
        if overslept == Ok(true) {
            tracing::debug!(queue = self.index, "the guest slept over an answer of its disk, and is woken");
        }
        self.wake_if(overslept);
    }

    fn wake_if(&mut self, wanted: Result<bool, RingFault>) {
        match wanted {
            Ok(true) => {
                if let Some(call) = &self.call {
                    self.signal(call, "call");
                }
            }
            Ok(false) => (),
            Err(fault) => self.fail(fault),
        }
    }

    /// Nothing more is taken from a ring that makes no sense, until the guest resets it.
    fn fail(&mut self, fault: RingFault) {
        tracing::warn!(queue = self.index, %fault, "the guest broke a queue of its disk; it is no longer served");
        self.broken = true;
        if let Some(error) = &self.error {
            self.signal(error, "error");
        }
    }

    fn signal(&self, counter: &EventCounter, what: &str) {
        if let Err(error) = self.signaller.signal(counter) {
            tracing::warn!(queue = self.index, what, %error, "QEMU cannot be signalled");
        }
    }

    fn refuse_while_running(&self) -> Result<(), QueueError> {
        if self.ring.is_some() { Err(QueueError::Running { queue: self.index }) } else { Ok(()) }
    }
}

/// Guest-physical places of the rings, if they are wholly mapped and aligned.
fn place(addresses: RingAddresses, size: u16, memory: &GuestMap) -> Option<RingPlace> {
    let (descriptor_bytes, available_bytes, used_bytes) = part_bytes(size);
    let place = RingPlace {
        descriptors: memory.guest_address(addresses.descriptors, descriptor_bytes)?,
        available: memory.guest_address(addresses.available, available_bytes)?,
        used: memory.guest_address(addresses.used, used_bytes)?,
        log: addresses.log,
    };
    let aligned = place.available.is_multiple_of(2) && place.used.is_multiple_of(4);
    aligned.then_some(place)
}
