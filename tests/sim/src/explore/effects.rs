//! A core's effects in the small world: whatever is local happens at once.

use std::collections::VecDeque;

use dormouse_core::effect::{Base, Effect, Entry};
use dormouse_core::event::{
    Answer, Event, ReplicaProblem, Saved, SessionMemo, StoreProblem, Ticket, Uploaded,
};
use dormouse_core::ids::{Generation, Nonce, Run, Txid};
use dormouse_core::position::{POSITION_VERSION, Position, RemoteTip};
use dormouse_core::time::Deadline;

use super::state::{
    Ask, Break, File, Flight, Instance, Running, SLOT, Stage, State, To, Told, file_id,
};

impl State {
    /// An input of a core, and all that follows from it at once.
    pub(super) fn step(&mut self, b: usize, event: Event) {
        if self.boxes[b].paused.is_some() {
            self.boxes[b].mailbox.push(event);
            return;
        }
        let now = self.now();
        let mut events = VecDeque::from([event]);
        while let Some(event) = events.pop_front() {
            let Some(core) = self.boxes[b].core.as_mut() else { return };
            let mut effects = Vec::new();
            core.step(now, event, &mut effects);
            for effect in effects {
                if let Some((ticket, answer)) = self.carry_out(b, effect) {
                    events.push_back(Event::Answer(ticket, answer));
                }
            }
        }
    }

    fn ask(&mut self, b: usize, ask: Ask, to: To) {
        let life = self.boxes[b].life;
        self.flights.push(Flight { b, life, ask, to });
    }

    /// What is known at once.
    fn carry_out(&mut self, b: usize, effect: Effect) -> Option<(Ticket, Answer)> {
        match effect {
            Effect::Journal(entry) => self.journal(b, entry),
            Effect::Get(ticket, key) => self.ask(b, Ask::Get(key), To::Core(ticket)),
            Effect::Put(ticket, key, body, expect) => {
                self.ask(b, Ask::Put(key, body, expect), To::Core(ticket));
            }
            Effect::List(ticket, _) => self.ask(b, Ask::List, To::Core(ticket)),
            Effect::Inspect(ticket, _) => {
                return Some((ticket, Answer::Inspected(Ok(self.inspect(b)))));
            }
            Effect::Restore { ticket, set_aside, .. } => {
                if set_aside {
                    self.set_aside(b);
                }
                self.boxes[b].fence = None;
                self.ask(b, Ask::Read, To::Restore(ticket));
            }
            Effect::SetAside(ticket, _) => return Some((ticket, self.set_aside_for_good(b))),
            Effect::Apply(ticket, _, txid) => self.ask(b, Ask::ReadOne(txid), To::Apply(ticket)),
            Effect::PutFence(ticket, _, txid, nonce) => {
                return self.put_fence(b, ticket, txid, nonce);
            }
            Effect::PutImage(ticket, _, txid, nonce) => {
                let content = self.boxes[b].disk.copy.clone().unwrap_or_default();
                self.send_fence(b, ticket, File { txid, nonce, content, parent: None });
            }
            Effect::Adopt(ticket, _, generation, tip) => {
                self.adopt(b, generation, &tip);
                return Some((ticket, Answer::Adopted(Ok(()))));
            }
            Effect::OpenReplica { ticket, generation, base, .. } => {
                self.open(b, generation, &base);
                return Some((ticket, Answer::Opened(Ok(()))));
            }
            Effect::Spawn(ticket, _) => return Some((ticket, Answer::Healthy(self.spawn(b)))),
            Effect::Attach(ticket, _) => {
                if let Stage::Running(running) = &mut self.boxes[b].stage {
                    running.attached = true;
                }
                return Some((ticket, Answer::Attached(Ok(()))));
            }
            Effect::Resume(ticket, _, generation) => {
                return Some((ticket, Answer::Attached(self.resume_replica(b, generation))));
            }
            Effect::Hold(_, run, held) => self.boxes[b].disk.held = Some((run, held)),
            Effect::Save(ticket, _) => return self.save(b, ticket),
            Effect::Abandon(_) => self.boxes[b].stage = Stage::Nothing,
            Effect::TryStop(ticket, ..) => return Some((ticket, Answer::StopTaken)),
            Effect::AskDue(ticket, _) => return Some((ticket, Answer::Due(Ok(None)))),
            Effect::Terminate(ticket, _) | Effect::Kill(ticket, _) => {
                self.boxes[b].instance = None;
                return Some((ticket, Answer::Empty));
            }
            Effect::Freeze(ticket, _) | Effect::Thaw(ticket, _) => {
                return Some((ticket, Answer::Frozen(Ok(()))));
            }
            Effect::Deadline(deadline) => self.set_deadline(b, deadline),
            Effect::Publish(..)
            | Effect::Refuse(..)
            | Effect::RecordDue(..)
            | Effect::Retired(_)
            | Effect::Handed(..)
            | Effect::TakeoverEnded(..)
            | Effect::Exit => {}
        }
        None
    }

