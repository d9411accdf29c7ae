//! One host: its state, its lease, and the moves between states (DESIGN section 4).
//!
//! The wake runs lease → copy → start; the sleep runs stop → save → park. Each part is a module.

use alloc::string::String;
use alloc::vec::Vec;
use core::mem;

use crate::effect::{Effect, Failure, Reason, Word};
use crate::event::{Answer, Cause, HostSeed, Policy, Subject, Ticket};
use crate::ids::{Attempt, BoxName, ETag, Generation, Host, Run, Slot, Txid};
use crate::position::{LocalCopy, RemoteTip};
use crate::record::HostRecord;
use crate::session::Session;
use crate::shared::{Mode, Shared};
use crate::time::{Mono, Nanos, Now, Wall};
use crate::watch::Watched;

mod copy;
mod handover;
mod lease;
mod park;
mod start;
mod stop;
mod take_over;
mod view;

use copy::CopyPut;
pub(crate) use lease::LeaseStep;
pub use view::HostView;

/// This box's right to run the host.
#[derive(Clone, Debug, Hash)]
pub(crate) enum Lease {
    /// Not held, and nothing is known.
    None,
    /// Released by this box: taken back in one round trip while nobody came between.
    Remembered { record: HostRecord, etag: ETag },
    /// Held. `before` is the record that the acquisition replaced.
    Owned { record: HostRecord, etag: ETag, before: Option<HostRecord> },
}

/// What a release may name.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Tip {
    /// Something may be newer than what is durable: no release.
    Doubtful,
    /// Everything up to here is durable, and nothing is newer.
    Known(Option<RemoteTip>),
}

/// What a wake is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Purpose {
    /// Somebody waits: the instance is started.
    Serve,
    /// Nobody does: what a sleep left behind is uploaded, and nothing is started.
    Sync,
}

/// One wake.
#[derive(Clone, Copy, Debug, Hash)]
pub(crate) struct Wake {
    pub(crate) deadline: Mono,
}

#[derive(Clone, Debug, Hash)]
pub(crate) enum CopyStep {
    Inspecting,
    Listing {
        local: LocalCopy,
    },
    Fetching {
        /// What the LIST or the record named.
        newest: Option<RemoteTip>,
    },
    Fencing {
        put: CopyPut,
    },
    Applying,
    Imaging {
        put: CopyPut,
    },
    /// Its number was taken by an older upload of our own: which is the next free one?
    Relisting,
    Adopting {
        tip: RemoteTip,
    },
    /// Nothing is to be started: the host went to another box, and what this one could not upload
    /// is set aside.
    Forking {
        owner: BoxName,
        generation: Generation,
    },
}

/// Why an instance is stopped.
#[derive(Clone, Debug, Hash)]
pub(crate) enum Why {
    Idle,
    Operator,
    Died,
    Leaving,
    Removed,
    /// Of an earlier activator: no replica is attached to it.
    Leftover,
    Failed(Failure),
    /// Nothing ran: a sync of what an earlier sleep left behind.
    Synced,
}

/// What follows a sleep.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Then {
    Sleep,
    WakeAgain,
}

#[derive(Clone, Debug, Hash)]
pub(crate) enum StopStep {
    /// Idle stops only: asking the table whether something is in flight.
    Taking {
        since: Mono,
    },
    /// Idle stops only: the question of the next due time, before it is frozen and cannot answer.
    AskingAwake {
        until: Mono,
    },
    Asking {
        until: Mono,
    },
    Terminating {
        until: Mono,
    },
    Killing {
        until: Mono,
    },
}

#[derive(Clone, Debug, Hash)]
pub(crate) enum ParkStep {
    Putting { put: Release },
    Checking { put: Release },
    Pausing { put: Release, until: Mono },
}

/// A release, repeated byte for byte until it is definite.
#[derive(Clone, Debug, Hash)]
pub(crate) struct Release {
    pub(crate) record: HostRecord,
    /// The record that it replaces; unknown when a predecessor sent it.
    pub(crate) over: Option<(HostRecord, ETag)>,
    pub(crate) pause: Nanos,
}

