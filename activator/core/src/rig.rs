//! For tests: a core with one host, and a driver that obliges it from a store in memory.

use alloc::collections::{BTreeMap, VecDeque};
use alloc::format;
use alloc::string::String;
use alloc::vec::Vec;

use crate::effect::{Base, Effect, Expect, RecordKey};
use crate::event::{
    Answer, Event, Got, HostSeed, Leftover, Policy, Sample, Saved, SessionMemo, StoreProblem,
    Subject, Ticket, Uploaded, Wrote,
};
use crate::ids::{ETag, Epoch, Generation, Run, Slot, Txid};
use crate::position::{FileId, LocalCopy, Newest, POSITION_VERSION, Position, RemoteTip};
use crate::record::{HostRecord, HostState, Owner, SessionRecord};
use crate::time::{Boot, MILLI_NS, Mono, Nanos, Now, Wall};
use crate::{Core, Identity, Settings, TakeoverMode};

pub(crate) const SLOT: Slot = Slot(0);
pub(crate) const HOST: &str = "h.test";
/// Carried by the newest file; the copy's spool has it.
const NONCE: &str = "mine";
const FILE: FileId = FileId { inode: 1, size: 4096, ctime_ns: 5 };

pub(crate) struct Rig {
    pub(crate) core: Core,
    pub(crate) now: Now,
    /// Everything that the core has pushed.
    pub(crate) said: Vec<Effect>,
    pub(crate) records: BTreeMap<RecordKey, (Vec<u8>, ETag)>,
    pub(crate) local: LocalCopy,
    pub(crate) tip: Option<RemoteTip>,
    /// How old the store says that its records are.
    pub(crate) age: Option<Nanos>,
    /// The store gives no answer.
    pub(crate) away: bool,
    /// What is sent, and nobody hears of again.
    pub(crate) lost: fn(&Effect) -> bool,
    /// How a final sync ends; by default clean.
    pub(crate) saves: Option<Saved>,
    /// A core for each state that was met.
    pub(crate) met: BTreeMap<String, (Core, Now)>,
    pending: VecDeque<Effect>,
    written: u64,
}

impl Rig {
    pub(crate) fn new(frozen: Option<Nanos>) -> Self {
        Self::with(TakeoverMode::Manual, frozen)
    }

    pub(crate) fn automatic() -> Self {
        Self::with(TakeoverMode::Automatic, None)
    }

    fn with(takeover: TakeoverMode, frozen: Option<Nanos>) -> Self {
        let identity = Identity { name: "box1".into(), id: "id1".into(), boot_id: "b".into() };
        let now = Now { mono: Mono(1), boot: Boot(1), wall: Wall(1_000_000) };
        let mut rig = Self {
            core: Core::new(Settings { takeover, ..Settings::new(identity) }),
            now,
            said: Vec::new(),
            records: BTreeMap::new(),
            local: LocalCopy::default(),
            tip: None,
            age: None,
            away: false,
            lost: |_| false,
            saves: None,
            met: BTreeMap::new(),
            pending: VecDeque::new(),
            written: 0,
        };
        let hosts = Vec::from([seed(frozen, None)]);
        rig.step(Event::Boot { base: "n".into(), memo: None, hosts });
        rig
    }

    /// The activator is killed and started again; the instance runs on. It finds the lease that was
    /// held for it, unless that is forgotten.
    pub(crate) fn restart(&mut self, remembers: bool) {
        let held = self.said.iter().rev().find_map(|effect| {
            if let Effect::Hold(_, run, held) = effect { Some((*run, held.clone())) } else { None }
        });
        let deadline = self.said.iter().rev().find_map(|effect| {
            if let Effect::Deadline(deadline) = effect { *deadline } else { None }
        });
        let (run, held) = held.unwrap();
        let leftover = Leftover { run, held: Some(held).filter(|_| remembers) };
        let settings = self.core.shared.settings.clone();
        let memo = SessionMemo { epoch: Epoch(1), bases: Vec::from(["n".into()]), deadline };
        self.core = Core::new(settings);
        self.said.clear();
        self.pending.clear();
        let hosts = Vec::from([seed(None, Some(leftover))]);
        self.step(Event::Boot { base: "m".into(), memo: Some(memo), hosts });
    }

    /// One input; its effects wait to be obliged.
    pub(crate) fn step(&mut self, event: Event) {
        let mut effects = Vec::new();
        self.core.step(self.now, event, &mut effects);
        self.said.extend(effects.iter().cloned());
        self.pending.extend(effects);
        self.met.entry(self.label()).or_insert_with(|| (self.core.clone(), self.now));
    }

    pub(crate) fn label(&self) -> String {
        label(&self.core)
    }

    /// Obliges until the host's state has this label.
    pub(crate) fn until(&mut self, wanted: &str) {
        for _ in 0..200 {
            if self.label() == wanted {
                return;
            }
            if let Some(effect) = self.pending.pop_front() {
                self.oblige(effect);
            } else {
                self.pass_time();
            }
        }
        panic!("{wanted} never came; it is {}, after {:?}", self.label(), self.said);
    }

