//! The lease: read, take by compare-and-swap, recognise by nonce (DESIGN section 5, rules 1 to 7).

use alloc::format;
use alloc::string::String;

use super::{Context, HostEntry, Lease, Purpose, RETRY_AFTER, State, Tip, Wake};
use crate::effect::{Effect, Expect, Reason, RecordKey};
use crate::event::{Answer, Got, StoreProblem, Wrote};
use crate::ids::{ETag, Generation, Host, Nonce, Txid};
use crate::position::RemoteTip;
use crate::record::{HostRecord, HostState, SessionRecord};
use crate::time::{Mono, Nanos, Now};
use crate::watch::Judged;

#[derive(Clone, Debug, Hash)]
pub(crate) enum LeaseStep {
    /// The session is not live (or not renewed) yet.
    AwaitSession,
    Reading,
    /// Whose session is it, and is it over?
    OwnerSession {
        owned: Owned,
    },
    /// Fencing the owner's session, which is dead.
    Overthrowing {
        owned: Owned,
        /// Of the fence.
        nonce: Nonce,
    },
    /// Whether that fence stands is read again.
    AskingAgain {
        owned: Owned,
        until: Mono,
    },
    Putting {
        put: LeasePut,
    },
    /// Read back: is the record's nonce ours?
    Checking {
        put: LeasePut,
    },
    Pausing {
        put: LeasePut,
        until: Mono,
    },
}

/// Another box's record over the host, as it was read.
#[derive(Clone, Debug, Hash)]
pub(crate) struct Owned {
    record: HostRecord,
    etag: ETag,
    /// Before its owner's session is read again.
    pause: Nanos,
}

#[derive(Clone, Debug, Hash)]
pub(crate) struct LeasePut {
    pub(crate) record: HostRecord,
    pub(crate) before: Option<HostRecord>,
    pub(crate) expect: Expect,
    pub(crate) pause: Nanos,
}

impl LeaseStep {
    /// Whether a write was sent whose outcome is not definite.
    pub(super) const fn is_sent(&self) -> bool {
        match self {
            Self::Putting { .. } | Self::Checking { .. } | Self::Pausing { .. } => true,
            Self::AwaitSession
            | Self::Reading
            | Self::OwnerSession { .. }
            | Self::Overthrowing { .. }
            | Self::AskingAgain { .. } => false,
        }
    }
}

impl HostEntry {
    pub(super) fn begin_lease(&mut self, wake: Wake, ctx: &mut Context<'_>) {
        if let Some(why) = ctx.session.refusal() {
            let detail = String::from(why);
            return self.fail_wake(Reason::NoSession, detail, ctx);
        }
        // The deadline is checked at each write: an answer may have come late.
        if !ctx.session.may_write(ctx.now) {
            if let Some(why) = ctx.session.trouble(ctx.now) {
                return self.fail_wake(Reason::StoreDown, format!("store: {why}"), ctx);
            }
            self.state = State::Leasing { wake, step: LeaseStep::AwaitSession };
            return;
        }
        match core::mem::replace(&mut self.lease, Lease::None) {
            Lease::Remembered { record, etag } => self.take(wake, Some((record, etag)), ctx),
            Lease::None | Lease::Owned { .. } => self.read_record(wake, ctx),
        }
    }

    fn read_record(&mut self, wake: Wake, ctx: &mut Context<'_>) {
        let ticket = self.ticket();
        ctx.fx.push(Effect::Get(ticket, RecordKey::Host(self.host.clone())));
        self.state = State::Leasing { wake, step: LeaseStep::Reading };
    }

    /// The session came to life, or was renewed: hosts that waited for it go on.
    pub(crate) fn on_session_live(&mut self, ctx: &mut Context<'_>) {
        if let State::Leasing { wake, step: LeaseStep::AwaitSession } = self.state {
            self.begin_lease(wake, ctx);
        } else if let State::Backoff { failure, .. } = &self.state
            && failure.reason == Reason::StoreDown
        {
            // What it was sent away for is over.
            self.backoff = ctx.shared.settings.backoff;
            self.state = State::Asleep;
        }
    }

