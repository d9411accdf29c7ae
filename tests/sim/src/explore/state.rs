//! A state: both boxes, the store, and what is on its way between them.

use std::collections::BTreeSet;
use std::hash::{DefaultHasher, Hash, Hasher};

use dormouse_core::effect::{Expect, RecordKey};
use dormouse_core::event::{
    Event, Got, Held, HostSeed, Leftover, Policy, SessionMemo, Ticket, Wrote,
};
use dormouse_core::ids::{BoxId, BoxName, ETag, Generation, Host, Nonce, Run, Slot, Txid};
use dormouse_core::position::{FileId, LocalCopy, Newest, Position, RemoteTip};
use dormouse_core::record::{HostRecord, HostState, SessionRecord};
use dormouse_core::time::{Boot, Deadline, MILLI_NS, Mono, Nanos, Now, SECOND_NS, Wall};
use dormouse_core::{Core, Identity, Settings, TakeoverMode};

use super::Bounds;
use super::moves::Move;
use crate::objects::{Condition, Objects, Tags};
use crate::rng::mix;
use crate::store::Write;

/// The host's slot.
pub(super) const SLOT: Slot = Slot(0);
/// BOOTTIME and MONOTONIC of the beginning.
const BEGINNING: u64 = 1000 * SECOND_NS;

/// How often what may still happen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Budget {
    /// Lost or late requests and answers, deaths, pauses.
    pub faults: u8,
    /// Requests for the host, on either box.
    pub requests: u8,
    /// Commits of an instance.
    pub commits: u8,
    /// Sleeps by an operator's word.
    pub rests: u8,
    /// Takeovers by an operator's word, of a box that is down.
    pub takeovers: u8,
}

/// A rule that is broken on purpose.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Break {
    /// A fence is answered as written, and never sent.
    FenceOmitted,
    /// Nobody kills at the deadline but the activator.
    GuardOmitted,
    /// The store ignores `If-Match` on host records.
    HostMatchIgnored,
    /// The store ignores `If-None-Match` on files.
    NoneMatchIgnored,
    /// A failed condition on a record is taken as a success.
    NonceUnchecked,
}

/// An L0 file.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct File {
    pub(super) txid: Txid,
    pub(super) nonce: Nonce,
    /// All writes up to this file.
    pub(super) content: Vec<Write>,
    /// What it was built on; an image on nothing.
    pub(super) parent: Option<Vec<Write>>,
}

/// A request to the store.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) enum Ask {
    Get(RecordKey),
    Put(RecordKey, Vec<u8>, Expect),
    List,
    Read,
    ReadOne(Txid),
    PutFile(File),
}

/// What an answer is for.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) enum To {
    Core(Ticket),
    Restore(Ticket),
    Apply(Ticket),
    Fence(Ticket),
    /// The running replica with this number.
    Upload(u32),
}

/// A request on its way.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Flight {
    pub(super) b: usize,
    pub(super) life: u32,
    pub(super) ask: Ask,
    pub(super) to: To,
}

/// What the store answers.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) enum Told {
    Got(Got),
    Wrote(Wrote),
    Newest(Option<Newest>),
    /// Content and tip, or a gap.
    Read(Result<(Vec<Write>, RemoteTip), String>),
    One(Option<(File, ETag)>),
    /// Done, or the nonce that stands there.
    File(Result<ETag, (Nonce, ETag)>),
    Nothing,
}

impl Told {
    /// Of a file: done, or the nonce that stands there; none when nobody answered.
    pub(super) fn file(self) -> Option<Result<ETag, (Nonce, ETag)>> {
        if let Self::File(file) = self { Some(file) } else { None }
    }
}

