//! An instance that an earlier activator left serving: taken over under its lease, not interrupted.
//!
//! The lease goes on as long as the session does: until the session is claimed again, nothing is
//! uploaded, and a session that turns out to be another's fences all of it.

use super::{Context, HostEntry, Lease, State, Then, Why};
use crate::effect::{Effect, Word};
use crate::event::{Answer, Held};
use crate::ids::Run;
use crate::record::HostRecord;
use crate::time::Mono;

impl HostEntry {
    /// It serves on, and its replica is found again.
    pub(crate) fn take_over(
        &mut self,
        run: Run,
        record: HostRecord,
        held: Held,
        ctx: &mut Context<'_>,
    ) {
        ctx.shared.counters.add("instances_taken_over");
        let generation = record.generation;
        // What it began over was fenced before the start; since then, the record is our own.
        let before = Some(record.clone());
        self.lease = Lease::Owned { record, etag: held.etag, before };
        ctx.fx.push(Effect::Publish(self.slot, Word::Awake(run)));
        let ticket = self.ticket();
        ctx.fx.push(Effect::Resume(ticket, self.slot, generation));
        let until = ctx.now.mono + ctx.shared.settings.wake_budget;
        self.state = State::Resuming { run, until };
    }

    pub(super) fn on_resumed(
        &mut self,
        run: Run,
        until: Mono,
        answer: Answer,
        ctx: &mut Context<'_>,
    ) {
        match answer {
            Answer::Attached(Ok(())) => self.awake(run, ctx),
            Answer::Attached(Err(problem)) => {
                self.last_problem = Some(problem.detail().into());
                self.give_up(run, Then::Sleep, ctx);
            }
            Answer::Got(_)
            | Answer::Wrote(_)
            | Answer::Inspected(_)
            | Answer::Listed(_)
            | Answer::Fetched(_)
            | Answer::Uploaded(_)
            | Answer::Adopted(_)
            | Answer::SetAside(_)
            | Answer::Opened(_)
            | Answer::Healthy(_)
            | Answer::StartFailed(_)
            | Answer::StopTaken
            | Answer::StopBusy
            | Answer::Due(_)
            | Answer::Empty
            | Answer::Saved(_)
            | Answer::Frozen(_) => self.state = State::Resuming { run, until },
        }
    }

    /// Stopped as one that nobody follows: what it wrote last is synced behind it.
    pub(super) fn give_up(&mut self, run: Run, then: Then, ctx: &mut Context<'_>) {
        ctx.fx.push(Effect::Abandon(self.slot));
        self.stop(Some(run), Why::Leftover, then, ctx);
    }

    /// Whether it runs under a lease of this box's session.
    pub(crate) const fn is_owned(&self) -> bool {
        matches!(self.lease, Lease::Owned { .. })
    }
}
