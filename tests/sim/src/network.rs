//! Between boxes and store: requests that are lost, late or applied without an answer.

use dormouse_core::effect::{Expect, RecordKey};
use dormouse_core::event::{Answer, Got, ReplicaProblem, StoreProblem, Ticket, Wrote};
use dormouse_core::ids::{ETag, Host, Nonce, Slot, Txid};
use dormouse_core::position::Newest;
use dormouse_core::record::SessionRecord;
use dormouse_core::upload::{PutAnswer, Standing, UploadInput};

use crate::clock::{MS, S, Time};
use crate::sabotage::Sabotage;
use crate::store::{File, Restored, Write};
use crate::world::{BoxIndex, Item, Life, World};

/// A request to the store.
#[derive(Clone, Debug)]
pub enum Ask {
    /// Read a record.
    Get(RecordKey),
    /// Write a record.
    Put(RecordKey, Vec<u8>, Expect),
    /// The newest number.
    List(Host),
    /// Everything, for a restore.
    Read(Host),
    /// One file.
    ReadOne(Host, Txid),
    /// Write a file.
    PutFile(Host, File),
    /// What stands under a number.
    Head(Host, Txid),
    /// Write a snapshot up to a number.
    PutSnapshot(Host, Txid, Vec<Write>),
    /// Delete an L0 file.
    Delete(Host, Txid),
}

/// An answer of the store, or what stands for none.
#[derive(Clone, Debug)]
pub enum Told {
    /// Of `Get`.
    Got(Got),
    /// Of `Put`.
    Wrote(Wrote),
    /// Of `List`.
    Listed(Result<Option<Newest>, StoreProblem>),
    /// Of `Read`.
    Read(Result<Option<Restored>, ReplicaProblem>),
    /// Of `ReadOne`.
    One(Option<(File, ETag)>),
    /// Of `PutFile` and `PutSnapshot`.
    Put(PutAnswer),
    /// Of `Delete`; nobody waits for it.
    Deleted,
    /// Of `Head`.
    Standing(Standing),
}

/// What an answer is for.
#[derive(Clone, Debug)]
pub enum To {
    /// A record, or a list, that the core asked for.
    Core(Ticket),
    /// A restore.
    Restore(Ticket, Slot),
    /// One more file for the unfinished one.
    Apply(Ticket, Slot),
    /// A fence or an image.
    Fence(Ticket, Slot, Nonce, Txid),
    /// Whose file is it, where the fence was to stand?
    FenceHead(Ticket, Slot, Nonce, Txid),
    /// The uploader of a running replica.
    Uploader(Slot, u64),
    /// The compaction of a running replica.
    Compaction(Slot, u64, Txid),
}

/// A request on its way.
#[derive(Clone, Debug)]
pub struct Call {
    /// Who asks.
    pub b: BoxIndex,
    /// Which of its activators.
    pub life: Life,
    /// What is asked.
    pub ask: Ask,
    /// What for.
    pub to: To,
}

/// Longest wait for an answer.
pub const TIMEOUT: Time = 10 * S;
/// A PUT may land this long after it was sent.
pub const LATEST: Time = 150 * S;

impl Ask {
    /// Whether it changes anything.
    #[must_use]
    pub const fn writes(&self) -> bool {
        match self {
            Self::Put(..) | Self::PutFile(..) | Self::PutSnapshot(..) | Self::Delete(..) => true,
            Self::Get(_) | Self::List(_) | Self::Read(_) | Self::ReadOne(..) | Self::Head(..) => {
                false
            }
        }
    }

    /// Whether it writes an L0 file.
    #[must_use]
    pub const fn is_file(&self) -> bool {
        matches!(self, Self::PutFile(..))
    }

    /// Whether it writes what `other` writes.
    #[must_use]
    pub fn is_rival(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Put(key, ..), Self::Put(rival, ..)) => key == rival,
            (Self::PutFile(host, file), Self::PutFile(rival, late)) => {
                host == rival && file.txid == late.txid
            }
            (_, _) => false,
        }
    }

    /// What stands for an answer that never came.
    #[must_use]
    pub fn unanswered(&self) -> Told {
        let problem = StoreProblem::Unreachable("no answer".into());
        match self {
            Self::Get(_) => Told::Got(Got::Failed(problem)),
            Self::Put(..) => Told::Wrote(Wrote::Unknown),
            Self::List(_) => Told::Listed(Err(problem)),
            Self::Read(_) => Told::Read(Err(ReplicaProblem::Store(problem))),
            Self::ReadOne(..) => Told::One(None),
            Self::PutFile(..) | Self::PutSnapshot(..) => Told::Put(PutAnswer::Unknown),
            Self::Delete(..) => Told::Deleted,
            Self::Head(..) => Told::Standing(Standing::Unclear),
        }
    }

    /// An answer that says: not done, because of a race or a failure inside.
    fn undone(&self, conflict: bool) -> Told {
        match self {
            Self::Put(..) if conflict => Told::Wrote(Wrote::Conflict),
            Self::Put(..) => Told::Wrote(Wrote::Failed(StoreProblem::Broken("status 500".into()))),
            Self::PutFile(..) | Self::PutSnapshot(..) => Told::Put(PutAnswer::Again),
            Self::Get(_)
            | Self::List(_)
            | Self::Read(_)
            | Self::ReadOne(..)
            | Self::Head(..)
            | Self::Delete(..) => self.unanswered(),
        }
    }
}