/// Where a host is. One enum, its data inside.
#[derive(Clone, Debug, Hash)]
pub(crate) enum State {
    Asleep,
    Leasing {
        wake: Wake,
        step: LeaseStep,
    },
    Restoring {
        wake: Wake,
        step: CopyStep,
    },
    Opening {
        wake: Wake,
    },
    Starting {
        wake: Wake,
        /// The newest run that was reported dead: the news may overtake that of its health.
        died: Option<Run>,
    },
    Attaching {
        wake: Wake,
        run: Run,
    },
    /// Taken over from an earlier activator: it serves, and its replica is being found again.
    Resuming {
        run: Run,
        until: Mono,
    },
    Awake {
        run: Run,
        since: Mono,
    },
    Freezing {
        run: Run,
    },
    Frozen {
        run: Run,
        since: Mono,
    },
    Thawing {
        run: Run,
    },
    Stopping {
        run: Option<Run>,
        why: Why,
        then: Then,
        step: StopStep,
    },
    Saving {
        why: Why,
        then: Then,
    },
    Parking {
        step: ParkStep,
    },
    /// The lease or the session was lost: killing, with no question and no drain.
    Fenced {
        then: Then,
        until: Mono,
    },
    Unproven {
        why: Why,
        then: Then,
        fenced: bool,
        until: Mono,
    },
    Backoff {
        until: Mono,
        failure: Failure,
        /// It is another box's, and taken over when that is dead.
        watched: Option<Watched>,
    },
}

/// One host.
#[derive(Clone, Debug, Hash)]
pub(crate) struct HostEntry {
    pub(crate) slot: Slot,
    pub(crate) host: Host,
    pub(crate) policy: Policy,
    pub(crate) lease: Lease,
    pub(crate) state: State,
    pub(crate) attempt: Attempt,
    /// Wait after the next failed wake.
    pub(crate) backoff: Nanos,
    pub(crate) due: Option<Wall>,
    pub(crate) tip: Tip,
    /// What the wake that is under way is for.
    pub(crate) purpose: Purpose,
    /// The local copy may be ahead of the store although the host sleeps: it is synced from this
    /// moment on, as soon as the session may write.
    pub(crate) unsynced: Option<Mono>,
    /// Newest number that a record, a position, a list or an upload has named: a restore that ends
    /// before it is refused.
    pub(crate) least: Txid,
    pub(crate) removed: bool,
    /// A move to or from an outside supervisor.
    pub(crate) handover: Option<handover::Handover>,
    pub(crate) last_problem: Option<String>,
}

/// What a host's move needs of the rest of the core.
pub(crate) struct Context<'a> {
    pub(crate) shared: &'a mut Shared,
    pub(crate) session: &'a Session,
    pub(crate) now: Now,
    pub(crate) fx: &'a mut Vec<Effect>,
}

/// How long a waiter of a host that lives elsewhere should stay away: TTL + 1 s.
fn elsewhere_retry(shared: &Shared) -> Nanos {
    Nanos(shared.settings.ttl.0.saturating_add(crate::time::SECOND_NS))
}

/// A retry hint where nothing better is known.
const RETRY_AFTER: Nanos = Nanos::from_secs(5);

impl HostEntry {
    pub(crate) fn new(seed: &HostSeed, shared: &Shared) -> Self {
        Self {
            slot: seed.slot,
            host: seed.host.clone(),
            policy: seed.policy,
            lease: Lease::None,
            state: State::Asleep,
            attempt: Attempt(0),
            backoff: shared.settings.backoff,
            due: seed.due,
            tip: Tip::Doubtful,
            purpose: Purpose::Serve,
            unsynced: seed.unsynced.then_some(Mono(0)),
            least: Txid(0),
            removed: false,
            handover: None,
            last_problem: None,
        }
    }

    pub(crate) fn ticket(&mut self) -> Ticket {
        self.attempt = Attempt(self.attempt.0.saturating_add(1));
        Ticket { subject: Subject::Host(self.slot), attempt: self.attempt }
    }

    /// Whether it is to be let go: by a removal, or with the activator.
    fn is_going(&self, ctx: &Context<'_>) -> bool {
        self.removed || self.goes_out() || ctx.shared.mode == Mode::Leaving
    }

