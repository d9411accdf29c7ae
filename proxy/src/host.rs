//! One managed host as one loop sees it: its slot, what it has in flight, who waits for it.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::task::{Context, Poll, Waker};

use dormouse_link::message::RouteLimits;
use dormouse_link::protocol::{self, Entry, Request};
use dormouse_link::{Counters, Quiet, ReadWord, Refusal, RunNumber, Slot, Word};
use dormouse_proxy_core::Host;

use crate::clock;
use crate::delta::{Route, Table};
use crate::pool::Pool;

/// The state of a host on one loop.
pub(crate) struct HostState<S> {
    pub(crate) name: Host,
    place: RefCell<Place>,
    inflight: Cell<u32>,
    waiters: RefCell<Vec<Rc<Waiter>>>,
    /// Waiters on all loops.
    waiting: Arc<AtomicU32>,
    limits: RefCell<RouteLimits>,
    /// The route is gone: tell once nothing is in flight.
    retiring: Cell<bool>,
    pub(crate) pool: Rc<Pool<S>>,
    pub(crate) unreached: Quiet,
}

#[derive(Clone)]
struct Place {
    table: Arc<Table>,
    slot: Slot,
}

impl Place {
    /// The loop checks a route's slot against its table before it makes a place of them.
    fn parts(&self) -> Option<(ReadWord<'_>, &Counters)> {
        Some((self.table.view.word(self.slot)?, self.table.view.counters(self.slot)?))
    }
}

/// What a waiter hears.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Notice {
    /// Look again.
    Look,
    /// Refused.
    Refused { reason: Refusal, retry_after_s: u32 },
}

struct Waiter {
    /// A sidecar's: it joins a wake, and never asks for one.
    sidecar: bool,
    notice: Cell<Option<Notice>>,
    waker: Cell<Option<Waker>>,
}

/// Why no waiter is listed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TooMany;

impl<S: dormouse_ring::Stream> HostState<S> {
    pub(crate) fn new(table: Arc<Table>, route: Route) -> Self {
        Self {
            name: route.host,
            place: RefCell::new(Place { table, slot: route.slot }),
            inflight: Cell::new(0),
            waiters: RefCell::default(),
            waiting: route.waiters,
            limits: RefCell::new(route.limits),
            retiring: Cell::new(false),
            pool: Rc::new(Pool::new()),
            unreached: Quiet::default(),
        }
    }

    pub(crate) fn slot(&self) -> Slot {
        self.place.borrow().slot
    }

    pub(crate) fn limits(&self) -> RouteLimits {
        self.limits.borrow().clone()
    }

    pub(crate) fn set_limits(&self, limits: RouteLimits) {
        self.limits.replace(limits);
    }

    /// Where a run of this host listens.
    pub(crate) fn socket(&self, run: RunNumber) -> std::path::PathBuf {
        self.place.borrow().table.socket(&self.name, run)
    }

    /// What the word says, for a request that is not counted.
    pub(crate) fn peek(&self) -> Word {
        let none = Word::Refusing { reason: Refusal::Unknown };
        self.place.borrow().parts().map_or(none, |(word, _)| protocol::peek(word))
    }

    /// Whether someone's request for a wake is not yet answered.
    pub(crate) fn is_requested(&self) -> bool {
        self.place.borrow().parts().is_some_and(|(_, counters)| counters.requested())
    }

    /// Whether the session's deadline has passed: then nothing is sent, whatever the word says.
    pub(crate) fn is_past_deadline(&self) -> bool {
        self.place.borrow().table.view.deadline().is_some_and(clock::has_passed)
    }

    /// Whether an answer of this run may still be passed on. Where sessions end by time, not past the
    /// deadline, nor once the run was fenced: a session that was taken anew has a deadline ahead.
    pub(crate) fn believes(&self, run: RunNumber) -> bool {
        let Some(deadline) = self.place.borrow().table.view.deadline() else { return true };
        if clock::has_passed(deadline) {
            return false;
        }
        match self.peek() {
            Word::Awake { run: current } | Word::Stopping { run: current } => current == run,
            Word::Asleep | Word::Waking | Word::Refusing { .. } => false,
        }
    }

    /// Counts a request in, if the host is awake.
    pub(crate) fn enter(self: &Rc<Self>) -> Result<(RunNumber, Counted<S>), Word> {
        let place = self.place.borrow();
        let Some((word, counters)) = place.parts() else {
            return Err(Word::Refusing { reason: Refusal::Unknown });
        };
        match protocol::enter(word, counters) {
            Entry::Counted { run } => {
                counters.stamp_payload(clock::monotonic_ns());
                self.inflight.set(self.inflight.get() + 1);
                Ok((run, Counted { host: self.clone(), retired: None }))
            }
            Entry::NotAwake(word) => Err(word),
        }
    }

    /// Asks for a wake. The waiter is listed before.
    pub(crate) fn request(&self) -> Option<Request> {
        let place = self.place.borrow();
        place.parts().map(|(word, counters)| protocol::request(word, counters))
    }

