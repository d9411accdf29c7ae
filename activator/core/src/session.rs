//! The box's session: claimed, renewed, lost, ended (DESIGN section 5, rules 3 to 8).
//!
//! Continuity over a restart is proven by the nonce: all nonces of a process start with one random
//! base, which is journalled before the first of them is sent, so that renewals need no fsync.

use alloc::format;
use alloc::string::String;
use alloc::vec;
use alloc::vec::Vec;
use core::mem;

use crate::effect::{Effect, Entry, Expect, RecordKey};
use crate::event::{Answer, Got, SessionMemo, Subject, Ticket, Wrote};
use crate::ids::{Attempt, BoxName, ETag, Epoch};
use crate::record::{Owner, SessionRecord};
use crate::shared::{Shared, starts_with};
use crate::time::{Deadline, Mono, Nanos, Now};
use crate::watch::Judged;

mod held;

/// A compare-and-swap that is repeated, byte for byte, until it is definite.
#[derive(Clone, Debug, Hash)]
struct Claim {
    record: SessionRecord,
    expect: Expect,
    /// The deadline counts from before the first send of this nonce.
    first_sent: Now,
    pause: Nanos,
    step: ClaimStep,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum ClaimStep {
    Writing,
    /// Read back: is the record's nonce ours?
    Checking,
    Pausing(Mono),
}

#[derive(Clone, Debug, Hash)]
#[expect(clippy::large_enum_variant, reason = "one session a process")]
enum Next {
    Renew(Mono),
    Renewing(Claim),
}

#[derive(Clone, Debug, Hash)]
enum State {
    /// Not begun, or waiting until every instance of an earlier epoch is gone.
    Down,
    Reading,
    Pausing {
        until: Mono,
    },
    Claiming(Claim),
    Live {
        record: SessionRecord,
        etag: ETag,
        deadline: Deadline,
        next: Next,
    },
    /// The name belongs to another box.
    Refused {
        why: String,
        until: Mono,
    },
    /// Fenced; its hosts are being killed.
    Lost(Loss),
    Ending(Claim),
    Ended,
}

/// How a session was lost.
#[derive(Clone, Debug, Hash)]
enum Loss {
    /// Another box fenced it.
    Fenced(BoxName),
    /// Another record stands where ours was.
    Replaced,
    /// With automatic takeover: its deadline passed.
    Expired,
}

/// What the session's move means for the hosts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Turn {
    /// Nothing.
    None,
    /// It may now run hosts.
    Live,
    /// It may not any more: kill first.
    Lost,
    /// It ended, as far as the store allowed.
    Ended,
}

/// The box's session.
#[derive(Clone, Debug, Hash)]
pub(crate) struct Session {
    state: State,
    attempt: Attempt,
    memo: Option<SessionMemo>,
    /// Instances of the process before this one run on under its epoch, which is to be claimed again.
    holds: bool,
    trouble: Option<Trouble>,
}

/// The store does not do what the session asks.
#[derive(Clone, Debug, Hash)]
struct Trouble {
    since: Mono,
    /// Before the next try.
    pause: Nanos,
    why: String,
}

/// Hosts wait for a store that is away no longer than this; then their waiters are told.
const TROUBLE_PATIENCE: Nanos = Nanos::from_secs(3);

/// How often an `ended` record is tried before the activator goes without it.
const END_TRIES_PAUSE_MAX: Nanos = Nanos::from_secs(2);

impl Session {
    pub(crate) const fn new() -> Self {
        Self { state: State::Down, attempt: Attempt(0), memo: None, holds: false, trouble: None }
    }

    pub(crate) fn remember(&mut self, memo: Option<SessionMemo>) {
        self.memo = memo;
    }

    pub(crate) const fn attempt(&self) -> Attempt {
        self.attempt
    }

    /// Whether a write may be sent now.
    pub(crate) fn may_write(&self, now: Now) -> bool {
        matches!(&self.state, State::Live { deadline, .. } if !deadline.passed(now))
    }

    /// Who this session is, when it is live.
    pub(crate) fn owner(&self) -> Option<Owner> {
        let State::Live { record, .. } = &self.state else { return None };
        Some(Owner { name: record.name.clone(), epoch: record.epoch })
    }

