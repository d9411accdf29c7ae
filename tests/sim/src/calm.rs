//! The calm after the storm, in which invariant 7 must hold: everything requested wakes, everything
//! idle sleeps, what is due wakes by itself, and a shutdown lets everything go.

use dormouse_core::event::Event;
use dormouse_core::ids::Host;
use dormouse_core::record::HostState;

use crate::clock::{S, Time};
use crate::proxies::Ended;
use crate::world::{BoxIndex, Item, World, host};

/// Until every box has a session again: its own renewals, or an operator's takeover of its name.
const SESSIONS_WITHIN: Time = 240 * S;
/// Late writes have landed by then, and what was begun in the storm has ended.
const SETTLE: Time = 200 * S;
/// Until a requested host serves: its backoff, a restore, and a stop that was under way.
const AWAKE_WITHIN: Time = 150 * S;
/// After the idle window: a sweep, the question, a deaf instance, the last sync.
const ASLEEP_WITHIN: Time = 100 * S;
/// After a due time: a sweep, and a start.
const DUE_WITHIN: Time = 40 * S;
/// A shutdown.
const EXIT_WITHIN: Time = 90 * S;
/// A due time as promised in calm.
const DUE_IN: Time = 60 * S;

impl World {
    /// Everything is mended, then must work.
    pub fn calm(&mut self) {
        self.tell(|| "calm begins".into());
        self.stormy = false;
        for b in 0..self.boxes.len() {
            self.boxes[b].outage = 0;
            self.boxes[b].clock.mend_wall();
            self.after(0, Item::Restart(b));
        }
        self.run_until(self.time + SETTLE);
        self.invariant_7_sessions();
        self.take_all_in();
        for number in 0..self.plan.hosts {
            self.invariant_7_requested_hosts_wake(&host(number));
        }
        if self.violation.is_some() {
            return;
        }
        self.ledger.due_in = Some(DUE_IN);
        self.invariant_7_idle_hosts_sleep();
        self.invariant_7_due_hosts_wake();
        if self.violation.is_some() {
            return;
        }
        self.invariant_7_a_shutdown_ends();
        self.invariant_10_every_write_is_somewhere();
        for host in self.store.replicated() {
            self.invariant_3_durable_data_is_in_every_restore(&host);
        }
    }

    /// Operators take back what is outside; on any box, where its own has lost its disk.
    fn take_all_in(&mut self) {
        for number in 0..self.plan.hosts {
            let host = host(number);
            for _ in 0..6 {
                let Some(record) = self.store.hosts.get(&host) else { break };
                if record.state != HostState::Outside {
                    break;
                }
                let id = record.id.clone();
                let own = self.boxes.iter().position(|world| world.id == id);
                let b = own.unwrap_or_else(|| self.rng.index(self.boxes.len()));
                let slot = self.slot_of(b, &host);
                if let Some(slot) = slot {
                    self.core_event(b, Event::TakeIn(slot));
                }
                self.run_until(self.time + 30 * S);
            }
        }
    }

    fn slot_of(&self, b: BoxIndex, host: &Host) -> Option<dormouse_core::ids::Slot> {
        let activator = self.boxes[b].activator.as_ref()?;
        activator.hosts.iter().find(|(_, hosted)| hosted.host == *host).map(|(slot, _)| *slot)
    }

