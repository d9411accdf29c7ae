//! A host's copy as a driver works on it: one task after the other, each in small steps.

use std::collections::VecDeque;

use dormouse_core::effect::Base;
use dormouse_core::event::{Answer, ReplicaProblem, StoreProblem, Ticket, Uploaded};
use dormouse_core::ids::{ETag, Generation, Host, Nonce, Run, Slot, Txid};
use dormouse_core::position::RemoteTip;
use dormouse_core::upload::{PutAnswer, Standing};

use crate::clock::MS;
use crate::disk::{Copy, history};
use crate::network::{Ask, To};
use crate::replicas::{Running, Start};
use crate::sabotage::Sabotage;
use crate::store::{Body, File, Restored};
use crate::world::{BoxIndex, Item, World};

/// How far a host's replica has come.
#[derive(Debug)]
pub enum Stage {
    /// None.
    Nothing,
    /// The read lock is held.
    Opened(Start),
    /// It follows the WAL.
    Running(Box<Running>),
}

/// A host as the driver has it.
#[derive(Debug)]
pub struct Hosted {
    /// Its name.
    pub host: Host,
    /// Run of its instance.
    pub run: Option<Run>,
    /// Its replica.
    pub stage: Stage,
    unfinished: Option<Restored>,
    /// A fence or image in the making: a repeat sends the same bytes.
    fence: Option<File>,
    tasks: VecDeque<Task>,
    busy: bool,
}

/// A piece of work on a copy.
#[derive(Clone, Debug)]
pub enum Task {
    /// Restore; set a local file aside first.
    Restore(Ticket, bool),
    /// Set the local file aside: the host went to another box.
    Fork(Ticket),
    /// Upload a fence over the unfinished file.
    Fence(Ticket, Nonce, Txid),
    /// Apply one more file.
    Apply(Ticket, Txid),
    /// Upload the whole local file.
    Image(Ticket, Nonce, Txid),
    /// Give the unfinished file its name.
    Adopt(Ticket, Generation, RemoteTip),
    /// Take the read lock.
    Open(Ticket, Generation, Base),
    /// Follow the WAL.
    Attach(Ticket),
    /// Follow the WAL of an instance that was taken over.
    Resume(Ticket, Generation),
    /// Let go of the replica.
    Abandon,
}

impl Hosted {
    /// Nothing is known but its name.
    #[must_use]
    pub const fn new(host: Host) -> Self {
        Self {
            host,
            run: None,
            stage: Stage::Nothing,
            unfinished: None,
            fence: None,
            tasks: VecDeque::new(),
            busy: false,
        }
    }

    /// Number of its running replica.
    #[must_use]
    pub fn replica(&self) -> Option<u64> {
        match &self.stage {
            Stage::Running(running) => Some(running.number),
            Stage::Nothing | Stage::Opened(_) => None,
        }
    }

    /// Commits that are not durable, and an upload that does not get on.
    #[must_use]
    pub fn is_stalled(&self) -> bool {
        match &self.stage {
            Stage::Running(running) => running.is_stalled(),
            Stage::Nothing | Stage::Opened(_) => false,
        }
    }
}

impl World {
    /// A task on a copy; it begins when those before it have ended.
    pub fn task(&mut self, b: BoxIndex, slot: Slot, task: Task) {
        if let Some(hosted) = self.hosted(b, slot) {
            hosted.tasks.push_back(task);
            self.next_task(b, slot);
        }
    }

    /// `Effect::Inspect`.
    pub fn inspect(&mut self, b: BoxIndex, ticket: Ticket, slot: Slot) {
        let Some(host) = self.host_at(b, slot) else { return };
        let mut seen = self.boxes[b].disk.inspect(&host);
        if self.breaks(Sabotage::WarmCacheTrusted)
            && let (Some(file), Some(position)) = (seen.file, &mut seen.position)
            && let Some(activator) = &self.boxes[b].activator
        {
            let view = activator.core.host(slot);
            position.generation = view.and_then(|v| v.generation).unwrap_or_default();
            position.clean = true;
            position.file = file;
            if let Some(newest) = self.store.newest(&host) {
                (position.txid, position.etag) = (newest.tip.txid, newest.tip.etag);
            }
            seen.wal_bytes = 0;
        }
        if self.breaks(Sabotage::DamageUnseen) {
            seen.damaged = false;
            if let Some(database) = &mut self.boxes[b].disk.copy(&host).database {
                database.damaged = false;
            }
        }
        if self.breaks(Sabotage::NewestAssumedOwn) {
            seen.spool.extend(self.store.newest(&host).and_then(|newest| newest.nonce));
        }
        let span = self.rng.between(0, 10) * MS;
        self.answer_after(span, b, ticket, Answer::Inspected(Ok(seen)));
    }

