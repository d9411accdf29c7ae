//! What several tests share: a database, its follower and a replica in a directory store.

use std::fs;
use std::path::{Path, PathBuf};

use dormouse_core::ids::{Host, Nonce, Txid};
use dormouse_store::{Body, Condition, DirectoryStore, LtxKey, Metadata, PutOutcome, Store};
use rusqlite::Connection;

use crate::follow::Follower;
use crate::restore::{RestoreError, Restored, Target, restore};

pub(crate) const PREFIX: &str = "p";

pub(crate) struct World {
    pub(crate) dir: tempfile::TempDir,
    pub(crate) store: DirectoryStore,
    pub(crate) host: Host,
    pub(crate) txid: Txid,
}

impl World {
    pub(crate) fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("state")).unwrap();
        fs::create_dir(dir.path().join("data")).unwrap();
        let store = DirectoryStore::open(&dir.path().join("store")).unwrap();
        Self { dir, store, host: Host::from("a.example"), txid: Txid(0) }
    }

    pub(crate) fn db(&self) -> PathBuf {
        self.dir.path().join("data/db.sqlite")
    }

    pub(crate) fn state(&self) -> PathBuf {
        self.dir.path().join("state")
    }

    pub(crate) fn app(&self, page_size: u32) -> Connection {
        let conn = Connection::open(self.db()).unwrap();
        conn.pragma_update(None, "page_size", page_size).unwrap();
        conn.pragma_update(None, "journal_mode", "wal").unwrap();
        conn.execute_batch("CREATE TABLE IF NOT EXISTS t (id INTEGER PRIMARY KEY, a)").unwrap();
        conn
    }

    pub(crate) fn follow(&self, is_current: bool) -> Follower {
        Follower::open(&self.db(), &self.state(), is_current).unwrap()
    }

    /// Spools what is pending and puts it into the store; whether there was anything.
    pub(crate) async fn ship(&mut self, follower: &mut Follower) -> bool {
        follower.poll().unwrap();
        let next = self.txid.next();
        let nonce = Nonce::from("n");
        let Some(file) = follower.spool(next, &nonce, 1_000).unwrap() else { return false };
        self.put(&LtxKey::l0(next), &file.path).await;
        fs::remove_file(&file.path).unwrap();
        if let Some(mark) = file.mark {
            mark.save(&self.state()).unwrap();
        }
        self.txid = next;
        true
    }

    pub(crate) async fn put(&self, key: &LtxKey, path: &Path) {
        let key = self.store.layout().ltx_key(PREFIX, &self.host, key);
        let body = Body::from(fs::read(path).unwrap());
        let outcome = self.store.put(&key, body, Condition::IfAbsent, Metadata::new()).await;
        assert!(matches!(outcome, PutOutcome::Done { .. }), "{outcome:?}");
    }

    pub(crate) async fn restore(&self, target: Target) -> Result<Restored, RestoreError> {
        let to = self.dir.path().join("restored");
        restore(&self.store, PREFIX, &self.host, target, &to).await
    }

    /// The restored file is byte for byte the database after its last checkpoint.
    pub(crate) async fn assert_restore_is_identical(&self) {
        let restored = self.restore(Target::Latest).await.unwrap();
        assert_eq!(restored.txid, self.txid);
        let ours = fs::read(self.db()).unwrap();
        let theirs = fs::read(&restored.path).unwrap();
        assert_eq!(ours.len(), theirs.len());
        if let Some(at) = (0..ours.len()).find(|at| ours[*at] != theirs[*at]) {
            panic!("byte {at} differs (page size {})", restored.page_size.get());
        }
        let conn = Connection::open(&restored.path).unwrap();
        let check: String = conn.query_row("PRAGMA integrity_check", (), |row| row.get(0)).unwrap();
        assert_eq!(check, "ok");
    }

    pub(crate) fn ltx_path(&self, level: u8, min: u64, max: u64) -> PathBuf {
        let key = LtxKey { level, min: Txid(min), max: Txid(max) };
        let key = self.store.layout().ltx_key(PREFIX, &self.host, &key);
        self.dir.path().join("store").join(key)
    }
}

pub(crate) fn insert(conn: &Connection, rows: u32, bytes: u32) {
    conn.execute(
        "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < ?1)
         INSERT INTO t (a) SELECT randomblob(?2) FROM n",
        (rows, bytes),
    )
    .unwrap();
}
