//! The release of a host: one compare-and-swap, journalled before it is sent, repeated byte for
//! byte until it is definite. Until then the host is not woken (DESIGN section 5, rule 7).

use alloc::format;

use super::{Context, HostEntry, Lease, ParkStep, Release, State, Tip};
use crate::effect::{Effect, Entry, Expect, RecordKey};
use crate::event::{Answer, Got, Wrote};
use crate::ids::{ETag, Epoch, Generation, Nonce, Txid};
use crate::record::{HostRecord, HostState, Owner};
use crate::shared::Mode;

impl HostEntry {
    /// Gives the lease back; false when there is nothing that may be given back.
    pub(crate) fn release(&mut self, ctx: &mut Context<'_>) -> bool {
        self.release_as(HostState::Released, ctx)
    }

    pub(super) fn release_as(&mut self, state: HostState, ctx: &mut Context<'_>) -> bool {
        assert!(self.is_at_rest(), "invariant 4: a release while something may run");
        let Lease::Owned { record, etag, .. } = &self.lease else { return false };
        // Unclean: the record stays owned, so that the next owner fences it.
        let Tip::Known(saved) = self.tip.clone() else { return false };
        if !ctx.session.may_write(ctx.now) {
            return false;
        }
        let released = HostRecord {
            state,
            nonce: ctx.shared.nonces.fresh(),
            txid: saved.as_ref().map_or(Txid(0), |tip| tip.txid),
            etag: saved.and_then(|tip| tip.etag),
            ..record.clone()
        };
        let over = Some((record.clone(), etag.clone()));
        self.lease = Lease::None;
        let put = Release { record: released, over, pause: ctx.shared.settings.retry };
        self.send_release(put, ctx);
        true
    }

    fn send_release(&mut self, put: Release, ctx: &mut Context<'_>) {
        let key = RecordKey::Host(self.host.clone());
        let ticket = self.ticket();
        let step = if let Some((_, etag)) = &put.over {
            // At each send: an entry that could not be written then is written now, or not sent.
            let nonce = put.record.nonce.clone();
            ctx.fx.push(Effect::Journal(Entry::Releasing { host: self.host.clone(), nonce }));
            let expect = Expect::Tag(etag.clone());
            ctx.fx.push(Effect::Put(ticket, key, put.record.encode(), expect));
            ParkStep::Putting { put }
        } else {
            // A predecessor's: its outcome is read, never guessed.
            ctx.fx.push(Effect::Get(ticket, key));
            ParkStep::Checking { put }
        };
        self.state = State::Parking { step };
    }

    /// A release that a predecessor journalled and that is not known to be definite.
    pub(crate) fn resume_release(&mut self, nonce: &Nonce, ctx: &mut Context<'_>) {
        let record = HostRecord {
            generation: Generation(0),
            owner: Owner { name: ctx.shared.settings.identity.name.clone(), epoch: Epoch(0) },
            nonce: nonce.clone(),
            id: ctx.shared.settings.identity.id.clone(),
            state: HostState::Released,
            since: Generation(0),
            txid: Txid(0),
            etag: None,
            build: None,
        };
        self.send_release(Release { record, over: None, pause: ctx.shared.settings.retry }, ctx);
    }

    pub(super) fn on_park(&mut self, step: ParkStep, answer: Answer, ctx: &mut Context<'_>) {
        match (step, answer) {
            (ParkStep::Putting { put }, Answer::Wrote(Wrote::Done(etag))) => {
                self.released(put.record, etag, ctx);
            }
            (ParkStep::Putting { put }, Answer::Wrote(Wrote::ConditionFailed)) => {
                let ticket = self.ticket();
                ctx.fx.push(Effect::Get(ticket, RecordKey::Host(self.host.clone())));
                self.state = State::Parking { step: ParkStep::Checking { put } };
            }
            // Nothing was written, and somebody waits: the host stays ours, as after a crash.
            (ParkStep::Putting { put }, Answer::Wrote(Wrote::Failed(problem)))
                if put.record.state == HostState::Outside =>
            {
                ctx.shared.counters.add("releases_left");
                let why = format!("the store did not take it: {}", problem.detail());
                self.end_handover(Err(why), ctx);
                self.end_release(ctx);
            }
            // Nothing was written, and the activator goes: the record stays owned, as after a crash.
            (ParkStep::Putting { .. }, Answer::Wrote(Wrote::Failed(_)))
                if ctx.shared.mode == Mode::Leaving =>
            {
                ctx.shared.counters.add("releases_left");
                self.end_release(ctx);
            }
            (ParkStep::Putting { put } | ParkStep::Checking { put }, Answer::Wrote(_))
            | (ParkStep::Checking { put }, Answer::Got(Got::Failed(_))) => {
                self.pause_release(put, ctx);
            }
            (ParkStep::Checking { put }, Answer::Got(Got::Found { body, etag, .. })) => {
                self.on_release_read(&put, &body, etag, ctx);
            }
            (ParkStep::Checking { .. }, Answer::Got(Got::Absent)) => self.end_release(ctx),
            (step, _) => self.state = State::Parking { step },
        }
    }

    fn pause_release(&mut self, mut put: Release, ctx: &mut Context<'_>) {
        let until = ctx.shared.again(&mut put.pause, &put.record.nonce, ctx.now);
        self.state = State::Parking { step: ParkStep::Pausing { put, until } };
    }

    fn on_release_read(&mut self, put: &Release, body: &[u8], etag: ETag, ctx: &mut Context<'_>) {
        let own_id = ctx.shared.settings.identity.id.clone();
        match HostRecord::decode(body) {
            Ok(found) if found.nonce == put.record.nonce => self.released(found, etag, ctx),
            // Not landed yet, and it still could: replace what it was conditional on, so that it
            // cannot. The host stays ours and unclean; the next wake takes it with a new number.
            Ok(found) if found.id == own_id && found.state == HostState::Owned => {
                let nonce = put.record.nonce.clone();
                let sealed = HostRecord { nonce, ..found.clone() };
                let put = Release { record: sealed, over: Some((found, etag)), pause: put.pause };
                self.send_release(put, ctx);
            }
            Ok(_) | Err(_) => self.end_release(ctx),
        }
    }

    pub(super) fn tick_park(&mut self, step: ParkStep, ctx: &mut Context<'_>) {
        match step {
            ParkStep::Pausing { put, until } if until <= ctx.now.mono => {
                self.send_release(put, ctx);
            }
            step @ (ParkStep::Putting { .. }
            | ParkStep::Checking { .. }
            | ParkStep::Pausing { .. }) => self.state = State::Parking { step },
        }
    }

    /// It stands in the store.
    fn released(&mut self, record: HostRecord, etag: ETag, ctx: &mut Context<'_>) {
        if record.state == HostState::Outside {
            // Not to be taken back by a mere visit.
            self.lease = Lease::None;
            self.end_handover(Ok(()), ctx);
        } else {
            self.lease = Lease::Remembered { record, etag };
        }
        self.end_release(ctx);
    }

    fn end_release(&mut self, ctx: &mut Context<'_>) {
        ctx.fx.push(Effect::Journal(Entry::Settled { host: self.host.clone() }));
        let why = "its record was changed by somebody else meanwhile";
        self.end_handover(Err(why.into()), ctx);
        self.state = State::Asleep;
    }
}
