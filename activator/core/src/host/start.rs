//! The start: replica opened before it, instance, replica attached, awake; and the frozen tier.

use alloc::format;
use alloc::string::String;

use super::{Context, HostEntry, Lease, Purpose, State, StopStep, Then, Wake, Why};
use crate::effect::{Effect, Failure, Reason, Word};
use crate::event::{Answer, Held, ReplicaProblem};
use crate::ids::Run;
use crate::time::{Mono, Nanos};

impl HostEntry {
    pub(super) fn on_opened(&mut self, wake: Wake, answer: Answer, ctx: &mut Context<'_>) {
        let Answer::Opened(opened) = answer else {
            self.state = State::Opening { wake };
            return;
        };
        if let Err(problem) = opened {
            ctx.fx.push(Effect::Abandon(self.slot));
            return self.fail_replica(&problem, ctx);
        }
        if self.purpose == Purpose::Sync {
            let ticket = self.ticket();
            ctx.fx.push(Effect::Save(ticket, self.slot));
            self.state = State::Saving { why: Why::Synced, then: Then::Sleep };
            return;
        }
        assert!(self.generation().is_some(), "invariant 1: a start without a lease");
        let ticket = self.ticket();
        ctx.fx.push(Effect::Spawn(ticket, self.slot));
        self.state = State::Starting { wake, died: None };
    }

    pub(super) fn on_started(
        &mut self,
        wake: Wake,
        died: Option<Run>,
        answer: Answer,
        ctx: &mut Context<'_>,
    ) {
        if let Answer::StartFailed(why) = answer {
            return self.fail_start(Reason::Broken, why, ctx);
        }
        let Answer::Healthy(run) = answer else {
            self.state = State::Starting { wake, died };
            return;
        };
        if died == Some(run) {
            return self.fail_early(ctx);
        }
        let ticket = self.ticket();
        ctx.fx.push(Effect::Attach(ticket, self.slot));
        self.state = State::Attaching { wake, run };
    }

    pub(super) fn on_attached(
        &mut self,
        wake: Wake,
        run: Run,
        answer: Answer,
        ctx: &mut Context<'_>,
    ) {
        let Answer::Attached(attached) = answer else {
            self.state = State::Attaching { wake, run };
            return;
        };
        match attached {
            Ok(()) => self.awake(run, ctx),
            Err(problem) => {
                let detail = format!("replica: {}", problem.detail());
                let reason = match problem {
                    ReplicaProblem::Store(_) => Reason::StoreDown,
                    ReplicaProblem::Corrupt(_) => Reason::Replica,
                    ReplicaProblem::Unfit(_) => Reason::Database,
                    ReplicaProblem::Local(_) => Reason::Disk,
                };
                self.fail_start(reason, detail, ctx);
            }
        }
    }

    pub(super) fn awake(&mut self, run: Run, ctx: &mut Context<'_>) {
        let Lease::Owned { record, etag, .. } = &self.lease else {
            panic!("invariant 1: awake without a lease");
        };
        let held = Held { record: record.encode(), etag: etag.clone() };
        ctx.fx.push(Effect::Hold(self.slot, run, held));
        self.backoff = ctx.shared.settings.backoff;
        self.last_problem = None;
        // What was on this disk alone is followed now: its lag says how far behind it is.
        self.unsynced = None;
        // Woken for: a failed question at sleep must not wake it again.
        if self.due.is_some_and(|due| due <= ctx.now.wall) {
            self.due = None;
            ctx.fx.push(Effect::RecordDue(self.slot, None));
        }
        ctx.fx.push(Effect::Publish(self.slot, Word::Awake(run)));
        self.state = State::Awake { run, since: ctx.now.mono };
    }

    /// A wake failed after a process may have been started: kill it, prove it, keep what it wrote.
    pub(super) fn fail_start(&mut self, reason: Reason, detail: String, ctx: &mut Context<'_>) {
        ctx.shared.counters.add("wakes_failed");
        let retry_after = self.backoff.max(Nanos::from_secs(1));
        self.last_problem = Some(detail.clone());
        let failure = Failure { reason, detail, retry_after };
        ctx.fx.push(Effect::Refuse(self.slot, failure.clone()));
        self.kill(None, Why::Failed(failure), Then::Sleep, ctx);
    }

    /// It was healthy, and died before it served.
    pub(super) fn fail_early(&mut self, ctx: &mut Context<'_>) {
        ctx.shared.counters.add("instances_died");
        self.fail_start(
            Reason::Broken,
            "the instance exited before it served: see its app.log".into(),
            ctx,
        );
    }

    /// The idle window has passed.
    pub(crate) fn on_idle(&mut self, ctx: &mut Context<'_>) {
        let State::Awake { run, since } = self.state else { return };
        let ticket = self.ticket();
        ctx.fx.push(Effect::TryStop(ticket, self.slot, run));
        let step = StopStep::Taking { since };
        self.state = State::Stopping { run: Some(run), why: Why::Idle, then: Then::Sleep, step };
    }

    pub(super) fn freeze(&mut self, run: Run, ctx: &mut Context<'_>) {
        let ticket = self.ticket();
        ctx.fx.push(Effect::Freeze(ticket, self.slot));
        self.state = State::Freezing { run };
    }

    pub(super) fn on_frozen(&mut self, run: Run, answer: &Answer, ctx: &mut Context<'_>) {
        let Answer::Frozen(frozen) = answer else {
            self.state = State::Freezing { run };
            return;
        };
        match frozen {
            Ok(()) => self.state = State::Frozen { run, since: ctx.now.mono },
            // What cannot be frozen is stopped.
            Err(_) => self.stop(Some(run), Why::Idle, Then::Sleep, ctx),
        }
    }

    pub(super) fn on_thawed(&mut self, run: Run, answer: &Answer, ctx: &mut Context<'_>) {
        let Answer::Frozen(thawed) = answer else {
            self.state = State::Thawing { run };
            return;
        };
        match thawed {
            Ok(()) => self.awake(run, ctx),
            Err(_) => self.stop(Some(run), Why::Died, Then::WakeAgain, ctx),
        }
    }

    /// When a frozen host is stopped for good.
    pub(super) fn frozen_until(&self, since: Mono) -> Mono {
        since + self.policy.frozen.unwrap_or_default()
    }
}
