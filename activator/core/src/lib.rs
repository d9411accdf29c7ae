//! Every decision of the activator. Does no I/O, reads no clock, never logs, cannot fail.
//!
//! [`Core::step`] takes an event and the three clocks, and pushes effects. Failures are events.
//! An effect that wants an answer carries a ticket; an answer with an old one is dropped and
//! counted. [`Core::next_due`] tells the driver when to send the next [`event::Event::Sweep`].

#![no_std]

extern crate alloc;

use alloc::collections::{BTreeMap, BTreeSet};
use alloc::string::String;
use alloc::vec::Vec;

#[cfg(test)]
mod automatic_tests;
#[cfg(test)]
mod crowd_tests;
pub mod effect;
pub mod event;
mod host;
#[cfg(test)]
mod host_snapshots;
pub mod ids;
pub mod position;
mod pressure;
mod queue;
pub mod record;
#[cfg(test)]
mod restart_tests;
#[cfg(test)]
mod rig;
#[cfg(test)]
mod scenario_tests;
mod session;
mod settings;
mod shared;
mod takeover;
pub mod time;
pub mod upload;
mod watch;

pub use host::HostView;
pub use settings::{Identity, Settings, TakeoverMode};
pub use shared::Counters;

use effect::Effect;
use event::{Answer, Cause, Event, Held, HostSeed, Leftover, Sample, Subject, Ticket};
use host::{Context, HostEntry, Lease, State, Tip, Why};
use ids::Slot;
use queue::Queue;
use record::HostRecord;
use session::{Session, Turn};
use shared::{Mode, Nonces, Shared};
use takeover::Takeover;
use time::{Mono, Nanos, Now, Wall};
use watch::Watches;

/// Bounds of the time between sweeps while a host is awake; a quarter of the shortest window else.
const SWEEP_MIN: Nanos = Nanos::from_millis(100);
const SWEEP_MAX: Nanos = Nanos::from_secs(30);

/// The activator's state machine.
#[derive(Clone, Debug, Hash)]
pub struct Core {
    shared: Shared,
    session: Session,
    takeover: Takeover,
    hosts: BTreeMap<Slot, HostEntry>,
    /// Hosts that are not plainly asleep: what a sweep looks at.
    active: BTreeSet<Slot>,
    /// Due times of all hosts.
    due: BTreeSet<(Wall, Slot)>,
    /// Hosts that came to rest and are to be let go: by a shutdown or a removal.
    resting: Vec<Slot>,
    /// Of those: synced once already, before they go.
    let_go_tried: BTreeSet<Slot>,
    /// Wakes that wait for their turn.
    queue: Queue,
    swept: Option<Mono>,
    exiting: bool,
}

impl Core {
    /// A core that waits for [`Event::Boot`].
    #[must_use]
    pub fn new(settings: Settings) -> Self {
        Self {
            shared: Shared {
                settings,
                nonces: Nonces::default(),
                counters: Counters::default(),
                watches: Watches::default(),
                mode: Mode::Staying,
                pressed: false,
            },
            session: Session::new(),
            takeover: Takeover::new(),
            hosts: BTreeMap::new(),
            active: BTreeSet::new(),
            due: BTreeSet::new(),
            resting: Vec::new(),
            let_go_tried: BTreeSet::new(),
            queue: Queue::default(),
            swept: None,
            exiting: false,
        }
    }

    /// One move.
    pub fn step(&mut self, now: Now, event: Event, fx: &mut Vec<Effect>) {
        // Before anything else is heard: an answer that comes after the deadline changes nothing.
        if self.session.expire(&mut self.shared, now) {
            self.lose("the session could not be renewed in time", now, fx);
        }
        match event {
            Event::Boot { base, memo, hosts } => self.boot(now, base, memo, hosts, fx),
            Event::Added(seed) => self.add(&seed, now, fx),
            Event::Treated(slot, policy) => {
                self.with(slot, now, fx, |host, _| host.policy = policy);
            }
            Event::Removed(slot) => self.remove(slot, now, fx),
            Event::Requested(slot, cause) => self.request(slot, cause, now, fx),
            Event::Rest(slot) => {
                self.queue.leave(slot);
                self.with(slot, now, fx, |host, ctx| host.rest(Why::Operator, ctx));
            }
            Event::Died(slot, run) => {
                self.with(slot, now, fx, |host, ctx| host.on_died(run, false, ctx));
            }
            Event::StoodDown(slot) => {
                let detail = "another writer was met in the replica";
                self.with(slot, now, fx, |host, ctx| host.fence(detail, ctx));
            }
            Event::Pressure(permille, samples) => self.press(now, permille, &samples, fx),
            Event::Sweep(samples) => self.sweep(now, &samples, fx),
            Event::Shutdown => self.shut_down(now, fx),
            Event::Takeover(target) => self.takeover.begin(target, fx),
            Event::HandOut(slot) => self.with(slot, now, fx, HostEntry::hand_out),
            Event::TakeIn(slot) => self.with(slot, now, fx, HostEntry::take_in),
            Event::Answer(ticket, answer) => self.answer(now, ticket, answer, fx),
        }
        self.after(now, fx);
    }