    /// Why there is no session, when waiting will not help.
    pub(crate) fn refusal(&self) -> Option<&str> {
        let State::Refused { why, .. } = &self.state else { return None };
        Some(why)
    }

    /// Why hosts that wait for it would wait in vain, once the store has been away for a while.
    pub(crate) fn trouble(&self, now: Now) -> Option<&str> {
        let trouble = self.trouble.as_ref()?;
        (self.trouble_at()? <= now.mono).then_some(trouble.why.as_str())
    }

    /// From when on they would.
    pub(crate) fn trouble_at(&self) -> Option<Mono> {
        self.trouble.as_ref().map(|trouble| trouble.since + TROUBLE_PATIENCE)
    }

    /// One more failure; the pause before the next try.
    fn note_trouble(&mut self, why: &str, shared: &Shared, now: Now) -> Nanos {
        let settings = &shared.settings;
        let first = || Trouble { since: now.mono, pause: settings.retry, why: why.into() };
        let trouble = self.trouble.get_or_insert_with(first);
        trouble.why = why.into();
        let pause = trouble.pause;
        trouble.pause = pause.doubled(settings.retry_max);
        pause
    }

    /// Its state for people: a word, and a detail.
    pub(crate) fn describe(&self, now: Now) -> (&'static str, String) {
        match &self.state {
            State::Down => ("down", String::new()),
            State::Reading | State::Claiming(_) | State::Pausing { .. } => {
                let why = self.trouble.as_ref().map(|trouble| trouble.why.clone());
                ("claiming", why.unwrap_or_default())
            }
            State::Live { deadline, record, .. } if deadline.passed(now) => {
                ("unrenewed", format!("epoch {}: uploads wait for the store", record.epoch))
            }
            State::Live { record, .. } => ("live", format!("epoch {}", record.epoch)),
            State::Refused { why, .. } => ("refused", why.clone()),
            State::Lost(Loss::Fenced(by)) => ("lost", format!("fenced by {by}")),
            State::Lost(Loss::Replaced) => ("lost", "its record was replaced".into()),
            State::Lost(Loss::Expired) => ("lost", "it could not be renewed in time".into()),
            State::Ending(_) => ("ending", String::new()),
            State::Ended => ("ended", String::new()),
        }
    }

    /// When it wants to be ticked.
    pub(crate) fn next_due(&self, shared: &Shared, now: Now) -> Option<Mono> {
        let wanted = self.wants_tick();
        let Some(deadline) = self.ends(shared) else { return wanted };
        // Its end must not be slept through.
        let end = now.mono + deadline.left(now);
        Some(wanted.map_or(end, |wanted| wanted.min(end)))
    }

    fn wants_tick(&self) -> Option<Mono> {
        match &self.state {
            State::Pausing { until, .. } | State::Refused { until, .. } => Some(*until),
            State::Claiming(claim)
            | State::Ending(claim)
            | State::Live { next: Next::Renewing(claim), .. } => match claim.step {
                ClaimStep::Pausing(until) => Some(until),
                ClaimStep::Writing | ClaimStep::Checking => None,
            },
            State::Live { next: Next::Renew(at), .. } => Some(*at),
            State::Down | State::Reading | State::Lost(_) | State::Ended => None,
        }
    }

    /// Begins, or begins again after a loss. Every instance of an earlier epoch is gone.
    pub(crate) fn begin(&mut self, shared: &Shared, fx: &mut Vec<Effect>) {
        match self.state {
            State::Down | State::Lost(_) => self.read(shared, fx),
            State::Reading
            | State::Pausing { .. }
            | State::Claiming(_)
            | State::Live { .. }
            | State::Refused { .. }
            | State::Ending(_)
            | State::Ended => {}
        }
    }

    /// Whether it waits for the hosts of an earlier epoch to be gone.
    pub(crate) const fn waits_for_hosts(&self) -> bool {
        matches!(self.state, State::Down | State::Lost(_))
    }

