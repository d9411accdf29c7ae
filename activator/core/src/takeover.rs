//! `dormouse takeover BOX`: the operator's word that a box is gone (DESIGN section 5, rule 8).
//!
//! The word alone is not enough: the session's entity tag must stay unchanged for TTL + margin on
//! BOOTTIME, and the fence is one compare-and-swap over exactly that tag.

use alloc::vec::Vec;
use core::mem;

use crate::effect::{Effect, Expect, RecordKey, TakeoverEnd};
use crate::event::{Answer, Got, Subject, Ticket, Wrote};
use crate::ids::{Attempt, BoxName, ETag};
use crate::record::SessionRecord;
use crate::shared::Shared;
use crate::time::{Boot, Mono, Nanos, Now};
use crate::watch::{is_old, patience};

#[derive(Clone, Debug, Hash)]
enum State {
    Idle,
    Reading { target: BoxName },
    Watching { target: BoxName, record: SessionRecord, etag: ETag, until: Boot, poll: Mono },
    Rereading { target: BoxName, record: SessionRecord, etag: ETag },
    Fencing { target: BoxName, fence: SessionRecord },
    Checking { target: BoxName, fence: SessionRecord },
}

/// The operator's takeover; one at a time.
#[derive(Clone, Debug, Hash)]
pub(crate) struct Takeover {
    state: State,
    attempt: Attempt,
}

impl Takeover {
    pub(crate) const fn new() -> Self {
        Self { state: State::Idle, attempt: Attempt(0) }
    }

    pub(crate) const fn attempt(&self) -> Attempt {
        self.attempt
    }

    pub(crate) const fn next_due(&self) -> Option<Mono> {
        match &self.state {
            State::Watching { poll, .. } => Some(*poll),
            State::Idle
            | State::Reading { .. }
            | State::Rereading { .. }
            | State::Fencing { .. }
            | State::Checking { .. } => None,
        }
    }

    pub(crate) fn begin(&mut self, target: BoxName, fx: &mut Vec<Effect>) {
        if !matches!(self.state, State::Idle) {
            let why = "another takeover is under way".into();
            return end(target, TakeoverEnd::Refused(why), fx);
        }
        self.read(&target, fx);
        self.state = State::Reading { target };
    }

    fn ticket(&mut self) -> Ticket {
        self.attempt = Attempt(self.attempt.0.saturating_add(1));
        Ticket { subject: Subject::Takeover, attempt: self.attempt }
    }

    fn read(&mut self, target: &BoxName, fx: &mut Vec<Effect>) {
        let ticket = self.ticket();
        fx.push(Effect::Get(ticket, RecordKey::Session(target.clone())));
    }

    pub(crate) fn tick(&mut self, shared: &Shared, now: Now, fx: &mut Vec<Effect>) {
        match mem::replace(&mut self.state, State::Idle) {
            State::Watching { target, record, etag, until, poll } => {
                if poll > now.mono {
                    self.state = State::Watching { target, record, etag, until, poll };
                } else if until > now.boot {
                    let left = Nanos(until.0.saturating_sub(now.boot.0));
                    let poll = now.mono + left.min(shared.settings.ttl);
                    self.state = State::Watching { target, record, etag, until, poll };
                } else {
                    self.read(&target, fx);
                    self.state = State::Rereading { target, record, etag };
                }
            }
            other @ (State::Idle
            | State::Reading { .. }
            | State::Rereading { .. }
            | State::Fencing { .. }
            | State::Checking { .. }) => self.state = other,
        }
    }