    /// Whether nothing of it is running or under way.
    pub(crate) const fn is_at_rest(&self) -> bool {
        matches!(self.state, State::Asleep | State::Backoff { .. })
    }

    /// Whether a process of it may be running.
    pub(crate) const fn may_run(&self) -> bool {
        match &self.state {
            State::Asleep
            | State::Leasing { .. }
            | State::Restoring { .. }
            | State::Opening { .. }
            | State::Saving { .. }
            | State::Parking { .. }
            | State::Backoff { .. } => false,
            State::Starting { .. }
            | State::Attaching { .. }
            | State::Resuming { .. }
            | State::Awake { .. }
            | State::Freezing { .. }
            | State::Frozen { .. }
            | State::Thawing { .. }
            | State::Stopping { .. }
            | State::Fenced { .. }
            | State::Unproven { .. } => true,
        }
    }

    pub(crate) fn generation(&self) -> Option<Generation> {
        match &self.lease {
            Lease::Owned { record, .. } => Some(record.generation),
            Lease::None | Lease::Remembered { .. } => None,
        }
    }

    /// The record before this acquisition left data in doubt: its owner did not let go.
    fn over_unclean(&self) -> bool {
        match &self.lease {
            Lease::Owned { before: Some(before), .. } => {
                before.state != crate::record::HostState::Released
            }
            Lease::Owned { before: None, .. } | Lease::None | Lease::Remembered { .. } => false,
        }
    }

    /// Somebody wants it awake.
    pub(crate) fn on_request(&mut self, cause: Cause, ctx: &mut Context<'_>) {
        if self.is_going(ctx) {
            let reason = match (self.removed, self.goes_out()) {
                (true, _) => Reason::Removed,
                (false, true) => Reason::Outside,
                (false, false) => Reason::Leaving,
            };
            return self.refuse(reason, "the host is not woken any more".into(), RETRY_AFTER, ctx);
        }
        match mem::replace(&mut self.state, State::Asleep) {
            State::Asleep => self.begin_wake(ctx),
            State::Awake { run, since } => {
                // A waiter that came before the word: told again, nothing else.
                ctx.fx.push(Effect::Publish(self.slot, Word::Awake(run)));
                self.state = State::Awake { run, since };
            }
            State::Resuming { run, until } => {
                ctx.fx.push(Effect::Publish(self.slot, Word::Awake(run)));
                self.state = State::Resuming { run, until };
            }
            State::Frozen { run, .. } | State::Freezing { run } => {
                let ticket = self.ticket();
                ctx.fx.push(Effect::Thaw(ticket, self.slot));
                self.state = State::Thawing { run };
            }
            State::Backoff { until, .. } if until <= ctx.now.mono => self.begin_wake(ctx),
            State::Backoff { until, failure, watched } => {
                let failure = match &watched {
                    Some(watched) => self.watched_failure(watched, ctx.now),
                    None => failure,
                };
                match cause {
                    // The due host waits silently: its tick wakes it when the backoff ends.
                    Cause::Due => {}
                    Cause::Client | Cause::Operator => {
                        ctx.fx.push(Effect::Refuse(self.slot, failure.clone()));
                    }
                }
                self.state = State::Backoff { until, failure, watched };
            }
            State::Stopping { run, why, step, .. } => {
                self.state = State::Stopping { run, why, then: Then::WakeAgain, step };
            }
            State::Saving { why, .. } => {
                self.state = State::Saving { why, then: Then::WakeAgain };
            }
            State::Fenced { until, .. } => {
                self.state = State::Fenced { then: Then::WakeAgain, until };
            }
            State::Unproven { why, then, fenced, until } => {
                let left = until.since(ctx.now.mono);
                let detail = "a stop of this host is not proven yet".into();
                self.refuse(Reason::Unproven, detail, left, ctx);
                self.state = State::Unproven { why, then, fenced, until };
            }
            State::Parking { step } => {
                // Its release is in flight: the waiter is told to come again.
                let detail = "the host is being released".into();
                self.refuse(Reason::Leaving, detail, RETRY_AFTER, ctx);
                self.state = State::Parking { step };
            }
            coming @ (State::Leasing { .. }
            | State::Restoring { .. }
            | State::Opening { .. }
            | State::Starting { .. }
            | State::Attaching { .. }
            | State::Thawing { .. }) => {
                self.purpose = Purpose::Serve;
                self.state = coming;
            }
        }
    }

