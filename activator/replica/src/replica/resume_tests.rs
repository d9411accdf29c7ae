use std::time::Duration;

use dormouse_core::ids::{ETag, Generation};
use dormouse_core::time::Nanos;
use dormouse_core::upload::UploadSettings;
use dormouse_store::DirectoryStore;
use rusqlite::Connection;

use super::*;
use crate::clock::system_now;
use crate::faulty::{Fault, FaultyStore};
use crate::follow::Limits;
use crate::levels::{Budget, LevelSettings};
use crate::replica::gather_tests::until;
use crate::replica::{Event, Running};
use crate::testkit::{PREFIX, World, insert};

const BUDGET: Nanos = Nanos::from_secs(20);

fn settings(world: &World) -> Settings {
    Settings {
        database: world.db(),
        state_dir: world.state(),
        generation: Generation(3),
        upload: UploadSettings { retry_min: Nanos::from_millis(1), ..UploadSettings::default() },
        limits: Limits::default(),
        levels: LevelSettings::default(),
        budget: Budget::default(),
        clock: system_now,
        keeper: None,
    }
}

fn place<S: Store>(world: &World, store: S) -> Place<S> {
    Place { store, prefix: PREFIX.to_owned(), host: world.host.clone() }
}

fn watcher() -> Watcher {
    Watcher::start(Duration::from_secs(5)).unwrap()
}

