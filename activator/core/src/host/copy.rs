//! The local copy: used, restored behind a fence, or kept behind a full image
//! (DESIGN section 5, rules 9 and 10, and its table).

use alloc::format;
use alloc::string::String;

use super::{Context, CopyStep, HostEntry, Lease, Purpose, State, Tip, Wake};
use crate::effect::{Base, Effect, Reason};
use crate::event::{Answer, ReplicaProblem, Uploaded};
use crate::ids::{BoxName, ETag, Generation, Nonce, Txid};
use crate::position::{Claimed, CopyRefusal, LocalCopy, Remote, RemoteTip, Verdict, judge};
use crate::record::HostRecord;
use crate::time::{Mono, Nanos};

/// What an upload that a start depends on consists of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Kind {
    Fence,
    Image,
}

/// An upload that a start depends on, repeated byte for byte until its outcome is definite.
#[derive(Clone, Debug, Hash)]
pub(crate) struct CopyPut {
    txid: Txid,
    nonce: Nonce,
    /// Before the next repeat.
    pause: Nanos,
    /// When it is sent, again or at last; none while its answer is awaited.
    pub(super) until: Option<Mono>,
}

impl HostEntry {
    pub(super) fn begin_copy(&mut self, wake: Wake, ctx: &mut Context<'_>) {
        let ticket = self.ticket();
        ctx.fx.push(Effect::Inspect(ticket, self.slot));
        self.state = State::Restoring { wake, step: CopyStep::Inspecting };
    }

    pub(super) fn on_copy(
        &mut self,
        wake: Wake,
        step: CopyStep,
        answer: Answer,
        ctx: &mut Context<'_>,
    ) {
        match (step, answer) {
            (CopyStep::Inspecting, Answer::Inspected(Ok(local))) => {
                let remote = self.newest_by_tip();
                self.decide(wake, local, &remote, ctx);
            }
            (CopyStep::Forking { owner, generation }, Answer::Inspected(Ok(local))) => {
                self.on_fork_seen(wake, owner, generation, &local, ctx);
            }
            (_, Answer::Inspected(Err(why)) | Answer::SetAside(Err(why))) => {
                self.fail_wake(Reason::Disk, why, ctx);
            }
            (CopyStep::Forking { owner, .. }, Answer::SetAside(Ok(name))) => {
                self.end_fork(&owner, &name, ctx);
            }
            (CopyStep::Listing { local }, Answer::Listed(Ok(newest))) => {
                self.decide(wake, local, &Remote::Known(newest), ctx);
            }
            (CopyStep::Relisting, Answer::Listed(Ok(newest))) => {
                let next = newest.map_or(Txid(1), |newest| newest.tip.txid.next());
                self.upload(wake, Kind::Image, next, ctx);
            }
            (CopyStep::Fetching { newest }, Answer::Fetched(Ok(tip))) => {
                self.on_fetched(wake, with_tag(tip, newest), ctx);
            }
            (CopyStep::Applying, Answer::Fetched(Ok(tip))) => self.on_fetched(wake, tip, ctx),
            (CopyStep::Fencing { put }, Answer::Uploaded(uploaded)) => {
                self.on_fence(wake, put, uploaded, ctx);
            }
            (CopyStep::Imaging { put }, Answer::Uploaded(uploaded)) => {
                self.on_image(wake, put, uploaded, ctx);
            }
            (CopyStep::Adopting { tip }, Answer::Adopted(Ok(()))) => {
                self.open(wake, Base::At(tip), ctx);
            }
            (_, Answer::Listed(Err(p)) | Answer::Fetched(Err(p)) | Answer::Adopted(Err(p))) => {
                self.fail_replica(&p, ctx);
            }
            (step, _) => self.state = State::Restoring { wake, step },
        }
    }

