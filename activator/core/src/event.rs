//! Inputs of the core: what happened, as data that can be logged and replayed.

use alloc::string::String;
use alloc::vec::Vec;

use serde::{Deserialize, Serialize};

use crate::ids::{Attempt, BoxName, ETag, Epoch, Host, Nonce, Run, Slot, Txid};
use crate::position::{LocalCopy, Newest, RemoteTip};
use crate::time::{Deadline, Mono, Nanos, Wall};

/// Whom an answer is for, and which of its questions it answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Ticket {
    /// Who asked.
    pub subject: Subject,
    /// Which question; an older one's answer is dropped and counted.
    pub attempt: Attempt,
}

/// Who asks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Subject {
    /// The box's session.
    Session,
    /// An operator's takeover.
    Takeover,
    /// A host.
    Host(Slot),
}

/// How one host is treated.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Policy {
    /// Idle time after which it sleeps.
    pub idle: Nanos,
    /// With a frozen tier: how long it stays frozen before it is stopped.
    pub frozen: Option<Nanos>,
    /// Whether it is asked for its next due time at sleep.
    pub asks_due: bool,
}

/// A host as the registry knows it.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct HostSeed {
    /// Its slot.
    pub slot: Slot,
    /// Its name.
    pub host: Host,
    /// How it is treated.
    pub policy: Policy,
    /// When it must wake by itself.
    pub due: Option<Wall>,
    /// A run that an earlier activator left behind.
    pub leftover: Option<Leftover>,
    /// A release that was journalled and is not definite.
    pub releasing: Option<Nonce>,
    /// Its position says that the local copy may be ahead of the store.
    pub unsynced: bool,
}

/// An instance that an earlier activator left behind.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Leftover {
    /// Its run.
    pub run: Run,
    /// Under which lease it served, when it did: then it may be taken over.
    pub held: Option<Held>,
}

/// The lease of an instance that serves, for an activator that comes after this one.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Held {
    /// The host's record, as it was written.
    pub record: Vec<u8>,
    /// Its entity tag.
    pub etag: ETag,
}

/// What is remembered of this box's session.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct SessionMemo {
    /// Its epoch.
    pub epoch: Epoch,
    /// Starts of all nonces that were written under it.
    pub bases: Vec<String>,
    /// Until when the process before this one might act, when that is known.
    #[serde(default)]
    pub deadline: Option<Deadline>,
}

/// Why a host is to wake.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Cause {
    /// A request.
    Client,
    /// `dormouse wake`.
    Operator,
    /// Its due time has come.
    Due,
}

/// One host's activity, read from the table (or the kernel's maps) for a sweep.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Sample {
    /// The host.
    pub slot: Slot,
    /// Counted requests in flight, over all proxies.
    pub in_flight: u64,
    /// Last client payload or count-out, whichever is later.
    pub last_active: Mono,
    /// Whether its replica has commits that are not durable and cannot be uploaded now.
    pub stalled: bool,
}

/// An input of the core.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Event {
    /// The first event: what registry, journal and a look at the machine say.
    Boot {
        /// Random text; starts every nonce of this process.
        base: String,
        /// What the journal remembers of the session.
        memo: Option<SessionMemo>,
        /// All hosts.
        hosts: Vec<HostSeed>,
    },
    /// A host was added.
    Added(HostSeed),
    /// A host is treated otherwise from now on.
    Treated(Slot, Policy),
    /// A host is to be retired; ends with [`crate::effect::Effect::Retired`].
    Removed(Slot),
    /// A host is to wake.
    Requested(Slot, Cause),
    /// An operator's word: put it to sleep now.
    Rest(Slot),
    /// Its instance is dead or does not accept.
    Died(Slot, Run),
    /// Another writer was met in its replica.
    StoodDown(Slot),
    /// Thousandths of the time in which something waits for memory, and the awake hosts.
    Pressure(u32, Vec<Sample>),
    /// Time has passed ([`crate::Core::next_due`]).
    Sweep(Vec<Sample>),
    /// Put everything to sleep, release it, end the session; ends with `Exit`.
    Shutdown,
    /// An operator's word: an outside supervisor runs it from now on.
    HandOut(Slot),
    /// An operator's word: take it back; the local file is the truth.
    TakeIn(Slot),
    /// The operator's word that a box is gone.
    Takeover(BoxName),
    /// What an effect with this ticket led to.
    Answer(Ticket, Answer),
}

/// One line of the event log, from which a history can be replayed.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Line {
    /// The first one: what the core was made with.
    Settings(crate::Settings),
    /// An input, and when.
    Step(crate::time::Now, Event),
}

