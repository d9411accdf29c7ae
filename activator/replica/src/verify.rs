//! A restore for practice: into a scratch file, with every checksum, then `SQLite`'s own check.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use dormouse_core::ids::Txid;
use dormouse_core::time::{MILLI_NS, Now};
use dormouse_store::Store;
use rusqlite::{Connection, OpenFlags};
use tokio::task::JoinError;

use crate::put::Place;
use crate::restore::{Progress, RestoreError, Restored, Target, plan, restore_watched};

/// Findings of the integrity check that are kept.
const FINDINGS_MAX: u32 = 20;

/// What was restored, and found good.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Verified {
    /// What it held.
    pub restored: Restored,
    /// Files that were read, each under its checksum.
    pub files: usize,
    /// Bytes of these files.
    pub bytes: u64,
    /// Requests.
    pub requests: u64,
    /// Milliseconds of the restore.
    pub restore_ms: u64,
    /// Milliseconds of the integrity check.
    pub check_ms: u64,
}

/// Why a replica is not good, or could not be verified: [`VerifyError::blames_replica`].
#[derive(Debug, thiserror::Error)]
pub enum VerifyError {
    /// It cannot be restored.
    #[error(transparent)]
    Restore(#[from] RestoreError),
    /// It ends before what this box knows to be acknowledged.
    #[error("the replica ends at TXID {have}, but {acknowledged} was acknowledged")]
    Older {
        /// What can be restored; 0: nothing.
        have: Txid,
        /// What the position on this box names.
        acknowledged: Txid,
    },
    /// `SQLite` found damage in the restored database.
    #[error("the restored database is damaged: {}", findings.join("; "))]
    Damaged {
        /// What `PRAGMA integrity_check` said.
        findings: Vec<String>,
    },
    /// `SQLite` cannot read it.
    #[error("the restored database cannot be read: {0}")]
    Sqlite(#[from] rusqlite::Error),
    /// It is larger than was allowed.
    #[error("the replica's restore reads {bytes} bytes, more than the {max} that are allowed")]
    TooLarge {
        /// Bytes of its files.
        bytes: u64,
        /// Bytes that were allowed.
        max: u64,
    },
    /// The scratch directory.
    #[error("{}: {source}", path.display())]
    Io {
        /// The directory.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// The runtime is going down.
    #[error("the check ended early: {0}")]
    Runtime(#[from] JoinError),
}

impl VerifyError {
    /// Whether the replica is at fault. Else it may be good: the store, the scratch disk or the question
    /// was in the way.
    #[must_use]
    pub const fn blames_replica(&self) -> bool {
        match self {
            Self::Damaged { .. }
            | Self::Older { .. }
            | Self::Restore(
                RestoreError::Gap { .. }
                | RestoreError::Ltx(_)
                | RestoreError::Misfit { .. }
                | RestoreError::MissingPage { .. },
            ) => true,
            // Unreached: the TXID or time that was asked for, which is not in every good replica.
            Self::Restore(
                RestoreError::Empty
                | RestoreError::Unreached { .. }
                | RestoreError::TooOld { .. }
                | RestoreError::Read(_)
                | RestoreError::NoRoom { .. }
                | RestoreError::Io { .. },
            )
            | Self::Sqlite(_)
            | Self::TooLarge { .. }
            | Self::Io { .. }
            | Self::Runtime(_) => false,
        }
    }
}

/// The scratch directory, which goes with whatever is in it, also when the drill is cut off.
struct Scratch(PathBuf);

impl Drop for Scratch {
    fn drop(&mut self) {
        drop(fs::remove_dir_all(&self.0));
    }
}

/// Restores into `scratch`, a directory that is made and removed, and checks what came out. The newest
/// state must not end before `acknowledged`, the number that this box's position names.
pub async fn verify<S: Store>(
    place: &Place<S>,
    (target, acknowledged): (Target, Txid),
    scratch: &Path,
    bytes_max: u64,
    progress: &Progress,
    clock: fn() -> Now,
) -> Result<Verified, VerifyError> {
    let Place { store, prefix, host } = place;
    let acknowledged = if target == Target::Latest { acknowledged } else { Txid(0) };
    let plan = match plan(store, prefix, host, target).await {
        Err(RestoreError::Empty) if acknowledged > Txid(0) => {
            return Err(VerifyError::Older { have: Txid(0), acknowledged });
        }
        planned => planned?,
    };
    if plan.txid < acknowledged {
        return Err(VerifyError::Older { have: plan.txid, acknowledged });
    }
    if plan.bytes > bytes_max {
        return Err(VerifyError::TooLarge { bytes: plan.bytes, max: bytes_max });
    }
    let io = |source| VerifyError::Io { path: scratch.to_owned(), source };
    fs::create_dir_all(scratch).map_err(io)?;
    let scratch = Scratch(scratch.to_owned());
    let begun = clock().mono;
    let file = scratch.0.join("restored.db");
    let restored = restore_watched(store, prefix, host, target, &file, progress).await?;
    let read = clock().mono;
    tokio::task::spawn_blocking(move || check(&file)).await??;
    Ok(Verified {
        restored,
        files: plan.files.len(),
        bytes: plan.bytes,
        requests: plan.requests,
        restore_ms: read.since(begun).0 / MILLI_NS,
        check_ms: clock().mono.since(read).0 / MILLI_NS,
    })
}

/// `PRAGMA integrity_check` of a database that nobody else has open. Blocks.
pub fn check(file: &Path) -> Result<(), VerifyError> {
    use rusqlite::ErrorCode::{DatabaseCorrupt, NotADatabase};
    let findings = match findings(file) {
        Ok(findings) => findings,
        // So badly that the check itself breaks off.
        Err(error) => match error.sqlite_error_code() {
            Some(DatabaseCorrupt | NotADatabase) => vec![error.to_string()],
            Some(_) | None => return Err(error.into()),
        },
    };
    if findings == ["ok"] { Ok(()) } else { Err(VerifyError::Damaged { findings }) }
}

fn findings(file: &Path) -> rusqlite::Result<Vec<String>> {
    let flags = OpenFlags::SQLITE_OPEN_READ_WRITE | OpenFlags::SQLITE_OPEN_NO_MUTEX;
    let conn = Connection::open_with_flags(file, flags)?;
    let mut statement = conn.prepare(&format!("PRAGMA integrity_check({FINDINGS_MAX})"))?;
    statement.query_map((), |row| row.get(0))?.collect()
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt as _;

    use super::*;
    use crate::clock::system_now;
    use crate::testkit::{PREFIX, World, insert};

    async fn shipped() -> (World, Place<dormouse_store::DirectoryStore>) {
        let mut world = World::new();
        let app = world.app(4096);
        let mut follower = world.follow(false);
        world.ship(&mut follower).await;
        insert(&app, 50, 500);
        app.execute_batch("CREATE INDEX i ON t (a)").unwrap();
        world.ship(&mut follower).await;
        drop(app);
        follower.close_clean().unwrap();
        let store = world.store.clone();
        let place = Place { store, prefix: PREFIX.to_owned(), host: world.host.clone() };
        (world, place)
    }

    #[tokio::test]
    async fn a_good_replica_is_good_and_leaves_nothing_behind() {
        let (world, place) = shipped().await;
        let scratch = world.dir.path().join("scratch");
        let progress = Progress::default();
        let done =
            verify(&place, (Target::Latest, world.txid), &scratch, u64::MAX, &progress, system_now)
                .await;
        let done = done.unwrap();
        assert_eq!((done.restored.txid, done.files, done.requests), (world.txid, 2, 3));
        assert_eq!(progress.now(), (done.bytes, done.bytes));
        assert!(!scratch.exists());
        let beyond = (Target::Latest, world.txid.next());
        let older = verify(&place, beyond, &scratch, u64::MAX, &progress, system_now).await;
        assert!(matches!(older, Err(VerifyError::Older { .. })));
        let small =
            verify(&place, (Target::Latest, Txid(0)), &scratch, 10, &progress, system_now).await;
        assert!(matches!(small, Err(VerifyError::TooLarge { .. })));
        assert!(!scratch.exists());
    }

    #[tokio::test]
    async fn what_is_in_the_way_of_a_check_is_not_blamed_on_the_replica() {
        let (world, place) = shipped().await;
        let scratch = world.dir.path().join("scratch");
        let progress = Progress::default();
        let blamed = async |target| {
            let done =
                verify(&place, (target, Txid(0)), &scratch, u64::MAX, &progress, system_now).await;
            done.unwrap_err().blames_replica()
        };
        assert!(!blamed(Target::Txid(Txid(99))).await, "a question too far");
        fs::write(&scratch, "no directory").unwrap();
        assert!(!blamed(Target::Latest).await, "our own disk");
        fs::remove_file(&scratch).unwrap();
        let store = world.dir.path().join("store");
        let listed = place.store.list(PREFIX, None).await.unwrap().entries;
        let file = store.join(&listed.first().unwrap().key);
        let mut bytes = fs::read(&file).unwrap();
        *bytes.last_mut().unwrap() ^= 0x40;
        fs::write(&file, bytes).unwrap();
        assert!(blamed(Target::Latest).await, "a checksum");
        fs::remove_file(&file).unwrap();
        assert!(blamed(Target::Latest).await, "a gap");
        fs::rename(&store, world.dir.path().join("away")).unwrap();
        assert!(!blamed(Target::Latest).await, "a store that is away");
    }

    #[tokio::test]
    async fn a_database_that_sqlite_finds_damaged_is_told_with_the_findings() {
        let (world, _) = shipped().await;
        let file = fs::File::options().write(true).open(world.db()).unwrap();
        let len = file.metadata().unwrap().len();
        file.write_all_at(&[0xff; 4096], len - 4096).unwrap();
        let error = check(&world.db()).unwrap_err();
        assert!(
            matches!(&error, VerifyError::Damaged { findings } if !findings.is_empty()),
            "{error}"
        );
    }
}