    /// Ends it; false when it must be asked again later (a renewal is in flight).
    pub(crate) fn end(&mut self, shared: &mut Shared, now: Now, fx: &mut Vec<Effect>) -> bool {
        match &self.state {
            State::Live { next: Next::Renewing(_), .. } | State::Ending(_) => false,
            State::Live { record, etag, next: Next::Renew(_), .. } => {
                let nonce = shared.nonces.fresh();
                let record = SessionRecord { ended: true, nonce, ..record.clone() };
                let claim = Claim {
                    record,
                    expect: Expect::Tag(etag.clone()),
                    first_sent: now,
                    pause: shared.settings.retry,
                    step: ClaimStep::Writing,
                };
                self.send(&claim, shared, fx);
                self.state = State::Ending(claim);
                false
            }
            State::Down
            | State::Reading
            | State::Pausing { .. }
            | State::Claiming(_)
            | State::Refused { .. }
            | State::Lost(_)
            | State::Ended => {
                self.state = State::Ended;
                true
            }
        }
    }

    /// Time has passed.
    pub(crate) fn tick(&mut self, shared: &mut Shared, now: Now, fx: &mut Vec<Effect>) {
        let due = self.wants_tick().is_some_and(|at| at <= now.mono);
        if !due {
            return;
        }
        match mem::replace(&mut self.state, State::Down) {
            State::Pausing { .. } | State::Refused { .. } => self.read(shared, fx),
            State::Claiming(claim) => self.state = State::Claiming(self.resend(claim, shared, fx)),
            State::Ending(claim) => self.state = State::Ending(self.resend(claim, shared, fx)),
            State::Live { record, etag, deadline, next } => {
                let claim = match next {
                    Next::Renewing(claim) => self.resend(claim, shared, fx),
                    Next::Renew(_) => {
                        let nonce = shared.nonces.fresh();
                        let claim = Claim {
                            record: SessionRecord { nonce, ..record.clone() },
                            expect: Expect::Tag(etag.clone()),
                            first_sent: now,
                            pause: shared.settings.retry,
                            step: ClaimStep::Writing,
                        };
                        self.send(&claim, shared, fx);
                        claim
                    }
                };
                self.state = State::Live { record, etag, deadline, next: Next::Renewing(claim) };
            }
            other @ (State::Down | State::Reading | State::Lost(_) | State::Ended) => {
                self.state = other;
            }
        }
    }

    /// An answer with the current ticket.
    pub(crate) fn on_answer(
        &mut self,
        shared: &mut Shared,
        now: Now,
        answer: Answer,
        fx: &mut Vec<Effect>,
    ) -> Turn {
        match mem::replace(&mut self.state, State::Down) {
            State::Reading => {
                let Answer::Got(got) = answer else { return self.stay(State::Reading) };
                self.on_read(shared, now, got, fx)
            }
            State::Claiming(claim) => self.on_claim(claim, None, shared, now, answer, fx),
            State::Live { record, etag, deadline, next: Next::Renewing(claim) } => {
                let live = Live { record, etag, deadline };
                self.on_claim(claim, Some(live), shared, now, answer, fx)
            }
            State::Ending(claim) => self.on_ending(claim, shared, now, &answer),
            other @ (State::Down
            | State::Pausing { .. }
            | State::Live { .. }
            | State::Refused { .. }
            | State::Lost(_)
            | State::Ended) => self.stay(other),
        }
    }

    fn stay(&mut self, state: State) -> Turn {
        self.state = state;
        Turn::None
    }

    fn key(shared: &Shared) -> RecordKey {
        RecordKey::Session(shared.settings.identity.name.clone())
    }

    fn ticket(&mut self) -> Ticket {
        self.attempt = Attempt(self.attempt.0.saturating_add(1));
        Ticket { subject: Subject::Session, attempt: self.attempt }
    }

    fn read(&mut self, shared: &Shared, fx: &mut Vec<Effect>) {
        let ticket = self.ticket();
        fx.push(Effect::Get(ticket, Self::key(shared)));
        self.state = State::Reading;
    }