/// A replica that is being worked on, or runs.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) enum Stage {
    Nothing,
    Unfinished { content: Vec<Write>, tip: RemoteTip },
    Running(Running),
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Running {
    pub(super) number: u32,
    pub(super) generation: Generation,
    pub(super) tip: Option<RemoteTip>,
    /// What the newest file holds; none: the next is an image.
    pub(super) based: Option<Vec<Write>>,
    pub(super) file: Option<File>,
    pub(super) in_flight: bool,
    pub(super) saving: Option<Ticket>,
    pub(super) attached: bool,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Instance {
    pub(super) run: Run,
    pub(super) generation: Generation,
}

/// What survives the activator, and a crash.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(super) struct Disk {
    pub(super) memo: Option<SessionMemo>,
    pub(super) releasing: Option<Nonce>,
    pub(super) copy: Option<Vec<Write>>,
    pub(super) position: Option<Position>,
    pub(super) spool: BTreeSet<(Txid, Nonce)>,
    /// The L0 that a running replica has spooled.
    pub(super) unsent: Option<File>,
    /// What the position's L0 holds, where a replica ran.
    pub(super) mark: Option<Vec<Write>>,
    pub(super) held: Option<(Run, Held)>,
    pub(super) forks: BTreeSet<Vec<Write>>,
    pub(super) runs: u64,
}

/// One box.
#[derive(Clone, Debug, Hash)]
pub(super) struct Machine {
    pub(super) core: Option<Core>,
    pub(super) life: u32,
    pub(super) replicas: u32,
    /// Paused: with all its processes, or its activator alone.
    pub(super) paused: Option<bool>,
    /// Answers that a paused activator has not read.
    pub(super) mailbox: Vec<Event>,
    pub(super) told: Vec<(To, Ask, Told)>,
    pub(super) disk: Disk,
    pub(super) instance: Option<Instance>,
    pub(super) stage: Stage,
    /// A fence or an image in the making.
    pub(super) fence: Option<File>,
    pub(super) deadline: Option<Deadline>,
    pub(super) overthrown: bool,
}

/// The store, as the seeds' one.
#[derive(Clone, Debug, Hash)]
pub(super) struct Store {
    pub(super) records: Objects<RecordKey, Vec<u8>>,
    pub(super) files: Objects<Txid, File>,
}

/// A state.
#[derive(Clone, Debug)]
pub struct State {
    pub(super) now_ns: u64,
    pub(super) end_ns: u64,
    pub(super) boxes: [Machine; 2],
    pub(super) store: Store,
    pub(super) flights: Vec<Flight>,
    /// Writes without a sender: they may land at any moment.
    pub(super) late: Vec<Flight>,
    pub(super) durable: BTreeSet<Write>,
    pub(super) writes: Write,
    pub(super) left: Budget,
    pub(super) automatic: bool,
    pub(super) sabotage: Option<Break>,
    pub(super) violation: Option<String>,
}

fn hash(value: &impl Hash) -> u64 {
    let mut hasher = DefaultHasher::new();
    value.hash(&mut hasher);
    hasher.finish()
}

/// The host's name.
pub(super) fn the_host() -> Host {
    Host("h.test".into())
}

impl State {
    /// Awake on the first box, with one durable write; both sessions live.
    #[must_use]
    pub fn awake(bounds: &Bounds) -> Self {
        let machine = || Machine {
            core: None,
            life: 0,
            replicas: 0,
            paused: None,
            mailbox: Vec::new(),
            told: Vec::new(),
            disk: Disk::default(),
            instance: None,
            stage: Stage::Nothing,
            fence: None,
            deadline: None,
            overthrown: false,
        };
        let mut state = Self {
            now_ns: BEGINNING,
            end_ns: BEGINNING,
            boxes: [machine(), machine()],
            store: Store {
                records: Objects::new(Tags::Content),
                files: Objects::new(Tags::Content),
            },
            flights: Vec::new(),
            late: Vec::new(),
            durable: BTreeSet::new(),
            writes: 0,
            left: Budget { requests: 1, commits: 1, ..Budget::default() },
            automatic: bounds.automatic,
            sabotage: None,
            violation: None,
        };
        for step in
            [Move::Start(0), Move::Start(1), Move::Request(0), Move::Commit(0), Move::Upload(0)]
        {
            state.go(step);
            state.deliver_all();
        }
        debug_assert_eq!(state.durable.len(), 1, "the start has one durable write");
        state.left = bounds.budget;
        state.sabotage = bounds.sabotage;
        state.end_ns = state.now_ns + bounds.horizon_s * SECOND_NS;
        state
    }

    fn deliver_all(&mut self) {
        while !self.flights.is_empty() {
            self.go(Move::Deliver(0));
        }
    }