    pub(crate) fn begin_wake(&mut self, ctx: &mut Context<'_>) {
        ctx.shared.counters.add("wakes");
        ctx.fx.push(Effect::Publish(self.slot, Word::Waking));
        self.begin(Purpose::Serve, ctx);
    }

    /// What a sleep left behind is uploaded; nothing is started.
    pub(crate) fn begin_sync(&mut self, ctx: &mut Context<'_>) {
        ctx.shared.counters.add("syncs");
        self.begin(Purpose::Sync, ctx);
    }

    fn begin(&mut self, purpose: Purpose, ctx: &mut Context<'_>) {
        let deadline = ctx.now.mono + ctx.shared.settings.wake_budget;
        self.purpose = purpose;
        let wake = Wake { deadline };
        match self.lease {
            Lease::Owned { .. } => self.begin_copy(wake, ctx),
            Lease::None | Lease::Remembered { .. } => self.begin_lease(wake, ctx),
        }
    }

    pub(crate) fn refuse(
        &mut self,
        reason: Reason,
        detail: String,
        retry_after: Nanos,
        ctx: &mut Context<'_>,
    ) {
        let failure = Failure { reason, detail, retry_after };
        ctx.fx.push(Effect::Refuse(self.slot, failure));
    }

    /// A wake failed before any process was started.
    pub(crate) fn fail_wake(&mut self, reason: Reason, detail: String, ctx: &mut Context<'_>) {
        if self.purpose == Purpose::Sync {
            return self.fail_sync(detail, ctx);
        }
        ctx.shared.counters.add("wakes_failed");
        let retry_after = match reason {
            Reason::Elsewhere => elsewhere_retry(ctx.shared),
            Reason::Outside
            | Reason::StoreDown
            | Reason::NoSession
            | Reason::Replica
            | Reason::Database
            | Reason::Disk
            | Reason::Broken
            | Reason::Unproven
            | Reason::TimedOut
            | Reason::Lost
            | Reason::Leaving
            | Reason::Removed => self.backoff.max(Nanos::from_secs(1)),
        };
        self.last_problem = Some(detail.clone());
        let failure = Failure { reason, detail, retry_after };
        ctx.fx.push(Effect::Refuse(self.slot, failure.clone()));
        self.back_off(failure, ctx);
    }

    /// Another box owns the host, and is taken over at a moment to come: whoever asks then meets no
    /// pause. Until then it is looked at as often as a session is renewed, and at most so often.
    fn fail_watched(&mut self, watched: Watched, ctx: &mut Context<'_>) {
        if self.purpose == Purpose::Sync {
            return self.fail_sync(watched.told(ctx.now), ctx);
        }
        ctx.shared.counters.add("wakes_failed");
        let failure = self.watched_failure(&watched, ctx.now);
        ctx.fx.push(Effect::Refuse(self.slot, failure.clone()));
        let renewal = Nanos(ctx.shared.settings.ttl.0 / 3);
        let until = ctx.now.mono + watched.left(ctx.now).min(renewal);
        self.state = State::Backoff { until, failure, watched: Some(watched) };
    }

    fn watched_failure(&mut self, watched: &Watched, now: Now) -> Failure {
        let detail = watched.told(now);
        self.last_problem = Some(detail.clone());
        Failure { reason: Reason::Elsewhere, detail, retry_after: watched.left(now) }
    }

    /// Nobody waits, and whoever comes next is not to be sent away for it.
    fn fail_sync(&mut self, detail: String, ctx: &Context<'_>) {
        self.last_problem = Some(detail);
        if self.handover.is_some() {
            // Who asked is told; nothing is tried again behind an operator's back.
            self.state = State::Asleep;
            return;
        }
        self.sync_later(ctx);
    }

    /// Asleep, and synced after a pause.
    fn sync_later(&mut self, ctx: &Context<'_>) {
        self.unsynced = Some(ctx.now.mono + ctx.shared.settings.backoff_max);
        self.state = State::Asleep;
    }