    /// A box's session, as its core says.
    #[must_use]
    pub fn session_word(&self, b: BoxIndex) -> &'static str {
        let now = self.boxes[b].clock.now(self.time);
        self.boxes[b].activator.as_ref().map_or("none", |a| a.core.session(now).0)
    }

    fn invariant_7_sessions(&mut self) {
        let end = self.time + SESSIONS_WITHIN;
        let all = |world: &Self| (0..world.boxes.len()).all(|b| world.session_word(b) == "live");
        while self.violation.is_none() && self.time < end && !all(self) {
            for b in 0..self.boxes.len() {
                self.add_missing(b);
                if self.session_word(b) == "refused" {
                    // The operator's word that whoever had this name is gone.
                    let by = self.rng.index(self.boxes.len());
                    let name = self.boxes[b].name.clone();
                    self.core_event(by, Event::Takeover(name));
                }
            }
            self.run_while(50 * S, all);
        }
        if !all(self) {
            let words: Vec<&str> = (0..self.boxes.len()).map(|b| self.session_word(b)).collect();
            self.violate(7, &format!("no session in calm: {words:?}"));
        }
        for b in 0..self.boxes.len() {
            self.add_missing(b);
        }
        self.run_until(self.time + 5 * S);
        for b in 0..self.boxes.len() {
            self.add_missing(b);
        }
    }

    /// The box that owns a host, else any.
    fn right_box(&mut self, host: &Host) -> BoxIndex {
        let any = self.rng.index(self.boxes.len());
        let record = self.store.hosts.get(host).filter(|r| r.state == HostState::Owned);
        let owner = record.and_then(|r| self.boxes.iter().position(|b| b.id == r.id));
        owner.unwrap_or(any)
    }

    /// A host's state on a box, as its core says.
    #[must_use]
    pub fn state_of(&self, b: BoxIndex, host: &Host) -> &'static str {
        let Some(activator) = &self.boxes[b].activator else { return "none" };
        activator.core.hosts().find(|view| view.host == *host).map_or("none", |view| view.state)
    }

    /// Whether it is awake, and healthy.
    #[must_use]
    pub fn is_served(&self, b: BoxIndex, host: &Host) -> bool {
        let healthy = |i: &crate::instances::Instance| i.b == b && i.host == *host && i.healthy;
        self.state_of(b, host) == "awake" && self.instances.values().any(healthy)
    }

    fn invariant_7_requested_hosts_wake(&mut self, host: &Host) {
        let end = self.time + AWAKE_WITHIN;
        while self.violation.is_none() {
            let b = self.right_box(host);
            let Some(id) = self.request(b, host, true) else { return };
            self.run_while(35 * S, |w| w.requests.get(&id).is_none_or(|r| r.ended.is_some()));
            let ended = self.requests.get(&id).and_then(|request| request.ended);
            if ended == Some(Ended::Served) && self.is_served(b, host) {
                return;
            }
            if self.time > end {
                let views: Vec<_> = self
                    .boxes
                    .iter()
                    .filter_map(|b| b.activator.as_ref()?.core.hosts().find(|v| v.host == *host))
                    .collect();
                return self
                    .violate(7, &format!("{host} was requested and is not awake: {views:?}"));
            }
            self.run_until(self.time + 2 * S);
        }
    }

    fn invariant_7_idle_hosts_sleep(&mut self) {
        let rests =
            |world: &Self| {
                world.instances.is_empty()
                    && world.boxes.iter().filter_map(|b| b.activator.as_ref()).all(|a| {
                        a.core.hosts().all(|view| matches!(view.state, "asleep" | "backoff"))
                    })
            };
        let within = self.plan.idle * 5 / 4 + self.plan.frozen.unwrap_or(0) + ASLEEP_WITHIN;
        if !self.run_while(within, rests) {
            let states: Vec<_> = self
                .boxes
                .iter()
                .filter_map(|b| b.activator.as_ref())
                .map(|a| a.core.hosts().map(|v| (v.state, v.problem)).collect::<Vec<_>>())
                .collect();
            self.violate(7, &format!("an idle host does not sleep: {states:?}"));
        }
    }

    fn invariant_7_due_hosts_wake(&mut self) {
        self.ledger.due_in = None;
        let mut promised: Vec<_> = std::mem::take(&mut self.ledger.promised).into_iter().collect();
        // In their order: who is due first may sleep again before the last one wakes.
        promised.sort_by_key(|((b, _), due)| {
            due.0.saturating_sub(self.boxes[*b].clock.now(self.time).wall.0)
        });
        for ((b, host), due) in promised {
            let wall = self.boxes[b].clock.now(self.time).wall;
            let left = due.0.saturating_sub(wall.0) * crate::clock::MS;
            let served = self.run_while(left + DUE_WITHIN, |world| world.is_served(b, &host));
            if !served {
                let state = self.state_of(b, &host);
                self.violate(7, &format!("{host} was due on box{b} and is {state}"));
            }
        }
    }

    fn invariant_7_a_shutdown_ends(&mut self) {
        self.ledger.over = true;
        self.ledger.exited.clear();
        for b in 0..self.boxes.len() {
            self.shut_down(b);
        }
        let all = self.boxes.len();
        if !self.run_while(EXIT_WITHIN, |world| world.ledger.exited.len() == all) {
            let exited = self.ledger.exited.clone();
            self.violate(7, &format!("a shutdown does not end; only {exited:?} did"));
        }
    }
}