/// A position as the driver of a host leaves it before an open.
fn note(world: &World, txid: Txid, etag: Option<ETag>) {
    let position = Position {
        version: dormouse_core::position::POSITION_VERSION,
        generation: Generation(3),
        txid,
        etag,
        file: crate::inspect::stat(&world.db()).unwrap().unwrap(),
        page_count: 0,
        page_size: 4096,
        clean: false,
    };
    position_file::save(&world.state(), &position).unwrap();
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

async fn resume(world: &World) -> (Replica<DirectoryStore>, Opened) {
    let place = place(world, world.store.clone());
    Replica::resume(place, watcher(), settings(world), Holders::default()).await.unwrap()
}

/// A host that slept at number 1 and is awake again; its app has written nothing yet.
async fn awake(world: &World) -> (Running, Connection) {
    let app = world.app(4096);
    insert(&app, 100, 500);
    let place = place(world, world.store.clone());
    let base = Base::Image { after: Txid(0) };
    let (replica, _) =
        Replica::open(place.clone(), watcher(), settings(world), base).await.unwrap();
    let running = replica.start(None);
    drop(app);
    let finished = running.finish(BUDGET).await;
    assert!(finished.clean, "{finished:?}");
    note(world, finished.txid, finished.etag.clone());
    let base = Base::Current { txid: finished.txid, etag: finished.etag };
    let (replica, opened) = Replica::open(place, watcher(), settings(world), base).await.unwrap();
    assert_eq!(opened, Opened::Continuing { txid: finished.txid });
    (replica.start(None), world.app(4096))
}

/// The event comes before the mark is on the disk, without which an image is right.
async fn durable_and_marked(world: &World, running: &mut Running, txid: Txid) {
    assert_eq!(durable(running).await, txid);
    until("its mark is saved", || WalMark::load(&world.state(), txid).is_some()).await;
}

/// As a kill: nothing is finished, and the app runs on.
async fn kill(running: Running) {
    let task = std::sync::Arc::clone(&running.task);
    running.abandon();
    let mut ticks = tokio::time::interval(Duration::from_millis(1));
    while !task.is_finished() {
        ticks.tick().await;
    }
}

async fn ends_equal(mut world: World, running: Running, app: Connection) {
    drop(app);
    let finished = running.finish(BUDGET).await;
    assert!(finished.clean, "{finished:?}");
    world.txid = finished.txid;
    world.assert_restore_is_identical().await;
}

fn size_of(world: &World, txid: u64) -> u64 {
    fs::metadata(world.ltx_path(0, txid, txid)).unwrap().len()
}

#[tokio::test]
async fn what_was_written_in_the_gap_is_an_increment() {
    let world = World::new();
    let (mut running, app) = awake(&world).await;
    insert(&app, 1, 10);
    durable_and_marked(&world, &mut running, Txid(2)).await;
    kill(running).await;
    insert(&app, 1, 10);
    let (replica, opened) = resume(&world).await;
    assert_eq!(opened, Opened::Continuing { txid: Txid(2) });
    let mut running = replica.start(None);
    assert_eq!(durable(&mut running).await, Txid(3));
    assert!(size_of(&world, 3) < size_of(&world, 1) / 4, "no image");
    ends_equal(world, running, app).await;
}

#[tokio::test]
async fn a_host_that_has_written_nothing_uploads_nothing() {
    let world = World::new();
    let (running, app) = awake(&world).await;
    kill(running).await;
    let (replica, opened) = resume(&world).await;
    assert_eq!(opened, Opened::Continuing { txid: Txid(1) });
    let running = replica.start(None);
    drop(app);
    let finished = running.finish(BUDGET).await;
    assert!(finished.clean && finished.txid == Txid(1), "{finished:?}");
}

#[tokio::test]
async fn the_first_write_of_a_visit_in_the_gap_is_an_increment() {
    let world = World::new();
    let (running, app) = awake(&world).await;
    kill(running).await;
    insert(&app, 1, 10);
    let (replica, opened) = resume(&world).await;
    assert_eq!(opened, Opened::Continuing { txid: Txid(1) });
    let mut running = replica.start(None);
    assert_eq!(durable(&mut running).await, Txid(2));
    assert!(size_of(&world, 2) < size_of(&world, 1) / 4, "no image");
    ends_equal(world, running, app).await;
}

#[tokio::test]
async fn a_wal_that_was_begun_anew_in_the_gap_calls_for_an_image() {
    for writes_before in [false, true] {
        let world = World::new();
        let (mut running, app) = awake(&world).await;
        if writes_before {
            insert(&app, 1, 10);
            durable_and_marked(&world, &mut running, Txid(2)).await;
        }
        kill(running).await;
        insert(&app, 1, 10);
        app.query_row("PRAGMA wal_checkpoint(RESTART)", (), |_| Ok(())).unwrap();
        insert(&app, 1, 10);
        let (replica, opened) = resume(&world).await;
        assert_eq!(opened, Opened::NeedsFullImage);
        let mut running = replica.start(None);
        durable(&mut running).await;
        ends_equal(world, running, app).await;
    }
}

/// What a checkpoint in the gap took out of the WAL is nowhere but in the file.
#[tokio::test]
async fn a_wal_that_was_emptied_in_the_gap_calls_for_an_image() {
    let world = World::new();
    let (running, app) = awake(&world).await;
    kill(running).await;
    insert(&app, 1, 10);
    app.query_row("PRAGMA wal_checkpoint(TRUNCATE)", (), |_| Ok(())).unwrap();
    let (replica, opened) = resume(&world).await;
    assert_eq!(opened, Opened::NeedsFullImage);
    let mut running = replica.start(None);
    durable(&mut running).await;
    ends_equal(world, running, app).await;
}

#[tokio::test]
async fn what_was_spooled_and_perhaps_sent_goes_first_with_its_own_nonce() {
    for fault in [Fault::AnswerLost, Fault::RequestLost] {
        let world = World::new();
        let (running, app) = awake(&world).await;
        kill(running).await;
        let store = FaultyStore::new(world.store.clone(), &[fault; 64]);
        let place = place(&world, store.clone());
        let (replica, _) =
            Replica::resume(place, watcher(), settings(&world), Holders::default()).await.unwrap();
        let running = replica.start(None);
        insert(&app, 1, 10);
        let mut ticks = tokio::time::interval(Duration::from_millis(1));
        while store.counts().puts == 0 {
            ticks.tick().await;
        }
        kill(running).await;
        let spooled = spool::left_over(&world.state()).unwrap();
        assert_eq!(spooled.len(), 1, "{spooled:?}");
        insert(&app, 1, 10);
        let (replica, _) = resume(&world).await;
        let mut running = replica.start(None);
        assert_eq!(durable(&mut running).await, Txid(2));
        assert_eq!(durable(&mut running).await, Txid(3));
        ends_equal(world, running, app).await;
    }
}

#[tokio::test]
async fn a_position_of_another_generation_or_a_clean_one_is_refused() {
    let world = World::new();
    let (running, _app) = awake(&world).await;
    kill(running).await;
    let other = Settings { generation: Generation(4), ..settings(&world) };
    let refused =
        Replica::resume(place(&world, world.store.clone()), watcher(), other, Holders::default())
            .await;
    assert!(matches!(refused, Err(OpenError::NotOpen(_))));
    let position = position_file::load(&world.state()).unwrap().unwrap();
    position_file::save(&world.state(), &Position { clean: true, ..position }).unwrap();
    let refused = Replica::resume(
        place(&world, world.store.clone()),
        watcher(),
        settings(&world),
        Holders::default(),
    )
    .await;
    assert!(matches!(refused, Err(OpenError::NotOpen(_))));
}

#[tokio::test]
async fn two_files_behind_the_position_are_refused() {
    let world = World::new();
    let (running, _app) = awake(&world).await;
    kill(running).await;
    let dir = spool::dir(&world.state());
    fs::create_dir_all(&dir).unwrap();
    for nonce in ["a", "b"] {
        fs::write(dir.join(spool::name(Txid(2), &Nonce::from(nonce))), "x").unwrap();
    }
    let refused = Replica::resume(
        place(&world, world.store.clone()),
        watcher(),
        settings(&world),
        Holders::default(),
    )
    .await;
    assert!(matches!(refused, Err(OpenError::NotOpen(_))));
}

#[tokio::test]
async fn an_app_that_has_a_former_file_open_is_not_followed_after_a_restart_either() {
    let world = World::new();
    let app = world.app(4096);
    // Another file, so that the followed one is known to be no longer the app's.
    let other = world.dir.path().join("other.db");
    app.execute("VACUUM INTO ?1", [other.to_str().unwrap()]).unwrap();
    std::fs::rename(other, world.db()).unwrap();
    // A position that was written after the swap says nothing of the file before.
    note(&world, Txid(0), None);
    let holds = Holders::new(|_, _| true);
    let place = place(&world, world.store.clone());
    let resumed = Replica::resume(place, watcher(), settings(&world), holds).await;
    let (replica, opened) = resumed.unwrap();
    assert_eq!(opened, Opened::NeedsFullImage);
    let running = replica.start(None);
    let mut status = running.watch();
    let told = status.wait_for(|status| match &status.state {
        crate::replica::State::Detached { reason } => reason.contains("former file"),
        crate::replica::State::Following | crate::replica::State::StoodDown => false,
    });
    tokio::time::timeout(Duration::from_secs(20), told).await.unwrap().unwrap();
    running.abandon();
}