    /// Asleep, and not woken again before a pause that doubles with each failed wake.
    fn back_off(&mut self, failure: Failure, ctx: &Context<'_>) {
        let until = ctx.now.mono + self.backoff;
        self.state = State::Backoff { until, failure, watched: None };
        self.backoff = self.backoff.doubled(ctx.shared.settings.backoff_max);
    }

    /// An answer with the current ticket.
    pub(crate) fn on_answer(&mut self, answer: Answer, ctx: &mut Context<'_>) {
        match mem::replace(&mut self.state, State::Asleep) {
            State::Leasing { wake, step } => self.on_lease(wake, step, answer, ctx),
            State::Restoring { wake, step } => self.on_copy(wake, step, answer, ctx),
            State::Opening { wake } => self.on_opened(wake, answer, ctx),
            State::Starting { wake, died } => self.on_started(wake, died, answer, ctx),
            State::Attaching { wake, run } => self.on_attached(wake, run, answer, ctx),
            State::Resuming { run, until } => self.on_resumed(run, until, answer, ctx),
            State::Freezing { run } => self.on_frozen(run, &answer, ctx),
            State::Thawing { run } => self.on_thawed(run, &answer, ctx),
            State::Stopping { run, why, then, step } => {
                self.on_stop(run, why, then, step, answer, ctx);
            }
            State::Saving { why, then } => self.on_saved(why, then, answer, ctx),
            State::Parking { step } => self.on_park(step, answer, ctx),
            State::Fenced { then, until } => self.on_fenced(then, until, &answer, ctx),
            State::Unproven { why, then, fenced, until } => {
                self.on_late_proof(why, then, fenced, until, &answer, ctx);
            }
            settled @ (State::Asleep
            | State::Awake { .. }
            | State::Frozen { .. }
            | State::Backoff { .. }) => self.state = settled,
        }
    }

    /// A wake that took longer than its budget, a pause that is over, a grace that ended.
    pub(crate) fn on_tick(&mut self, ctx: &mut Context<'_>) {
        if self.next_due(ctx.session, ctx.now).is_none_or(|at| at > ctx.now.mono) {
            return;
        }
        match mem::replace(&mut self.state, State::Asleep) {
            State::Leasing { wake, .. } if wake.deadline <= ctx.now.mono => {
                self.fail_wake(Reason::TimedOut, "no lease within the wake's budget".into(), ctx);
            }
            State::Leasing { wake, step } => self.tick_lease(wake, step, ctx),
            State::Restoring { wake, .. } if wake.deadline <= ctx.now.mono => {
                let detail = "the copy was not current within the wake's budget".into();
                self.fail_wake(Reason::TimedOut, detail, ctx);
            }
            State::Restoring { wake, step } => self.tick_copy(wake, step, ctx),
            State::Opening { .. } => {
                ctx.fx.push(Effect::Abandon(self.slot));
                let detail = "the replica did not open within the wake's budget".into();
                self.fail_wake(Reason::TimedOut, detail, ctx);
            }
            State::Starting { .. } | State::Attaching { .. } => {
                let detail = "the instance was not ready within the wake's budget".into();
                self.fail_start(Reason::TimedOut, detail, ctx);
            }
            State::Resuming { run, .. } => self.give_up(run, Then::Sleep, ctx),
            State::Frozen { run, .. } => self.stop_frozen(run, Why::Idle, ctx),
            State::Stopping { run, why, then, step } => self.tick_stop(run, why, then, step, ctx),
            State::Parking { step } => self.tick_park(step, ctx),
            State::Fenced { then, .. } => {
                self.unproven(Why::Operator, then, true, ctx);
            }
            State::Unproven { why, then, fenced, .. } => self.kill_again(why, then, fenced, ctx),
            // Asleep again; a due host is woken by the same sweep.
            State::Backoff { .. } => {}
            State::Asleep if self.unsynced.is_some() => self.begin_sync(ctx),
            settled @ (State::Asleep
            | State::Awake { .. }
            | State::Freezing { .. }
            | State::Thawing { .. }
            | State::Saving { .. }) => self.state = settled,
        }
    }
}