    fn next_task(&mut self, b: BoxIndex, slot: Slot) {
        let span = self.rng.between(0, 20) * MS;
        let Some(life) = self.boxes[b].activator.as_ref().map(|a| a.life) else { return };
        let Some(hosted) = self.hosted(b, slot).filter(|hosted| !hosted.busy) else { return };
        let Some(task) = hosted.tasks.pop_front() else { return };
        hosted.busy = true;
        self.after(span, Item::Copied(b, life, slot, task));
    }

    /// A task's work is done; its answer, and the next one.
    fn task_ends(&mut self, b: BoxIndex, slot: Slot, ticket: Ticket, answer: Answer) {
        if let Some(hosted) = self.hosted(b, slot) {
            hosted.busy = false;
        }
        self.next_task(b, slot);
        self.answer(b, ticket, answer);
    }

    /// The local part of a task.
    pub fn copied(&mut self, b: BoxIndex, slot: Slot, task: Task) {
        let Some(host) = self.host_at(b, slot) else { return };
        match task {
            Task::Restore(ticket, set_aside) => {
                if set_aside {
                    self.invariant_10_nothing_is_set_aside_without_need(b, &host);
                }
                if set_aside && !self.breaks(Sabotage::ForkDiscarded) {
                    self.tell(|| format!("box{b} sets its copy of {host} aside"));
                    self.boxes[b].disk.set_aside(&host);
                    self.ledger.count("forks");
                }
                if let Some(hosted) = self.hosted(b, slot) {
                    hosted.fence = None;
                }
                self.ask(b, Ask::Read(host), To::Restore(ticket, slot));
            }
            Task::Fork(ticket) => {
                let idle = self.hosted(b, slot).is_some_and(|h| matches!(h.stage, Stage::Nothing));
                let answer = if idle {
                    self.tell(|| format!("box{b} sets its copy of {host} aside, for good"));
                    self.boxes[b].disk.set_aside(&host);
                    self.ledger.count("forks of lost hosts");
                    Ok("fork".into())
                } else {
                    Err("the copy is in use again".into())
                };
                self.task_ends(b, slot, ticket, Answer::SetAside(answer));
            }
            Task::Apply(ticket, txid) => {
                self.ask(b, Ask::ReadOne(host, txid), To::Apply(ticket, slot));
            }
            Task::Fence(ticket, nonce, txid) => self.make_fence(b, slot, ticket, nonce, txid),
            Task::Image(ticket, nonce, txid) => self.make_image(b, slot, ticket, nonce, txid),
            Task::Adopt(ticket, generation, tip) => self.adopt(b, slot, ticket, generation, &tip),
            Task::Open(ticket, generation, base) => self.open(b, slot, ticket, generation, &base),
            Task::Attach(ticket) => {
                let answer = self.attach(b, slot);
                self.task_ends(b, slot, ticket, Answer::Attached(answer));
            }
            Task::Resume(ticket, generation) => {
                let answer = self.resume(b, slot, generation);
                self.task_ends(b, slot, ticket, Answer::Attached(answer));
            }
            Task::Abandon => {
                if let Some(hosted) = self.hosted(b, slot) {
                    hosted.stage = Stage::Nothing;
                    hosted.busy = false;
                }
                self.next_task(b, slot);
            }
        }
    }

    /// The files of a restore were read.
    pub fn restored(
        &mut self,
        b: BoxIndex,
        slot: Slot,
        ticket: Ticket,
        read: Result<Option<Restored>, ReplicaProblem>,
    ) {
        let answer = match read {
            Err(problem) => Err(problem),
            Ok(None) => Err(ReplicaProblem::Corrupt("nothing to restore".into())),
            Ok(Some(mut restored)) => {
                self.ledger.count("restores");
                if self.breaks(Sabotage::SnapshotTagTaken)
                    && restored.tip.etag.is_none()
                    && let Some(host) = self.host_at(b, slot)
                {
                    restored.tip.etag = self.store.snapshot_tag(&host, restored.tip.txid);
                }
                let tip = restored.tip.clone();
                self.name_early(b, slot, &restored);
                if let Some(hosted) = self.hosted(b, slot) {
                    hosted.unfinished = Some(restored);
                }
                Ok(tip)
            }
        };
        self.task_ends(b, slot, ticket, Answer::Fetched(answer));
    }

