//! Wakes that wait for their turn: so many are under way at a time, the rest in the order in which
//! they were asked for. What this box owns needs no store, and so does not wait behind what is stuck for
//! its lease.

use alloc::collections::VecDeque;
use alloc::vec::Vec;

use crate::Core;
use crate::effect::Effect;
use crate::event::Cause;
use crate::host::{HostEntry, State};
use crate::ids::Slot;
use crate::shared::Mode;
use crate::time::{Mono, Nanos, Now};

/// Who waits, first come first.
#[derive(Clone, Debug, Default, Hash)]
pub(crate) struct Queue {
    waiting: VecDeque<Waiting>,
}

#[derive(Clone, Debug, Hash)]
struct Waiting {
    slot: Slot,
    cause: Cause,
    since: Mono,
}

impl Queue {
    pub(crate) fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    pub(crate) fn has(&self, slot: Slot) -> bool {
        self.waiting.iter().any(|waiting| waiting.slot == slot)
    }

    /// Behind all others; one that waits keeps its place.
    pub(crate) fn join(&mut self, slot: Slot, cause: Cause, now: Mono) {
        if !self.has(slot) {
            self.waiting.push_back(Waiting { slot, cause, since: now });
        }
    }

    pub(crate) fn leave(&mut self, slot: Slot) {
        self.waiting.retain(|waiting| waiting.slot != slot);
    }

    /// The first for whom there is room. Whoever waited longer than `patience` is dropped: those who asked
    /// have been told.
    pub(crate) fn next(
        &mut self,
        now: Mono,
        patience: Nanos,
        has_room: impl Fn(Slot) -> bool,
    ) -> Option<(Slot, Cause)> {
        self.waiting.retain(|waiting| now.since(waiting.since) < patience);
        let place = self.waiting.iter().position(|waiting| has_room(waiting.slot))?;
        self.waiting.remove(place).map(|waiting| (waiting.slot, waiting.cause))
    }
}

impl Core {
    /// Somebody wants it awake: at once, or when it is its turn.
    pub(crate) fn request(&mut self, slot: Slot, cause: Cause, now: Now, fx: &mut Vec<Effect>) {
        let Some(host) = self.hosts.get(&slot) else { return };
        let begins = match host.state {
            State::Asleep => true,
            State::Backoff { until, .. } => until <= now.mono,
            State::Leasing { .. }
            | State::Restoring { .. }
            | State::Opening { .. }
            | State::Starting { .. }
            | State::Attaching { .. }
            | State::Resuming { .. }
            | State::Awake { .. }
            | State::Freezing { .. }
            | State::Frozen { .. }
            | State::Thawing { .. }
            | State::Stopping { .. }
            | State::Saving { .. }
            | State::Parking { .. }
            | State::Fenced { .. }
            | State::Unproven { .. } => false,
        };
        let goes = host.removed || host.goes_out() || self.shared.mode == Mode::Leaving;
        if begins && !goes {
            self.queue.join(slot, cause, now.mono);
            self.begin_wakes(now, fx);
            if self.queue.has(slot) {
                self.shared.counters.add("wakes_queued");
            }
            return;
        }
        self.with(slot, now, fx, |host, ctx| host.on_request(cause, ctx));
    }

    /// As many as there is room for.
    pub(crate) fn begin_wakes(&mut self, now: Now, fx: &mut Vec<Effect>) {
        let settings = &self.shared.settings;
        let most = usize::try_from(settings.wakes_max).unwrap_or(usize::MAX);
        let patience = settings.wake_budget;
        while !self.queue.is_empty() {
            let (leasing, starting) = self.under_way();
            let hosts = &self.hosts;
            let has_room = |slot| {
                let is_owned = hosts.get(&slot).is_some_and(HostEntry::is_owned);
                most == 0 || starting + if is_owned { 0 } else { leasing } < most
            };
            let Some((slot, cause)) = self.queue.next(now.mono, patience, has_room) else { return };
            self.with(slot, now, fx, |host, ctx| host.on_request(cause, ctx));
        }
    }

    /// Wakes that ask for their lease, and those that are beyond.
    fn under_way(&self) -> (usize, usize) {
        let hosts = self.active.iter().filter_map(|slot| self.hosts.get(slot));
        hosts.fold((0, 0), |(leasing, starting), host| match host.state {
            State::Leasing { .. } => (leasing + 1, starting),
            State::Restoring { .. }
            | State::Opening { .. }
            | State::Starting { .. }
            | State::Attaching { .. } => (leasing, starting + 1),
            State::Asleep
            | State::Resuming { .. }
            | State::Awake { .. }
            | State::Freezing { .. }
            | State::Frozen { .. }
            | State::Thawing { .. }
            | State::Stopping { .. }
            | State::Saving { .. }
            | State::Parking { .. }
            | State::Fenced { .. }
            | State::Unproven { .. }
            | State::Backoff { .. } => (leasing, starting),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_keeps_its_place_and_who_waited_too_long_is_dropped() {
        let mut queue = Queue::default();
        let patience = Nanos(10);
        for (slot, at) in [(1, 0), (2, 5), (1, 6), (3, 7), (4, 8)] {
            queue.join(Slot(slot), Cause::Client, Mono(at));
        }
        queue.leave(Slot(3));
        assert!(queue.has(Slot(2)) && !queue.has(Slot(3)));
        let mut next = |at, room: &dyn Fn(Slot) -> bool| {
            queue.next(Mono(at), patience, room).map(|(slot, _)| slot)
        };
        assert_eq!(next(9, &|_| false), None, "no room for anybody");
        assert_eq!(next(9, &|slot| slot != Slot(1)), Some(Slot(2)), "it passes who has none");
        assert_eq!(next(9, &|_| true), Some(Slot(1)));
        assert_eq!(next(18, &|_| true), None, "it waited for ten");
        assert!(queue.is_empty());
    }
}