    /// What a sleep left behind belongs to a history that another box has gone past.
    pub(super) fn begin_fork(&mut self, wake: Wake, record: &HostRecord, ctx: &mut Context<'_>) {
        let ticket = self.ticket();
        ctx.fx.push(Effect::Inspect(ticket, self.slot));
        let step =
            CopyStep::Forking { owner: record.owner.name.clone(), generation: record.generation };
        self.state = State::Restoring { wake, step };
    }

    fn on_fork_seen(
        &mut self,
        wake: Wake,
        owner: BoxName,
        generation: Generation,
        local: &LocalCopy,
        ctx: &mut Context<'_>,
    ) {
        let written = local.position.as_ref().map(|position| position.generation);
        if local.file.is_none() || written.is_none_or(|written| written >= generation) {
            let detail = format!("box {owner} owns this host; the local copy was left as it is");
            return self.fail_wake(Reason::Elsewhere, detail, ctx);
        }
        let ticket = self.ticket();
        ctx.fx.push(Effect::SetAside(ticket, self.slot));
        self.state = State::Restoring { wake, step: CopyStep::Forking { owner, generation } };
    }

    fn end_fork(&mut self, owner: &BoxName, name: &str, ctx: &mut Context<'_>) {
        ctx.shared.counters.add("forks_set_aside");
        self.last_problem = Some(format!(
            "box {owner} took this host over; what was not uploaded here is kept as {name}"
        ));
        self.unsynced = None;
        self.state = State::Asleep;
        if self.purpose == Purpose::Serve {
            // Somebody came meanwhile: the answer is the other box's to give.
            self.begin_wake(ctx);
        }
    }

    pub(super) fn fail_replica(&mut self, problem: &ReplicaProblem, ctx: &mut Context<'_>) {
        match problem {
            ReplicaProblem::Store(problem) => self.fail_store(problem, ctx),
            ReplicaProblem::Corrupt(why) => {
                self.fail_wake(Reason::Replica, format!("replica: {why}"), ctx);
            }
            ReplicaProblem::Unfit(why) => {
                self.fail_wake(Reason::Database, format!("database: {why}"), ctx);
            }
            ReplicaProblem::Local(why) => self.fail_wake(Reason::Disk, why.clone(), ctx),
        }
    }

    /// A record that was cleanly released, and a clean sleep, name the newest file: no LIST. Once
    /// the replica was opened, what the record named is history.
    fn newest_by_tip(&self) -> Remote {
        match &self.tip {
            Tip::Known(Some(tip)) => Remote::named(tip.clone()),
            Tip::Known(None) | Tip::Doubtful => Remote::Unasked,
        }
    }

    fn decide(&mut self, wake: Wake, local: LocalCopy, remote: &Remote, ctx: &mut Context<'_>) {
        let Lease::Owned { record, before, .. } = &self.lease else {
            return self.lose("the lease was lost during the wake", ctx);
        };
        let claimed = Claimed {
            before: before.as_ref(),
            unbroken: Some(record.generation),
            box_id: &ctx.shared.settings.identity.id,
        };
        self.least = self.least.max(named(before.as_ref(), &local, remote));
        let tip = local.position.as_ref().map(|p| RemoteTip { txid: p.txid, etag: p.etag.clone() });
        match judge(claimed, &local, remote) {
            Verdict::List => {
                let ticket = self.ticket();
                ctx.fx.push(Effect::List(ticket, self.slot));
                self.state = State::Restoring { wake, step: CopyStep::Listing { local } };
            }
            Verdict::Use => {
                let base = match tip {
                    Some(tip) if tip.txid > Txid(0) => Base::At(tip),
                    Some(_) | None => Base::Nothing,
                };
                self.open(wake, base, ctx);
            }
            // An absent file over an unclean record: its owner may still write number 1.
            Verdict::Fresh if self.over_unclean() => {
                self.upload(wake, Kind::Fence, Txid(1), ctx);
            }
            Verdict::Fresh => self.open(wake, Base::Nothing, ctx),
            Verdict::Restore { set_aside } => {
                if set_aside {
                    ctx.shared.counters.add("forks_set_aside");
                }
                let ticket = self.ticket();
                ctx.fx.push(Effect::Restore { ticket, slot: self.slot, set_aside });
                let newest = match remote {
                    Remote::Known(newest) => newest.as_ref().map(|newest| newest.tip.clone()),
                    Remote::Unasked => None,
                };
                self.state = State::Restoring { wake, step: CopyStep::Fetching { newest } };
            }
            Verdict::Keep | Verdict::Adopt => {
                self.upload(wake, Kind::Image, remote.txid().next(), ctx);
            }
            Verdict::Refuse(refusal) => {
                self.fail_wake(Reason::Replica, String::from(refusal.explain()), ctx);
            }
        }
    }