    /// Sends the compare-and-swap over `before`.
    fn take(&mut self, wake: Wake, before: Option<(HostRecord, ETag)>, ctx: &mut Context<'_>) {
        let Some(owner) = ctx.session.owner().filter(|_| ctx.session.may_write(ctx.now)) else {
            self.state = State::Leasing { wake, step: LeaseStep::AwaitSession };
            return;
        };
        let id = ctx.shared.settings.identity.id.clone();
        let (before, expect) = match before {
            None => (None, Expect::Absent),
            Some((record, etag)) => (Some(record), Expect::Tag(etag)),
        };
        let generation = before.as_ref().map_or(Generation(1), |b| b.generation.next());
        // Unbroken while nobody else stands between: the record still names this box.
        let since = before.as_ref().filter(|b| b.id == id).map_or(generation, |b| b.since);
        let record = HostRecord {
            generation,
            owner,
            nonce: ctx.shared.nonces.fresh(),
            id,
            state: HostState::Owned,
            since,
            txid: before.as_ref().map_or(Txid(0), |b| b.txid),
            etag: before.as_ref().and_then(|b| b.etag.clone()),
            build: before.as_ref().and_then(|b| b.build.clone()),
        };
        let put = LeasePut { record, before, expect, pause: ctx.shared.settings.retry };
        self.send_lease(wake, put, ctx);
    }

    fn send_lease(&mut self, wake: Wake, put: LeasePut, ctx: &mut Context<'_>) {
        let ticket = self.ticket();
        let key = RecordKey::Host(self.host.clone());
        ctx.fx.push(Effect::Put(ticket, key, put.record.encode(), put.expect.clone()));
        self.state = State::Leasing { wake, step: LeaseStep::Putting { put } };
    }

    pub(super) fn tick_lease(&mut self, wake: Wake, step: LeaseStep, ctx: &mut Context<'_>) {
        match step {
            LeaseStep::Pausing { put, until } if until <= ctx.now.mono => {
                if ctx.session.may_write(ctx.now) {
                    self.send_lease(wake, put, ctx);
                } else {
                    // Still undecided: it is repeated when the session may write again.
                    let until = ctx.now.mono + put.pause;
                    self.state = State::Leasing { wake, step: LeaseStep::Pausing { put, until } };
                }
            }
            LeaseStep::AskingAgain { owned, until } if until <= ctx.now.mono => {
                self.ask_owner(wake, owned, ctx);
            }
            LeaseStep::AwaitSession if ctx.session.trouble(ctx.now).is_some() => {
                self.begin_lease(wake, ctx);
            }
            step @ (LeaseStep::AwaitSession
            | LeaseStep::Reading
            | LeaseStep::OwnerSession { .. }
            | LeaseStep::Overthrowing { .. }
            | LeaseStep::AskingAgain { .. }
            | LeaseStep::Putting { .. }
            | LeaseStep::Checking { .. }
            | LeaseStep::Pausing { .. }) => self.state = State::Leasing { wake, step },
        }
    }

    pub(super) fn on_lease(
        &mut self,
        wake: Wake,
        step: LeaseStep,
        answer: Answer,
        ctx: &mut Context<'_>,
    ) {
        match (step, answer) {
            (LeaseStep::Reading, Answer::Got(got)) => self.on_record(wake, got, ctx),
            (LeaseStep::OwnerSession { owned }, Answer::Got(got)) => {
                self.on_owner_session(wake, owned, got, ctx);
            }
            (LeaseStep::Overthrowing { owned, nonce }, Answer::Wrote(wrote)) => {
                self.on_overthrow(wake, owned, &nonce, wrote, ctx);
            }
            (LeaseStep::Putting { put }, Answer::Wrote(wrote)) => {
                self.on_lease_put(wake, put, wrote, ctx);
            }
            (LeaseStep::Checking { put }, Answer::Got(Got::Found { body, etag, .. })) => {
                match HostRecord::decode(&body) {
                    Ok(found) if found.nonce == put.record.nonce => self.own(wake, put, etag, ctx),
                    Ok(_) | Err(_) => self.read_record(wake, ctx),
                }
            }
            (LeaseStep::Checking { .. }, Answer::Got(Got::Absent)) => self.read_record(wake, ctx),
            (LeaseStep::Checking { put }, Answer::Got(Got::Failed(_))) => {
                self.pause_lease(wake, put, ctx);
            }
            (step, _) => self.state = State::Leasing { wake, step },
        }
    }

    fn pause_lease(&mut self, wake: Wake, mut put: LeasePut, ctx: &mut Context<'_>) {
        let until = ctx.shared.again(&mut put.pause, &put.record.nonce, ctx.now);
        self.state = State::Leasing { wake, step: LeaseStep::Pausing { put, until } };
    }

