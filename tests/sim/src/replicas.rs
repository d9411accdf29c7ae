//! A running replica: the real uploader, and what spools, sends and remembers around it.

use dormouse_core::event::{Answer, Event, ReplicaProblem, Saved, Ticket};
use dormouse_core::ids::{ETag, Generation, Slot, Txid};
use dormouse_core::position::RemoteTip;
use dormouse_core::time::{Boot, Deadline, Mono, Nanos, Wall};
use dormouse_core::upload::{
    Class, PutAnswer, Spooled, UploadInput, UploadOutput, UploadSettings, Uploader,
};

use crate::clock::{MS, S, Time};
use crate::copies::Stage;
use crate::disk::history;
use crate::network::{Ask, To};
use crate::sabotage::Sabotage;
use crate::store::{Body, File, Write};
use crate::world::{BoxIndex, Item, World};

/// What a replica continues from.
#[derive(Clone, Debug)]
pub struct Start {
    /// Generation of the lease, for the position.
    pub generation: Generation,
    tip: Option<RemoteTip>,
    /// How much of the database the newest L0 holds; none: the next is a full image.
    based: Option<usize>,
}

impl Start {
    /// From a database that equals `tip`, or from none.
    #[must_use]
    pub fn new(generation: Generation, tip: Option<RemoteTip>, content: Option<&[Write]>) -> Self {
        let based = tip.as_ref().and(content).map(<[Write]>::len);
        Self { generation, tip, based }
    }
}

/// A replica that follows its database.
#[derive(Debug)]
pub struct Running {
    /// Its number: inputs of an earlier one are dropped.
    pub number: u64,
    start: Start,
    uploader: Uploader,
    file: Option<File>,
    /// How much of the database `file` and what came before it hold.
    spooled: usize,
    failed: bool,
    compacting: bool,
    saving: Option<Ticket>,
}

/// Bound of a final sync.
const SAVE_BUDGET: Time = 30 * S;

impl Running {
    /// Something is not durable, and the last upload failed.
    #[must_use]
    pub fn is_stalled(&self) -> bool {
        self.failed && !self.uploader.is_settled()
    }

    fn tip(&self) -> Option<RemoteTip> {
        self.start.tip.clone()
    }
}

impl World {
    /// Replication begins.
    pub fn attach(&mut self, b: BoxIndex, slot: Slot) -> Result<(), ReplicaProblem> {
        let now = self.boxes[b].clock.now(self.time);
        let number = self.number();
        let class = if self.rng.chance(self.plan.batched) {
            Class::Batched { every: Nanos::from_secs(10) }
        } else {
            Class::Stream
        };
        let deadline = self.boxes[b].activator.as_ref().and_then(|a| a.deadline);
        let deadline = deadline.filter(|_| !self.breaks(Sabotage::FencesDeleted));
        let none = || ReplicaProblem::Local("the replica was not opened".into());
        let hosted = self.hosted(b, slot).ok_or_else(none)?;
        let Stage::Opened(start) = &hosted.stage else { return Err(none()) };
        let settings = UploadSettings { class, ..UploadSettings::default() };
        hosted.stage = Stage::Running(Box::new(Running {
            number,
            start: start.clone(),
            uploader: Uploader::new(settings, now, deadline),
            file: None,
            spooled: 0,
            failed: false,
            compacting: false,
            saving: None,
        }));
        self.upload(b, slot, number, UploadInput::Committed);
        Ok(())
    }

