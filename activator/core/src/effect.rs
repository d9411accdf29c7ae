//! Outputs of the core: what is to be done, as data.
//!
//! Effects are carried out in the order in which they were pushed. [`Effect::Journal`] is durable
//! before the effect behind it begins; all others may go on side by side.

use alloc::string::String;
use alloc::vec::Vec;

use serde::{Deserialize, Serialize};

use crate::event::{Held, Ticket};
use crate::ids::{BoxName, ETag, Epoch, Generation, Host, Nonce, Run, Slot, Txid};
use crate::position::RemoteTip;
use crate::time::{Deadline, Nanos, Wall};

/// A record in the store.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum RecordKey {
    /// `<prefix>/sessions/<box>.json`.
    Session(BoxName),
    /// `<prefix>/<host>/lock.json`.
    Host(Host),
}

/// What must hold for a PUT to be carried out.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Expect {
    /// `If-None-Match: *`.
    Absent,
    /// `If-Match`.
    Tag(ETag),
}

/// An entry of the fsynced journal.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Entry {
    /// Nonces that start with `base` are ours, under this epoch.
    Session {
        /// The epoch.
        epoch: Epoch,
        /// The start of the nonces.
        base: String,
    },
    /// A release is about to be sent.
    Releasing {
        /// The host.
        host: Host,
        /// The nonce of the release.
        nonce: Nonce,
    },
    /// That release is definite.
    Settled {
        /// The host.
        host: Host,
    },
}

/// What the wake table is to say.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Word {
    /// Nothing runs.
    Asleep,
    /// A wake is under way.
    Waking,
    /// This run serves.
    Awake(Run),
    /// This run is being stopped.
    Stopping(Run),
}

/// Why waiters are sent away.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Reason {
    /// Another box owns the host.
    Elsewhere,
    /// The host is run by an outside supervisor.
    Outside,
    /// The store cannot be reached, or refuses.
    StoreDown,
    /// The session's name belongs to another box.
    NoSession,
    /// The replica is corrupt, gapped, or older than what was acknowledged.
    Replica,
    /// The database is none that can be replicated.
    Database,
    /// This box's disk failed or is full.
    Disk,
    /// The instance does not start.
    Broken,
    /// A stop is not proven yet.
    Unproven,
    /// The wake took longer than its budget.
    TimedOut,
    /// The lease or the session was lost.
    Lost,
    /// The activator is going.
    Leaving,
    /// The host is being removed.
    Removed,
}

/// A failed wake.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Failure {
    /// Its kind, for the reason header.
    pub reason: Reason,
    /// What happened, for people.
    pub detail: String,
    /// When asking again makes sense.
    pub retry_after: Nanos,
}

/// What the replica continues from.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Base {
    /// The local file equals this number.
    At(RemoteTip),
    /// Nothing exists yet.
    Nothing,
}

/// How a takeover ended.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum TakeoverEnd {
    /// The session is fenced: its hosts can be taken.
    Fenced,
    /// It had ended, or was fenced, before.
    AlreadyOver,
    /// It was renewed while it was watched: the box lives.
    Alive,
    /// There is no such session.
    Unknown,
    /// The store did not do it.
    Failed(String),
    /// Another takeover is under way, or the target is this box.
    Refused(String),
}

/// An output of the core.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Effect {
    /// Make an entry durable, before anything behind it is begun.
    Journal(Entry),
    /// Read a record.
    Get(Ticket, RecordKey),
    /// Write a record by compare-and-swap.
    Put(Ticket, RecordKey, Vec<u8>, Expect),
    /// Look at the local copy.
    Inspect(Ticket, Slot),
    /// Ask the store for the newest number.
    List(Ticket, Slot),
    /// Restore into an unfinished file; a local file is set aside first.
    Restore {
        /// For the answer.
        ticket: Ticket,
        /// The host.
        slot: Slot,
        /// Set the local file aside as a fork.
        set_aside: bool,
    },
    /// Set the local file aside as a fork: the host went to another box.
    SetAside(Ticket, Slot),
    /// Upload a fence, page 1 of the unfinished file.
    PutFence(Ticket, Slot, Txid, Nonce),
    /// Apply one more file to the unfinished one.
    Apply(Ticket, Slot, Txid),
    /// Upload the whole local file.
    PutImage(Ticket, Slot, Txid, Nonce),
    /// Give the unfinished file its name and position.
    Adopt(Ticket, Slot, Generation, RemoteTip),
    /// Take the read lock and clear `clean`; comes before the start.
    OpenReplica {
        /// For the answer.
        ticket: Ticket,
        /// The host.
        slot: Slot,
        /// Under this generation.
        generation: Generation,
        /// From here.
        base: Base,
    },
    /// Start the instance and wait until it is healthy.
    Spawn(Ticket, Slot),
    /// Follow the WAL.
    Attach(Ticket, Slot),
    /// Follow the WAL of an instance that an earlier activator started, under this generation: from
    /// where it left off, when that is proven, else with a whole image.
    Resume(Ticket, Slot, Generation),
    /// Keep the lease of a run that serves, for an activator that comes after this one.
    Hold(Slot, Run, Held),
    /// Let go of the replica without a last sync.
    Abandon(Slot),
    /// Publish the word, then notify the proxies.
    Publish(Slot, Word),
    /// Publish stopping, and take it back if a request is in flight.
    TryStop(Ticket, Slot, Run),
    /// Send the waiters away.
    Refuse(Slot, Failure),
    /// Ask the instance for its next due time.
    AskDue(Ticket, Slot),
    /// Keep a due time.
    RecordDue(Slot, Option<Wall>),
    /// SIGTERM to the instance.
    Terminate(Ticket, Slot),
    /// SIGKILL to all of it.
    Kill(Ticket, Slot),
    /// Freeze it.
    Freeze(Ticket, Slot),
    /// Thaw it.
    Thaw(Ticket, Slot),
    /// Copy the rest of the WAL, checkpoint, upload, write the position.
    Save(Ticket, Slot),
    /// Uploads and records count until then; with automatic takeover the table says so too.
    Deadline(Option<Deadline>),
    /// A removed host is gone from the core.
    Retired(Slot),
    /// How a move to or from an outside supervisor ended.
    Handed(Slot, Result<(), String>),
    /// How a takeover ended.
    TakeoverEnded(BoxName, TakeoverEnd),
    /// Everything is asleep; the session has ended as far as the store allowed.
    Exit,
}
