//! One loop: a thread with its own engine, routes, pools and waiters. No lock is taken for a
//! request; what changes comes as deltas over a channel.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::io;
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::AtomicU32;
use std::task::Waker;
use std::time::Duration;

use dormouse_link::{Quiet, Refusal, RunNumber, Slot};
use dormouse_proxy_core::Host;
use dormouse_ring::Engine;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender};
use tokio::sync::{Notify, Semaphore};

use crate::delta::{FromLoop, Route, Table, ToLoop};
use crate::door::Door;
use crate::host::{HostState, Notice};
use crate::pool::Pool;
use crate::settings::{Settings, Target};
use crate::stats::Stats;

/// Spare buffers of a loop: × 64 KiB = 8 MiB at most.
const SPARE_MAX: usize = 128;

/// What one loop is made of.
pub(crate) struct Setup {
    pub(crate) settings: Arc<Settings>,
    pub(crate) listeners: Vec<OwnedFd>,
    pub(crate) deltas: UnboundedReceiver<ToLoop>,
    pub(crate) to_link: UnboundedSender<FromLoop>,
    pub(crate) stats: Arc<Stats>,
    /// Connections of all loops.
    pub(crate) connections: Arc<Semaphore>,
    /// Waiters of all loops and hosts.
    pub(crate) waiting: Arc<AtomicU32>,
    pub(crate) drain: Duration,
    /// Told once this loop accepts.
    pub(crate) ready: UnboundedSender<()>,
}

/// A host that is served straight from an upstream.
pub(crate) struct Plain<S> {
    pub(crate) target: Target,
    pub(crate) pool: Rc<Pool<S>>,
    pub(crate) unreached: Quiet,
}

/// What a host name leads to.
pub(crate) enum Found<S> {
    Plain(Rc<Plain<S>>),
    Managed(Rc<HostState<S>>),
    Unknown,
    /// No activator has said yet which hosts there are.
    TooEarly,
}

/// A connection to an activator whose routes are still coming.
struct Arrival {
    table: Arc<Table>,
    routes: Vec<Route>,
}

/// The loop's state, shared by its local tasks.
pub(crate) struct Loop<E: Engine> {
    pub(crate) engine: E,
    settings: RefCell<Arc<Settings>>,
    pub(crate) stats: Arc<Stats>,
    pub(crate) waiting: Arc<AtomicU32>,
    /// The process ends: each connection gets one more request at most.
    pub(crate) draining: Cell<bool>,
    /// The drain is nearly over: what would never end by itself is ended.
    pub(crate) ending: Cell<bool>,
    plain: RefCell<HashMap<Host, Rc<Plain<E::Stream>>>>,
    managed: RefCell<HashMap<Host, Rc<HostState<E::Stream>>>>,
    slots: RefCell<HashMap<Slot, Rc<HostState<E::Stream>>>>,
    table: RefCell<Option<Arc<Table>>>,
    arrival: RefCell<Option<Arrival>>,
    to_link: UnboundedSender<FromLoop>,
    /// Tells the link that a retired slot has nothing in flight.
    pub(crate) on_retired: Rc<dyn Fn(Slot)>,
    /// Buffers of clients that have no upstream now, for those that get one.
    spare: RefCell<Vec<Vec<u8>>>,
    pub(crate) clients: RefCell<HashMap<u64, Waker>>,
    /// Clients that are counted by `older` have smaller numbers than this.
    pub(crate) older_than: Cell<u64>,
    pub(crate) older: Cell<usize>,
    pub(crate) next_client: Cell<u64>,
    /// A client has ended, told during a drain.
    pub(crate) ended: Notify,
    /// The routes of a table are complete.
    pub(crate) settled: Notify,
}

