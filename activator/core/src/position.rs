//! The durable position beside each database, and the table "is the local copy current?".

use alloc::string::String;
use alloc::vec::Vec;

use serde::{Deserialize, Serialize};

use crate::ids::{BoxId, ETag, Generation, Nonce, Txid};
use crate::record::{HostRecord, HostState};

/// What tells one file on disk from another, and from itself after a change.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct FileId {
    /// Inode number.
    pub inode: u64,
    /// Bytes.
    pub size: u64,
    /// Change time, nanoseconds since 1970.
    pub ctime_ns: u64,
}

/// Content of the position file: what of the database was acknowledged by the store.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Position {
    /// Version of this format; 1.
    pub version: u32,
    /// Generation under which it was written.
    pub generation: Generation,
    /// Newest acknowledged L0; 0 when nothing was ever uploaded.
    pub txid: Txid,
    /// Its entity tag: of the L0, never of a snapshot or a compaction that ends there too.
    pub etag: Option<ETag>,
    /// The database file as it was.
    pub file: FileId,
    /// Pages of the database.
    pub page_count: u32,
    /// Bytes a page.
    pub page_size: u32,
    /// Whether the file equals `txid` exactly: set by a finished sleep, cleared before a start.
    pub clean: bool,
}

/// Version of the position file that this code writes.
pub const POSITION_VERSION: u32 = 1;

/// Why a position file was not taken.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum PositionError {
    /// Not JSON of this shape.
    Malformed(String),
    /// Written by a newer version.
    Version(u32),
}

impl core::fmt::Display for PositionError {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        match self {
            Self::Malformed(why) => write!(f, "position file is malformed: {why}"),
            Self::Version(found) => write!(
                f,
                "position file is of version {found}, this program knows {POSITION_VERSION}: \
                 use the newer program"
            ),
        }
    }
}

impl core::error::Error for PositionError {}

impl Position {
    /// As JSON.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        // A struct of numbers and text always serialises; an empty file would be refused on load.
        serde_json::to_vec(self).unwrap_or_default()
    }

    /// From JSON.
    pub fn decode(bytes: &[u8]) -> Result<Self, PositionError> {
        #[derive(Deserialize)]
        struct Versioned {
            version: u32,
        }
        let malformed = |e: serde_json::Error| PositionError::Malformed(alloc::format!("{e}"));
        let Versioned { version } = serde_json::from_slice(bytes).map_err(malformed)?;
        if version != POSITION_VERSION {
            return Err(PositionError::Version(version));
        }
        serde_json::from_slice(bytes).map_err(malformed)
    }
}

/// What was found on this box's disk.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct LocalCopy {
    /// The database file, when there is one that is not empty.
    pub file: Option<FileId>,
    /// The position file, when there is one.
    pub position: Option<Position>,
    /// Bytes in its `-wal`; 0 when there is none.
    pub wal_bytes: u64,
    /// Nonces of uploads that were begun here and are not known to be acknowledged.
    #[serde(default)]
    pub spool: Vec<Nonce>,
    /// The file was followed once and is no database any more: cut off, or overwritten.
    #[serde(default)]
    pub damaged: bool,
}

/// The newest L0 in the store.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct RemoteTip {
    /// Its number.
    pub txid: Txid,
    /// Its entity tag, never that of a snapshot or a compaction; unknown when only its name is.
    pub etag: Option<ETag>,
}

/// The newest L0 in the store, and who began its upload.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Newest {
    /// Its number and tag.
    pub tip: RemoteTip,
    /// The nonce that it carries; unknown when only its number is, and of files of other programs.
    pub nonce: Option<Nonce>,
}

/// What is known of the remote replica.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Remote {
    /// Not asked yet.
    Unasked,
    /// A LIST (or a record that was cleanly released) says so; `None` is an empty replica.
    Known(Option<Newest>),
}

impl Remote {
    /// What a record, or a clean sleep, names as the newest.
    #[must_use]
    pub const fn named(tip: RemoteTip) -> Self {
        Self::Known(Some(Newest { tip, nonce: None }))
    }

    /// The newest number; 0 when there is none or it is not known.
    #[must_use]
    pub fn txid(&self) -> Txid {
        match self {
            Self::Known(Some(newest)) => newest.tip.txid,
            Self::Known(None) | Self::Unasked => Txid(0),
        }
    }
}