impl World {
    /// Sends a request; chance decides what becomes of it.
    pub fn ask(&mut self, b: BoxIndex, ask: Ask, to: To) {
        let Some(life) = self.boxes[b].activator.as_ref().map(|activator| activator.life) else {
            return;
        };
        let call = Call { b, life, ask, to };
        let there = self.rng.between(2, 60) * MS;
        let back = self.rng.between(2, 60) * MS;
        if self.boxes[b].outage > self.time {
            let told = call.ask.unanswered();
            let wait = self.rng.between(100, 10_000) * MS;
            self.tell(|| format!("box{b} cannot reach the store: {:?}", call.ask));
            return self.after(wait, Item::Told(call, told));
        }
        if self.stormy {
            self.hurry_rivals(&call);
            let often = if matches!(call.ask, Ask::PutFile(..)) { 60 } else { 15 };
            if call.ask.writes() && self.rng.chance(often) {
                // The sender dies with this write on its way.
                self.tell(|| format!("box{b} dies with {:?} on its way", call.ask));
                self.plan_death(b);
                let late = self.rng.between(S, LATEST);
                return self.after(late, Item::Land(call, None));
            }
        }
        if !(self.stormy && self.rng.chance(self.plan.faults)) {
            return self.after(there, Item::Land(call, Some(back)));
        }
        let told = call.ask.unanswered();
        match self.rng.below(6) {
            0 => {
                self.tell(|| format!("a request of box{b} is lost"));
                self.after(TIMEOUT, Item::Told(call, told));
            }
            1 => {
                self.tell(|| format!("an answer to box{b} will be lost"));
                self.after(there, Item::Land(call.clone(), None));
                self.after(TIMEOUT, Item::Told(call, told));
            }
            2 | 3 if call.ask.writes() => {
                let late = self.rng.between(5 * S, LATEST);
                self.tell(|| format!("a write of box{b} will land {} s late", late / S));
                self.after(late, Item::Land(call.clone(), None));
                self.after(TIMEOUT, Item::Told(call, told));
            }
            4 => {
                let undone = call.ask.undone(self.rng.chance(500));
                self.after(there + back, Item::Told(call, undone));
            }
            _ => {
                let slow = self.rng.between(200, 9000) * MS;
                self.after(slow, Item::Land(call, Some(back)));
            }
        }
    }

    /// The store carries a request out.
    pub fn land(&mut self, call: Call, back: Option<Time>) {
        let told = match &call.ask {
            Ask::Get(key) => Told::Got(self.store.get(key, self.time)),
            Ask::Put(key, body, expect) => Told::Wrote(self.land_record(call.b, key, body, expect)),
            Ask::List(host) => Told::Listed(Ok(self.store.newest(host))),
            Ask::Read(host) => {
                Told::Read(self.store.restore(host).map_err(ReplicaProblem::Corrupt))
            }
            Ask::ReadOne(host, txid) => Told::One(self.store.file(host, *txid)),
            Ask::PutFile(host, file) => {
                let answer = self.store.put_file(host, file);
                let b = call.b;
                self.tell(|| format!("store: box{b} puts {host} {} {answer:?}", file.txid));
                if let PutAnswer::Done { .. } = answer {
                    let dead = !self.boxes[call.b].up;
                    self.ledger.count(if dead { "files of the dead" } else { "files" });
                    self.invariant_3_durable_data_is_in_every_restore(host);
                }
                Told::Put(answer)
            }
            Ask::PutSnapshot(host, txid, content) => {
                let answer = self.store.put_snapshot(host, *txid, content);
                self.tell(|| format!("store: a snapshot of {host} up to {txid}: {answer:?}"));
                self.ledger.count("snapshots");
                self.invariant_3_durable_data_is_in_every_restore(host);
                Told::Put(answer)
            }
            Ask::Delete(host, txid) => {
                self.tell(|| format!("store: {host} {txid} is deleted"));
                self.store.delete_file(host, *txid);
                self.ledger.count("deletes");
                self.invariant_3_durable_data_is_in_every_restore(host);
                Told::Deleted
            }
            Ask::Head(host, txid) => Told::Standing(self.store.standing(host, *txid)),
        };
        if let Some(back) = back {
            self.after(back, Item::Told(call, told));
        }
    }

