//! The sleep: question, SIGTERM, SIGKILL, proof, final sync; and the fenced order.

use alloc::string::String;
use core::mem;

use super::{Context, HostEntry, Lease, RETRY_AFTER, State, StopStep, Then, Tip, Why};
use crate::effect::{Effect, Reason, Word};
use crate::event::{Answer, Saved};
use crate::ids::{Run, Txid};
use crate::time::{Mono, Wall};

impl HostEntry {
    /// Stops what may be running, by the polite order. The word comes first.
    pub(super) fn stop(&mut self, run: Option<Run>, why: Why, then: Then, ctx: &mut Context<'_>) {
        if let Some(run) = run {
            ctx.fx.push(Effect::Publish(self.slot, Word::Stopping(run)));
        }
        let asks = match &why {
            Why::Idle | Why::Operator | Why::Leaving | Why::Removed => self.policy.asks_due,
            Why::Died | Why::Leftover | Why::Synced | Why::Failed(_) => false,
        };
        if asks {
            self.ask_due(run, why, then, ctx);
        } else {
            self.terminate(run, why, then, ctx);
        }
    }

    /// Frozen processes answer no question and do not see SIGTERM: thawed first, and the answer to
    /// that is of no interest.
    pub(crate) fn stop_frozen(&mut self, run: Run, why: Why, ctx: &mut Context<'_>) {
        let ticket = self.ticket();
        ctx.fx.push(Effect::Thaw(ticket, self.slot));
        self.stop(Some(run), why, Then::Sleep, ctx);
    }

    fn ask_due(&mut self, run: Option<Run>, why: Why, then: Then, ctx: &mut Context<'_>) {
        let until = self.put_due_question(ctx);
        self.state = State::Stopping { run, why, then, step: StopStep::Asking { until } };
    }

    fn put_due_question(&mut self, ctx: &mut Context<'_>) -> Mono {
        let ticket = self.ticket();
        ctx.fx.push(Effect::AskDue(ticket, self.slot));
        // The driver answers within its own bound; this one only guards against none at all.
        ctx.now.mono + ctx.shared.settings.grace
    }

    /// Idle, and to be frozen: what is due meanwhile thaws it, so it is asked before.
    fn rest_warm(&mut self, run: Run, then: Then, ctx: &mut Context<'_>) {
        if ctx.shared.pressed {
            return self.stop(Some(run), Why::Idle, then, ctx);
        }
        if !self.policy.asks_due {
            return self.freeze(run, ctx);
        }
        let until = self.put_due_question(ctx);
        let step = StopStep::AskingAwake { until };
        self.state = State::Stopping { run: Some(run), why: Why::Idle, then, step };
    }

    /// The question before the frost is answered, or will not be.
    fn asked_awake(&mut self, run: Option<Run>, then: Then, ctx: &mut Context<'_>) {
        let Some(run) = run else { return };
        match then {
            Then::Sleep => self.freeze(run, ctx),
            Then::WakeAgain => {
                // Asked for while the word said stopping: it never stopped.
                ctx.fx.push(Effect::Publish(self.slot, Word::Awake(run)));
                self.state = State::Awake { run, since: ctx.now.mono };
            }
        }
    }

    fn note_due(&mut self, due: &Result<Option<Wall>, String>, ctx: &mut Context<'_>) {
        match due {
            Ok(due) => {
                self.due = *due;
                ctx.fx.push(Effect::RecordDue(self.slot, *due));
            }
            Err(_) => ctx.shared.counters.add("due_questions_failed"),
        }
    }

    fn terminate(&mut self, run: Option<Run>, why: Why, then: Then, ctx: &mut Context<'_>) {
        let ticket = self.ticket();
        ctx.fx.push(Effect::Terminate(ticket, self.slot));
        let until = ctx.now.mono + ctx.shared.settings.grace;
        self.state = State::Stopping { run, why, then, step: StopStep::Terminating { until } };
    }

    pub(super) fn kill(&mut self, run: Option<Run>, why: Why, then: Then, ctx: &mut Context<'_>) {
        let ticket = self.ticket();
        ctx.fx.push(Effect::Kill(ticket, self.slot));
        let until = ctx.now.mono + ctx.shared.settings.proof;
        self.state = State::Stopping { run, why, then, step: StopStep::Killing { until } };
    }

    /// What an earlier activator left running, and is not taken over.
    pub(crate) fn stop_leftover(&mut self, run: Run, ctx: &mut Context<'_>) {
        ctx.shared.counters.add("leftovers_stopped");
        self.stop(Some(run), Why::Leftover, Then::Sleep, ctx);
    }