/// What to do before a start.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Verdict {
    /// The store must be listed first.
    List,
    /// The local copy is current.
    Use,
    /// Nothing exists anywhere: start empty.
    Fresh,
    /// Restore what the remote has; a local file is set aside as a fork first.
    Restore {
        /// Whether a local file is there to be set aside.
        set_aside: bool,
    },
    /// Keep the local copy and upload all of it as the next number.
    Keep,
    /// A file without a history: it becomes TXID 1.
    Adopt,
    /// Do not start.
    Refuse(CopyRefusal),
}

/// Why a local copy and a remote do not go together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum CopyRefusal {
    /// A position or a record names a TXID, but the remote has nothing.
    RemoteEmpty,
    /// The remote is older than what was acknowledged.
    RemoteOlder,
    /// A file without a position beside a remote that has data.
    UnknownFile,
}

impl CopyRefusal {
    /// What happened, and what an operator can do about it.
    #[must_use]
    pub const fn explain(self) -> &'static str {
        match self {
            Self::RemoteEmpty => {
                "the replica is empty but a TXID was acknowledged: bring the replica back; \
                 the host does not start empty and uploads nothing"
            }
            Self::RemoteOlder => {
                "the replica is older than what was acknowledged: bring the newer replica back; \
                 the host does not start and uploads nothing"
            }
            Self::UnknownFile => {
                "the database has no position file but the replica has data: move the file away \
                 to restore, or empty the replica's prefix to adopt the file"
            }
        }
    }
}

/// The host record as it was read before this acquisition, and who asks.
#[derive(Clone, Copy, Debug, Hash)]
pub struct Claimed<'a> {
    /// The record before the acquisition; `None` when the host was never owned.
    pub before: Option<&'a HostRecord>,
    /// Set when the host was owned without a break since it slept.
    pub unbroken: Option<Generation>,
    /// This box.
    pub box_id: &'a BoxId,
}

/// The table of DESIGN section 5, rows in its order.
#[must_use]
pub fn judge(claimed: Claimed<'_>, local: &LocalCopy, remote: &Remote) -> Verdict {
    let Some(file) = &local.file else {
        return judge_no_file(claimed, local, remote);
    };
    if is_taken_in(claimed) {
        return judge_taken_in(claimed, *file, local, remote);
    }
    let Some(position) = &local.position else {
        return match remote {
            Remote::Unasked => Verdict::List,
            Remote::Known(None) => match named_txid(claimed, local) {
                None => Verdict::Adopt,
                Some(_) => Verdict::Refuse(CopyRefusal::RemoteEmpty),
            },
            Remote::Known(Some(_)) => Verdict::Refuse(CopyRefusal::UnknownFile),
        };
    };
    let intact = position.clean && position.file == *file && local.wal_bytes == 0 && !local.damaged;
    let unbroken = claimed.unbroken == Some(position.generation);
    let newest = match remote {
        Remote::Unasked if intact && unbroken => return Verdict::Use,
        Remote::Unasked => return Verdict::List,
        Remote::Known(None) => {
            return match position.txid {
                Txid(0) if is_own(claimed, position) => Verdict::Keep,
                Txid(0) => Verdict::Adopt,
                Txid(_) => Verdict::Refuse(CopyRefusal::RemoteEmpty),
            };
        }
        Remote::Known(Some(newest)) => newest,
    };
    let own = is_own(claimed, position);
    if intact && unbroken && may_equal(&newest.tip, position) {
        return Verdict::Use;
    }
    if intact && equals(&newest.tip, position) {
        // Another owner did not let go: what it still has on its way must find its number taken.
        return if own || !is_unclean(claimed) { Verdict::Use } else { Verdict::Keep };
    }
    if newest.tip.txid < position.txid {
        return Verdict::Refuse(CopyRefusal::RemoteOlder);
    }
    if own && !local.damaged && descends(newest, local, position) {
        return Verdict::Keep;
    }
    Verdict::Restore { set_aside: true }
}