    fn journal(&mut self, b: usize, entry: Entry) {
        let disk = &mut self.boxes[b].disk;
        match entry {
            Entry::Session { epoch, base } => match disk.memo.as_mut() {
                Some(memo) if memo.epoch == epoch => {
                    if !memo.bases.contains(&base) {
                        memo.bases.push(base);
                    }
                }
                Some(_) | None => {
                    disk.memo = Some(SessionMemo { epoch, bases: vec![base], deadline: None });
                }
            },
            Entry::Releasing { nonce, .. } => disk.releasing = Some(nonce),
            Entry::Settled { .. } => disk.releasing = None,
        }
    }

    fn set_deadline(&mut self, b: usize, deadline: Option<Deadline>) {
        let machine = &mut self.boxes[b];
        machine.deadline = deadline;
        if let Some(memo) = &mut machine.disk.memo {
            memo.deadline = deadline;
        }
    }

    /// Goes on where the replica of the activator before this one left off.
    fn resume_replica(&mut self, b: usize, generation: Generation) -> Result<(), ReplicaProblem> {
        let machine = &mut self.boxes[b];
        let position = machine.disk.position.clone().filter(|p| p.generation == generation);
        let Some(position) = position else {
            return Err(ReplicaProblem::Local("the replica was not open".into()));
        };
        machine.replicas += 1;
        let tip = RemoteTip { txid: position.txid, etag: position.etag };
        machine.stage = Stage::Running(Running {
            number: machine.replicas,
            generation,
            tip: Some(tip).filter(|tip| tip.txid > Txid(0)),
            based: machine.disk.mark.clone(),
            file: machine.disk.unsent.clone(),
            in_flight: false,
            saving: None,
            attached: true,
        });
        Ok(())
    }

    fn set_aside(&mut self, b: usize) {
        let disk = &mut self.boxes[b].disk;
        disk.forks.extend(disk.copy.take());
        disk.position = None;
    }

    fn set_aside_for_good(&mut self, b: usize) -> Answer {
        self.set_aside(b);
        Answer::SetAside(Ok("fork".into()))
    }

    /// The instance is gone: killed by the guard.
    pub(super) fn instance_ends(&mut self, b: usize) {
        let Some(instance) = self.boxes[b].instance.take() else { return };
        self.step(b, Event::Died(SLOT, instance.run));
    }

    fn spawn(&mut self, b: usize) -> Run {
        let machine = &mut self.boxes[b];
        machine.disk.runs += 1;
        let run = Run(machine.disk.runs);
        let view = machine.core.as_ref().and_then(|core| core.host(SLOT));
        let generation = view.and_then(|view| view.generation).unwrap_or_default();
        machine.instance = Some(Instance { run, generation });
        let content = machine.disk.copy.clone().unwrap_or_default();
        let missing = self.durable.iter().find(|write| !content.contains(write)).copied();
        if let Some(write) = missing.filter(|_| !self.boxes[b].overthrown) {
            self.violate(10, &format!("box{b} starts without write {write}"));
        }
        run
    }

    fn put_fence(
        &mut self,
        b: usize,
        ticket: Ticket,
        txid: Txid,
        nonce: Nonce,
    ) -> Option<(Ticket, Answer)> {
        let content = match &self.boxes[b].stage {
            Stage::Unfinished { tip, .. } if self.sabotage == Some(Break::FenceOmitted) => {
                return Some((ticket, Answer::Uploaded(Uploaded::Done(tip.clone()))));
            }
            Stage::Unfinished { content, .. } => content.clone(),
            Stage::Nothing | Stage::Running(_) => Vec::new(),
        };
        let parent = (txid > Txid(1)).then(|| content.clone());
        self.send_fence(b, ticket, File { txid, nonce, content, parent });
        None
    }