    /// An operator's word, a shutdown or a removal.
    pub(crate) fn rest(&mut self, why: Why, ctx: &mut Context<'_>) {
        match mem::replace(&mut self.state, State::Asleep) {
            State::Awake { run, .. } | State::Freezing { run } | State::Thawing { run } => {
                self.stop(Some(run), why, Then::Sleep, ctx);
            }
            State::Frozen { run, .. } => self.stop_frozen(run, why, ctx),
            State::Resuming { run, .. } => self.give_up(run, Then::Sleep, ctx),
            State::Starting { .. } | State::Attaching { .. } => {
                let detail = "the wake was called off".into();
                self.refuse(Reason::Leaving, detail, RETRY_AFTER, ctx);
                self.kill(None, why, Then::Sleep, ctx);
            }
            State::Opening { .. } => {
                ctx.fx.push(Effect::Abandon(self.slot));
                self.call_off(ctx);
            }
            // What is on its way may still land: the lease is taken, and then given back.
            State::Leasing { wake, step } if step.is_sent() && self.is_going(ctx) => {
                self.refuse(Reason::Leaving, "the host is going".into(), RETRY_AFTER, ctx);
                self.state = State::Leasing { wake, step };
            }
            State::Leasing { .. } | State::Restoring { .. } => self.call_off(ctx),
            // The idle stop may still be taken back; this one may not.
            State::Stopping {
                run,
                step: StopStep::Taking { .. } | StopStep::AskingAwake { .. },
                ..
            } => self.stop(run, why, Then::Sleep, ctx),
            State::Stopping { run, why, step, .. } => {
                self.state = State::Stopping { run, why, then: Then::Sleep, step };
            }
            State::Saving { why, .. } => self.state = State::Saving { why, then: Then::Sleep },
            State::Fenced { until, .. } => self.state = State::Fenced { then: Then::Sleep, until },
            settled @ (State::Asleep
            | State::Backoff { .. }
            | State::Parking { .. }
            | State::Unproven { .. }) => self.state = settled,
        }
    }

    /// A wake that has started nothing. The attempt moves on: its late answers are dropped.
    fn call_off(&mut self, ctx: &mut Context<'_>) {
        let stale = self.ticket();
        debug_assert_eq!(stale.attempt, self.attempt);
        self.refuse(Reason::Leaving, "the wake was called off".into(), RETRY_AFTER, ctx);
        self.state = State::Asleep;
    }

    /// The instance is dead or does not accept; whoever noticed wants it awake again.
    pub(crate) fn on_died(&mut self, died: Run, wake_again: bool, ctx: &mut Context<'_>) {
        let then = if wake_again { Then::WakeAgain } else { Then::Sleep };
        match mem::replace(&mut self.state, State::Asleep) {
            State::Awake { run, .. } | State::Frozen { run, .. } | State::Freezing { run }
                if run == died =>
            {
                self.note_death(ctx);
                self.stop(Some(run), Why::Died, then, ctx);
            }
            State::Resuming { run, .. } if run == died => {
                self.note_death(ctx);
                self.give_up(run, then, ctx);
            }
            // It was being thawed for a request.
            State::Thawing { run } if run == died => {
                self.note_death(ctx);
                self.stop(Some(run), Why::Died, Then::WakeAgain, ctx);
            }
            State::Starting { wake, died: known } => {
                self.state = State::Starting { wake, died: known.max(Some(died)) };
            }
            State::Attaching { run, .. } if run == died => self.fail_early(ctx),
            // No answer of the table may make it awake again.
            State::Stopping {
                run: Some(run),
                then,
                step: StopStep::Taking { .. } | StopStep::AskingAwake { .. },
                ..
            } if run == died => {
                self.note_death(ctx);
                self.stop(Some(run), Why::Died, then, ctx);
            }
            other @ (State::Asleep
            | State::Leasing { .. }
            | State::Restoring { .. }
            | State::Opening { .. }
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
            | State::Unproven { .. }
            | State::Backoff { .. }) => self.state = other,
        }
    }

    fn note_death(&mut self, ctx: &mut Context<'_>) {
        ctx.shared.counters.add("instances_died");
        self.last_problem = Some("the instance exited by itself".into());
    }