    /// Obliges until nothing is asked any more.
    pub(crate) fn settle(&mut self) {
        while let Some(effect) = self.pending.pop_front() {
            self.oblige(effect);
        }
    }

    /// Until the next due moment; an idle host looks idle.
    pub(crate) fn pass_time(&mut self) {
        let due = self.core.next_due(self.now).unwrap_or(self.now.mono + Nanos::from_secs(1));
        self.pass(Nanos(due.since(self.now.mono).0.max(MILLI_NS)));
        let last_active = Mono(0);
        let sample = Sample { slot: SLOT, in_flight: 0, last_active, stalled: false };
        self.step(Event::Sweep(Vec::from([sample])));
    }

    pub(crate) fn pass(&mut self, span: Nanos) {
        self.now = Now {
            mono: self.now.mono + span,
            boot: self.now.boot + span,
            wall: self.now.wall + span,
        };
    }

    /// The host's open question is answered so; what was to be obliged is forgotten.
    pub(crate) fn answer(&mut self, answer: Answer) {
        self.pending.clear();
        let attempt = self.core.hosts.get(&SLOT).unwrap().attempt;
        self.step(Event::Answer(Ticket { subject: Subject::Host(SLOT), attempt }, answer));
    }

    fn put(&mut self, key: RecordKey, body: Vec<u8>, expect: &Expect) -> Wrote {
        let holds = match (expect, self.records.get(&key)) {
            (Expect::Absent, None) => true,
            (Expect::Tag(tag), Some((_, found))) => tag == found,
            (Expect::Absent, Some(_)) | (Expect::Tag(_), None) => false,
        };
        if !holds {
            return Wrote::ConditionFailed;
        }
        self.written += 1;
        let etag = ETag(format!("\"{}\"", self.written));
        self.records.insert(key, (body, etag.clone()));
        Wrote::Done(etag)
    }

    /// Another box's record over this host; its session is over, or not.
    pub(crate) fn foreign(&mut self, over: bool, txid: u64) {
        let owner = Owner { name: "box2".into(), epoch: Epoch(1) };
        let record = HostRecord {
            generation: Generation(7),
            owner,
            nonce: "x".into(),
            id: "id2".into(),
            state: HostState::Owned,
            since: Generation(7),
            txid: Txid(txid),
            etag: None,
            build: None,
        };
        let session = SessionRecord {
            name: "box2".into(),
            id: "id2".into(),
            epoch: Epoch(1),
            nonce: "y".into(),
            ttl_ms: 30_000,
            boot_id: "b".into(),
            ended: false,
            fenced_by: over.then(|| "box3".into()),
        };
        self.records.insert(RecordKey::Host(HOST.into()), (record.encode(), "\"h\"".into()));
        self.records.insert(RecordKey::Session("box2".into()), (session.encode(), "\"s\"".into()));
    }

    /// A copy on disk.
    pub(crate) fn copy(&mut self, generation: u64, txid: u64, clean: bool) {
        self.local = LocalCopy {
            file: Some(FILE),
            position: Some(Position {
                version: POSITION_VERSION,
                generation: Generation(generation),
                txid: Txid(txid),
                etag: Some("\"t\"".into()),
                file: FILE,
                page_count: 1,
                page_size: 4096,
                clean,
            }),
            wal_bytes: 0,
            spool: Vec::from([NONCE.into()]),
            damaged: false,
        };
    }

    pub(crate) fn remote(&mut self, txid: u64) {
        self.tip = Some(RemoteTip::tagged(Txid(txid), "\"t\"".into()));
    }

    /// What is asked while this goes on, and when: until the host's state has another label than
    /// those that begin so.
    pub(crate) fn repeats(&mut self, label: &str, is: fn(&Effect) -> bool) -> Vec<Mono> {
        self.lost = is;
        let (mut seen, mut times) = (0, Vec::new());
        while self.label().starts_with(label) {
            let said = self.said.iter().filter(|effect| is(effect)).count();
            times.extend((said > seen).then_some(self.now.mono));
            seen = said;
            if let Some(effect) = self.pending.pop_front() {
                self.oblige(effect);
            } else {
                self.pass_time();
            }
        }
        times
    }

    fn set_aside(&mut self) -> Answer {
        self.local = LocalCopy::default();
        Answer::SetAside(Ok("db.fork".into()))
    }

    fn unheard(&self, effect: &Effect) -> Option<(Ticket, Answer)> {
        if !(self.lost)(effect) {
            return None;
        }
        if let Effect::Put(ticket, ..) = effect {
            return Some((*ticket, Answer::Wrote(Wrote::Unknown)));
        }
        let (Effect::PutFence(ticket, ..) | Effect::PutImage(ticket, ..)) = effect else {
            return None;
        };
        Some((*ticket, Answer::Uploaded(Uploaded::Unknown)))
    }

