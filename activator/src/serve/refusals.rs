//! What the log says of refused requests. Clients decide how often they ask, so they would decide how
//! large the log grows: a host's refusals are one line for each reason, and a count once a minute and
//! at the end.

use std::collections::BTreeMap;

use dormouse_core::ids::Slot;
use dormouse_core::time::Mono;
use dormouse_link::{Quiet, Refusal};

/// Hosts that are being refused.
#[derive(Debug, Default)]
pub(crate) struct Refusals(BTreeMap<Slot, Streak>);

#[derive(Debug)]
struct Streak {
    reason: Refusal,
    quiet: Quiet,
}

impl Refusals {
    /// One more. How many there were since the last line, this one included, where a line is due.
    pub(crate) fn note(&mut self, slot: Slot, reason: Refusal, now: Mono) -> Option<u64> {
        let begun = || Streak { reason, quiet: Quiet::default() };
        let streak = self.0.entry(slot).or_insert_with(begun);
        if streak.reason != reason {
            streak.reason = reason;
            streak.quiet.hurry();
        }
        streak.quiet.due(now.0)
    }

    /// It is served again, or gone: the reason, and the refusals that no line has told yet.
    pub(crate) fn end(&mut self, slot: Slot) -> Option<(Refusal, u64)> {
        let streak = self.0.remove(&slot)?;
        let untold = streak.quiet.untold();
        (untold > 0).then_some((streak.reason, untold))
    }
}

#[cfg(test)]
mod tests {
    use dormouse_core::time::Nanos;

    use super::*;

    fn at(seconds: u64) -> Mono {
        Mono(0) + Nanos::from_secs(seconds)
    }

    #[test]
    fn a_line_a_reason_and_a_count_a_minute_however_often_clients_ask() {
        let (mut refusals, slot) = (Refusals::default(), Slot(1));
        assert_eq!(refusals.note(slot, Refusal::Broken, at(5)), Some(1));
        for _ in 0..1000 {
            assert_eq!(refusals.note(slot, Refusal::Broken, at(5)), None);
            assert_eq!(refusals.note(slot, Refusal::Broken, at(64)), None);
        }
        assert_eq!(refusals.note(Slot(2), Refusal::Broken, at(64)), Some(1), "each host by itself");
        assert_eq!(refusals.note(slot, Refusal::Broken, at(65)), Some(2001));
        assert_eq!(refusals.note(slot, Refusal::Broken, at(66)), None);
        assert_eq!(refusals.note(slot, Refusal::StoreDown, at(67)), Some(2), "a reason of its own");
        assert_eq!(refusals.end(slot), None, "all was told");
        assert_eq!(refusals.note(slot, Refusal::StoreDown, at(68)), Some(1), "a new beginning");
        assert_eq!(refusals.note(slot, Refusal::StoreDown, at(69)), None);
        assert_eq!(refusals.end(slot), Some((Refusal::StoreDown, 1)));
    }
}