    pub(super) fn on_stop(
        &mut self,
        run: Option<Run>,
        why: Why,
        then: Then,
        step: StopStep,
        answer: Answer,
        ctx: &mut Context<'_>,
    ) {
        match (step, answer) {
            (StopStep::Taking { since }, Answer::StopBusy) => {
                ctx.shared.counters.add("idle_stops_taken_back");
                let Some(run) = run else { return };
                self.state = State::Awake { run, since };
                if then == Then::WakeAgain {
                    ctx.fx.push(Effect::Publish(self.slot, Word::Awake(run)));
                }
            }
            (StopStep::Taking { .. }, Answer::StopTaken) => match run {
                Some(run) if then == Then::WakeAgain => {
                    // Asked for while the word said stopping: it never stopped.
                    ctx.fx.push(Effect::Publish(self.slot, Word::Awake(run)));
                    self.state = State::Awake { run, since: ctx.now.mono };
                }
                Some(run) if self.policy.frozen.is_some() => self.rest_warm(run, then, ctx),
                Some(_) | None => self.stop(run, why, then, ctx),
            },
            (StopStep::AskingAwake { .. }, Answer::Due(due)) => {
                self.note_due(&due, ctx);
                self.asked_awake(run, then, ctx);
            }
            (StopStep::Asking { .. }, Answer::Due(due)) => {
                self.note_due(&due, ctx);
                self.terminate(run, why, then, ctx);
            }
            (StopStep::Terminating { .. } | StopStep::Killing { .. }, Answer::Empty) => {
                self.gone(why, then, ctx);
            }
            (step, _) => self.state = State::Stopping { run, why, then, step },
        }
    }

    pub(super) fn tick_stop(
        &mut self,
        run: Option<Run>,
        why: Why,
        then: Then,
        step: StopStep,
        ctx: &mut Context<'_>,
    ) {
        match step {
            StopStep::AskingAwake { until } if until <= ctx.now.mono => {
                self.asked_awake(run, then, ctx);
            }
            StopStep::Asking { until } if until <= ctx.now.mono => {
                self.terminate(run, why, then, ctx);
            }
            StopStep::Terminating { until } if until <= ctx.now.mono => {
                ctx.shared.counters.add("graces_ended");
                self.kill(run, why, then, ctx);
            }
            StopStep::Killing { until } if until <= ctx.now.mono => {
                self.unproven(why, then, false, ctx);
            }
            step @ (StopStep::Taking { .. }
            | StopStep::AskingAwake { .. }
            | StopStep::Asking { .. }
            | StopStep::Terminating { .. }
            | StopStep::Killing { .. }) => self.state = State::Stopping { run, why, then, step },
        }
    }

    /// The cgroup is proven empty.
    fn gone(&mut self, why: Why, then: Then, ctx: &mut Context<'_>) {
        match why {
            Why::Leftover => {
                // No replica was attached to it: what it wrote last is nowhere else.
                self.unsynced = Some(ctx.now.mono);
                self.settle(then, ctx);
            }
            why @ (Why::Idle
            | Why::Operator
            | Why::Died
            | Why::Leaving
            | Why::Removed
            | Why::Synced
            | Why::Failed(_)) => {
                let ticket = self.ticket();
                ctx.fx.push(Effect::Save(ticket, self.slot));
                self.state = State::Saving { why, then };
            }
        }
    }

    pub(super) fn on_saved(&mut self, why: Why, then: Then, answer: Answer, ctx: &mut Context<'_>) {
        let Answer::Saved(saved) = answer else {
            self.state = State::Saving { why, then };
            return;
        };
        match saved {
            Saved::Clean(tip) => {
                self.least = self.least.max(tip.as_ref().map_or(Txid(0), |tip| tip.txid));
                self.tip = Tip::Known(tip);
                if self.unsynced.take().is_some() {
                    self.last_problem = None;
                }
            }
            Saved::Unclean { why, .. } => {
                ctx.shared.counters.add("unclean_sleeps");
                self.tip = Tip::Doubtful;
                self.unsynced = Some(ctx.now.mono + ctx.shared.settings.retry_max);
                // What failed first is what people want to know.
                self.last_problem.get_or_insert(why);
            }
            Saved::StoodDown => {
                ctx.shared.counters.add("leases_lost");
                self.lease = Lease::None;
                self.tip = Tip::Doubtful;
                self.unsynced = Some(ctx.now.mono + ctx.shared.settings.retry_max);
            }
        }
        if let Why::Failed(failure) = why {
            ctx.fx.push(Effect::Publish(self.slot, Word::Asleep));
            self.back_off(failure.clone(), ctx);
            if then == Then::WakeAgain {
                ctx.fx.push(Effect::Refuse(self.slot, failure));
            }
            return;
        }
        self.settle(then, ctx);
    }

