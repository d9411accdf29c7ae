//! The wake table of an activator: words, an area a proxy, and the activator's steps on them.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::AtomicU64;

use dormouse_core::ids::Slot;
use dormouse_link::protocol;
use dormouse_link::{Counters, NotStopped, OwnWord, ReadWord, RunNumber, Word};

use crate::proxies::{Heard, ProxyId};
use crate::world::{BoxIndex, Life, World};

/// A wake table, with an area a proxy.
#[derive(Debug)]
pub struct Table {
    pub(crate) words: BTreeMap<Slot, AtomicU64>,
    pub(crate) areas: BTreeMap<ProxyId, BTreeMap<Slot, Counters>>,
    pub(crate) acknowledged: BTreeSet<ProxyId>,
    leaving: BTreeMap<Slot, BTreeSet<ProxyId>>,
    pub(crate) merged: BTreeMap<Slot, u64>,
}

impl Table {
    /// Everything asleep.
    #[must_use]
    pub fn new(slots: &[Slot]) -> Self {
        Self {
            words: slots.iter().map(|slot| (*slot, AtomicU64::new(0))).collect(),
            areas: BTreeMap::new(),
            acknowledged: BTreeSet::new(),
            leaving: BTreeMap::new(),
            merged: BTreeMap::new(),
        }
    }

    /// One more slot.
    pub fn make(&mut self, slot: Slot) {
        self.words.entry(slot).or_default();
        for area in self.areas.values_mut() {
            area.entry(slot).or_default();
        }
    }

    /// A removed host's slot is held until these proxies have let go of it.
    pub fn leave(&mut self, slot: Slot, proxies: &[ProxyId]) {
        self.merged.remove(&slot);
        if !proxies.is_empty() {
            self.leaving.insert(slot, proxies.iter().copied().collect());
        }
    }

    /// Whether the slot must not be given away yet.
    #[must_use]
    pub fn holds(&self, slot: Slot) -> bool {
        self.leaving.contains_key(&slot)
    }

    pub(crate) fn let_go(&mut self, proxy: ProxyId, slot: Option<Slot>) {
        for (held, waiting) in &mut self.leaving {
            if slot.is_none_or(|slot| slot == *held) {
                waiting.remove(&proxy);
            }
        }
        self.leaving.retain(|_, waiting| !waiting.is_empty());
    }

    /// In flight, and last activity by MONOTONIC.
    #[must_use]
    pub fn activity(&self, slot: Slot) -> (u64, u64) {
        let merged = self.merged.get(&slot).copied().unwrap_or(0);
        self.areas.values().filter_map(|area| area.get(&slot)).fold((0, merged), |sum, area| {
            let last = area.last_payload_ns().max(area.last_out_ns());
            (sum.0 + u64::from(area.inflight()), sum.1.max(last))
        })
    }

    fn counters(&self, slot: Slot) -> impl Iterator<Item = &Counters> {
        self.areas.values().filter_map(move |area| area.get(&slot))
    }

    pub(crate) fn parts(&self, proxy: ProxyId, slot: Slot) -> Option<(ReadWord<'_>, &Counters)> {
        let word = self.words.get(&slot)?;
        Some((ReadWord::over(word), self.areas.get(&proxy)?.get(&slot)?))
    }
}

impl World {
    /// Whether every live proxy counts in this table.
    pub(crate) fn is_settled(&self, b: BoxIndex, life: Life) -> bool {
        let world = &self.boxes[b];
        let table = world.tables.get(&life);
        world.proxies.keys().all(|id| table.is_some_and(|t| t.acknowledged.contains(id)))
    }

    /// Bits cleared, word published, proxies told.
    pub fn publish(&mut self, b: BoxIndex, slot: Slot, to: Word) {
        self.resolve(b, slot, Some(to));
        self.tell_proxies(b, &Heard::Notify(slot));
    }

    /// Sends all waiters of a slot away.
    pub fn refuse(&mut self, b: BoxIndex, slot: Slot) {
        self.resolve(b, slot, None);
        self.tell_proxies(b, &Heard::Refused(slot));
    }

    fn resolve(&self, b: BoxIndex, slot: Slot, to: Option<Word>) {
        let Some(life) = self.boxes[b].activator.as_ref().map(|a| a.life) else { return };
        let Some(table) = self.boxes[b].tables.get(&life) else { return };
        let Some(word) = table.words.get(&slot).map(OwnWord::over) else { return };
        let now = word.load();
        let to = to.unwrap_or(match now {
            Word::Waking => Word::Asleep,
            other @ (Word::Asleep
            | Word::Awake { .. }
            | Word::Stopping { .. }
            | Word::Refusing { .. }) => other,
        });
        let met = protocol::resolve(word, table.counters(slot), now, to);
        debug_assert!(met.is_ok(), "invariant 8: somebody else wrote a word");
    }

    /// The idle stop.
    pub fn try_stop(&mut self, b: BoxIndex, slot: Slot, run: RunNumber) -> bool {
        let Some(life) = self.boxes[b].activator.as_ref().map(|a| a.life) else { return false };
        if !self.is_settled(b, life) {
            return false;
        }
        let Some(table) = self.boxes[b].tables.get(&life) else { return false };
        let Some(word) = table.words.get(&slot).map(OwnWord::over) else { return false };
        match protocol::try_stop(word, run, table.counters(slot)) {
            Ok(()) => true,
            Err(NotStopped::InFlight(_)) => {
                self.publish(b, slot, Word::Awake { run });
                false
            }
            Err(NotStopped::Changed(_)) => false,
        }
    }
}