    fn oblige(&mut self, effect: Effect) {
        if let Some((ticket, answer)) = self.unheard(&effect) {
            return self.step(Event::Answer(ticket, answer));
        }
        let (ticket, answer) = match effect {
            Effect::Get(ticket, _) if self.away => {
                let problem = StoreProblem::Unreachable("away".into());
                (ticket, Answer::Got(Got::Failed(problem)))
            }
            Effect::Put(ticket, ..) if self.away => (ticket, Answer::Wrote(Wrote::Unknown)),
            Effect::Get(ticket, key) => {
                let age = self.age;
                let found = self.records.get(&key).cloned();
                let got = found.map_or(Got::Absent, |(body, etag)| Got::Found { body, etag, age });
                (ticket, Answer::Got(got))
            }
            Effect::Put(ticket, key, body, expect) => {
                (ticket, Answer::Wrote(self.put(key, body, &expect)))
            }
            Effect::Inspect(ticket, _) => (ticket, Answer::Inspected(Ok(self.local.clone()))),
            Effect::List(ticket, _) => {
                let newest = self.tip.clone().map(|tip| Newest { tip, nonce: Some(NONCE.into()) });
                (ticket, Answer::Listed(Ok(newest)))
            }
            Effect::Restore { ticket, .. } | Effect::Apply(ticket, ..) => {
                let tip = self.tip.clone().unwrap();
                (ticket, Answer::Fetched(Ok(tip)))
            }
            Effect::SetAside(ticket, _) => (ticket, self.set_aside()),
            Effect::PutFence(ticket, _, txid, _) | Effect::PutImage(ticket, _, txid, _) => {
                self.remote(txid.0);
                let tip = self.tip.clone().unwrap();
                (ticket, Answer::Uploaded(Uploaded::Done(tip)))
            }
            Effect::Adopt(ticket, _, generation, tip) => {
                self.copy(generation.0, tip.txid.0, true);
                (ticket, Answer::Adopted(Ok(())))
            }
            Effect::OpenReplica { ticket, generation, base, .. } => {
                let txid = match base {
                    Base::At(tip) => tip.txid.0,
                    Base::Nothing => 0,
                };
                self.copy(generation.0, txid, false);
                (ticket, Answer::Opened(Ok(())))
            }
            Effect::Spawn(ticket, _) => (ticket, Answer::Healthy(Run(1))),
            Effect::Attach(ticket, _) | Effect::Resume(ticket, ..) => {
                (ticket, Answer::Attached(Ok(())))
            }
            Effect::TryStop(ticket, ..) => (ticket, Answer::StopTaken),
            Effect::AskDue(ticket, _) => (ticket, Answer::Due(Ok(None))),
            Effect::Terminate(ticket, _) | Effect::Kill(ticket, _) => (ticket, Answer::Empty),
            Effect::Freeze(ticket, _) | Effect::Thaw(ticket, _) => (ticket, Answer::Frozen(Ok(()))),
            Effect::Save(ticket, _) => {
                let clean = Saved::Clean(self.tip.clone());
                (ticket, Answer::Saved(self.saves.clone().unwrap_or(clean)))
            }
            Effect::Journal(_)
            | Effect::Abandon(_)
            | Effect::Hold(..)
            | Effect::Publish(..)
            | Effect::Refuse(..)
            | Effect::RecordDue(..)
            | Effect::Deadline(_)
            | Effect::Retired(_)
            | Effect::Handed(..)
            | Effect::TakeoverEnded(..)
            | Effect::Exit => return,
        };
        self.step(Event::Answer(ticket, answer));
    }
}

fn seed(frozen: Option<Nanos>, leftover: Option<Leftover>) -> HostSeed {
    HostSeed {
        slot: SLOT,
        host: HOST.into(),
        policy: Policy { idle: Nanos::from_secs(60), frozen, asks_due: true },
        due: None,
        leftover,
        releasing: None,
        unsynced: false,
    }
}

/// The first pause is short, they grow, and they are bounded.
pub(crate) fn assert_backs_off(times: &[Mono]) {
    let gaps: Vec<Nanos> = times.windows(2).map(|two| two[1].since(two[0])).collect();
    let settings =
        Settings::new(Identity { name: "".into(), id: "".into(), boot_id: String::new() });
    let longer = |pause: Nanos| Nanos(pause.0 / 4 * 5);
    assert!((settings.retry..=longer(settings.retry)).contains(&gaps[0]), "{gaps:?}");
    assert!(gaps.iter().any(|gap| *gap >= settings.retry_max), "{gaps:?}");
    assert!(gaps.iter().all(|gap| *gap <= longer(settings.retry_max)), "{gaps:?}");
    assert!(times.len() < 40, "{} in one wake", times.len());
}

/// State and step of the host, by the names of their variants; `Gone` when it was retired.
pub(crate) fn label(core: &Core) -> String {
    let Some(host) = core.hosts.get(&SLOT) else { return "Gone".into() };
    let text = format!("{:?}", host.state);
    let name =
        |text: &str| -> String { text.chars().take_while(char::is_ascii_alphanumeric).collect() };
    match text.split_once("step: ") {
        Some((_, step)) => format!("{}.{}", name(&text), name(step)),
        None => name(&text),
    }
}