    /// Nothing runs any more.
    pub(super) fn settle(&mut self, then: Then, ctx: &mut Context<'_>) {
        ctx.shared.counters.add("sleeps");
        ctx.fx.push(Effect::Publish(self.slot, Word::Asleep));
        self.state = State::Asleep;
        if then == Then::WakeAgain {
            if self.is_going(ctx) {
                let detail = "the host is not woken any more".into();
                self.refuse(Reason::Leaving, detail, RETRY_AFTER, ctx);
            } else {
                self.begin_wake(ctx);
            }
        }
    }

    pub(super) fn unproven(&mut self, why: Why, then: Then, fenced: bool, ctx: &mut Context<'_>) {
        ctx.shared.counters.add("stops_unproven");
        let detail = "the instance could not be proven gone".into();
        self.refuse(Reason::Unproven, detail, ctx.shared.settings.proof, ctx);
        self.kill_again(why, then, fenced, ctx);
    }

    pub(super) fn kill_again(&mut self, why: Why, then: Then, fenced: bool, ctx: &mut Context<'_>) {
        let ticket = self.ticket();
        ctx.fx.push(Effect::Kill(ticket, self.slot));
        let until = ctx.now.mono + ctx.shared.settings.proof;
        self.state = State::Unproven { why, then, fenced, until };
    }

    pub(super) fn on_late_proof(
        &mut self,
        why: Why,
        then: Then,
        fenced: bool,
        until: Mono,
        answer: &Answer,
        ctx: &mut Context<'_>,
    ) {
        if *answer != Answer::Empty {
            self.state = State::Unproven { why, then, fenced, until };
        } else if fenced {
            self.end_fenced(then, ctx);
        } else {
            self.gone(why, then, ctx);
        }
    }

    /// The session or the lease is lost. The word first, then SIGKILL; no question, no drain.
    pub(crate) fn fence(&mut self, detail: &str, ctx: &mut Context<'_>) {
        ctx.shared.counters.add("fenced");
        self.last_problem = Some(detail.into());
        match mem::replace(&mut self.state, State::Asleep) {
            State::Asleep | State::Backoff { .. } => {
                self.lease = Lease::None;
                self.tip = Tip::Doubtful;
            }
            State::Leasing { .. } | State::Restoring { .. } => {
                let stale = self.ticket();
                debug_assert_eq!(stale.attempt, self.attempt);
                self.lose(detail, ctx);
            }
            State::Opening { .. } => {
                ctx.fx.push(Effect::Abandon(self.slot));
                let stale = self.ticket();
                debug_assert_eq!(stale.attempt, self.attempt);
                self.lose(detail, ctx);
            }
            State::Parking { step } => {
                self.lease = Lease::None;
                self.state = State::Parking { step };
            }
            State::Saving { .. } => {
                ctx.fx.push(Effect::Abandon(self.slot));
                let stale = self.ticket();
                debug_assert_eq!(stale.attempt, self.attempt);
                self.end_fenced(Then::Sleep, ctx);
            }
            State::Unproven { why, then, until, .. } => {
                self.state = State::Unproven { why, then, fenced: true, until };
            }
            State::Starting { .. }
            | State::Attaching { .. }
            | State::Resuming { .. }
            | State::Awake { .. }
            | State::Freezing { .. }
            | State::Frozen { .. }
            | State::Thawing { .. }
            | State::Stopping { .. }
            | State::Fenced { .. } => {
                ctx.fx.push(Effect::Publish(self.slot, Word::Asleep));
                let ticket = self.ticket();
                ctx.fx.push(Effect::Kill(ticket, self.slot));
                ctx.fx.push(Effect::Abandon(self.slot));
                self.refuse(Reason::Lost, detail.into(), RETRY_AFTER, ctx);
                let until = ctx.now.mono + ctx.shared.settings.proof;
                self.state = State::Fenced { then: Then::Sleep, until };
            }
        }
    }

    pub(super) fn on_fenced(
        &mut self,
        then: Then,
        until: Mono,
        answer: &Answer,
        ctx: &mut Context<'_>,
    ) {
        if *answer == Answer::Empty {
            self.end_fenced(then, ctx);
        } else {
            self.state = State::Fenced { then, until };
        }
    }

    fn end_fenced(&mut self, then: Then, ctx: &mut Context<'_>) {
        self.lease = Lease::None;
        self.tip = Tip::Doubtful;
        // What it wrote last is nowhere else: uploaded when the host is ours again, or set aside.
        self.unsynced = Some(ctx.now.mono);
        self.settle(then, ctx);
    }
}