    pub(crate) fn on_answer(
        &mut self,
        shared: &mut Shared,
        now: Now,
        answer: Answer,
        fx: &mut Vec<Effect>,
    ) {
        match (mem::replace(&mut self.state, State::Idle), answer) {
            (State::Reading { target }, Answer::Got(got)) => {
                self.on_first(target, got, shared, now, fx);
            }
            (State::Rereading { target, record, etag }, Answer::Got(got)) => {
                self.on_second(target, record, &etag, got, shared, fx);
            }
            (State::Fencing { target, fence }, Answer::Wrote(wrote)) => match wrote {
                Wrote::Done(_) => end(target, TakeoverEnd::Fenced, fx),
                Wrote::Failed(problem) => {
                    end(target, TakeoverEnd::Failed(problem.detail().into()), fx);
                }
                Wrote::ConditionFailed | Wrote::Conflict | Wrote::Unknown => {
                    self.read(&target, fx);
                    self.state = State::Checking { target, fence };
                }
            },
            (State::Checking { target, fence }, Answer::Got(got)) => match got {
                Got::Found { body, .. } => {
                    let found = SessionRecord::decode(&body).ok();
                    let fenced = found.is_some_and(|found| found.nonce == fence.nonce);
                    let how = if fenced {
                        TakeoverEnd::Fenced
                    } else {
                        TakeoverEnd::Failed(
                            "the session's record changed while it was fenced, or the fence is \
                             not definite: run takeover again"
                                .into(),
                        )
                    };
                    end(target, how, fx);
                }
                Got::Absent => end(target, TakeoverEnd::Unknown, fx),
                Got::Failed(problem) => {
                    end(target, TakeoverEnd::Failed(problem.detail().into()), fx);
                }
            },
            (other, _) => self.state = other,
        }
    }

    fn on_first(
        &mut self,
        target: BoxName,
        got: Got,
        shared: &mut Shared,
        now: Now,
        fx: &mut Vec<Effect>,
    ) {
        match got {
            Got::Absent => end(target, TakeoverEnd::Unknown, fx),
            Got::Failed(problem) => end(target, TakeoverEnd::Failed(problem.detail().into()), fx),
            Got::Found { body, etag, age } => match SessionRecord::decode(&body) {
                Err(error) => end(target, TakeoverEnd::Failed(error.0), fx),
                Ok(record) if record.has_ended() => {
                    end(target, TakeoverEnd::AlreadyOver, fx);
                }
                // By identity, not by name: a box that lost its disk takes over its former self.
                Ok(record) if record.id == shared.settings.identity.id => {
                    let why = "this box cannot take itself over".into();
                    end(target, TakeoverEnd::Refused(why), fx);
                }
                // Unchanged for long enough by the store's own clock.
                Ok(record) if is_old(&record, age, &shared.settings) => {
                    self.fence(target, record, etag, shared, fx);
                }
                Ok(record) => {
                    let watch = patience(&record, &shared.settings);
                    self.state = State::Watching {
                        target,
                        record,
                        etag,
                        until: now.boot + watch,
                        poll: now.mono + watch,
                    };
                }
            },
        }
    }

    fn on_second(
        &mut self,
        target: BoxName,
        record: SessionRecord,
        watched: &ETag,
        got: Got,
        shared: &mut Shared,
        fx: &mut Vec<Effect>,
    ) {
        match got {
            Got::Found { body, etag, .. } => {
                // The nonce too: entity tags may be content hashes.
                let same = SessionRecord::decode(&body).is_ok_and(|r| r.nonce == record.nonce);
                if etag != *watched || !same {
                    return end(target, TakeoverEnd::Alive, fx);
                }
                self.fence(target, record, etag, shared, fx);
            }
            Got::Absent => end(target, TakeoverEnd::Alive, fx),
            Got::Failed(problem) => end(target, TakeoverEnd::Failed(problem.detail().into()), fx),
        }
    }

    fn fence(
        &mut self,
        target: BoxName,
        record: SessionRecord,
        etag: ETag,
        shared: &mut Shared,
        fx: &mut Vec<Effect>,
    ) {
        let fence = shared.fence_of(record);
        let ticket = self.ticket();
        let key = RecordKey::Session(target.clone());
        fx.push(Effect::Put(ticket, key, fence.encode(), Expect::Tag(etag)));
        self.state = State::Fencing { target, fence };
    }
}

fn end(target: BoxName, how: TakeoverEnd, fx: &mut Vec<Effect>) {
    fx.push(Effect::TakeoverEnded(target, how));
}
