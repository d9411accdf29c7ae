//! `dormouse hibernate HOST --off|--on`: the host goes to an outside supervisor, and comes back.
//!
//! Out: asleep, everything uploaded, and the record says `outside`: no box wakes it. In: the file on
//! this box is the truth, and goes to the store as a full image.

use alloc::format;
use alloc::string::String;

use super::{Context, HostEntry, Lease, Purpose, Tip, Why};
use crate::effect::Effect;
use crate::record::HostState;

const NOT_RENEWED: &str = "the store cannot be written to now: the session is not renewed";

/// A handover that is under way.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Handover {
    /// To the outside supervisor.
    Out {
        /// What was not uploaded has been tried once.
        synced: bool,
    },
    /// Back.
    In,
}

impl HostEntry {
    pub(crate) fn hand_out(&mut self, ctx: &mut Context<'_>) {
        if self.is_going(ctx) || self.handover.is_some() {
            return self.refuse_handover("the host is going, or being handed over, already", ctx);
        }
        if !ctx.session.may_write(ctx.now) {
            // Before its instance is stopped for nothing.
            let trouble = ctx.session.trouble(ctx.now).map(|why| format!(" ({why})"));
            let why = format!("{NOT_RENEWED}{}", trouble.unwrap_or_default());
            return self.refuse_handover(&why, ctx);
        }
        self.handover = Some(Handover::Out { synced: false });
        self.rest(Why::Operator, ctx);
    }

    pub(crate) fn take_in(&mut self, ctx: &mut Context<'_>) {
        if self.is_going(ctx) || self.handover.is_some() || !self.is_at_rest() {
            return self.refuse_handover("the host is going, awake, or being handed over", ctx);
        }
        if matches!(self.lease, Lease::Owned { .. }) {
            return self.refuse_handover("the host is not outside: this box runs it", ctx);
        }
        self.handover = Some(Handover::In);
        self.begin(Purpose::Sync, ctx);
    }

    fn refuse_handover(&self, why: &str, ctx: &mut Context<'_>) {
        ctx.fx.push(Effect::Handed(self.slot, Err(why.into())));
    }

    pub(crate) fn end_handover(&mut self, how: Result<(), String>, ctx: &mut Context<'_>) {
        if self.handover.take().is_some() {
            ctx.fx.push(Effect::Handed(self.slot, how));
        }
    }

    /// Whether it is to be handed out.
    pub(crate) const fn goes_out(&self) -> bool {
        matches!(self.handover, Some(Handover::Out { .. }))
    }

    /// Whether it is to be taken back.
    pub(super) fn takes_in(&self) -> bool {
        self.handover == Some(Handover::In)
    }

    /// At rest, on its way out: synced first, then released as `outside`.
    pub(crate) fn go_out(&mut self, ctx: &mut Context<'_>) {
        let Some(Handover::Out { synced }) = self.handover else { return };
        if !ctx.session.may_write(ctx.now) {
            return self.end_handover(Err(NOT_RENEWED.into()), ctx);
        }
        let is_known = self.tip != Tip::Doubtful && self.unsynced.is_none();
        if matches!(self.lease, Lease::Owned { .. }) && is_known {
            if !self.release_as(HostState::Outside, ctx) {
                self.end_handover(Err("the host could not be released".into()), ctx);
            }
        } else if synced {
            let why = self.last_problem.clone().unwrap_or_default();
            self.end_handover(Err(format!("the host was not handed out: {why}")), ctx);
        } else {
            self.handover = Some(Handover::Out { synced: true });
            self.begin_sync(ctx);
        }
    }

    /// At rest, after it was taken in, or was not.
    pub(crate) fn settle_handover(&mut self, ctx: &mut Context<'_>) {
        if !self.takes_in() {
            return;
        }
        let is_in = matches!(self.lease, Lease::Owned { .. }) && self.unsynced.is_none();
        let why = || self.last_problem.clone().unwrap_or_else(|| "the lease was lost".into());
        let how = if is_in { Ok(()) } else { Err(why()) };
        self.end_handover(how, ctx);
    }
}