    /// Sabotage: name and clean position before the fence.
    fn name_early(&mut self, b: BoxIndex, slot: Slot, restored: &Restored) {
        if !self.breaks(Sabotage::PositionBeforeFence) {
            return;
        }
        let Some(activator) = &self.boxes[b].activator else { return };
        let generation = activator.core.host(slot).and_then(|view| view.generation);
        if let (Some(generation), Some(host)) = (generation, self.host_at(b, slot)) {
            let disk = &mut self.boxes[b].disk;
            disk.place(&host, restored.content.clone());
            disk.note(&host, generation, Some(&restored.tip), true);
        }
    }

    /// One more file was read.
    pub fn applied(&mut self, b: BoxIndex, slot: Slot, ticket: Ticket, one: Option<(File, ETag)>) {
        let answer = match (one, self.hosted(b, slot)) {
            (Some((file, etag)), Some(hosted)) => {
                // Over nothing at all, the file that met the fence is the first one.
                let empty = RemoteTip { txid: Txid(0), etag: None };
                let restored = hosted.unfinished.get_or_insert(Restored {
                    tip: empty,
                    content: Vec::new(),
                    merged: None,
                });
                restored.apply(&file);
                restored.tip = RemoteTip::tagged(file.txid, etag);
                Ok(restored.tip.clone())
            }
            (_, _) => Err(ReplicaProblem::Store(StoreProblem::Unreachable("no answer".into()))),
        };
        self.task_ends(b, slot, ticket, Answer::Fetched(answer));
    }

    fn make_fence(&mut self, b: BoxIndex, slot: Slot, ticket: Ticket, nonce: Nonce, txid: Txid) {
        if self.breaks(Sabotage::FenceOmitted) {
            let tip =
                self.hosted(b, slot).and_then(|h| h.unfinished.as_ref().map(|u| u.tip.clone()));
            if let Some(tip) = tip {
                let done = Answer::Uploaded(Uploaded::Done(tip));
                return self.task_ends(b, slot, ticket, done);
            }
        }
        let Some(hosted) = self.hosted(b, slot) else { return };
        if hosted.fence.as_ref().is_none_or(|fence| fence.nonce != nonce) {
            if txid == Txid(1) {
                // Over nothing: the empty database.
                let tip = RemoteTip { txid: Txid(0), etag: None };
                hosted.unfinished = Some(Restored { tip, content: Vec::new(), merged: None });
            }
            let content = hosted.unfinished.as_ref().map(|u| u.content.clone());
            let parent = history(&content.unwrap_or_default());
            let body = if txid == Txid(1) {
                Body::Image(Vec::new())
            } else {
                Body::Step { parent, writes: Vec::new() }
            };
            hosted.fence = Some(File { txid, nonce: nonce.clone(), fence: true, body });
            self.ledger.count("fences");
        }
        self.send_fence(b, slot, ticket, nonce, txid);
    }

    fn make_image(&mut self, b: BoxIndex, slot: Slot, ticket: Ticket, nonce: Nonce, txid: Txid) {
        let Some(host) = self.host_at(b, slot) else { return };
        let made = self.hosted(b, slot).and_then(|h| h.fence.as_ref().map(|f| f.nonce.clone()));
        let is_damaged = |copy: &Copy| copy.database.as_ref().is_some_and(|d| d.damaged);
        if made.as_ref() != Some(&nonce) && is_damaged(self.boxes[b].disk.copy(&host)) {
            // A supervisor outside left it so: an operator moves it away.
            self.boxes[b].disk.set_aside(&host);
            let problem = ReplicaProblem::Unfit("the database is cut off".into());
            return self.task_ends(b, slot, ticket, Answer::Uploaded(Uploaded::Failed(problem)));
        }
        if made.as_ref() != Some(&nonce) {
            self.boxes[b].disk.checkpoint(&host);
            let database = self.boxes[b].disk.copy(&host).database.clone();
            let Some(database) = database else {
                let problem = ReplicaProblem::Unfit("no database".into());
                let answer = Answer::Uploaded(Uploaded::Failed(problem));
                return self.task_ends(b, slot, ticket, answer);
            };
            let body = Body::Image(database.content);
            let file = File { txid, nonce: nonce.clone(), fence: true, body };
            if let Some(hosted) = self.hosted(b, slot) {
                hosted.fence = Some(file);
            }
        }
        self.send_fence(b, slot, ticket, nonce, txid);
    }