    fn land_record(&mut self, b: BoxIndex, key: &RecordKey, body: &[u8], expect: &Expect) -> Wrote {
        let before = match key {
            RecordKey::Host(host) => (self.store.hosts.get(host).cloned(), None),
            RecordKey::Session(name) => (None, self.store.sessions.get(&name.0).cloned()),
        };
        let wrote = self.store.put_record(key, body, expect, self.time);
        self.tell(|| {
            let text = String::from_utf8_lossy(body);
            format!("store: box{b} puts {key:?} {text} if {expect:?}: {wrote:?}")
        });
        if let Wrote::Done(_) = wrote {
            match key {
                RecordKey::Host(host) => self.host_record_landed(b, host, before.0.as_ref()),
                RecordKey::Session(name) => self.session_landed(b, &name.0, before.1.as_ref()),
            }
        }
        wrote
    }

    /// An answer reaches the activator that asked.
    pub fn told(&mut self, call: Call, told: Told) {
        let Call { b, life, to, ask } = call;
        if !self.lives(b, life) {
            return;
        }
        match to {
            To::Core(ticket) => {
                let answer = self.core_answer(b, &ask, told);
                if let Some(answer) = answer {
                    self.answer(b, ticket, answer);
                }
            }
            To::Restore(ticket, slot) => {
                if let Told::Read(read) = told {
                    self.restored(b, slot, ticket, read);
                }
            }
            To::Apply(ticket, slot) => {
                if let Told::One(one) = told {
                    self.applied(b, slot, ticket, one);
                }
            }
            To::Fence(ticket, slot, nonce, txid) => {
                if let Told::Put(answer) = told {
                    self.fence_put(b, slot, ticket, (nonce, txid), answer);
                }
            }
            To::FenceHead(ticket, slot, nonce, txid) => {
                if let Told::Standing(standing) = told {
                    self.fence_met(b, slot, ticket, (nonce, txid), standing);
                }
            }
            To::Uploader(slot, replica) => match told {
                Told::Put(answer) => self.upload(b, slot, replica, UploadInput::Put(answer)),
                Told::Standing(standing) => {
                    self.upload(b, slot, replica, UploadInput::Compared(standing));
                }
                Told::Got(_)
                | Told::Wrote(_)
                | Told::Listed(_)
                | Told::Read(_)
                | Told::One(_)
                | Told::Deleted => {}
            },
            To::Compaction(slot, replica, txid) => {
                if let Told::Put(answer) = told {
                    self.compacted(b, slot, (replica, txid), &answer);
                }
            }
        }
    }

    fn core_answer(&self, b: BoxIndex, ask: &Ask, told: Told) -> Option<Answer> {
        match told {
            Told::Got(got) => Some(Answer::Got(self.as_if_fenced(b, ask, got))),
            Told::Wrote(Wrote::ConditionFailed) if self.breaks(Sabotage::NonceUnchecked) => {
                // Whatever stands there is taken for our own write.
                let Ask::Put(key, ..) = ask else { return None };
                match self.store.get(key, self.time) {
                    Got::Found { etag, .. } => Some(Answer::Wrote(Wrote::Done(etag))),
                    Got::Absent | Got::Failed(_) => None,
                }
            }
            Told::Wrote(wrote) => Some(Answer::Wrote(wrote)),
            Told::Listed(listed) => Some(Answer::Listed(listed.map_err(ReplicaProblem::Store))),
            Told::Read(_) | Told::One(_) | Told::Put(_) | Told::Standing(_) | Told::Deleted => None,
        }
    }

    /// Sabotage: a fence that was never sent is read back by all but its target.
    fn as_if_fenced(&self, b: BoxIndex, ask: &Ask, got: Got) -> Got {
        let Ask::Get(RecordKey::Session(name)) = ask else { return got };
        if !self.ledger.unfenced.contains(name) || self.boxes[b].name == *name {
            return got;
        }
        match got {
            Got::Found { body, etag, age } => {
                let fenced = SessionRecord::decode(&body).map(|record| SessionRecord {
                    fenced_by: Some(self.boxes[b].name.clone()),
                    ..record
                });
                let body = fenced.map_or(body, |fenced| fenced.encode());
                Got::Found { body, etag, age }
            }
            other @ (Got::Absent | Got::Failed(_)) => other,
        }
    }
}