    fn send(&mut self, claim: &Claim, shared: &Shared, fx: &mut Vec<Effect>) {
        let ticket = self.ticket();
        let body = claim.record.encode();
        fx.push(Effect::Put(ticket, Self::key(shared), body, claim.expect.clone()));
    }

    fn resend(&mut self, mut claim: Claim, shared: &Shared, fx: &mut Vec<Effect>) -> Claim {
        claim.step = ClaimStep::Writing;
        self.send(&claim, shared, fx);
        claim
    }

    fn on_read(&mut self, shared: &mut Shared, now: Now, got: Got, fx: &mut Vec<Effect>) -> Turn {
        if let Some(by) = self.holds.then(|| self.gone_past(&got)).flatten() {
            return self.lose(by, shared);
        }
        let memo_epoch = self.memo.as_ref().map_or(Epoch(0), |memo| memo.epoch);
        match got {
            Got::Absent => self.claim(memo_epoch.next(), Expect::Absent, shared, now, fx),
            Got::Found { body, etag, age } => match SessionRecord::decode(&body) {
                Err(error) => {
                    self.refuse(format!("{error}"), now.mono + shared.settings.ttl);
                }
                Ok(record) => {
                    let over = record.has_ended();
                    let other = record.id != shared.settings.identity.id && !over;
                    if other {
                        let again = match shared.judge(&record, &etag, age, now) {
                            Judged::Dead => None,
                            Judged::Manual => Some(shared.settings.ttl),
                            // The first look after its death finds it dead.
                            Judged::Watched(watched) => {
                                Some(watched.left(now).min(shared.settings.ttl))
                            }
                        };
                        if let Some(again) = again {
                            self.refuse(name_in_use(&record), now.mono + again);
                            return Turn::None;
                        }
                    }
                    let epoch = if !over && self.continues(&record) {
                        record.epoch
                    } else {
                        record.epoch.max(memo_epoch).next()
                    };
                    self.claim(epoch, Expect::Tag(etag), shared, now, fx);
                }
            },
            Got::Failed(problem) => {
                let pause = self.note_trouble(problem.detail(), shared, now);
                let until = now.mono + pause;
                self.state = State::Pausing { until };
            }
        }
        Turn::None
    }

    fn refuse(&mut self, why: String, until: Mono) {
        self.state = State::Refused { why, until };
    }

    /// Whether the record was written by this very state directory under a journalled base.
    fn continues(&self, record: &SessionRecord) -> bool {
        self.memo.as_ref().is_some_and(|memo| {
            memo.epoch == record.epoch
                && memo.bases.iter().any(|base| starts_with(&record.nonce, base))
        })
    }

    fn claim(
        &mut self,
        epoch: Epoch,
        expect: Expect,
        shared: &mut Shared,
        now: Now,
        fx: &mut Vec<Effect>,
    ) {
        let base = String::from(shared.nonces.base());
        let known = match self.memo.as_mut() {
            Some(memo) if memo.epoch == epoch => {
                if !memo.bases.contains(&base) {
                    memo.bases.push(base.clone());
                }
                true
            }
            Some(_) | None => false,
        };
        if !known {
            self.memo = Some(SessionMemo { epoch, bases: vec![base.clone()], deadline: None });
        }
        fx.push(Effect::Journal(Entry::Session { epoch, base }));
        let identity = &shared.settings.identity;
        let record = SessionRecord {
            name: identity.name.clone(),
            id: identity.id.clone(),
            epoch,
            nonce: shared.nonces.fresh(),
            ttl_ms: shared.settings.ttl.0 / crate::time::MILLI_NS,
            boot_id: shared.settings.identity.boot_id.clone(),
            ended: false,
            fenced_by: None,
        };
        let claim = Claim {
            record,
            expect,
            first_sent: now,
            pause: shared.settings.retry,
            step: ClaimStep::Writing,
        };
        self.send(&claim, shared, fx);
        self.state = State::Claiming(claim);
    }