    fn send_fence(&mut self, b: BoxIndex, slot: Slot, ticket: Ticket, nonce: Nonce, txid: Txid) {
        let Some(host) = self.host_at(b, slot) else { return };
        self.boxes[b].disk.copy(&host).spool.insert((txid, nonce.clone()));
        let file = self.hosted(b, slot).and_then(|hosted| hosted.fence.clone());
        if let Some(file) = file {
            self.ask(b, Ask::PutFile(host, file), To::Fence(ticket, slot, nonce, txid));
        }
    }

    /// A fence or an image was answered.
    pub fn fence_put(
        &mut self,
        b: BoxIndex,
        slot: Slot,
        ticket: Ticket,
        (nonce, txid): (Nonce, Txid),
        answer: PutAnswer,
    ) {
        match answer {
            PutAnswer::Done { etag } => self.fence_done(b, slot, ticket, txid, etag),
            PutAnswer::ConditionFailed => {
                if let Some(host) = self.host_at(b, slot) {
                    self.ask(b, Ask::Head(host, txid), To::FenceHead(ticket, slot, nonce, txid));
                }
            }
            PutAnswer::Again | PutAnswer::Unknown | PutAnswer::Refused => {
                self.task_ends(b, slot, ticket, Answer::Uploaded(Uploaded::Unknown));
            }
        }
    }

    /// Whose file stands where the fence was to stand.
    pub fn fence_met(
        &mut self,
        b: BoxIndex,
        slot: Slot,
        ticket: Ticket,
        (nonce, txid): (Nonce, Txid),
        standing: Standing,
    ) {
        let uploaded = match standing {
            Standing::File { nonce: found, etag } if found.as_ref() == Some(&nonce) => {
                return self.fence_done(b, slot, ticket, txid, etag);
            }
            Standing::File { nonce: Some(found), .. } => {
                let host = self.host_at(b, slot);
                let spool = host.map(|host| self.boxes[b].disk.copy(&host).spool.clone());
                let own = spool.is_some_and(|s| s.iter().any(|(_, nonce)| *nonce == found));
                self.ledger.count(if own { "met by own late file" } else { "met by a late file" });
                Uploaded::Taken { own }
            }
            Standing::File { nonce: None, .. } => Uploaded::Taken { own: false },
            Standing::Absent | Standing::Unclear => Uploaded::Unknown,
        };
        self.task_ends(b, slot, ticket, Answer::Uploaded(uploaded));
    }

    fn fence_done(&mut self, b: BoxIndex, slot: Slot, ticket: Ticket, txid: Txid, etag: ETag) {
        let tip = RemoteTip::tagged(txid, etag);
        if let Some(restored) = self.hosted(b, slot).and_then(|h| h.unfinished.as_mut()) {
            restored.tip = tip.clone();
        }
        self.task_ends(b, slot, ticket, Answer::Uploaded(Uploaded::Done(tip)));
    }

    fn adopt(
        &mut self,
        b: BoxIndex,
        slot: Slot,
        ticket: Ticket,
        generation: Generation,
        tip: &RemoteTip,
    ) {
        let taken = self.hosted(b, slot).and_then(|hosted| {
            hosted.fence = None;
            hosted.unfinished.take().map(|restored| (hosted.host.clone(), restored))
        });
        let answer = match taken {
            None => Err(ReplicaProblem::Local("no unfinished file".into())),
            Some((host, restored)) => {
                self.invariant_10_no_local_work_is_discarded(b, &host, &restored.content);
                self.boxes[b].disk.place(&host, restored.content);
                self.boxes[b].disk.note(&host, generation, Some(tip), true);
                Ok(())
            }
        };
        self.task_ends(b, slot, ticket, Answer::Adopted(answer));
    }

    fn open(
        &mut self,
        b: BoxIndex,
        slot: Slot,
        ticket: Ticket,
        generation: Generation,
        base: &Base,
    ) {
        let Some(host) = self.host_at(b, slot) else { return };
        let tip = match base {
            Base::At(tip) => Some(tip.clone()),
            Base::Nothing => None,
        };
        let disk = &mut self.boxes[b].disk;
        disk.note(&host, generation, tip.as_ref(), false);
        let copy = disk.copy(&host);
        if tip.is_some() {
            copy.spool.clear();
        }
        copy.unsent = None;
        let content = copy.database.as_ref().map(|database| database.content.clone());
        copy.mark = content.as_ref().filter(|_| tip.is_some()).map(Vec::len);
        let start = Start::new(generation, tip, content.as_deref());
        if let Some(hosted) = self.hosted(b, slot) {
            hosted.fence = None;
            hosted.unfinished = None;
            hosted.stage = Stage::Opened(start);
        }
        self.task_ends(b, slot, ticket, Answer::Opened(Ok(())));
    }
}