    /// When the next sweep is wanted, by MONOTONIC.
    #[must_use]
    pub fn next_due(&self, now: Now) -> Option<Mono> {
        let mut next = earlier(self.session.next_due(&self.shared, now), self.takeover.next_due());
        let mut window: Option<Nanos> = None;
        for host in self.active.iter().filter_map(|slot| self.hosts.get(slot)) {
            next = earlier(next, host.next_due(&self.session, now));
            if matches!(host.state, State::Awake { .. }) {
                let quarter = Nanos(host.policy.idle.0 / 4);
                window = Some(window.map_or(quarter, |w| w.min(quarter)));
            }
        }
        if let Some(window) = window {
            let interval = window.clamp(SWEEP_MIN, SWEEP_MAX);
            next = earlier(next, Some(self.swept.unwrap_or(now.mono) + interval));
        }
        let sleeping = self.due.iter().find(|(_, slot)| self.wants_due_wake(*slot));
        if let Some((due, _)) = sleeping {
            let left = Nanos(due.0.saturating_sub(now.wall.0).saturating_mul(time::MILLI_NS));
            next = earlier(next, Some(now.mono + left));
        }
        next
    }

    /// Awake hosts: those of which a sweep wants samples.
    pub fn awake(&self) -> impl Iterator<Item = Slot> + '_ {
        let is_awake = |slot: &&Slot| {
            self.hosts.get(slot).is_some_and(|host| matches!(host.state, State::Awake { .. }))
        };
        self.active.iter().filter(is_awake).copied()
    }

    /// One host, for people and tools.
    #[must_use]
    pub fn host(&self, slot: Slot) -> Option<HostView> {
        self.hosts.get(&slot).map(|host| self.view(host))
    }

    /// All hosts, for people and tools.
    pub fn hosts(&self) -> impl Iterator<Item = HostView> + '_ {
        self.hosts.values().map(|host| self.view(host))
    }

    fn view(&self, host: &HostEntry) -> HostView {
        let view = host.view();
        let waits = matches!(host.state, State::Asleep) && self.queue.has(host.slot);
        HostView { state: if waits { "queued" } else { view.state }, ..view }
    }

    /// The session: a word and a detail.
    #[must_use]
    pub fn session(&self, now: Now) -> (&'static str, String) {
        self.session.describe(now)
    }

    /// Counters by name.
    #[must_use]
    pub const fn counters(&self) -> &Counters {
        &self.shared.counters
    }

    fn boot(
        &mut self,
        now: Now,
        base: String,
        memo: Option<event::SessionMemo>,
        hosts: Vec<HostSeed>,
        fx: &mut Vec<Effect>,
    ) {
        self.shared.nonces = Nonces::new(base);
        self.session.remember(memo);
        for seed in hosts {
            self.add(&seed, now, fx);
        }
    }

    fn add(&mut self, seed: &HostSeed, now: Now, fx: &mut Vec<Effect>) {
        let slot = seed.slot;
        let entry = HostEntry::new(seed, &self.shared);
        let former = self.hosts.insert(slot, entry);
        assert!(former.is_none(), "invariant 8: a slot was given to a second host");
        self.due.extend(seed.due.map(|due| (due, slot)));
        let held = seed.leftover.as_ref().and_then(|leftover| self.lease_of(leftover, now));
        if held.is_some() {
            self.session.hold();
        }
        self.with(slot, now, fx, |host, ctx| {
            if let (Some(leftover), Some((record, held))) = (&seed.leftover, held) {
                host.take_over(leftover.run, record, held, ctx);
            } else if let Some(leftover) = &seed.leftover {
                host.stop_leftover(leftover.run, ctx);
            } else if let Some(nonce) = &seed.releasing {
                host.resume_release(nonce, ctx);
            }
        });
    }

    /// The lease that an instance of an earlier activator goes on under, when it may.
    fn lease_of(&self, leftover: &Leftover, now: Now) -> Option<(HostRecord, Held)> {
        let held = leftover.held.as_ref()?;
        let record = HostRecord::decode(&held.record).ok()?;
        let may = self.session.may_hold(&self.shared, &record, now);
        may.then(|| (record, held.clone()))
    }

    fn remove(&mut self, slot: Slot, now: Now, fx: &mut Vec<Effect>) {
        self.with(slot, now, fx, |host, ctx| {
            host.removed = true;
            host.rest(Why::Removed, ctx);
        });
    }

    fn shut_down(&mut self, now: Now, fx: &mut Vec<Effect>) {
        self.shared.mode = Mode::Leaving;
        let handed: Vec<Slot> =
            self.hosts.values().filter(|host| host.handover.is_some()).map(|h| h.slot).collect();
        for slot in handed {
            let why = "the activator is going";
            self.with(slot, now, fx, |host, ctx| host.end_handover(Err(why.into()), ctx));
        }
        let active: Vec<Slot> = self.active.iter().copied().collect();
        for slot in active {
            self.with(slot, now, fx, |host, ctx| host.rest(Why::Leaving, ctx));
        }
        self.resting.extend(self.hosts.keys());
    }

    /// A host at rest that is to be let go: its release, or its end.
    fn let_go(&mut self, slot: Slot, now: Now, fx: &mut Vec<Effect>) {
        let leaving = self.shared.mode == Mode::Leaving;
        let can_write = self.session.may_write(now);
        let Some(host) = self.hosts.get_mut(&slot) else { return };
        let goes_out = host.goes_out();
        if !host.is_at_rest() || !(leaving || host.removed || goes_out) {
            return;
        }
        if goes_out && !leaving && !host.removed {
            return self.with(slot, now, fx, HostEntry::go_out);
        }
        if host.unsynced.is_some() && can_write && !self.let_go_tried.contains(&slot) {
            // One try: what is left after it stays on this disk, and is said to.
            self.let_go_tried.insert(slot);
            return self.with(slot, now, fx, HostEntry::begin_sync);
        }
        if matches!(host.lease, Lease::Owned { .. }) {
            if host.removed && !leaving && host.tip != Tip::Doubtful && !can_write {
                return; // Tried again when the session is live.
            }
            let mut releasing = false;
            self.with(slot, now, fx, |host, ctx| releasing = host.release(ctx));
            if releasing {
                return;
            }
        }
        let Some(host) = self.hosts.get_mut(&slot) else { return };
        if host.removed {
            let due = host.due;
            self.hosts.remove(&slot);
            self.let_go_tried.remove(&slot);
            self.active.remove(&slot);
            if let Some(due) = due {
                self.due.remove(&(due, slot));
            }
            fx.push(Effect::Retired(slot));
        } else {
            // Unclean: left owned in the store, so that whoever comes next fences it.
            host.lease = match core::mem::replace(&mut host.lease, Lease::None) {
                Lease::Owned { .. } | Lease::None => Lease::None,
                remembered @ Lease::Remembered { .. } => remembered,
            };
        }
    }

    fn sweep(&mut self, now: Now, samples: &[Sample], fx: &mut Vec<Effect>) {
        self.swept = Some(now.mono);
        self.session.tick(&mut self.shared, now, fx);
        self.takeover.tick(&self.shared, now, fx);
        let active: Vec<Slot> = self.active.iter().copied().collect();
        for slot in active {
            self.with(slot, now, fx, HostEntry::on_tick);
        }
        for sample in samples {
            self.judge_idle(now, sample, fx);
        }
        let due: Vec<Slot> = self
            .due
            .iter()
            .take_while(|(due, _)| *due <= now.wall)
            .map(|(_, slot)| *slot)
            .collect();
        for slot in due {
            if self.wants_due_wake(slot) {
                self.shared.counters.add("due_wakes");
                self.request(slot, Cause::Due, now, fx);
            }
        }
    }

    fn wants_due_wake(&self, slot: Slot) -> bool {
        let rests = |state: &State| matches!(state, State::Asleep | State::Frozen { .. });
        self.shared.mode == Mode::Staying
            && !self.queue.has(slot)
            && self.hosts.get(&slot).is_some_and(|host| !host.removed && rests(&host.state))
    }

    fn judge_idle(&mut self, now: Now, sample: &Sample, fx: &mut Vec<Effect>) {
        let can_upload = self.session.may_write(now);
        let Some(host) = self.hosts.get(&sample.slot) else { return };
        let State::Awake { since, .. } = host.state else { return };
        let quiet = now.mono.since(sample.last_active.max(since)) >= host.policy.idle;
        // With the store away a sleep could not finish: the host stays up, its data with it.
        let saves = can_upload && !sample.stalled;
        if sample.in_flight == 0 && quiet && saves {
            self.with(sample.slot, now, fx, HostEntry::on_idle);
        }
    }

    fn answer(&mut self, now: Now, ticket: Ticket, answer: Answer, fx: &mut Vec<Effect>) {
        let current = match ticket.subject {
            Subject::Session => Some(self.session.attempt()),
            Subject::Takeover => Some(self.takeover.attempt()),
            Subject::Host(slot) => self.hosts.get(&slot).map(|host| host.attempt),
        };
        if current != Some(ticket.attempt) {
            self.shared.counters.add("stale_answers");
            return;
        }
        match ticket.subject {
            Subject::Session => {
                let turn = self.session.on_answer(&mut self.shared, now, answer, fx);
                self.turn(now, turn, fx);
            }
            Subject::Takeover => self.takeover.on_answer(&mut self.shared, now, answer, fx),
            Subject::Host(slot) => {
                self.with(slot, now, fx, |host, ctx| host.on_answer(answer, ctx));
            }
        }
    }

    fn turn(&mut self, now: Now, turn: Turn, fx: &mut Vec<Effect>) {
        match turn {
            Turn::None | Turn::Ended => {}
            Turn::Live => {
                let active: Vec<Slot> = self.active.iter().copied().collect();
                for slot in active {
                    self.with(slot, now, fx, HostEntry::on_session_live);
                }
                let removed = self.hosts.values().filter(|host| host.removed);
                self.resting.extend(removed.map(|host| host.slot));
            }
            Turn::Lost => self.lose("the box's session was lost", now, fx),
        }
    }

    /// No host may run any more.
    fn lose(&mut self, detail: &str, now: Now, fx: &mut Vec<Effect>) {
        let all: Vec<Slot> = self.hosts.keys().copied().collect();
        for slot in all {
            self.with(slot, now, fx, |host, ctx| host.fence(detail, ctx));
        }
    }

    /// What follows from a move, whichever it was.
    fn after(&mut self, now: Now, fx: &mut Vec<Effect>) {
        self.begin_wakes(now, fx);
        while let Some(slot) = self.resting.pop() {
            self.let_go(slot, now, fx);
        }
        let booted = !self.shared.nonces.base().is_empty();
        if booted && self.session.waits_for_hosts() && !self.hosts_keep_it_waiting() {
            self.session.begin(&self.shared, fx);
        }
        if self.shared.mode == Mode::Leaving && !self.exiting && self.is_settled() {
            self.exiting = self.session.end(&mut self.shared, now, fx);
            if self.exiting {
                fx.push(Effect::Exit);
            }
        }
    }

    /// A new epoch waits for everything of an earlier one; the same epoch only for what is not
    /// taken over under it.
    fn hosts_keep_it_waiting(&self) -> bool {
        let goes_on = |host: &HostEntry| self.session.holds() && host.is_owned();
        let running = |host: &&HostEntry| host.may_run();
        let mut hosts = self.active.iter().filter_map(|slot| self.hosts.get(slot)).filter(running);
        hosts.any(|host| !goes_on(host))
    }

    fn is_settled(&self) -> bool {
        self.active.iter().filter_map(|slot| self.hosts.get(slot)).all(HostEntry::is_at_rest)
    }

    /// Moves one host, then puts it into the indexes where it now belongs.
    fn with(
        &mut self,
        slot: Slot,
        now: Now,
        fx: &mut Vec<Effect>,
        act: impl FnOnce(&mut HostEntry, &mut Context<'_>),
    ) {
        let Some(host) = self.hosts.get_mut(&slot) else { return };
        let before = host.due;
        let mut context = Context { shared: &mut self.shared, session: &self.session, now, fx };
        act(host, &mut context);
        if host.is_at_rest() {
            host.settle_handover(&mut context);
        }
        if host.due != before {
            if let Some(before) = before {
                self.due.remove(&(before, slot));
            }
            self.due.extend(host.due.map(|due| (due, slot)));
        }
        if matches!(host.state, State::Asleep) && host.unsynced.is_none() {
            self.active.remove(&slot);
        } else {
            self.active.insert(slot);
        }
        let goes = host.removed || host.goes_out() || self.shared.mode == Mode::Leaving;
        if host.is_at_rest() && goes {
            self.resting.push(slot);
        }
    }
}

fn earlier(a: Option<Mono>, b: Option<Mono>) -> Option<Mono> {
    match (a, b) {
        (Some(a), Some(b)) => Some(a.min(b)),
        (one, None) | (None, one) => one,
    }
}