/// What came of a GET.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Got {
    /// The object.
    Found {
        /// Its bytes.
        body: Vec<u8>,
        /// Its entity tag.
        etag: ETag,
        /// How old it is by the store's own clock, where the store tells.
        age: Option<Nanos>,
    },
    /// No such key: definite.
    Absent,
    /// The store did not give a definite answer.
    Failed(StoreProblem),
}

/// What came of a conditional PUT.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Wrote {
    /// Carried out.
    Done(ETag),
    /// The condition did not hold: definite, nothing was written by this request.
    ConditionFailed,
    /// Lost a race inside the store: nothing was written; ask again.
    Conflict,
    /// No answer: it may have been carried out, or may still be.
    Unknown,
    /// The store refused, or is broken: nothing was written.
    Failed(StoreProblem),
}

/// Why a store did not do it.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum StoreProblem {
    /// No answer in time, or no connection.
    Unreachable(String),
    /// It will not: credentials, policy, missing bucket.
    Refused(String),
    /// It failed inside.
    Broken(String),
}

impl StoreProblem {
    /// The text for people.
    #[must_use]
    pub fn detail(&self) -> &str {
        match self {
            Self::Unreachable(text) | Self::Refused(text) | Self::Broken(text) => text,
        }
    }
}

/// Why work on a replica came to nothing.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum ReplicaProblem {
    /// The store did not do it.
    Store(StoreProblem),
    /// Gap, bad checksum, torn file: the host must not start.
    Corrupt(String),
    /// The local disk failed or is full.
    Local(String),
    /// The database cannot be replicated (not WAL, exclusive lock, a link …).
    Unfit(String),
}

impl ReplicaProblem {
    /// The text for people.
    #[must_use]
    pub fn detail(&self) -> &str {
        match self {
            Self::Store(problem) => problem.detail(),
            Self::Corrupt(text) | Self::Local(text) | Self::Unfit(text) => text,
        }
    }
}

/// What came of a write-once upload that a start depends on.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Uploaded {
    /// It is there, and is ours.
    Done(RemoteTip),
    /// The number is taken by another file.
    Taken {
        /// Its nonce is one that this box left in its own spool: an upload of ours, come late.
        own: bool,
    },
    /// No answer: repeat the same bytes.
    Unknown,
    /// It came to nothing.
    Failed(ReplicaProblem),
}

/// What an effect led to.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Answer {
    /// Of `Effect::Get`.
    Got(Got),
    /// Of `Effect::Put`.
    Wrote(Wrote),
    /// Of `Effect::Inspect`.
    Inspected(Result<LocalCopy, String>),
    /// Of `Effect::List`.
    Listed(Result<Option<Newest>, ReplicaProblem>),
    /// Of `Effect::Restore` and `Effect::Apply`: the unfinished file is at this number.
    Fetched(Result<RemoteTip, ReplicaProblem>),
    /// Of `Effect::PutFence` and `Effect::PutImage`.
    Uploaded(Uploaded),
    /// Of `Effect::Adopt`.
    Adopted(Result<(), ReplicaProblem>),
    /// Of `Effect::SetAside`: the name that the local file has now.
    SetAside(Result<String, String>),
    /// Of `Effect::OpenReplica`.
    Opened(Result<(), ReplicaProblem>),
    /// Of `Effect::Spawn`: the instance of this run is healthy.
    Healthy(Run),
    /// Of `Effect::Spawn`: it was not started, did not become healthy, or exited.
    StartFailed(String),
    /// Of `Effect::Attach` and `Effect::Resume`.
    Attached(Result<(), ReplicaProblem>),
    /// Of `Effect::TryStop`: the word says stopping and nothing is in flight.
    StopTaken,
    /// Of `Effect::TryStop`: something is in flight; the word was taken back.
    StopBusy,
    /// Of `Effect::AskDue`; `Err` keeps the last known due time.
    Due(Result<Option<Wall>, String>),
    /// Of `Effect::Terminate` and `Effect::Kill`: the cgroup is proven empty.
    Empty,
    /// Of `Effect::Save`.
    Saved(Saved),
    /// Of `Effect::Freeze` and `Effect::Thaw`.
    Frozen(Result<(), String>),
}

/// How a final sync ended.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Saved {
    /// Everything is durable and the position says clean.
    Clean(Option<RemoteTip>),
    /// Something stays local: kept, uploaded at the next wake.
    Unclean {
        /// Newest durable number.
        durable: Txid,
        /// Why.
        why: String,
    },
    /// Another writer was met.
    StoodDown,
}