    /// Replication of an instance that was taken over goes on: what was spooled is sent first, and
    /// the next file is an increment only if the place in the WAL is proven.
    pub fn resume(
        &mut self,
        b: BoxIndex,
        slot: Slot,
        generation: Generation,
    ) -> Result<(), ReplicaProblem> {
        let forgets = self.breaks(Sabotage::SpoolForgotten);
        let now = self.boxes[b].clock.now(self.time);
        let number = self.number();
        let proven = self.rng.chance(700);
        let local = |why: &str| ReplicaProblem::Local(why.into());
        let host = self.host_at(b, slot).ok_or_else(|| local("the host is gone"))?;
        // None until the session is claimed again: nothing is sent before.
        let known = self.boxes[b].activator.as_ref().and_then(|a| a.deadline);
        let over = Deadline { mono: Mono(0), boot: Boot(0), wall: Wall(0) };
        let copy = self.boxes[b].disk.copy(&host);
        let position = copy.position.clone().filter(|p| p.generation == generation && !p.clean);
        let position = position.ok_or_else(|| local("the replica was not open"))?;
        let tip = Some(RemoteTip { txid: position.txid, etag: position.etag });
        let unsent = copy.unsent.clone().filter(|_| !forgets);
        let mut uploader =
            Uploader::new(UploadSettings::default(), now, Some(known.unwrap_or(over)));
        if let Some((file, _)) = &unsent {
            uploader.resume(now, Spooled { txid: file.txid, nonce: file.nonce.clone() });
        }
        let start = Start {
            generation,
            tip: tip.filter(|tip| tip.txid > Txid(0)),
            based: copy.mark.filter(|_| proven),
        };
        let (file, spooled) = unsent.map_or((None, 0), |(file, holds)| (Some(file), holds));
        self.ledger.count("instances taken over");
        let hosted = self.hosted(b, slot).ok_or_else(|| local("the host is gone"))?;
        hosted.stage = Stage::Running(Box::new(Running {
            number,
            start,
            uploader,
            file,
            spooled,
            failed: false,
            compacting: false,
            saving: None,
        }));
        self.upload(b, slot, number, UploadInput::Committed);
        Ok(())
    }

    /// An instance has committed: its replica sees that by and by.
    pub fn committed(&mut self, b: BoxIndex, slot: Slot) {
        let span = self.rng.between(1, 50) * MS;
        let Some(life) = self.boxes[b].activator.as_ref().map(|a| a.life) else { return };
        if let Some(number) = self.hosted(b, slot).and_then(|hosted| hosted.replica()) {
            self.after(span, Item::Upload(b, life, slot, number, UploadInput::Committed));
        }
    }

    fn running(&mut self, b: BoxIndex, slot: Slot, number: u64) -> Option<&mut Running> {
        match &mut self.hosted(b, slot)?.stage {
            Stage::Running(running) if running.number == number => Some(running),
            Stage::Running(_) | Stage::Nothing | Stage::Opened(_) => None,
        }
    }

    /// An input of a replica's uploader, and all that follows from it.
    pub fn upload(&mut self, b: BoxIndex, slot: Slot, number: u64, input: UploadInput) {
        let now = self.boxes[b].clock.now(self.time);
        let assume = self.breaks(Sabotage::DurableAssumed);
        let Some(running) = self.running(b, slot, number) else { return };
        let input = if assume && input == UploadInput::Put(PutAnswer::Unknown) {
            UploadInput::Put(PutAnswer::Done { etag: ETag("\"assumed\"".into()) })
        } else {
            input
        };
        if let UploadInput::Put(answer) = &input {
            running.failed = !matches!(answer, PutAnswer::Done { .. });
        }
        let mut outputs = Vec::new();
        running.uploader.step(now, input, &mut outputs);
        for output in outputs {
            match output {
                UploadOutput::Spool => self.spool(b, slot, number),
                UploadOutput::Put(file) => self.put_spooled(b, slot, number, &file),
                UploadOutput::Compare(file) => {
                    if let Some(host) = self.host_at(b, slot) {
                        let head = Ask::Head(host, file.txid);
                        self.ask(b, head, To::Uploader(slot, number));
                    }
                }
                UploadOutput::Durable { txid, etag } => self.durable(b, slot, number, txid, etag),
                UploadOutput::StandDown { txid } => self.stood_down(b, slot, number, txid),
                UploadOutput::Refused { .. } => {}
            }
        }
        self.schedule_upload(b, slot, number);
        self.conclude(b, slot, number, false);
    }

    fn schedule_upload(&mut self, b: BoxIndex, slot: Slot, number: u64) {
        let Some(due) = self.running(b, slot, number).and_then(|r| r.uploader.next_due()) else {
            return;
        };
        let wait = self.boxes[b].clock.until(self.time, due).max(MS);
        if let Some(life) = self.boxes[b].activator.as_ref().map(|a| a.life) {
            self.after(wait, Item::Upload(b, life, slot, number, UploadInput::Tick));
        }
    }

