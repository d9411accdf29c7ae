use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use dormouse_store::DirectoryStore;

use super::gather_tests::{files, until};
use super::*;
use crate::clock::system_now;
use crate::faulty::{Fault, FaultyStore};
use crate::restore::Target;
use crate::testkit::{PREFIX, World, insert};
use crate::wal::WalHeader;

pub(super) const BUDGET: Nanos = Nanos::from_secs(20);

async fn open(world: &World, base: Base) -> (Replica<DirectoryStore>, Opened) {
    open_on(world, world.store.clone(), base).await
}

async fn open_on<S: Store>(world: &World, store: S, base: Base) -> (Replica<S>, Opened) {
    let watcher = Watcher::start(Duration::from_secs(5)).unwrap();
    let place = Place { store, prefix: PREFIX.to_owned(), host: world.host.clone() };
    let settings = Settings {
        database: world.db(),
        state_dir: world.state(),
        generation: Generation(3),
        upload: UploadSettings { retry_min: Nanos::from_millis(1), ..UploadSettings::default() },
        limits: Limits::default(),
        levels: LevelSettings::default(),
        budget: Budget::default(),
        clock: system_now,
        keeper: None,
    };
    Replica::open(place, watcher, settings, base).await.unwrap()
}

async fn durable(running: &mut Running) -> Txid {
    let event = tokio::time::timeout(Duration::from_secs(20), running.event()).await;
    match event.unwrap().unwrap() {
        Event::Durable { txid, .. } => txid,
        other @ (Event::StoodDown { .. } | Event::Refused { .. } | Event::Stalled { .. }) => {
            panic!("{other:?}")
        }
    }
}

#[tokio::test]
async fn a_host_sleeps_clean_and_wakes_without_a_full_image() {
    let mut world = World::new();
    let (replica, opened) = open(&world, Base::Image { after: Txid(0) }).await;
    assert_eq!(opened, Opened::NeedsFullImage);
    let app = world.app(4096);
    insert(&app, 100, 500);
    let mut running = replica.start(None);
    assert_eq!(durable(&mut running).await, Txid(1));
    insert(&app, 1, 10);
    assert_eq!(durable(&mut running).await, Txid(2));
    insert(&app, 1, 10);
    drop(app);
    let finished = running.finish(BUDGET).await;
    assert!(finished.clean, "{finished:?}");
    let position = position_file::load(&world.state()).unwrap().unwrap();
    assert!(position.clean && position.txid == finished.txid);
    assert_eq!(crate::inspect::stat(&world.db()).unwrap(), Some(position.file));
    world.txid = finished.txid;
    world.assert_restore_is_identical().await;

    let base = Base::Current { txid: finished.txid, etag: finished.etag };
    let (replica, opened) = open(&world, base).await;
    assert_eq!(opened, Opened::Continuing { txid: finished.txid });
    assert!(!position_file::load(&world.state()).unwrap().unwrap().clean);
    let app = world.app(4096);
    let mut running = replica.start(None);
    insert(&app, 1, 10);
    assert_eq!(durable(&mut running).await, finished.txid.next());
    drop(app);
    let again = running.finish(BUDGET).await;
    assert!(again.clean, "{again:?}");
    world.txid = again.txid;
    world.assert_restore_is_identical().await;
}

#[tokio::test]
async fn a_visit_that_writes_nothing_uploads_nothing() {
    let world = World::new();
    drop(world.app(4096));
    let (replica, _) = open(&world, Base::Image { after: Txid(0) }).await;
    let first = replica.start(None).finish(BUDGET).await;
    assert!(first.clean && first.txid == Txid(1), "{first:?}");
    let base = Base::Current { txid: Txid(1), etag: first.etag.clone() };
    let (replica, _) = open(&world, base).await;
    let running = replica.start(None);
    let app = rusqlite::Connection::open(world.db()).unwrap();
    let rows: u32 = app.query_row("SELECT count(*) FROM t", (), |row| row.get(0)).unwrap();
    assert_eq!(rows, 0);
    drop(app);
    let second = running.finish(BUDGET).await;
    assert_eq!(second, first);
}