    fn send_fence(&mut self, b: usize, ticket: Ticket, file: File) {
        let machine = &mut self.boxes[b];
        if machine.fence.as_ref().is_none_or(|fence| fence.nonce != file.nonce) {
            machine.disk.spool.insert((file.txid, file.nonce.clone()));
            machine.fence = Some(file);
        }
        if let Some(file) = machine.fence.clone() {
            self.ask(b, Ask::PutFile(file), To::Fence(ticket));
        }
    }

    pub(super) fn fence_told(&mut self, b: usize, ticket: Ticket, told: Told) {
        let Some(fence) = self.boxes[b].fence.clone() else { return };
        let done = |etag| Uploaded::Done(RemoteTip::tagged(fence.txid, etag));
        let uploaded = match told.file() {
            Some(Ok(etag)) => done(etag),
            Some(Err((nonce, etag))) if nonce == fence.nonce => done(etag),
            Some(Err((nonce, _))) => {
                let own = self.boxes[b].disk.spool.iter().any(|(_, spooled)| *spooled == nonce);
                Uploaded::Taken { own }
            }
            None => Uploaded::Unknown,
        };
        if let (Uploaded::Done(done), Stage::Unfinished { tip, .. }) =
            (&uploaded, &mut self.boxes[b].stage)
        {
            *tip = done.clone();
        }
        self.step(b, Event::Answer(ticket, Answer::Uploaded(uploaded)));
    }

    pub(super) fn restored(&mut self, b: usize, ticket: Ticket, told: Told) {
        let read = if let Told::Read(read) = told { Some(read) } else { None };
        let fetched = match read {
            Some(Ok((content, tip))) => {
                self.boxes[b].stage = Stage::Unfinished { content, tip: tip.clone() };
                Ok(tip)
            }
            Some(Err(why)) => Err(ReplicaProblem::Corrupt(why)),
            None => Err(unreachable()),
        };
        self.step(b, Event::Answer(ticket, Answer::Fetched(fetched)));
    }

    pub(super) fn applied(&mut self, b: usize, ticket: Ticket, told: Told) {
        let fetched = if let Told::One(Some((file, etag))) = told {
            let tip = RemoteTip::tagged(file.txid, etag);
            self.boxes[b].stage = Stage::Unfinished { content: file.content, tip: tip.clone() };
            Ok(tip)
        } else {
            Err(unreachable())
        };
        self.step(b, Event::Answer(ticket, Answer::Fetched(fetched)));
    }

    fn adopt(&mut self, b: usize, generation: Generation, tip: &RemoteTip) {
        let machine = &mut self.boxes[b];
        let stage = std::mem::replace(&mut machine.stage, Stage::Nothing);
        // Over nothing at all the fence is the empty database.
        let content = match stage {
            Stage::Unfinished { content, .. } => content,
            Stage::Nothing | Stage::Running(_) => Vec::new(),
        };
        let dropped = machine
            .disk
            .copy
            .as_ref()
            .and_then(|copy| copy.iter().find(|write| !content.contains(write)).copied());
        machine.fence = None;
        machine.disk.copy = Some(content);
        self.note(b, generation, Some(tip), true);
        if let Some(write) = dropped {
            self.violate(10, &format!("box{b} overwrites write {write}"));
        }
    }

    fn note(&mut self, b: usize, generation: Generation, tip: Option<&RemoteTip>, clean: bool) {
        let disk = &mut self.boxes[b].disk;
        let none = dormouse_core::position::FileId { inode: 0, size: 0, ctime_ns: 0 };
        disk.position = Some(Position {
            version: POSITION_VERSION,
            generation,
            txid: tip.map_or(Txid(0), |tip| tip.txid),
            etag: tip.and_then(|tip| tip.etag.clone()),
            file: disk.copy.as_ref().map_or(none, |content| file_id(content)),
            page_count: 1,
            page_size: 512,
            clean,
        });
    }