    fn on_lease_put(&mut self, wake: Wake, put: LeasePut, wrote: Wrote, ctx: &mut Context<'_>) {
        match wrote {
            Wrote::Done(etag) => self.own(wake, put, etag, ctx),
            Wrote::ConditionFailed => {
                let ticket = self.ticket();
                ctx.fx.push(Effect::Get(ticket, RecordKey::Host(self.host.clone())));
                self.state = State::Leasing { wake, step: LeaseStep::Checking { put } };
            }
            Wrote::Conflict | Wrote::Unknown => self.pause_lease(wake, put, ctx),
            Wrote::Failed(problem) => self.fail_store(&problem, ctx),
        }
    }

    pub(super) fn fail_store(&mut self, problem: &StoreProblem, ctx: &mut Context<'_>) {
        self.fail_wake(Reason::StoreDown, format!("store: {}", problem.detail()), ctx);
    }

    fn on_record(&mut self, wake: Wake, got: Got, ctx: &mut Context<'_>) {
        let (record, etag) = match got {
            Got::Absent => return self.take(wake, None, ctx),
            Got::Failed(problem) => return self.fail_store(&problem, ctx),
            Got::Found { body, etag, .. } => match HostRecord::decode(&body) {
                Ok(record) => (record, etag),
                Err(error) => {
                    return self.fail_wake(Reason::Replica, format!("{error}"), ctx);
                }
            },
        };
        let own = record.id == ctx.shared.settings.identity.id;
        let pause = ctx.shared.settings.retry;
        match record.state {
            HostState::Outside if self.takes_in() && own => {
                self.take(wake, Some((record, etag)), ctx);
            }
            // Only when the box that handed it out is gone.
            HostState::Outside if self.takes_in() => {
                self.ask_owner(wake, Owned { record, etag, pause }, ctx);
            }
            HostState::Outside => {
                let detail = format!(
                    "an outside supervisor on box {} runs this host; `dormouse hibernate {} --on` \
                     there takes it back",
                    record.owner.name, self.host
                );
                self.fail_wake(Reason::Outside, detail, ctx);
            }
            HostState::Released => self.take(wake, Some((record, etag)), ctx),
            // Ours, of this epoch or an earlier one: all instances of it were proven gone.
            HostState::Owned if own => self.take(wake, Some((record, etag)), ctx),
            HostState::Owned => self.ask_owner(wake, Owned { record, etag, pause }, ctx),
        }
    }

    /// Whose session is it, and is it over?
    fn ask_owner(&mut self, wake: Wake, owned: Owned, ctx: &mut Context<'_>) {
        let ticket = self.ticket();
        ctx.fx.push(Effect::Get(ticket, RecordKey::Session(owned.record.owner.name.clone())));
        self.state = State::Leasing { wake, step: LeaseStep::OwnerSession { owned } };
    }

    fn on_owner_session(&mut self, wake: Wake, owned: Owned, got: Got, ctx: &mut Context<'_>) {
        match got {
            Got::Found { body, etag: tag, age } => match SessionRecord::decode(&body) {
                Ok(session) if is_given_up(&owned.record, &session) => {
                    self.take(wake, Some((owned.record, owned.etag)), ctx);
                }
                Ok(session) => match ctx.shared.judge(&session, &tag, age, ctx.now) {
                    Judged::Dead if ctx.session.may_write(ctx.now) => {
                        self.overthrow(wake, owned, session, tag, ctx);
                    }
                    judged @ (Judged::Dead | Judged::Manual | Judged::Watched(_)) => {
                        self.elsewhere(wake, &owned.record, &judged, ctx);
                    }
                },
                Err(error) => self.fail_wake(Reason::Replica, format!("{error}"), ctx),
            },
            Got::Absent => self.elsewhere(wake, &owned.record, &Judged::Manual, ctx),
            Got::Failed(problem) => self.fail_store(&problem, ctx),
        }
    }

    /// Another box's session owns it.
    fn elsewhere(
        &mut self,
        wake: Wake,
        record: &HostRecord,
        judged: &Judged,
        ctx: &mut Context<'_>,
    ) {
        if self.purpose == Purpose::Sync && !self.takes_in() {
            // Our copy is a fork: whoever owns the host does not have what was not uploaded.
            return self.begin_fork(wake, record, ctx);
        }
        let name = &record.owner.name;
        if record.state == HostState::Outside {
            let detail = handed_out(record, &self.host, judged, ctx.now);
            return self.fail_wake(Reason::Elsewhere, detail, ctx);
        }
        let detail = match judged {
            Judged::Watched(watched) => return self.fail_watched(watched.clone(), ctx),
            Judged::Dead => format!(
                "box {name} owns this host and is dead; this box's own session is not renewed"
            ),
            Judged::Manual => format!(
                "box {name} owns this host: wake it there, or run `dormouse takeover {name}` when \
                 that box is gone"
            ),
        };
        self.fail_wake(Reason::Elsewhere, detail, ctx);
    }