    /// Copies what was committed into the next file; the WAL is fsynced before.
    fn spool(&mut self, b: BoxIndex, slot: Slot, number: u64) {
        let unsynced = self.breaks(Sabotage::SpoolUnsynced);
        let Some(host) = self.host_at(b, slot) else { return };
        let nonce = dormouse_core::ids::Nonce(format!("f{}", self.number()));
        let copy = self.boxes[b].disk.copy(&host);
        let content = copy.database.as_mut().map(|database| {
            if !unsynced {
                database.synced = database.content.len();
            }
            database.content.clone()
        });
        let content = content.unwrap_or_default();
        let Some(running) = self.running(b, slot, number) else { return };
        let txid = running.tip().map_or(Txid(0), |tip| tip.txid).next();
        let body = match running.start.based {
            Some(based) if based >= content.len() => None,
            None if content.is_empty() => None,
            Some(based) => Some(Body::Step {
                parent: history(&content[..based]),
                writes: content[based..].to_vec(),
            }),
            None => Some(Body::Image(content.clone())),
        };
        running.spooled = content.len();
        running.file = body.map(|body| File { txid, nonce: nonce.clone(), fence: false, body });
        let spooled = running.file.as_ref().map(|_| Spooled { txid, nonce: nonce.clone() });
        let unsent = running.file.clone().map(|file| (file, content.len()));
        if unsent.is_some() {
            let copy = self.boxes[b].disk.copy(&host);
            copy.spool.insert((txid, nonce));
            copy.unsent = unsent;
        }
        let span = self.rng.between(1, 10) * MS;
        if let Some(life) = self.boxes[b].activator.as_ref().map(|a| a.life) {
            let input = UploadInput::Spooled(spooled);
            self.after(span, Item::Upload(b, life, slot, number, input));
        }
    }

    fn put_spooled(&mut self, b: BoxIndex, slot: Slot, number: u64, spooled: &Spooled) {
        let file = self.running(b, slot, number).and_then(|running| running.file.clone());
        if let (Some(file), Some(host)) = (file, self.host_at(b, slot)) {
            assert_eq!(file.nonce, spooled.nonce, "invariant 3: a repeat sends the same file");
            self.ask(b, Ask::PutFile(host, file), To::Uploader(slot, number));
            let life = self.boxes[b].activator.as_ref().map(|a| a.life);
            if let Some(life) = life.filter(|_| self.breaks(Sabotage::TwoInFlight)) {
                // The next one does not wait for the answer.
                let done = PutAnswer::Done { etag: ETag("\"assumed\"".into()) };
                self.after(MS, Item::Upload(b, life, slot, number, UploadInput::Put(done)));
            }
        }
    }

    /// The client whose write it was may be told that it is durable.
    fn durable(&mut self, b: BoxIndex, slot: Slot, number: u64, txid: Txid, etag: ETag) {
        let Some(host) = self.host_at(b, slot) else { return };
        let Some(running) = self.running(b, slot, number) else { return };
        let Some(file) = running.file.take() else { return };
        let tip = RemoteTip::tagged(txid, etag);
        running.start.tip = Some(tip.clone());
        let spooled = running.spooled;
        running.start.based = Some(spooled);
        let generation = running.start.generation;
        let disk = &mut self.boxes[b].disk;
        disk.note(&host, generation, Some(&tip), false);
        let copy = disk.copy(&host);
        copy.spool.remove(&(txid, file.nonce.clone()));
        copy.unsent = None;
        copy.mark = Some(spooled);
        let writes = match file.body {
            Body::Image(writes) | Body::Step { writes, .. } => writes,
        };
        self.tell(|| format!("box{b}: {host} {txid} is durable"));
        if !self.breaks(Sabotage::TwoInFlight) {
            self.ledger.durable.entry(host.clone()).or_default().extend(writes);
        }
        self.invariant_3_durable_data_is_in_every_restore(&host);
        if self.plan.compacts > 0 && self.rng.chance(self.plan.compacts) {
            self.compact(b, slot, number);
        }
    }

    /// Whether the session's deadline, as the driver knows it, is still ahead.
    fn may_write(&self, b: BoxIndex) -> bool {
        let now = self.boxes[b].clock.now(self.time);
        let deadline = self.boxes[b].activator.as_ref().and_then(|a| a.deadline);
        deadline.is_some_and(|deadline| !deadline.passed(now))
    }

    /// A snapshot of what was acknowledged.
    pub fn compact(&mut self, b: BoxIndex, slot: Slot, number: u64) {
        let unacknowledged = self.breaks(Sabotage::SnapshotUnacknowledged);
        let may_write = self.may_write(b) || self.breaks(Sabotage::FencesDeleted);
        let Some(host) = self.host_at(b, slot).filter(|_| may_write) else { return };
        let database = self.boxes[b].disk.copy(&host).database.clone();
        let Some(running) = self.running(b, slot, number).filter(|r| !r.compacting) else { return };
        let (Some(tip), Some(based)) = (running.tip(), running.start.based) else { return };
        let Some(mut content) = database.map(|database| database.content) else { return };
        if !unacknowledged {
            content.truncate(based);
        }
        running.compacting = true;
        let ask = Ask::PutSnapshot(host, tip.txid, content);
        self.ask(b, ask, To::Compaction(slot, number, tip.txid));
    }

