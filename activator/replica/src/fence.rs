//! Fences: a write-once L0 that takes the next number before an app starts, so that a late
//! upload of an earlier owner finds it taken.
//!
//! One step a call: the core checks its session's deadline before each.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};

use dormouse_core::ids::{ETag, Nonce, Txid};
use dormouse_core::upload::{PutAnswer, Standing};
use dormouse_store::{LtxKey, Store};

use crate::follow::{FollowError, Follower, Limits, WalMark};
use crate::levels;
use crate::ltx::{Encoder, Encoding, Header, LtxError, Pgno, WAL_HEADER_LEN};
use crate::position_file::{self, PositionFileError};
use crate::put::{Kind, Place};
use crate::restore::Restored;
use crate::spool;

/// A fence file, ready to be sent as often as it takes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fence {
    /// Its number.
    pub txid: Txid,
    /// Its nonce.
    pub nonce: Nonce,
    path: PathBuf,
    timestamp_ms: i64,
}

/// How sending a fence ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FenceOutcome {
    /// The number is ours.
    Done {
        /// Tag of the fence.
        etag: ETag,
    },
    /// Another writer's file has the number: apply it ([`Restored::apply_one`]), fence the next.
    Taken {
        /// Its nonce, if it has one.
        nonce: Option<Nonce>,
    },
    /// Not known: send the same fence again.
    Again {
        /// What was seen.
        why: String,
    },
    /// The store says no.
    Refused {
        /// The store's words.
        why: String,
    },
}