/// Whether the copy holds all that the newest file does. The position is durable before an upload
/// leaves the spool: a newer file whose nonce is not in it was made without this disk, or after it
/// was put back to an earlier state.
fn descends(newest: &Newest, local: &LocalCopy, position: &Position) -> bool {
    if newest.tip.txid == position.txid {
        return may_equal(&newest.tip, position);
    }
    newest.nonce.as_ref().is_some_and(|nonce| local.spool.contains(nonce))
}

/// The local file of a host that came back from an outside supervisor on this box: the truth.
fn judge_taken_in(
    claimed: Claimed<'_>,
    file: FileId,
    local: &LocalCopy,
    remote: &Remote,
) -> Verdict {
    let Remote::Known(newest) = remote else { return Verdict::List };
    let Some(Newest { tip, .. }) = newest else {
        return match named_txid(claimed, local) {
            None => Verdict::Adopt,
            Some(_) => Verdict::Refuse(CopyRefusal::RemoteEmpty),
        };
    };
    match &local.position {
        Some(position) if tip.txid < position.txid => Verdict::Refuse(CopyRefusal::RemoteOlder),
        // Put back to a state from before it was handed out.
        Some(position) if claimed.before.is_some_and(|record| position.txid < record.txid) => {
            Verdict::Restore { set_aside: true }
        }
        Some(position)
            if position.clean
                && position.file == file
                && local.wal_bytes == 0
                && equals(tip, position) =>
        {
            Verdict::Use
        }
        Some(_) | None => Verdict::Keep,
    }
}

fn is_taken_in(claimed: Claimed<'_>) -> bool {
    claimed
        .before
        .is_some_and(|record| record.state == HostState::Outside && record.id == *claimed.box_id)
}

fn judge_no_file(claimed: Claimed<'_>, local: &LocalCopy, remote: &Remote) -> Verdict {
    match remote {
        Remote::Unasked => Verdict::List,
        Remote::Known(Some(Newest { tip, .. })) => {
            let acknowledged = local.position.as_ref().map_or(Txid(0), |p| p.txid);
            if tip.txid < acknowledged.max(named_txid(claimed, local).unwrap_or_default()) {
                return Verdict::Refuse(CopyRefusal::RemoteOlder);
            }
            Verdict::Restore { set_aside: false }
        }
        Remote::Known(None) => match named_txid(claimed, local) {
            None => Verdict::Fresh,
            Some(_) => Verdict::Refuse(CopyRefusal::RemoteEmpty),
        },
    }
}

/// The TXID that a position file or a record names, when one does.
fn named_txid(claimed: Claimed<'_>, local: &LocalCopy) -> Option<Txid> {
    let recorded = claimed.before.map_or(Txid(0), |record| record.txid);
    let positioned = local.position.as_ref().map_or(Txid(0), |position| position.txid);
    Some(recorded.max(positioned)).filter(|txid| *txid > Txid(0))
}

/// Whether the record was left owned.
fn is_unclean(claimed: Claimed<'_>) -> bool {
    claimed.before.is_some_and(|record| record.state == HostState::Owned)
}

/// Whether nobody but this box wrote between the position and now.
fn is_own(claimed: Claimed<'_>, position: &Position) -> bool {
    if claimed.unbroken == Some(position.generation) {
        return true;
    }
    match claimed.before {
        // `since` is the first generation of this box's unbroken ownership.
        Some(record) => match record.state {
            HostState::Owned | HostState::Released => {
                record.id == *claimed.box_id
                    && position.generation >= record.since
                    && position.generation <= record.generation
            }
            HostState::Outside => false,
        },
        None => false,
    }
}

/// Whether the position is of this very file: of an unknown tag nothing is believed.
fn equals(tip: &RemoteTip, position: &Position) -> bool {
    let same_tag = match (&tip.etag, &position.etag) {
        (Some(theirs), Some(ours)) => theirs == ours,
        (None, _) | (_, None) => tip.txid == Txid(0),
    };
    tip.txid == position.txid && same_tag
}

/// Whether nothing says that the position is of another file.
fn may_equal(tip: &RemoteTip, position: &Position) -> bool {
    let tags = tip.etag.as_ref().zip(position.etag.as_ref());
    tip.txid == position.txid && tags.is_none_or(|(theirs, ours)| theirs == ours)
}

#[cfg(test)]
#[path = "position_tests.rs"]
mod tests;