    /// Lists a waiter, within the host's bound.
    pub(crate) fn wait(self: &Rc<Self>, sidecar: bool) -> Result<Ticket<S>, TooMany> {
        let limit = self.limits.borrow().waiters;
        if self.waiting.fetch_add(1, Ordering::Relaxed) >= limit {
            self.waiting.fetch_sub(1, Ordering::Relaxed);
            return Err(TooMany);
        }
        let waiter = Rc::new(Waiter { sidecar, notice: Cell::default(), waker: Cell::default() });
        self.waiters.borrow_mut().push(waiter.clone());
        Ok(Ticket { host: self.clone(), waiter })
    }

    /// Whether anyone waits who may ask for a wake.
    pub(crate) fn is_wished_for(&self) -> bool {
        self.waiters.borrow().iter().any(|waiter| !waiter.sidecar)
    }

    /// Whether only the word's change is waited for, which has happened already.
    pub(crate) fn is_missed(&self) -> bool {
        !self.waiters.borrow().is_empty() && matches!(self.peek(), Word::Awake { .. })
    }

    /// The activator spoke: reads the word again. Gives whether a wake must be posted.
    pub(crate) fn look_again(&self) -> bool {
        match self.peek() {
            Word::Awake { .. } => {
                self.tell_all(Notice::Look);
                false
            }
            Word::Refusing { reason } => {
                self.pool.clear();
                self.tell_all(Notice::Refused { reason, retry_after_s: 5 });
                false
            }
            Word::Asleep | Word::Waking | Word::Stopping { .. } => {
                // The app's own shutdown waits for its open connections.
                self.pool.clear();
                self.is_wished_for() && matches!(self.request(), Some(Request::Post))
            }
        }
    }

    /// Tells everyone who waits now.
    pub(crate) fn tell_all(&self, notice: Notice) {
        for waiter in self.waiters.borrow().iter() {
            waiter.notice.set(Some(notice));
            if let Some(waker) = waiter.waker.take() {
                waker.wake();
            }
        }
    }

    /// Moves to another table: what is in flight is counted there before anything reads its word.
    pub(crate) fn move_to(&self, table: &Arc<Table>, slot: Slot) {
        let new = Place { table: table.clone(), slot };
        if let Some((_, counters)) = new.parts() {
            counters.carry_over(self.inflight.get());
        }
        self.place.replace(new);
    }

    /// Whether it stands at this place already.
    pub(crate) fn is_at(&self, table: &Arc<Table>, slot: Slot) -> bool {
        let place = self.place.borrow();
        place.slot == slot && place.table.view.table_id() == table.view.table_id()
    }

    /// The route is gone. Gives whether nothing is in flight any more.
    pub(crate) fn retire(&self) -> bool {
        self.pool.clear();
        self.tell_all(Notice::Refused { reason: Refusal::Held, retry_after_s: 5 });
        self.retiring.set(true);
        self.inflight.get() == 0
    }
}

/// A request that counts as in flight until this is dropped.
pub(crate) struct Counted<S: dormouse_ring::Stream> {
    host: Rc<HostState<S>>,
    /// Called with the slot when this was the last request of a retired route.
    retired: Option<Rc<dyn Fn(Slot)>>,
}

impl<S: dormouse_ring::Stream> Counted<S> {
    /// Who hears that a retired route has nothing in flight any more.
    pub(crate) fn on_retired(&mut self, tell: Rc<dyn Fn(Slot)>) {
        self.retired = Some(tell);
    }

    /// Stamps payload of the client, where no kernel part does.
    pub(crate) fn stamp(&self) {
        if let Some((_, counters)) = self.host.place.borrow().parts() {
            counters.stamp_payload(clock::monotonic_ns());
        }
    }
}

impl<S: dormouse_ring::Stream> Drop for Counted<S> {
    fn drop(&mut self) {
        let left = self.host.inflight.get().saturating_sub(1);
        self.host.inflight.set(left);
        let place = self.host.place.borrow();
        if let Some((_, counters)) = place.parts() {
            protocol::leave(counters, clock::monotonic_ns());
        }
        if left == 0
            && self.host.retiring.get()
            && let Some(tell) = &self.retired
        {
            tell(place.slot);
        }
    }
}

/// A place among a host's waiters, given up on drop.
pub(crate) struct Ticket<S: dormouse_ring::Stream> {
    host: Rc<HostState<S>>,
    waiter: Rc<Waiter>,
}

impl<S: dormouse_ring::Stream> Ticket<S> {
    /// What was heard.
    pub(crate) fn poll(&self, cx: &mut Context<'_>) -> Poll<Notice> {
        if let Some(notice) = self.waiter.notice.take() {
            return Poll::Ready(notice);
        }
        self.waiter.waker.set(Some(cx.waker().clone()));
        Poll::Pending
    }
}

impl<S: dormouse_ring::Stream> Drop for Ticket<S> {
    fn drop(&mut self) {
        let mut waiters = self.host.waiters.borrow_mut();
        waiters.retain(|waiter| !Rc::ptr_eq(waiter, &self.waiter));
        self.host.waiting.fetch_sub(1, Ordering::Relaxed);
        if waiters.is_empty()
            && let Some((_, counters)) = self.host.place.borrow().parts()
        {
            // Nobody waits here: a later waiter posts again, whatever became of our post.
            counters.forget_request();
        }
    }
}