    /// One number for all that matters; what is on its way has no order.
    #[must_use]
    pub fn fingerprint(&self) -> u64 {
        let bag = |flights: &[Flight]| flights.iter().map(hash).fold(0, u64::wrapping_add);
        let rest =
            hash(&(&self.boxes, &self.store, &self.durable, self.now_ns, self.writes, self.left));
        mix(rest, mix(bag(&self.flights), bag(&self.late)))
    }

    pub(super) fn now(&self) -> Now {
        Now { mono: Mono(self.now_ns), boot: Boot(self.now_ns), wall: Wall(self.now_ns / MILLI_NS) }
    }

    /// A new activator.
    pub(super) fn start(&mut self, b: usize) {
        let machine = &mut self.boxes[b];
        machine.life += 1;
        let identity = Identity {
            name: BoxName(format!("box{b}")),
            id: BoxId(format!("id{b}")),
            boot_id: "boot".into(),
        };
        let second = Nanos::from_secs(1);
        let settings = Settings {
            ttl: Nanos::from_secs(3),
            margin: second,
            takeover: if self.automatic { TakeoverMode::Automatic } else { TakeoverMode::Manual },
            wake_budget: Nanos::from_secs(60),
            backoff: second,
            backoff_max: second,
            retry: second,
            retry_max: second,
            ..Settings::new(identity)
        };
        machine.core = Some(Core::new(settings));
        machine.stage = Stage::Nothing;
        machine.fence = None;
        machine.mailbox.clear();
        machine.told.clear();
        machine.deadline = None;
        let policy = Policy { idle: Nanos::from_secs(1_000_000), frozen: None, asks_due: false };
        let unsynced = machine.disk.position.as_ref().is_some_and(|position| !position.clean);
        let seed = HostSeed {
            slot: SLOT,
            host: the_host(),
            policy,
            due: None,
            leftover: machine.instance.as_ref().map(|instance| {
                let held = machine.disk.held.clone().filter(|(run, _)| *run == instance.run);
                Leftover { run: instance.run, held: held.map(|(_, held)| held) }
            }),
            releasing: machine.disk.releasing.clone(),
            unsynced,
        };
        let base = format!("n{b}x{}", machine.life);
        let memo = machine.disk.memo.clone();
        self.step(b, Event::Boot { base, memo, hosts: vec![seed] });
    }

    /// What a look at the local copy tells.
    pub(super) fn inspect(&self, b: usize) -> LocalCopy {
        let disk = &self.boxes[b].disk;
        let file = disk.copy.as_ref().map(|content| file_id(content));
        let spool = disk.spool.iter().map(|(_, nonce)| nonce.clone()).collect();
        LocalCopy { file, position: disk.position.clone(), wal_bytes: 0, spool, damaged: false }
    }

    pub(super) fn put_record(&mut self, key: &RecordKey, body: &[u8], expect: &Expect) -> Wrote {
        let ignored = self.sabotage == Some(Break::HostMatchIgnored)
            && matches!(key, RecordKey::Host(_))
            && self.store.records.get(key).is_some();
        let condition = match expect {
            Expect::Absent => Condition::Absent,
            Expect::Tag(_) if ignored => Condition::None,
            Expect::Tag(tag) => Condition::Tag(tag),
        };
        let before = self.host_record();
        let (content, now) = (hash(&body), self.now_ns);
        let put = self.store.records.put(key.clone(), body.to_vec(), content, condition, now);
        let Some(etag) = put else { return Wrote::ConditionFailed };
        self.check_record(key, body, before);
        Wrote::Done(etag)
    }

    pub(super) fn put_file(&mut self, file: &File) -> Result<ETag, (Nonce, ETag)> {
        let ignored = self.sabotage == Some(Break::NoneMatchIgnored);
        let condition = if ignored { Condition::None } else { Condition::Absent };
        let content = hash(&(&file.content, &file.parent));
        let put = self.store.files.put(file.txid, file.clone(), content, condition, 0);
        put.ok_or_else(|| match self.store.files.get(&file.txid) {
            Some(found) => (found.value.nonce.clone(), found.etag.clone()),
            None => unreachable!("a number that is not free has a file"),
        })
    }