/// Runs a loop until it is drained.
pub(crate) fn run<E: Engine>(engine: E, setup: Setup) -> io::Result<()> {
    engine.run(async move {
        let Setup { settings, listeners, mut deltas, to_link, drain, ready, .. } = setup;
        let retired = to_link.clone();
        let this = Rc::new(Loop {
            engine,
            plain: RefCell::default(),
            settings: RefCell::new(settings.clone()),
            stats: setup.stats,
            waiting: setup.waiting,
            draining: Cell::new(false),
            ending: Cell::new(false),
            managed: RefCell::default(),
            slots: RefCell::default(),
            table: RefCell::default(),
            arrival: RefCell::default(),
            // The link client outlives the loops; without it there is nobody to tell.
            on_retired: Rc::new(move |slot| drop(retired.send(FromLoop::Unrouted(slot)))),
            to_link,
            spare: RefCell::default(),
            clients: RefCell::default(),
            older_than: Cell::new(0),
            older: Cell::new(0),
            next_client: Cell::new(0),
            ended: Notify::new(),
            settled: Notify::new(),
        });
        this.take_settings(settings);
        let mut door = Door::new(listeners, setup.connections)?;
        door.open(&this);
        // It fails only when the process ends.
        ready.send(()).unwrap_or_default();
        while let Some(delta) = deltas.recv().await {
            if matches!(delta, ToLoop::Drain) {
                break;
            }
            this.apply(delta);
        }
        this.drain(&mut door, &mut deltas, drain).await;
        Ok(())
    })?
}

impl<E: Engine> Loop<E> {
    /// What a host name leads to.
    pub(crate) fn find(&self, host: &Host) -> Found<E::Stream> {
        if let Some(plain) = self.plain.borrow().get(host) {
            return Found::Plain(plain.clone());
        }
        match self.managed.borrow().get(host) {
            Some(state) => Found::Managed(state.clone()),
            None if self.settings.borrow().managed && self.table.borrow().is_none() => {
                Found::TooEarly
            }
            None => Found::Unknown,
        }
    }

    /// What the config says now.
    pub(crate) fn settings(&self) -> Arc<Settings> {
        self.settings.borrow().clone()
    }

    /// A plain route that did not change keeps its connections; a request that is under way keeps
    /// those of one that did.
    fn take_settings(&self, settings: Arc<Settings>) {
        let mut former = self.plain.take();
        let plain = settings.plain.iter().map(|(host, target)| {
            let kept = former.remove(host).filter(|known| known.target == *target);
            let fresh = || {
                let (target, pool) = (target.clone(), Rc::new(Pool::new()));
                Rc::new(Plain { target, pool, unreached: Quiet::default() })
            };
            (host.clone(), kept.unwrap_or_else(fresh))
        });
        self.plain.replace(plain.collect());
        self.settings.replace(settings);
    }

    /// Posts a wake.
    pub(crate) fn post(&self, slot: Slot) {
        self.stats.wakes_posted.add();
        self.tell_link(FromLoop::Post(slot));
    }

    /// Reports a run whose socket is missing or refuses.
    pub(crate) fn report_gone(&self, slot: Slot, run: RunNumber) {
        self.stats.instance_gone.add();
        self.tell_link(FromLoop::Gone { slot, run });
    }

    fn tell_link(&self, message: FromLoop) {
        // It fails only when the process ends.
        drop(self.to_link.send(message));
    }

    /// A buffer for what an upstream sends.
    pub(crate) fn borrow_buffer(&self) -> Vec<u8> {
        self.spare.borrow_mut().pop().unwrap_or_default()
    }

    /// Takes a buffer back.
    pub(crate) fn return_buffer(&self, mut buffer: Vec<u8>) {
        let mut spare = self.spare.borrow_mut();
        if spare.len() < SPARE_MAX {
            buffer.clear();
            spare.push(buffer);
        }
    }

    /// A connection was accepted, and is to be served.
    pub(crate) fn register(&self) -> u64 {
        let id = self.next_client.get();
        self.next_client.set(id + 1);
        self.clients.borrow_mut().insert(id, Waker::noop().clone());
        id
    }

    /// How to wake a client's task when the loop drains.
    pub(crate) fn set_waker(&self, id: u64, waker: Waker) {
        self.clients.borrow_mut().insert(id, waker);
    }

    /// A client's task ends.
    pub(crate) fn unregister(&self, id: u64) {
        self.clients.borrow_mut().remove(&id);
        if id < self.older_than.get() {
            self.older.set(self.older.get().saturating_sub(1));
        }
        if self.draining.get() {
            self.ended.notify_one();
        }
    }