    fn on_fetched(&mut self, wake: Wake, tip: RemoteTip, ctx: &mut Context<'_>) {
        if tip.txid < self.least {
            let why = String::from(CopyRefusal::RemoteOlder.explain());
            return self.fail_wake(Reason::Replica, why, ctx);
        }
        self.least = tip.txid;
        if self.over_unclean() {
            return self.upload(wake, Kind::Fence, tip.txid.next(), ctx);
        }
        self.adopt(wake, tip, ctx);
    }

    fn adopt(&mut self, wake: Wake, tip: RemoteTip, ctx: &mut Context<'_>) {
        assert!(tip.txid >= self.least, "invariant 10: an older copy than was named");
        self.least = tip.txid;
        let Some(generation) = self.generation() else {
            return self.lose("the lease was lost during the wake", ctx);
        };
        let ticket = self.ticket();
        ctx.fx.push(Effect::Adopt(ticket, self.slot, generation, tip.clone()));
        self.state = State::Restoring { wake, step: CopyStep::Adopting { tip } };
    }

    fn upload(&mut self, wake: Wake, kind: Kind, txid: Txid, ctx: &mut Context<'_>) {
        let nonce = ctx.shared.nonces.fresh();
        let put = CopyPut { txid, nonce, pause: ctx.shared.settings.retry, until: None };
        self.send_upload(wake, kind, put, ctx);
    }

    /// Sends a fence or an image, or the same bytes once more.
    fn send_upload(&mut self, wake: Wake, kind: Kind, mut put: CopyPut, ctx: &mut Context<'_>) {
        // The deadline is checked before each PUT, after the answer that gave the number.
        let may = ctx.session.may_write(ctx.now);
        put.until = (!may).then(|| ctx.now.mono + put.pause);
        if may {
            // From here on the store may hold a newer file than the record names.
            self.tip = Tip::Doubtful;
            let (ticket, txid, nonce) = (self.ticket(), put.txid, put.nonce.clone());
            ctx.fx.push(match kind {
                Kind::Fence => Effect::PutFence(ticket, self.slot, txid, nonce),
                Kind::Image => Effect::PutImage(ticket, self.slot, txid, nonce),
            });
        }
        self.state = State::Restoring { wake, step: kind.step(put) };
    }

    /// Its outcome is unknown. A store that is slow or away is not helped by whole images in a row.
    fn pause_upload(&mut self, wake: Wake, kind: Kind, mut put: CopyPut, ctx: &Context<'_>) {
        put.until = Some(ctx.shared.again(&mut put.pause, &put.nonce, ctx.now));
        self.state = State::Restoring { wake, step: kind.step(put) };
    }

    pub(super) fn tick_copy(&mut self, wake: Wake, step: CopyStep, ctx: &mut Context<'_>) {
        let is_due = |put: &CopyPut| put.until.is_some_and(|until| until <= ctx.now.mono);
        match step {
            CopyStep::Fencing { put } if is_due(&put) => {
                self.send_upload(wake, Kind::Fence, put, ctx);
            }
            CopyStep::Imaging { put } if is_due(&put) => {
                self.send_upload(wake, Kind::Image, put, ctx);
            }
            step @ (CopyStep::Inspecting
            | CopyStep::Listing { .. }
            | CopyStep::Fetching { .. }
            | CopyStep::Fencing { .. }
            | CopyStep::Applying
            | CopyStep::Imaging { .. }
            | CopyStep::Relisting
            | CopyStep::Adopting { .. }
            | CopyStep::Forking { .. }) => self.state = State::Restoring { wake, step },
        }
    }