    /// Fences a dead session, by the tag that was seen: its next renewal fails, or this does.
    fn overthrow(
        &mut self,
        wake: Wake,
        owned: Owned,
        dead: SessionRecord,
        tag: ETag,
        ctx: &mut Context<'_>,
    ) {
        ctx.shared.counters.add("sessions_fenced");
        let key = RecordKey::Session(dead.name.clone());
        let fence = ctx.shared.fence_of(dead);
        let nonce = fence.nonce.clone();
        let ticket = self.ticket();
        ctx.fx.push(Effect::Put(ticket, key, fence.encode(), Expect::Tag(tag)));
        self.state = State::Leasing { wake, step: LeaseStep::Overthrowing { owned, nonce } };
    }

    fn on_overthrow(
        &mut self,
        wake: Wake,
        mut owned: Owned,
        nonce: &Nonce,
        wrote: Wrote,
        ctx: &mut Context<'_>,
    ) {
        match wrote {
            Wrote::Done(_) => self.take(wake, Some((owned.record, owned.etag)), ctx),
            // It was renewed, or fenced by somebody, perhaps by us: its record says so.
            Wrote::ConditionFailed => self.ask_owner(wake, owned, ctx),
            // Not definite. A fence that is read is; one that still travels is tried again.
            Wrote::Conflict | Wrote::Unknown => {
                let until = ctx.shared.again(&mut owned.pause, nonce, ctx.now);
                let step = LeaseStep::AskingAgain { owned, until };
                self.state = State::Leasing { wake, step };
            }
            Wrote::Failed(problem) => self.fail_store(&problem, ctx),
        }
    }

    fn own(&mut self, wake: Wake, put: LeasePut, etag: ETag, ctx: &mut Context<'_>) {
        ctx.shared.counters.add("leases_taken");
        let LeasePut { record, before, .. } = put;
        let former = before.as_ref().map_or(Generation(0), |before| before.generation);
        assert!(record.generation > former, "invariant 2: a generation that does not rise");
        self.tip = match &before {
            None => Tip::Known(None),
            Some(before) => match before.state {
                HostState::Released => Tip::Known(tip_of(before)),
                HostState::Owned | HostState::Outside => Tip::Doubtful,
            },
        };
        self.lease = Lease::Owned { record, etag, before };
        if self.is_going(ctx) && self.purpose == Purpose::Serve {
            self.state = State::Asleep;
            return;
        }
        self.begin_copy(wake, ctx);
    }

    /// The lease is gone: a wake that has started nothing yet just ends.
    pub(super) fn lose(&mut self, detail: &str, ctx: &mut Context<'_>) {
        self.lease = Lease::None;
        self.tip = Tip::Doubtful;
        self.refuse(Reason::Lost, detail.into(), RETRY_AFTER, ctx);
        self.state = State::Asleep;
    }
}

/// Whether the session that owned a host is over. What a box handed out stays its own over its restarts:
/// the file that the supervisor writes is there.
fn is_given_up(record: &HostRecord, session: &SessionRecord) -> bool {
    let lives_on = session.id == record.id && !session.has_ended();
    session.is_over(record.owner.epoch) && !(record.state == HostState::Outside && lives_on)
}

/// What to do on this box to have a host back that another one handed out.
fn handed_out(record: &HostRecord, host: &Host, judged: &Judged, now: Now) -> String {
    let name = &record.owner.name;
    let then = match judged {
        Judged::Watched(watched) => {
            format!(
                "it is given up in {} s unless it renews its session",
                watched.left(now).secs_up()
            )
        }
        Judged::Dead | Judged::Manual => format!("first run `dormouse takeover {name}` here"),
    };
    format!(
        "box {name} handed this host to an outside supervisor, and has the file that it writes: run \
         `dormouse hibernate {host} --on` on that box. Only when that box is gone for good ({then}), \
         run it here again: the host then goes on from what was uploaded before it was handed out"
    )
}

/// The newest file that a cleanly released record names.
pub(super) fn tip_of(record: &HostRecord) -> Option<RemoteTip> {
    (record.txid > Txid(0)).then(|| RemoteTip { txid: record.txid, etag: record.etag.clone() })
}