    fn open(&mut self, b: usize, generation: Generation, base: &Base) {
        let tip = match base {
            Base::At(tip) => Some(tip.clone()),
            Base::Nothing => None,
        };
        self.note(b, generation, tip.as_ref(), false);
        let machine = &mut self.boxes[b];
        machine.fence = None;
        machine.replicas += 1;
        if tip.is_some() {
            machine.disk.spool.clear();
        }
        let based = tip.as_ref().and(machine.disk.copy.clone());
        machine.disk.unsent = None;
        machine.disk.mark.clone_from(&based);
        machine.stage = Stage::Running(Running {
            number: machine.replicas,
            generation,
            tip,
            based,
            file: None,
            in_flight: false,
            saving: None,
            attached: false,
        });
    }

    /// The last sync: what is not durable is sent once more.
    fn save(&mut self, b: usize, ticket: Ticket) -> Option<(Ticket, Answer)> {
        let now = self.now();
        let machine = &mut self.boxes[b];
        let may = machine.deadline.is_some_and(|deadline| !deadline.passed(now));
        let Stage::Running(running) = &mut machine.stage else {
            return Some((ticket, Answer::Saved(unclean("there was no replica"))));
        };
        running.attached = true;
        let behind = running.based.as_ref() != machine.disk.copy.as_ref();
        let settled = !behind && running.file.is_none();
        if settled {
            return Some((ticket, Answer::Saved(self.end_save(b))));
        }
        running.saving = Some(ticket);
        if running.in_flight {
            return None;
        }
        if !may {
            machine.stage = Stage::Nothing;
            return Some((ticket, Answer::Saved(unclean("the deadline has passed"))));
        }
        self.upload(b);
        None
    }

    fn end_save(&mut self, b: usize) -> Saved {
        let stage = std::mem::replace(&mut self.boxes[b].stage, Stage::Nothing);
        let Stage::Running(running) = stage else { return unclean("there was no replica") };
        self.note(b, running.generation, running.tip.as_ref(), true);
        let disk = &mut self.boxes[b].disk;
        disk.spool.clear();
        disk.unsent = None;
        disk.mark = None;
        Saved::Clean(running.tip)
    }

    /// It counts only while the session lives.
    pub(super) fn upload_told(&mut self, b: usize, number: u32, told: Told) {
        let now = self.now();
        let machine = &mut self.boxes[b];
        let may = machine.deadline.is_some_and(|deadline| !deadline.passed(now));
        let Stage::Running(running) = &mut machine.stage else { return };
        if running.number != number {
            return;
        }
        running.in_flight = false;
        let Some(file) = running.file.clone() else { return };
        let saving = running.saving;
        let etag = match told.file() {
            Some(Ok(etag)) => Some(etag),
            Some(Err((nonce, etag))) if nonce == file.nonce => Some(etag),
            Some(Err(_)) => {
                machine.stage = Stage::Nothing;
                if self.owns(b) {
                    self.violate(10, &format!("box{b} owns the host, and met another writer"));
                }
                let event = match saving {
                    Some(ticket) => Event::Answer(ticket, Answer::Saved(Saved::StoodDown)),
                    None => Event::StoodDown(SLOT),
                };
                return self.step(b, event);
            }
            None => None,
        };
        let Some(etag) = etag.filter(|_| may) else {
            if let Some(ticket) = saving {
                machine.stage = Stage::Nothing;
                let saved = Answer::Saved(unclean("no answer"));
                self.step(b, Event::Answer(ticket, saved));
            }
            return;
        };
        let tip = RemoteTip::tagged(file.txid, etag);
        running.tip = Some(tip.clone());
        running.based = Some(file.content.clone());
        running.file = None;
        let generation = running.generation;
        machine.disk.unsent = None;
        machine.disk.mark.clone_from(&running.based);
        machine.disk.spool.remove(&(file.txid, file.nonce));
        self.durable.extend(file.content);
        self.note(b, generation, Some(&tip), false);
        if let Some((ticket, answer)) = saving.and_then(|ticket| self.save(b, ticket)) {
            self.step(b, Event::Answer(ticket, answer));
        }
    }
}

fn unclean(why: &str) -> Saved {
    Saved::Unclean { durable: Txid(0), why: why.into() }
}

fn unreachable() -> ReplicaProblem {
    ReplicaProblem::Store(StoreProblem::Unreachable("no answer".into()))
}
