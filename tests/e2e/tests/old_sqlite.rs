//! Apps bring their own SQLite: here that of the Python beside datasette, on Debian 12 3.40.1, which
//! has the WAL-reset race. One process writes, another one checkpoints all the time, ours follows.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::sync::Arc;
use std::time::Duration;

use dormouse_core::ids::{Generation, Host, Txid};
use dormouse_core::time::Nanos;
use dormouse_core::upload::UploadSettings;
use dormouse_replica::clock::system_now;
use dormouse_replica::follow::{Keeper, Limits};
use dormouse_replica::levels::{Budget, LevelSettings};
use dormouse_replica::put::Place;
use dormouse_replica::replica::{Base, Replica, Settings};
use dormouse_replica::restore::{Target, restore};
use dormouse_replica::watch::Watcher;
use dormouse_store::DirectoryStore;
use rusqlite::Connection;

const ROWS: u32 = 12_000;

const WRITER: &str = "
import sqlite3, sys, time, random
c = sqlite3.connect(sys.argv[1], timeout=60, isolation_level=None)
c.execute('PRAGMA synchronous = normal')
for n in range(int(sys.argv[2])):
    c.execute('INSERT INTO t (a) VALUES (randomblob(?))', (random.randrange(2000),))
    if n % 700 == 699:
        time.sleep(random.random() * 0.06)
print(sqlite3.sqlite_version)
";

const CHECKPOINTER: &str = "
import sqlite3, sys, time, random
c = sqlite3.connect(sys.argv[1], timeout=0, isolation_level=None)
while True:
    try:
        c.execute('PRAGMA wal_checkpoint(%s)' % random.choice(['PASSIVE'] * 5 + ['RESTART', 'TRUNCATE'])).fetchall()
    except sqlite3.OperationalError:
        pass
    time.sleep(random.random() * 0.002)
";

/// Ends with the test.
struct Process(Child);

impl Drop for Process {
    fn drop(&mut self) {
        self.0.kill().ok();
        self.0.wait().ok();
    }
}

fn python() -> PathBuf {
    let datasette = std::env::var_os("DORMOUSE_DATASETTE").map(PathBuf::from);
    datasette.map_or_else(|| "python3".into(), |path| path.with_file_name("python3"))
}

fn script(text: &str, database: &Path) -> Command {
    let mut command = Command::new(python());
    command.arg("-c").arg(text).arg(database);
    command
}

/// Has no descriptors; its locks are taken all the same.
#[derive(Debug)]
struct Nobody;

impl Keeper for Nobody {
    fn take(&self) -> Vec<OwnedFd> {
        Vec::new()
    }

    fn keep(&self, _descriptors: &[BorrowedFd<'_>]) {}

    fn forget(&self) {}
}

#[tokio::test(flavor = "multi_thread")]
async fn a_sqlite_with_the_wal_reset_race_loses_nothing_beside_our_checkpoints() {
    loses_nothing(None).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn nor_does_it_beside_locks_that_are_kept_for_the_next_process() {
    loses_nothing(Some(Arc::new(Nobody))).await;
}

async fn loses_nothing(keeper: Option<Arc<dyn Keeper>>) {
    let dir = tempfile::tempdir().unwrap();
    let state_dir = dir.path().join("state");
    std::fs::create_dir(&state_dir).unwrap();
    let database = dir.path().join("app.db");
    let first = Connection::open(&database).unwrap();
    first
        .execute_batch("PRAGMA journal_mode = wal; CREATE TABLE t (id INTEGER PRIMARY KEY, a)")
        .unwrap();
    let store = DirectoryStore::open(&dir.path().join("store")).unwrap();
    let place = Place { store, prefix: "p".to_owned(), host: Host::from("a.example") };
    let settings = Settings {
        database: database.clone(),
        state_dir,
        generation: Generation(1),
        upload: UploadSettings { burst: 1000, ..UploadSettings::default() },
        limits: Limits::default(),
        levels: LevelSettings::default(),
        budget: Budget::default(),
        clock: system_now,
        keeper,
    };
    let watcher = Watcher::start(Duration::from_secs(1)).unwrap();
    let base = Base::Image { after: Txid(0) };
    let (replica, _) = Replica::open(place.clone(), watcher, settings, base).await.unwrap();
    let running = replica.start(None);
    running.attached(Duration::from_secs(10)).await.unwrap();
    let checkpointer = Process(script(CHECKPOINTER, &database).spawn().unwrap());
    let mut writer = script(WRITER, &database);
    let written = tokio::task::spawn_blocking(move || writer.arg(ROWS.to_string()).output());
    let written = written.await.unwrap().unwrap();
    assert!(written.status.success(), "{}", String::from_utf8_lossy(&written.stderr));
    drop(checkpointer);
    drop(first);
    let finished = running.finish(Nanos::from_secs(60)).await;
    assert!(finished.clean, "{finished:?}");
    assert!(finished.txid > Txid(10), "it was followed while it wrote: {finished:?}");
    let to = dir.path().join("restored");
    let Place { store, prefix, host } = &place;
    let restored = restore(store, prefix, host, Target::Latest, &to).await.unwrap();
    let version = String::from_utf8_lossy(&written.stdout).into_owned();
    for path in [&database, &restored.path] {
        let conn = Connection::open(path).unwrap();
        let rows: u32 = conn.query_row("SELECT count(*) FROM t", (), |row| row.get(0)).unwrap();
        assert_eq!(rows, ROWS, "{} by SQLite {version}", path.display());
        let check: String = conn.query_row("PRAGMA integrity_check", (), |row| row.get(0)).unwrap();
        assert_eq!(check, "ok", "{} by SQLite {version}", path.display());
    }
}