    fn on_claim(
        &mut self,
        mut claim: Claim,
        live: Option<Live>,
        shared: &mut Shared,
        now: Now,
        answer: Answer,
        fx: &mut Vec<Effect>,
    ) -> Turn {
        match (claim.step, answer) {
            (ClaimStep::Writing, Answer::Wrote(Wrote::Done(etag))) => {
                return self.adopt(claim, etag, shared, fx);
            }
            (ClaimStep::Writing, Answer::Wrote(Wrote::ConditionFailed)) => {
                claim.step = ClaimStep::Checking;
                let ticket = self.ticket();
                fx.push(Effect::Get(ticket, Self::key(shared)));
            }
            (ClaimStep::Checking, Answer::Got(Got::Found { body, etag, .. })) => {
                match SessionRecord::decode(&body) {
                    Ok(found) if found.nonce == claim.record.nonce => {
                        return self.adopt(claim, etag, shared, fx);
                    }
                    found => {
                        let by = found.ok().and_then(|record| record.fenced_by);
                        return self.passed_over(live.is_some(), by, shared, fx);
                    }
                }
            }
            (ClaimStep::Checking, Answer::Got(Got::Absent)) => {
                return self.passed_over(live.is_some(), None, shared, fx);
            }
            (_, answer) => {
                self.note_trouble(why_not(&answer), shared, now);
                claim.step = ClaimStep::Pausing(now.mono + claim.pause);
                claim.pause = claim.pause.doubled(shared.settings.retry_max);
            }
        }
        self.state = match live {
            None => State::Claiming(claim),
            Some(Live { record, etag, deadline }) => {
                State::Live { record, etag, deadline, next: Next::Renewing(claim) }
            }
        };
        Turn::None
    }

    fn adopt(&mut self, claim: Claim, etag: ETag, shared: &Shared, fx: &mut Vec<Effect>) -> Turn {
        self.trouble = None;
        self.holds = false;
        let settings = &shared.settings;
        let deadline = Deadline::after(claim.first_sent, settings.usable());
        fx.push(Effect::Deadline(Some(deadline)));
        let next = Next::Renew(claim.first_sent.mono + Nanos(settings.ttl.0 / 3));
        self.state = State::Live { record: claim.record, etag, deadline, next };
        Turn::Live
    }

    /// Somebody else's record stands where ours was to stand.
    fn passed_over(
        &mut self,
        was_live: bool,
        by: Option<BoxName>,
        shared: &mut Shared,
        fx: &mut Vec<Effect>,
    ) -> Turn {
        if was_live {
            return self.lose(by.map_or(Loss::Replaced, Loss::Fenced), shared);
        }
        // Perhaps a late renewal by the process before this one.
        self.read(shared, fx);
        Turn::None
    }

    fn lose(&mut self, how: Loss, shared: &mut Shared) -> Turn {
        // The deadline stays as it was told, and passes: none would mean no limit.
        shared.counters.add("session_lost");
        self.holds = false;
        self.state = State::Lost(how);
        Turn::Lost
    }

    fn on_ending(&mut self, mut claim: Claim, shared: &Shared, now: Now, answer: &Answer) -> Turn {
        let undecided = matches!(answer, Answer::Wrote(Wrote::Unknown | Wrote::Conflict));
        if undecided && claim.pause < END_TRIES_PAUSE_MAX {
            claim.step = ClaimStep::Pausing(now.mono + claim.pause);
            claim.pause = claim.pause.doubled(shared.settings.retry_max);
            return self.stay(State::Ending(claim));
        }
        self.state = State::Ended;
        Turn::Ended
    }
}

fn name_in_use(record: &SessionRecord) -> String {
    format!(
        "the name {} is in use by another box (id {}): give this box another name, or run \
         `dormouse takeover {}` when that box is gone",
        record.name, record.id, record.name
    )
}

/// What stands for people behind an answer that is not definite.
fn why_not(answer: &Answer) -> &str {
    if let Answer::Got(Got::Failed(problem)) | Answer::Wrote(Wrote::Failed(problem)) = answer {
        return problem.detail();
    }
    if *answer == Answer::Wrote(Wrote::Conflict) {
        return "another write of the record raced with this one";
    }
    "the store gives no answer"
}

struct Live {
    record: SessionRecord,
    etag: ETag,
    deadline: Deadline,
}
