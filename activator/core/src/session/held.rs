//! The session of instances that an earlier process started, until it is claimed again; and its end.

use super::{Loss, Session, State};
use crate::event::{Got, SessionMemo};
use crate::record::{HostRecord, HostState, SessionRecord};
use crate::shared::Shared;
use crate::time::{Deadline, Now};

impl Session {
    /// Whether an instance that serves under this record may be taken over: it is of the epoch that
    /// is to go on, and with automatic takeover the deadline that was told has not passed.
    pub(crate) fn may_hold(&self, shared: &Shared, record: &HostRecord, now: Now) -> bool {
        let identity = &shared.settings.identity;
        let is_own = record.id == identity.id && record.owner.name == identity.name;
        let is_in_time = |memo: &SessionMemo| {
            !shared.is_automatic() || memo.deadline.is_some_and(|deadline| !deadline.passed(now))
        };
        let goes_on = |memo: &SessionMemo| memo.epoch == record.owner.epoch && is_in_time(memo);
        record.state == HostState::Owned && is_own && self.memo.as_ref().is_some_and(goes_on)
    }

    /// An instance is taken over: the session goes on, or is lost.
    pub(crate) const fn hold(&mut self) {
        self.holds = true;
    }

    pub(crate) const fn holds(&self) -> bool {
        self.holds
    }

    /// With automatic takeover: when everything under it must have stopped.
    pub(super) fn ends(&self, shared: &Shared) -> Option<Deadline> {
        let deadline = match &self.state {
            State::Live { deadline, .. } => Some(*deadline),
            State::Down
            | State::Reading
            | State::Pausing { .. }
            | State::Claiming(_)
            | State::Refused { .. }
            | State::Lost(_)
            | State::Ending(_)
            | State::Ended => {
                self.memo.as_ref().filter(|_| self.holds).and_then(|memo| memo.deadline)
            }
        };
        deadline.filter(|_| shared.is_automatic())
    }

    /// With automatic takeover: ends a session whose deadline has passed; true when it did.
    pub(crate) fn expire(&mut self, shared: &mut Shared, now: Now) -> bool {
        if self.ends(shared).is_none_or(|deadline| !deadline.passed(now)) {
            return false;
        }
        self.holds = false;
        shared.counters.add("session_expired");
        // A renewal may be on its way: its answer is not heard any more.
        let stale = self.ticket();
        debug_assert_eq!(stale.attempt, self.attempt);
        self.state = State::Lost(Loss::Expired);
        true
    }

    /// What stands where the record should that instances run under; none when it stands.
    pub(super) fn gone_past(&self, got: &Got) -> Option<Loss> {
        match got {
            Got::Failed(_) => None,
            Got::Absent => Some(Loss::Replaced),
            Got::Found { body, .. } => match SessionRecord::decode(body) {
                Ok(record) if !record.has_ended() && self.continues(&record) => None,
                Ok(record) => Some(record.fenced_by.map_or(Loss::Replaced, Loss::Fenced)),
                Err(_) => Some(Loss::Replaced),
            },
        }
    }
}