/// Frames of the WAL, and how many of them are in the database file.
fn frames(app: &rusqlite::Connection) -> (i64, i64) {
    let row = |row: &rusqlite::Row<'_>| Ok((row.get(1)?, row.get(2)?));
    app.query_row("PRAGMA wal_checkpoint(NOOP)", (), row).unwrap()
}

#[tokio::test]
async fn a_long_wal_is_checkpointed_when_its_writer_makes_a_pause() {
    let mut world = World::new();
    let app = world.app(4096);
    app.pragma_update(None, "wal_autocheckpoint", 0).unwrap();
    let (replica, _) = open(&world, Base::Image { after: Txid(0) }).await;
    let mut running = replica.start(None);
    durable(&mut running).await;
    insert(&app, 1500, 3000);
    let (all, _) = frames(&app);
    assert!(all > 1000 && all < 4000, "enough, and too little to be held up for: {all}");
    let copied = async {
        let mut ticks = tokio::time::interval(Duration::from_millis(5));
        while frames(&app) != (all, all) {
            ticks.tick().await;
        }
    };
    tokio::time::timeout(Duration::from_secs(20), copied).await.expect("a checkpoint in the pause");
    drop(app);
    let finished = running.finish(BUDGET).await;
    assert!(finished.clean, "{finished:?}");
    world.txid = finished.txid;
    world.assert_restore_is_identical().await;
}

#[tokio::test]
async fn a_taken_number_makes_the_host_stand_down() {
    let world = World::new();
    let app = world.app(4096);
    let (replica, _) = open(&world, Base::Image { after: Txid(0) }).await;
    let theirs = world.dir.path().join("theirs");
    std::fs::write(&theirs, b"theirs").unwrap();
    let key = dormouse_store::LtxKey { level: 0, min: Txid(1), max: Txid(1) };
    world.put(&key, &theirs).await;
    let mut running = replica.start(None);
    assert_eq!(running.event().await, Some(Event::StoodDown { txid: Txid(1), was_ours: false }));
    drop(app);
    let finished = running.finish(BUDGET).await;
    assert!(!finished.clean && finished.txid == Txid(0));
}

#[tokio::test]
async fn past_the_deadline_nothing_is_sent_until_it_moves() {
    let world = World::new();
    let app = world.app(4096);
    let (replica, _) = open(&world, Base::Image { after: Txid(0) }).await;
    let past = Deadline::after(system_now(), Nanos(0));
    let mut running = replica.start(Some(past));
    let mut status = running.watch();
    status.wait_for(|status| status.behind_since.is_some()).await.unwrap();
    assert!(!world.ltx_path(0, 1, 1).exists());
    running.set_deadline(Some(Deadline::after(system_now(), Nanos::from_secs(60)))).await;
    assert_eq!(durable(&mut running).await, Txid(1));
    drop(app);
    assert!(running.finish(BUDGET).await.clean);
}