/// Why a fence could not be prepared.
#[derive(Debug, thiserror::Error)]
pub enum FenceError {
    /// A local file could not be read or written.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// The LTX file could not be written.
    #[error(transparent)]
    Ltx(#[from] LtxError),
    /// The database could not be read.
    #[error(transparent)]
    Follow(#[from] FollowError),
    /// The position could not be read.
    #[error(transparent)]
    Position(#[from] PositionFileError),
}

impl FenceError {
    /// This box's disk is in the way, not the database: a full one, say.
    #[must_use]
    pub fn blames_disk(&self) -> bool {
        match self {
            Self::Follow(error) => error.blames_disk(),
            Self::Io { .. } | Self::Ltx(_) | Self::Position(_) => true,
        }
    }
}

impl Fence {
    /// A fence after what was restored: page 1 as it is. Over an empty remote
    /// ([`Restored::empty`]) it is TXID 1, the whole one-page database. Blocks.
    pub fn after(
        restored: &Restored,
        state_dir: &Path,
        nonce: &Nonce,
        timestamp_ms: i64,
    ) -> Result<Self, FenceError> {
        let io = |source| FenceError::Io { path: restored.path.clone(), source };
        let txid = restored.txid.next();
        let mut header = Header::new(restored.page_size, restored.page_count, txid, txid);
        header.timestamp_ms = timestamp_ms;
        header.wal_offset = WAL_HEADER_LEN;
        let mut page = vec![0; restored.page_size.buffer_len()];
        File::open(&restored.path).and_then(|file| file.read_exact_at(&mut page, 0)).map_err(io)?;
        let dir = spool::dir(state_dir);
        let path = dir.join(spool::name(txid, nonce));
        let io = |source| FenceError::Io { path: path.clone(), source };
        fs::create_dir_all(&dir).map_err(io)?;
        let file = File::create(&path).map_err(io)?;
        let name = path.to_string_lossy();
        let mut encoder = Encoder::new(file, &name, header, Encoding::Frame)?;
        encoder.page(Pgno(1), &page)?;
        let (file, _) = encoder.finish()?;
        file.sync_all().and_then(|()| spool::sync_dir(&dir)).map_err(io)?;
        Ok(Self { txid, nonce: nonce.clone(), path, timestamp_ms })
    }

    /// What a database that no app has open holds beyond the L0 before `txid`, as `txid`: it serves
    /// as the fence when the local copy is kept. An increment where the place in the WAL proves
    /// itself, else a full image. The WAL is emptied; afterwards the file equals `txid`. Pages of
    /// another size than before mark the replica as damaged, so that the visit makes a snapshot.
    /// Blocks.
    pub fn image(
        database: &Path,
        state_dir: &Path,
        limits: Limits,
        txid: Txid,
        nonce: &Nonce,
        timestamp_ms: i64,
    ) -> Result<Self, FenceError> {
        let before = Txid(txid.0.saturating_sub(1));
        let mark = WalMark::load(state_dir, before);
        let mut follower = Follower::open_at(database, state_dir, mark.as_ref())?;
        follower.set_limits(limits);
        let known = position_file::load(state_dir)?.filter(|position| position.txid > Txid(0));
        let known = known.map_or(0, |position| position.page_size);
        if ![0, follower.page_size().get()].contains(&known) {
            // Its files do not fit to those before: until a snapshot is there, no restore gets past.
            let io = |source| FenceError::Io { path: state_dir.to_owned(), source };
            levels::mark_damaged(state_dir).map_err(io)?;
        }
        follower.poll()?;
        let file = match follower.spool(txid, nonce, timestamp_ms)? {
            Some(file) => file,
            None => follower.spool_touch(txid, nonce, timestamp_ms)?,
        };
        follower.close_clean()?;
        Ok(Self { txid, nonce: nonce.clone(), path: file.path, timestamp_ms })
    }

    /// Sends the fence, and compares nonces when its name is taken.
    pub async fn send<S: Store>(&self, place: &Place<S>) -> FenceOutcome {
        let key = LtxKey::l0(self.txid);
        let (answer, why) =
            place.put(&key, &self.path, &self.nonce, self.timestamp_ms, Kind::Fence).await;
        match answer {
            PutAnswer::Done { etag } => FenceOutcome::Done { etag },
            PutAnswer::Again | PutAnswer::Unknown => FenceOutcome::Again { why },
            PutAnswer::Refused => FenceOutcome::Refused { why },
            PutAnswer::ConditionFailed => match place.standing(&key).await {
                Standing::File { nonce, etag } if nonce.as_ref() == Some(&self.nonce) => {
                    FenceOutcome::Done { etag }
                }
                Standing::File { nonce, .. } => FenceOutcome::Taken { nonce },
                Standing::Absent | Standing::Unclear => FenceOutcome::Again {
                    why: "the number is taken, but the store does not say by whom".to_owned(),
                },
            },
        }
    }
}

impl Restored {
    /// The fence is definite: this file now equals it.
    pub fn fenced(&mut self, fence: &Fence, etag: ETag) {
        self.txid = fence.txid;
        self.etag = Some(etag);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::restore::Target;
    use crate::testkit::{PREFIX, World, insert};

    fn place(world: &World) -> Place<dormouse_store::DirectoryStore> {
        Place { store: world.store.clone(), prefix: PREFIX.to_owned(), host: world.host.clone() }
    }

    fn nonce(text: &str) -> Nonce {
        Nonce::from(text)
    }

    #[tokio::test]
    async fn a_fence_takes_the_next_number_and_changes_nothing() {
        let mut world = World::new();
        let app = world.app(512);
        insert(&app, 50, 100);
        let mut follower = world.follow(false);
        world.ship(&mut follower).await;
        drop(app);
        follower.close_clean().unwrap();
        let mut restored = world.restore(Target::Latest).await.unwrap();
        let fence = Fence::after(&restored, &world.state(), &nonce("a"), 5).unwrap();
        let FenceOutcome::Done { etag } = fence.send(&place(&world)).await else { panic!() };
        assert_eq!(fence.send(&place(&world)).await, FenceOutcome::Done { etag: etag.clone() });
        restored.fenced(&fence, etag);
        assert_eq!(restored.txid, Txid(2));
        world.txid = Txid(2);
        world.assert_restore_is_identical().await;
    }

    #[tokio::test]
    async fn a_fence_over_a_number_that_is_taken_gives_the_other_file_to_be_applied() {
        let mut world = World::new();
        let app = world.app(4096);
        let mut follower = world.follow(false);
        world.ship(&mut follower).await;
        let mut restored = world.restore(Target::Latest).await.unwrap();
        insert(&app, 5, 5);
        world.ship(&mut follower).await;
        let fence = Fence::after(&restored, &world.state(), &nonce("a"), 5).unwrap();
        assert_eq!(fence.send(&place(&world)).await, FenceOutcome::Taken { nonce: None });
        restored.apply_one(&world.store, PREFIX, &world.host).await.unwrap();
        let fence = Fence::after(&restored, &world.state(), &nonce("b"), 5).unwrap();
        let FenceOutcome::Done { etag } = fence.send(&place(&world)).await else { panic!() };
        restored.fenced(&fence, etag);
        assert_eq!(restored.txid, Txid(3));
        let conn = rusqlite::Connection::open(&restored.path).unwrap();
        let rows: u32 = conn.query_row("SELECT count(*) FROM t", (), |row| row.get(0)).unwrap();
        assert_eq!(rows, 5);
    }

    #[tokio::test]
    async fn an_empty_remote_is_fenced_by_a_database_that_an_app_can_go_on_with() {
        let mut world = World::new();
        let mut made = Restored::empty(&world.dir.path().join("empty")).await.unwrap();
        let fence = Fence::after(&made, &world.state(), &nonce("a"), 5).unwrap();
        assert_eq!(fence.txid, Txid(1));
        let FenceOutcome::Done { etag } = fence.send(&place(&world)).await else { panic!() };
        made.fenced(&fence, etag);
        made.adopt(&world.db(), None).unwrap();
        world.txid = Txid(1);
        let mut follower = world.follow(true);
        assert_eq!(follower.image_needed(), None);
        let app = world.app(512);
        insert(&app, 5, 5);
        world.ship(&mut follower).await;
        drop(app);
        follower.close_clean().unwrap();
        world.assert_restore_is_identical().await;
    }

    #[tokio::test]
    async fn a_kept_copy_becomes_a_full_image_before_the_start() {
        let world = World::new();
        let app = world.app(4096);
        insert(&app, 100, 100);
        // A crash: what was not checkpointed is in the WAL.
        let mut crashed = World::new();
        std::fs::copy(world.db(), crashed.db()).unwrap();
        let wal = crate::follow::wal_path(&world.db());
        std::fs::copy(wal, crate::follow::wal_path(&crashed.db())).unwrap();
        drop(app);
        let (db, state) = (crashed.db(), crashed.state());
        let fence = Fence::image(&db, &state, Limits::default(), Txid(1), &nonce("a"), 5).unwrap();
        assert!(matches!(fence.send(&place(&crashed)).await, FenceOutcome::Done { .. }));
        crashed.txid = Txid(1);
        crashed.assert_restore_is_identical().await;
        let conn = rusqlite::Connection::open(db).unwrap();
        let rows: u32 = conn.query_row("SELECT count(*) FROM t", (), |row| row.get(0)).unwrap();
        assert_eq!(rows, 100);
    }

    /// A host whose activator and app were killed: 2,000 rows durable, and what `then` wrote.
    async fn killed(then: impl FnOnce(&rusqlite::Connection)) -> World {
        let mut world = World::new();
        let app = world.app(4096);
        insert(&app, 2000, 500);
        let mut follower = world.follow(false);
        world.ship(&mut follower).await;
        insert(&app, 5, 500);
        world.ship(&mut follower).await;
        drop(follower);
        then(&app);
        // Killed: no last close, no checkpoint.
        std::mem::forget(app);
        world
    }

    async fn fenced(world: &mut World) -> u64 {
        let txid = world.txid.next();
        let fence =
            Fence::image(&world.db(), &world.state(), Limits::default(), txid, &nonce("a"), 5)
                .unwrap();
        let size = fs::metadata(&fence.path).unwrap().len();
        assert!(matches!(fence.send(&place(world)).await, FenceOutcome::Done { .. }));
        world.txid = txid;
        world.assert_restore_is_identical().await;
        size
    }

    #[tokio::test]
    async fn a_place_in_the_wal_that_proves_itself_makes_the_fence_an_increment() {
        let mut world = killed(|app| {
            insert(app, 3, 500);
            app.execute_batch("DELETE FROM t WHERE id = 7").unwrap();
        })
        .await;
        let size = fenced(&mut world).await;
        assert!(size < 60_000, "an increment: {size}");
        // Nothing was written: the number is closed all the same.
        let mut world = killed(|_| ()).await;
        let size = fenced(&mut world).await;
        assert!(size < 10_000, "one page: {size}");
    }

    #[tokio::test]
    async fn pages_of_another_size_mark_the_replica_as_damaged_and_the_same_size_does_not() {
        for page_size in [4096, 8192] {
            let mut world = World::new();
            let app = world.app(4096);
            insert(&app, 5, 500);
            let mut follower = world.follow(false);
            world.ship(&mut follower).await;
            drop(app);
            follower.close_clean().unwrap();
            let file = crate::inspect::stat(&world.db()).unwrap().unwrap();
            let position = dormouse_core::position::Position {
                version: dormouse_core::position::POSITION_VERSION,
                generation: dormouse_core::ids::Generation(1),
                txid: world.txid,
                etag: None,
                file,
                page_count: 2,
                page_size: 4096,
                clean: true,
            };
            position_file::save(&world.state(), &position).unwrap();
            let app = rusqlite::Connection::open(world.db()).unwrap();
            app.execute_batch(&format!(
                "PRAGMA journal_mode = delete; PRAGMA page_size = {page_size}; VACUUM;
                 PRAGMA journal_mode = wal"
            ))
            .unwrap();
            drop(app);
            let next = world.txid.next();
            Fence::image(&world.db(), &world.state(), Limits::default(), next, &nonce("a"), 5)
                .unwrap();
            assert_eq!(levels::is_marked_damaged(&world.state()), page_size != 4096);
        }
    }

    #[tokio::test]
    async fn a_wal_that_was_restarted_or_changed_proves_nothing() {
        let mut world = killed(|app| {
            for _ in 0..2 {
                app.query_row("PRAGMA wal_checkpoint(RESTART)", (), |_| Ok(())).unwrap();
                insert(app, 5, 500);
            }
        })
        .await;
        let size = fenced(&mut world).await;
        assert!(size > 1_000_000, "a full image: {size}");
        // A mark of another L0.
        let mut world = killed(|app| insert(app, 3, 500)).await;
        let mark = world.state().join("wal-mark.json");
        let text = fs::read_to_string(&mark).unwrap();
        fs::write(&mark, text.replace("\"txid\":2", "\"txid\":1")).unwrap();
        let size = fenced(&mut world).await;
        assert!(size > 1_000_000, "a full image: {size}");
    }
}