    pub(crate) fn apply(&self, delta: ToLoop) {
        match delta {
            ToLoop::Connected(table) => {
                self.arrival.replace(Some(Arrival { table, routes: Vec::new() }));
            }
            ToLoop::Route(route) => {
                if let Some(arrival) = &mut *self.arrival.borrow_mut() {
                    arrival.routes.push(route);
                    return;
                }
                let table = self.table.borrow().clone();
                if let Some(table) = table {
                    let slot = route.slot;
                    self.place(&table, route);
                    self.tell_link(FromLoop::Routed(slot));
                }
            }
            ToLoop::RoutesDone => {
                if let Some(arrival) = self.arrival.take() {
                    self.settle(arrival);
                }
            }
            ToLoop::Unroute(slot) => {
                let state = self.slots.borrow_mut().remove(&slot);
                match state {
                    Some(state) => self.unroute(&state),
                    None => self.tell_link(FromLoop::Unrouted(slot)),
                }
            }
            ToLoop::Notify(slot) => {
                let state = self.slots.borrow().get(&slot).cloned();
                if state.is_some_and(|state| state.look_again()) {
                    self.post(slot);
                }
            }
            ToLoop::Refused { slot, reason, retry_after_s } => {
                let state = self.slots.borrow().get(&slot).cloned();
                if let Some(state) = state {
                    state.tell_all(Notice::Refused { reason, retry_after_s });
                }
            }
            ToLoop::Settings(settings) => self.take_settings(settings),
            ToLoop::Drain => (),
        }
    }

    fn unroute(&self, state: &Rc<HostState<E::Stream>>) {
        let mut managed = self.managed.borrow_mut();
        if managed.get(&state.name).is_some_and(|current| Rc::ptr_eq(current, state)) {
            managed.remove(&state.name);
        }
        if state.retire() {
            self.tell_link(FromLoop::Unrouted(state.slot()));
        }
    }

    /// Moves to a table whose routes are complete. What is in flight is counted there first; who
    /// waits is posted again, since nobody knows what became of the earlier posts.
    fn settle(&self, arrival: Arrival) {
        let Arrival { table, routes } = arrival;
        let mut leaving = self.managed.take();
        let old_slots = self.slots.take();
        for route in routes {
            let host = route.host.clone();
            if let Some(state) = leaving.remove(&host) {
                let same_table = self
                    .table
                    .borrow()
                    .as_ref()
                    .is_some_and(|old| old.view.table_id() == table.view.table_id());
                if !same_table || state.is_at(&table, route.slot) {
                    self.managed.borrow_mut().insert(host.clone(), state);
                } else {
                    // The slot went to another host and back: the old place keeps its count.
                    leaving.insert(host, state);
                }
            }
            self.place(&table, route);
        }
        for state in leaving.into_values().chain(old_slots.into_values()) {
            let managed = self.managed.borrow();
            if !managed.get(&state.name).is_some_and(|current| Rc::ptr_eq(current, &state)) {
                state.tell_all(Notice::Refused { reason: Refusal::Held, retry_after_s: 5 });
            }
        }
        self.table.replace(Some(table.clone()));
        self.settled.notify_waiters();
        let hosts: Vec<_> = self.managed.borrow().values().cloned().collect();
        for state in hosts {
            if state.is_wished_for() {
                // Sets the bit, so that later waiters need not post.
                let _posted_below = state.request();
                self.post(state.slot());
            }
            if state.is_missed() {
                state.tell_all(Notice::Look);
            }
        }
        self.tell_link(FromLoop::Moved(table.view.table_id()));
    }

    /// Puts a host at its place in a table.
    fn place(&self, table: &Arc<Table>, route: Route) {
        let slot = route.slot;
        let known = self.managed.borrow().get(&route.host).cloned();
        let state = match known {
            Some(state) if state.is_at(table, slot) => {
                state.set_limits(route.limits);
                state
            }
            Some(state) if self.arriving(table) => {
                state.set_limits(route.limits);
                state.move_to(table, slot);
                state
            }
            Some(old) => {
                self.unroute(&old);
                Rc::new(HostState::new(table.clone(), route))
            }
            None => Rc::new(HostState::new(table.clone(), route)),
        };
        self.managed.borrow_mut().insert(state.name.clone(), state.clone());
        self.slots.borrow_mut().insert(slot, state);
    }

    /// Whether this is not yet the loop's table.
    fn arriving(&self, table: &Arc<Table>) -> bool {
        self.table
            .borrow()
            .as_ref()
            .is_none_or(|current| current.view.table_id() != table.view.table_id())
    }
}