    fn on_fence(&mut self, wake: Wake, put: CopyPut, uploaded: Uploaded, ctx: &mut Context<'_>) {
        match uploaded {
            Uploaded::Done(tip) => {
                ctx.shared.counters.add("fences_written");
                self.adopt(wake, tip, ctx);
            }
            // An old owner's late file: it belongs to the history, and the next number is fenced.
            Uploaded::Taken { .. } => {
                let ticket = self.ticket();
                ctx.fx.push(Effect::Apply(ticket, self.slot, put.txid));
                self.state = State::Restoring { wake, step: CopyStep::Applying };
            }
            Uploaded::Unknown => self.pause_upload(wake, Kind::Fence, put, ctx),
            Uploaded::Failed(problem) => self.fail_replica(&problem, ctx),
        }
    }

    fn on_image(&mut self, wake: Wake, put: CopyPut, uploaded: Uploaded, ctx: &mut Context<'_>) {
        match uploaded {
            Uploaded::Done(tip) => {
                self.least = self.least.max(tip.txid);
                self.open(wake, Base::At(tip), ctx);
            }
            // A late upload of our own, from before a restart: it is older than the local file.
            Uploaded::Taken { own: true } => {
                let ticket = self.ticket();
                ctx.fx.push(Effect::List(ticket, self.slot));
                self.state = State::Restoring { wake, step: CopyStep::Relisting };
            }
            Uploaded::Taken { own: false } => {
                ctx.shared.counters.add("forks_set_aside");
                let ticket = self.ticket();
                ctx.fx.push(Effect::Restore { ticket, slot: self.slot, set_aside: true });
                let step = CopyStep::Fetching { newest: None };
                self.state = State::Restoring { wake, step };
            }
            Uploaded::Unknown => self.pause_upload(wake, Kind::Image, put, ctx),
            Uploaded::Failed(problem) => self.fail_replica(&problem, ctx),
        }
    }

    fn open(&mut self, wake: Wake, base: Base, ctx: &mut Context<'_>) {
        let Some(generation) = self.generation() else {
            return self.lose("the lease was lost during the wake", ctx);
        };
        self.tip = Tip::Doubtful;
        let (ticket, slot) = (self.ticket(), self.slot);
        ctx.fx.push(Effect::OpenReplica { ticket, slot, generation, base });
        self.state = State::Opening { wake };
    }
}

/// The newest number that is named anywhere.
fn named(before: Option<&HostRecord>, local: &LocalCopy, remote: &Remote) -> Txid {
    let recorded = before.map_or(Txid(0), |record| record.txid);
    let positioned = local.position.as_ref().map_or(Txid(0), |position| position.txid);
    recorded.max(positioned).max(remote.txid())
}

/// A restore whose last file is a snapshot does not see the tag of the L0 under that number; the
/// LIST or the record before it did.
fn with_tag(restored: RemoteTip, newest: Option<RemoteTip>) -> RemoteTip {
    match newest {
        Some(newest) if restored.etag.is_none() && newest.txid == restored.txid => newest,
        Some(_) | None => restored,
    }
}

impl Kind {
    const fn step(self, put: CopyPut) -> CopyStep {
        match self {
            Self::Fence => CopyStep::Fencing { put },
            Self::Image => CopyStep::Imaging { put },
        }
    }
}

impl RemoteTip {
    /// A tip whose tag is known.
    #[must_use]
    pub fn tagged(txid: Txid, etag: ETag) -> Self {
        Self { txid, etag: Some(etag) }
    }
}