    /// All files in order; an error for a gap, or for one that was built on another history.
    pub(super) fn restore(&self) -> Result<Option<(Vec<Write>, RemoteTip)>, String> {
        let mut content: Vec<Write> = Vec::new();
        let mut tip = None;
        for (number, (txid, object)) in (1..).zip(self.store.files.range(Txid(0)..)) {
            let file = &object.value;
            if txid.0 != number {
                return Err(format!("file {number} is missing"));
            }
            if file.parent.as_ref().is_some_and(|parent| *parent != content) {
                return Err(format!("file {txid} is built on another history"));
            }
            content.clone_from(&file.content);
            tip = Some(RemoteTip::tagged(*txid, object.etag.clone()));
        }
        Ok(tip.map(|tip| (content, tip)))
    }

    /// The newest file, and whose it is.
    pub(super) fn newest(&self) -> Option<Newest> {
        let (_, tip) = self.restore().ok().flatten()?;
        let nonce = self.store.files.get(&tip.txid).map(|file| file.value.nonce.clone());
        Some(Newest { tip, nonce })
    }

    pub(super) fn host_record(&self) -> Option<HostRecord> {
        let record = self.store.records.get(&RecordKey::Host(the_host()))?;
        HostRecord::decode(&record.value).ok()
    }

    fn check_record(&mut self, key: &RecordKey, body: &[u8], before: Option<HostRecord>) {
        match key {
            RecordKey::Host(_) => {
                let new = HostRecord::decode(body).ok();
                if let (Some(old), Some(new)) = (before, new)
                    && new.generation < old.generation
                {
                    self.violate(2, "a generation fell");
                }
            }
            RecordKey::Session(name) => {
                let fenced = SessionRecord::decode(body).is_ok_and(|r| r.fenced_by.is_some());
                let owner = usize::from(name.0 == "box1");
                let lives =
                    self.boxes[owner].core.is_some() || self.boxes[owner].instance.is_some();
                if fenced && !self.automatic && lives {
                    self.boxes[owner].overthrown = true;
                }
            }
        }
    }

    /// Whether the store's record names this box, under the generation that it believes to hold.
    pub(super) fn owns(&self, b: usize) -> bool {
        let view = self.boxes[b].core.as_ref().and_then(|core| core.host(SLOT));
        let generation = view.and_then(|view| view.generation);
        self.host_record().is_some_and(|record| {
            record.state == HostState::Owned
                && record.id.0 == format!("id{b}")
                && Some(record.generation) == generation
        })
    }

    pub(super) fn violate(&mut self, invariant: u8, what: &str) {
        self.violation.get_or_insert_with(|| format!("invariant {invariant}: {what}"));
    }

    /// The invariants of the design that a state can break.
    #[must_use]
    pub fn check(&self) -> Option<String> {
        if self.violation.is_some() {
            return self.violation.clone();
        }
        let record = self.host_record();
        let runs = |b: usize| {
            let machine = &self.boxes[b];
            let excused = machine.overthrown || machine.paused == Some(true);
            machine.instance.as_ref().filter(|_| !excused)
        };
        for b in 0..2 {
            let Some(instance) = runs(b) else { continue };
            let holds = record.as_ref().is_some_and(|record| {
                record.state == HostState::Owned
                    && record.id.0 == format!("id{b}")
                    && record.generation == instance.generation
            });
            if !holds {
                return Some(format!("invariant 1: box{b} runs what it does not hold"));
            }
        }
        if runs(0).is_some() && runs(1).is_some() {
            return Some("invariant 2: it runs twice".into());
        }
        let restored = match self.restore() {
            Ok(restored) => restored.map(|(content, _)| content).unwrap_or_default(),
            Err(why) => return Some(format!("invariant 3: {why}")),
        };
        let lost = self.durable.iter().find(|write| !restored.contains(write));
        lost.map(|write| format!("invariant 3: write {write} was reported durable"))
    }
}

/// Every commit changes the file.
pub(super) fn file_id(content: &[Write]) -> FileId {
    let size = content.iter().fold(0, |count, _| count + 1);
    FileId { inode: 1, size, ctime_ns: content.iter().fold(7, |hash, write| mix(hash, *write)) }
}