#[tokio::test]
async fn an_app_outside_wal_mode_is_named_and_attached_once_it_changes() {
    let world = World::new();
    let app = world.app(4096);
    app.pragma_update(None, "journal_mode", "delete").unwrap();
    let (replica, opened) = open(&world, Base::Image { after: Txid(0) }).await;
    assert_eq!(opened, Opened::NeedsFullImage);
    let mut running = replica.start(None);
    let Some(Event::Stalled { reason }) = running.event().await else { panic!("not named") };
    assert!(reason.contains("not in WAL mode"), "{reason}");
    assert!(matches!(running.status().state, State::Detached { .. }));
    let unfit = running.attached(Duration::from_millis(1)).await.unwrap_err();
    assert!(unfit.contains("not in WAL mode"), "{unfit}");
    app.pragma_update(None, "journal_mode", "wal").unwrap();
    assert_eq!(running.attached(Duration::from_secs(20)).await, Ok(()));
    assert_eq!(durable(&mut running).await, Txid(1));
    drop(app);
    assert!(running.finish(BUDGET).await.clean);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_busy_app_is_followed_while_its_wal_is_reused() {
    let mut world = World::new();
    let app = world.app(4096);
    let (replica, _) = open(&world, Base::Image { after: Txid(0) }).await;
    let start = system_now().mono;
    let running = replica.start(None);
    let wal = std::fs::File::open(wal_path(&world.db())).unwrap();
    let generation = move || WalHeader::read(&wal).unwrap().map(|header| header.salts);
    let writer = tokio::task::spawn_blocking(move || {
        app.pragma_update(None, "synchronous", "normal").unwrap();
        let (mut restarts, mut last) = (0, generation());
        while restarts < 3 {
            insert(&app, 1, 1000);
            let now = generation();
            restarts += u32::from(now != last);
            last = now;
        }
    });
    tokio::time::timeout(Duration::from_mins(1), writer).await.unwrap().unwrap();
    assert_ne!(running.status().image_needed, Some(ImageWhy::Generation));
    let finished = running.finish(BUDGET).await;
    assert!(finished.clean, "{finished:?}");
    let seconds = system_now().mono.since(start).secs_up();
    assert!(finished.txid.0 <= 12 + seconds, "gathered by the bucket: {}", finished.txid);
    world.txid = finished.txid;
    world.assert_restore_is_identical().await;
}

#[tokio::test]
async fn what_was_durable_is_in_every_later_restore_though_everything_local_is_lost() {
    let world = World::new();
    let app = world.app(4096);
    let (replica, _) = open(&world, Base::Image { after: Txid(0) }).await;
    let mut running = replica.start(None);
    durable(&mut running).await;
    insert(&app, 7, 100);
    let txid = durable(&mut running).await;
    running.abandon();
    let restored = world.restore(Target::Latest).await.unwrap();
    assert_eq!(restored.txid, txid);
    let conn = rusqlite::Connection::open(&restored.path).unwrap();
    let rows: u32 = conn.query_row("SELECT count(*) FROM t", (), |row| row.get(0)).unwrap();
    assert_eq!(rows, 7);
}

#[tokio::test]
async fn commits_become_durable_within_milliseconds() {
    let world = World::new();
    let app = world.app(4096);
    let (replica, _) = open(&world, Base::Image { after: Txid(0) }).await;
    let mut running = replica.start(None);
    durable(&mut running).await;
    let mut times = Vec::new();
    for _ in 0..8 {
        insert(&app, 1, 100);
        let start = system_now().mono;
        durable(&mut running).await;
        times.push(system_now().mono.since(start).0 / 1000);
    }
    times.sort_unstable();
    println!("commit to durable, microseconds: {times:?}");
    drop(app);
    assert!(running.finish(BUDGET).await.clean);
}

/// Waits for this number, whatever stalls before.
pub(super) async fn durable_at(running: &mut Running, txid: Txid) {
    let wait = async {
        loop {
            match running.event().await.unwrap() {
                Event::Durable { txid: at, .. } if at == txid => return,
                Event::Durable { .. } | Event::Stalled { .. } => (),
                other @ (Event::StoodDown { .. } | Event::Refused { .. }) => panic!("{other:?}"),
            }
        }
    };
    tokio::time::timeout(Duration::from_secs(20), wait).await.unwrap();
}

#[tokio::test]
async fn lost_answers_are_repeated_byte_for_byte_until_they_are_definite() {
    use Fault::{AnswerLost, Down, RequestLost};
    let mut world = World::new();
    let app = world.app(4096);
    let faults = [AnswerLost, Down, RequestLost, Down, AnswerLost, AnswerLost];
    let store = FaultyStore::new(world.store.clone(), &faults);
    let (replica, _) = open_on(&world, store.clone(), Base::Image { after: Txid(0) }).await;
    let mut running = replica.start(None);
    for n in 1..5 {
        durable_at(&mut running, Txid(n)).await;
        insert(&app, 1, 10);
    }
    drop(app);
    let finished = running.finish(BUDGET).await;
    assert!(finished.clean && finished.txid == Txid(5), "{finished:?}");
    world.txid = finished.txid;
    world.assert_restore_is_identical().await;
    let sent = store.sent.lock().unwrap().clone();
    assert!(sent.len() > 5, "there were repeats");
    for (key, metadata) in &sent {
        let same = sent.iter().filter(|(other, _)| other == key);
        assert!(same.into_iter().all(|(_, other)| other == metadata), "one nonce a file: {key}");
    }
}

#[tokio::test]
async fn a_store_that_is_down_at_the_finish_leaves_an_unclean_copy_and_its_journal() {
    let world = World::new();
    let app = world.app(4096);
    let store = FaultyStore::new(world.store.clone(), &[Fault::Down; 1000]);
    let (replica, _) = open_on(&world, store, Base::Image { after: Txid(0) }).await;
    let mut running = replica.start(None);
    assert!(matches!(running.event().await, Some(Event::Stalled { .. })));
    drop(app);
    let finished = running.finish(Nanos::from_millis(50)).await;
    assert!(!finished.clean, "{finished:?}");
    assert_eq!(finished.txid, Txid(0));
    assert_eq!(spool::left_over(&world.state()).unwrap().len(), 1);
}

#[tokio::test]
async fn a_refusal_is_an_event() {
    let world = World::new();
    let app = world.app(4096);
    let store = FaultyStore::new(world.store.clone(), &[Fault::Refuse]);
    let (replica, _) = open_on(&world, store, Base::Image { after: Txid(0) }).await;
    let mut running = replica.start(None);
    let first = running.event().await;
    assert!(matches!(first, Some(Event::Stalled { .. })), "{first:?}");
    let second = running.event().await;
    assert!(matches!(second, Some(Event::Refused { .. })), "{second:?}");
    drop(app);
}

#[tokio::test]
async fn an_upload_of_our_own_that_landed_late_is_told_apart_from_another_writers() {
    let world = World::new();
    let app = world.app(4096);
    let store = FaultyStore::new(world.store.clone(), &[Fault::AnswerLost]);
    let (replica, _) = open_on(&world, store, Base::Image { after: Txid(0) }).await;
    let running = replica.start(None);
    let mut status = running.watch();
    status.wait_for(|status| status.trouble.is_some()).await.unwrap();
    running.abandon();
    // A restart: TXID 1 landed, but nobody was told.
    let (replica, _) = open(&world, Base::Image { after: Txid(0) }).await;
    let mut running = replica.start(None);
    assert_eq!(running.event().await, Some(Event::StoodDown { txid: Txid(1), was_ours: true }));
    drop(app);
}

/// A database beside the real one, with nine rows.
fn backup(world: &World, page_size: u32) -> std::path::PathBuf {
    let path = world.dir.path().join("data/other");
    let conn = rusqlite::Connection::open(&path).unwrap();
    conn.pragma_update(None, "page_size", page_size).unwrap();
    conn.execute_batch("PRAGMA journal_mode=wal; CREATE TABLE t (id INTEGER PRIMARY KEY, a)")
        .unwrap();
    insert(&conn, 9, 9);
    conn.close().unwrap();
    path
}

fn put_in_place(world: &World, backup: &std::path::Path) {
    for side in crate::restore::side_files(&world.db()) {
        crate::restore::remove(&side).unwrap();
    }
    std::fs::rename(backup, world.db()).unwrap();
}

#[tokio::test]
async fn a_database_that_is_replaced_is_followed_anew_by_a_full_image() {
    for page_size in [4096, 8192] {
        let mut world = World::new();
        let app = world.app(4096);
        let (replica, _) = open(&world, Base::Image { after: Txid(0) }).await;
        let mut running = replica.start(None);
        assert_eq!(durable(&mut running).await, Txid(1));
        let other = backup(&world, page_size);
        // The app restores a backup of its own over the database, and opens that.
        insert(&app, 1, 1);
        assert_eq!(durable(&mut running).await, Txid(2));
        drop(app);
        put_in_place(&world, &other);
        let app = world.app(4096);
        insert(&app, 1, 1);
        durable_at(&mut running, Txid(3)).await;
        if page_size != 4096 {
            until("a snapshot", || !files(&world, 9).is_empty()).await;
            until("it is known", || running.status().compaction.is_none()).await;
        }
        drop(app);
        let finished = running.finish(BUDGET).await;
        assert!(finished.clean, "{finished:?}");
        world.txid = finished.txid;
        world.assert_restore_is_identical().await;
        assert!(!levels::is_marked_damaged(&world.state()));
        // Before the snapshot stood, the files themselves were enough.
        if page_size != 4096 {
            let level = world.ltx_path(9, 1, 1).parent().unwrap().to_owned();
            std::fs::remove_dir_all(level).unwrap();
            world.assert_restore_is_identical().await;
        }
    }
}

#[tokio::test]
async fn what_is_written_while_nothing_is_followed_counts_as_lag() {
    let world = World::new();
    let app = world.app(4096);
    let (replica, _) = open(&world, Base::Image { after: Txid(0) }).await;
    let mut running = replica.start(None);
    assert_eq!(durable(&mut running).await, Txid(1));
    let mut status = running.watch();
    status.wait_for(|status| status.behind_since.is_none()).await.unwrap();
    // The app goes on with a file that has no name any more.
    let elsewhere = world.dir.path().join("elsewhere");
    std::fs::rename(world.db(), &elsewhere).unwrap();
    insert(&app, 1, 1);
    let lost = |status: &Status| matches!(status.state, State::Detached { .. });
    let wait = tokio::time::timeout(Duration::from_secs(20), status.wait_for(lost));
    assert!(wait.await.unwrap().unwrap().behind_since.is_some());
    std::fs::rename(&elsewhere, world.db()).unwrap();
    durable_at(&mut running, Txid(2)).await;
    status.wait_for(|status| status.behind_since.is_none()).await.unwrap();
    drop(app);
    assert!(running.finish(BUDGET).await.clean);
}

#[tokio::test]
async fn a_file_that_is_swapped_under_the_app_is_followed_once_the_app_has_let_go_of_the_former() {
    for with_database in [true, false] {
        let world = World::new();
        let app = world.app(4096);
        let (replica, _) = open(&world, Base::Image { after: Txid(0) }).await;
        let holds = Arc::new(AtomicBool::new(true));
        let look = Arc::clone(&holds);
        let replica = replica.held_by(Holders::new(move |_, former| {
            assert_eq!(former.len(), 2, "database and WAL");
            look.load(Ordering::SeqCst)
        }));
        let mut running = replica.start(None);
        assert_eq!(durable(&mut running).await, Txid(1));
        if with_database {
            let other = backup(&world, 4096);
            put_in_place(&world, &other);
        } else {
            crate::restore::remove(&wal_path(&world.db())).unwrap();
        }
        insert(&app, 1, 1);
        let told = |status: &Status| match &status.state {
            State::Detached { reason } => reason.contains("the app goes on with the former file"),
            State::Following | State::StoodDown => false,
        };
        let mut status = running.watch();
        let wait = tokio::time::timeout(Duration::from_secs(20), status.wait_for(told));
        assert!(wait.await.unwrap().unwrap().behind_since.is_some());
        assert!(!wal_path(&world.db()).exists(), "none is made beside the app's");
        drop(app);
        holds.store(false, Ordering::SeqCst);
        durable_at(&mut running, Txid(2)).await;
        assert_eq!(running.status().state, State::Following);
        assert!(running.finish(BUDGET).await.clean);
    }
}

#[tokio::test]
async fn an_app_that_has_not_written_yet_is_not_behind() {
    let world = World::new();
    let (replica, _) = open(&world, Base::Image { after: Txid(0) }).await;
    let mut running = replica.start(None);
    for make in [None, Some(world.db())] {
        if let Some(empty) = make {
            std::fs::write(empty, b"").unwrap();
        }
        let Some(Event::Stalled { .. }) = running.event().await else { panic!("not named") };
        let status = running.status();
        assert!(matches!(status.state, State::Detached { .. }), "{status:?}");
        assert_eq!(status.behind_since, None);
    }
    drop(world.app(4096));
    durable_at(&mut running, Txid(1)).await;
    assert!(running.finish(BUDGET).await.clean);
}

#[tokio::test(flavor = "multi_thread")]
async fn lag_under_steady_writes_goes_on_with_the_uploads() {
    let world = World::new();
    let (replica, _) = open(&world, Base::Image { after: Txid(0) }).await;
    let app = world.app(4096);
    let mut running = replica.start(None);
    let (stop, stopped) = std::sync::mpsc::channel::<()>();
    let writer = std::thread::spawn(move || {
        while stopped.try_recv() == Err(std::sync::mpsc::TryRecvError::Empty) {
            insert(&app, 1, 100);
        }
    });
    let mut since = Vec::new();
    // It is ahead again at nearly every one.
    while since.len() < 5 {
        durable(&mut running).await;
        since.extend(running.status().behind_since);
    }
    stop.send(()).unwrap();
    writer.join().unwrap();
    assert!(since.windows(2).all(|pair| pair[0] < pair[1]), "{since:?}");
    running.abandon();
}