    /// Only what a definite snapshot covers is deleted, and only while the session lives.
    pub fn compacted(
        &mut self,
        b: BoxIndex,
        slot: Slot,
        (number, txid): (u64, Txid),
        answer: &PutAnswer,
    ) {
        let fences_too = self.breaks(Sabotage::FencesDeleted);
        let may_write = self.may_write(b) || fences_too;
        let Some(running) = self.running(b, slot, number) else { return };
        running.compacting = false;
        let Some(host) = self.host_at(b, slot) else { return };
        if !matches!(answer, PutAnswer::Done { .. }) || !may_write {
            return;
        }
        for covered in self.store.covered(&host, txid, fences_too) {
            self.ask(b, Ask::Delete(host.clone(), covered), To::Compaction(slot, number, covered));
        }
    }

    fn stood_down(&mut self, b: BoxIndex, slot: Slot, number: u64, txid: Txid) {
        if let Some(host) = self.host_at(b, slot) {
            self.tell(|| format!("box{b}: {host} met another writer at {txid}"));
            self.invariant_10_the_owner_meets_no_other_writer(b, slot, &host, txid);
        }
        let saving = self.running(b, slot, number).and_then(|running| running.saving.take());
        if let Some(ticket) = saving {
            self.end_save(b, slot, ticket, Saved::StoodDown);
        } else {
            let Some(life) = self.boxes[b].activator.as_ref().map(|a| a.life) else { return };
            self.after(MS, Item::Core(b, life, Event::StoodDown(slot)));
        }
    }

    /// The last sync.
    pub fn save(&mut self, b: BoxIndex, ticket: Ticket, slot: Slot) {
        let Some(life) = self.boxes[b].activator.as_ref().map(|a| a.life) else { return };
        let Some(hosted) = self.hosted(b, slot) else { return };
        match &mut hosted.stage {
            Stage::Running(running) if !running.uploader.has_stood_down() => {
                running.saving = Some(ticket);
                let number = running.number;
                self.after(SAVE_BUDGET, Item::SaveEnds(b, life, slot, number));
                self.upload(b, slot, number, UploadInput::Committed);
                self.upload(b, slot, number, UploadInput::Flush);
            }
            Stage::Running(_) => self.end_save(b, slot, ticket, Saved::StoodDown),
            Stage::Nothing | Stage::Opened(_) => {
                let why = "there was no running replica".into();
                let saved = Saved::Unclean { durable: Txid(0), why };
                self.end_save(b, slot, ticket, saved);
            }
        }
    }

    /// The budget of a final sync is over.
    pub fn save_ends(&mut self, b: BoxIndex, slot: Slot, number: u64) {
        self.conclude(b, slot, number, true);
    }

    fn conclude(&mut self, b: BoxIndex, slot: Slot, number: u64, over: bool) {
        let pretend = self.breaks(Sabotage::SaveUnknown) && self.ledger.leaving.contains(&b);
        let Some(host) = self.host_at(b, slot) else { return };
        let Some(running) = self.running(b, slot, number) else { return };
        let settled = running.uploader.is_settled() || pretend && running.file.is_some();
        let Some(ticket) = running.saving.filter(|_| settled || over) else { return };
        running.saving = None;
        let (tip, generation) = (running.tip(), running.start.generation);
        let saved = if settled {
            let disk = &mut self.boxes[b].disk;
            disk.checkpoint(&host);
            disk.note(&host, generation, tip.as_ref(), true);
            let copy = disk.copy(&host);
            copy.spool.clear();
            copy.unsent = None;
            copy.mark = None;
            Saved::Clean(tip)
        } else {
            let durable = tip.map_or(Txid(0), |tip| tip.txid);
            Saved::Unclean { durable, why: "not everything was uploaded in time".into() }
        };
        self.end_save(b, slot, ticket, saved);
    }

    fn end_save(&mut self, b: BoxIndex, slot: Slot, ticket: Ticket, saved: Saved) {
        if let Some(hosted) = self.hosted(b, slot) {
            hosted.stage = Stage::Nothing;
        }
        // Through the queue: a final sync never ends inside the step that asked for it.
        self.answer_after(MS, b, ticket, Answer::Saved(saved));
    }
}
