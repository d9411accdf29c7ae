use std::time::Duration;

use super::tests::{BUDGET, durable_at};
use super::*;
use crate::clock::system_now;
use crate::faulty::FaultyStore;
use crate::restore::Target;
use crate::testkit::{PREFIX, World, insert};

/// Windows that pass within a test.
const QUICK: LevelSettings = LevelSettings {
    windows_ms: [40, 120, 300],
    snapshot_ms: 500,
    l0_retention_ms: 10,
    retention_ms: 100,
    local_bytes_max: 16 << 20,
    merge_bytes_max: 256 << 20,
    audit_ms: 3_600_000,
    retry_ms: 5,
};

async fn start(
    world: &World,
    store: &FaultyStore,
    levels: LevelSettings,
    base: Base,
    deadline: Option<Deadline>,
) -> (Running, Budget) {
    let budget = Budget::default();
    let place = Place { store: store.clone(), prefix: PREFIX.to_owned(), host: world.host.clone() };
    let settings = Settings {
        database: world.db(),
        state_dir: world.state(),
        generation: Generation(3),
        upload: UploadSettings { burst: 1000, ..UploadSettings::default() },
        limits: Limits::default(),
        levels,
        budget: budget.clone(),
        clock: system_now,
        keeper: None,
    };
    let watcher = Watcher::start(Duration::from_secs(5)).unwrap();
    let (replica, _) = Replica::open(place, watcher, settings, base).await.unwrap();
    (replica.start(deadline), budget)
}

fn fresh() -> Base {
    Base::Image { after: Txid(0) }
}

pub(super) fn files(world: &World, level: u8) -> Vec<String> {
    let dir = world.ltx_path(level, 1, 1).parent().unwrap().to_owned();
    let Ok(entries) = std::fs::read_dir(dir) else { return Vec::new() };
    let mut names: Vec<_> =
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.retain(|name| dormouse_store::LtxKey::parse_name(level, name).is_some());
    names.sort();
    names
}

pub(super) async fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    let wait = async {
        let mut ticks = tokio::time::interval(Duration::from_millis(5));
        while !is_so() {
            ticks.tick().await;
        }
    };
    assert!(tokio::time::timeout(Duration::from_secs(20), wait).await.is_ok(), "not so: {what}");
}

/// Commits until this is so; each commit an L0.
async fn write_until(
    app: &rusqlite::Connection,
    running: &mut Running,
    mut is_so: impl FnMut() -> bool,
) -> u64 {
    let mut txid = running.status().durable.0;
    let end = system_now().mono + Nanos::from_secs(20);
    while !is_so() {
        insert(app, 3, 700);
        txid += 1;
        durable_at(running, Txid(txid)).await;
        assert!(system_now().mono < end, "not within the limit at {txid}");
    }
    txid
}

#[tokio::test(flavor = "multi_thread")]
async fn an_awake_host_gathers_its_l0s_into_all_levels_and_lists_nothing() {
    let mut world = World::new();
    let app = world.app(4096);
    let store = FaultyStore::new(world.store.clone(), &[]);
    let (mut running, budget) = start(&world, &store, QUICK, fresh(), None).await;
    durable_at(&mut running, Txid(1)).await;
    write_until(&app, &mut running, || {
        [1, 2, 3, 9].iter().all(|level| !files(&world, *level).is_empty()) && budget.deleted() > 5
    })
    .await;
    let counts = store.counts();
    assert_eq!((counts.lists, counts.heads), (0, 0), "the writer knows what it wrote");
    assert!(budget.written() >= 4 && budget.failed() == 0);
    assert_eq!(running.status().compaction, None);
    drop(app);
    let finished = running.finish(BUDGET).await;
    assert!(finished.clean, "{finished:?}");
    assert!(files(&world, 0).contains(&format!("{0:016x}-{0:016x}.ltx", finished.txid.0)));
    assert!(world.ltx_path(0, 1, 1).exists(), "the first image is a fence");
    world.txid = finished.txid;
    world.assert_restore_is_identical().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_host_that_was_written_to_comes_to_rest_with_one_l0_beside_its_fence() {
    let world = World::new();
    let app = world.app(4096);
    let store = FaultyStore::new(world.store.clone(), &[]);
    let (mut running, _) = start(&world, &store, QUICK, fresh(), None).await;
    for txid in 1..=6 {
        durable_at(&mut running, Txid(txid)).await;
        insert(&app, 1, 10);
    }
    durable_at(&mut running, Txid(7)).await;
    until("only fence and newest are left", || files(&world, 0).len() == 2).await;
    let restored = world.restore(Target::Latest).await.unwrap();
    assert_eq!(restored.txid, Txid(7));
    running.abandon();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_visit_that_writes_nothing_gathers_nothing_that_an_earlier_one_left() {
    let world = World::new();
    let app = world.app(4096);
    let store = FaultyStore::new(world.store.clone(), &[]);
    let calm = LevelSettings { windows_ms: [1 << 40; 3], snapshot_ms: 1 << 40, ..QUICK };
    let (mut running, _) = start(&world, &store, calm, fresh(), None).await;
    durable_at(&mut running, Txid(1)).await;
    write_until(&app, &mut running, || files(&world, 0).len() >= 5).await;
    drop(app);
    let finished = running.finish(BUDGET).await;
    let base = Base::Current { txid: finished.txid, etag: finished.etag };
    let before = store.counts();
    let (mut running, budget) = start(&world, &store, QUICK, base, None).await;
    let app = world.app(4096);
    let end = system_now().mono + Nanos::from_millis(200);
    until("four windows pass", || end < system_now().mono).await;
    assert_eq!(store.counts(), before, "it is to cost no request");
    write_until(&app, &mut running, || budget.written() > 0 && budget.deleted() > 3).await;
    running.abandon();
}

#[tokio::test(flavor = "multi_thread")]
async fn past_the_deadline_levels_wait_for_its_next_move() {
    let world = World::new();
    let app = world.app(4096);
    let store = FaultyStore::new(world.store.clone(), &[]);
    let slow = LevelSettings { windows_ms: [200, 1 << 40, 1 << 40], ..QUICK };
    let soon = Deadline::after(system_now(), Nanos::from_secs(60));
    let (mut running, budget) = start(&world, &store, slow, fresh(), Some(soon)).await;
    durable_at(&mut running, Txid(1)).await;
    // The next window's end lies behind the deadline.
    insert(&app, 1, 10);
    durable_at(&mut running, Txid(2)).await;
    running.set_deadline(Some(Deadline::after(system_now(), Nanos(0)))).await;
    let written = budget.written();
    insert(&app, 1, 10);
    let mut status = running.watch();
    status.wait_for(|status| status.behind_since.is_some()).await.unwrap();
    let end = system_now().mono + Nanos::from_millis(450);
    until("two windows pass", || end < system_now().mono).await;
    assert_eq!(budget.written(), written);
    assert_eq!(budget.failed(), 0, "waiting is no failure");
    running.set_deadline(Some(Deadline::after(system_now(), Nanos::from_secs(60)))).await;
    until("the level is written", || budget.written() > written).await;
    running.abandon();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_job_that_fails_is_told_and_tried_again_and_never_fails_the_host() {
    let world = World::new();
    let app = world.app(4096);
    let store = FaultyStore::new(world.store.clone(), &[]);
    // Without local copies the inputs come from the store.
    let levels = LevelSettings { local_bytes_max: 0, retry_ms: 100, ..QUICK };
    let (mut running, budget) = start(&world, &store, levels, fresh(), None).await;
    durable_at(&mut running, Txid(1)).await;
    store.vanish_once("0000000000000001-0000000000000001.ltx");
    insert(&app, 1, 10);
    durable_at(&mut running, Txid(2)).await;
    let mut status = running.watch();
    let told = status.wait_for(|status| status.compaction.is_some()).await.unwrap().clone();
    assert!(told.compaction.unwrap().contains("no such object"));
    assert_eq!(budget.failed(), 1);
    assert_eq!(told.state, State::Following);
    status.wait_for(|status| status.compaction.is_none()).await.unwrap();
    until("it was tried again", || !files(&world, 1).is_empty()).await;
    assert_eq!(store.lists(), 1, "what the writer knew was in doubt");
    running.abandon();
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_crash_leaves_of_a_job_is_removed_and_the_replica_is_listed_once() {
    let mut world = World::new();
    let app = world.app(4096);
    let store = FaultyStore::new(world.store.clone(), &[]);
    let calm = LevelSettings { windows_ms: [1 << 40; 3], snapshot_ms: 1 << 40, ..QUICK };
    let (mut running, _) = start(&world, &store, calm, fresh(), None).await;
    durable_at(&mut running, Txid(1)).await;
    write_until(&app, &mut running, || files(&world, 0).len() >= 5).await;
    let copies = crate::levels::local_dir(&world.state());
    until("all are kept until they are merged", || {
        std::fs::read_dir(&copies).is_ok_and(|copies| copies.count() == 5)
    })
    .await;
    drop(app);
    let scratch = world.state().join("levels/job");
    std::fs::create_dir_all(&scratch).unwrap();
    std::fs::write(scratch.join("half"), b"x").unwrap();
    let finished = running.finish(BUDGET).await;
    assert!(finished.clean);
    // As if it had crashed: nothing is known of the inventory.
    let kept = world.state().join("inventory.json");
    std::fs::remove_file(kept).expect("a finished visit keeps its inventory");
    let base = Base::Current { txid: finished.txid, etag: finished.etag };
    let (mut running, budget) = start(&world, &store, QUICK, base, None).await;
    assert!(!scratch.exists() && !copies.exists());
    let app = world.app(4096);
    write_until(&app, &mut running, || budget.written() > 0 && budget.deleted() > 3).await;
    assert_eq!(store.lists(), 1);
    drop(app);
    let finished = running.finish(BUDGET).await;
    world.txid = finished.txid;
    world.assert_restore_is_identical().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn one_job_at_a_time_runs_on_a_box() {
    let world = World::new();
    let app = world.app(4096);
    let store = FaultyStore::new(world.store.clone(), &[]);
    let (mut running, budget) = start(&world, &store, QUICK, fresh(), None).await;
    let turn = budget.turn.clone().acquire_owned().await.unwrap();
    durable_at(&mut running, Txid(1)).await;
    // L0s go on while another host's job runs.
    for txid in 2..=8 {
        insert(&app, 1, 10);
        durable_at(&mut running, Txid(txid)).await;
    }
    assert_eq!(budget.written(), 0);
    drop(turn);
    until("its turn comes", || budget.written() > 0).await;
    running.abandon();
}

/// Rare levels, and an audit at once after each upload.
const AUDITED: LevelSettings = LevelSettings {
    windows_ms: [86_400_000; 3],
    snapshot_ms: 86_400_000,
    audit_ms: 0,
    retry_ms: 5,
    ..QUICK
};

#[tokio::test(flavor = "multi_thread")]
async fn files_that_are_gone_from_the_store_are_replaced_by_a_whole_image() {
    // The newest file, and one in the middle.
    for gone in [4, 2] {
        let mut world = World::new();
        let app = world.app(4096);
        let store = FaultyStore::new(world.store.clone(), &[]);
        let (mut running, _) = start(&world, &store, AUDITED, fresh(), None).await;
        durable_at(&mut running, Txid(1)).await;
        for txid in 2..=4 {
            insert(&app, 3, 700);
            durable_at(&mut running, Txid(txid)).await;
        }
        until("an audit was made", || store.lists() > 0).await;
        std::fs::remove_file(world.ltx_path(0, gone, gone)).unwrap();
        insert(&app, 3, 700);
        until("a snapshot mends it", || !files(&world, 9).is_empty()).await;
        until("nothing is wrong any more", || running.status().compaction.is_none()).await;
        insert(&app, 3, 700);
        drop(app);
        let finished = running.finish(BUDGET).await;
        assert!(finished.clean, "{finished:?}");
        world.txid = finished.txid;
        world.assert_restore_is_identical().await;
        assert_eq!(files(&world, 9).len(), 1, "mended once");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_replica_that_a_drill_found_damaged_is_mended_by_the_next_visit() {
    let mut world = World::new();
    let app = world.app(4096);
    let store = FaultyStore::new(world.store.clone(), &[]);
    let (mut running, _) = start(&world, &store, LevelSettings::default(), fresh(), None).await;
    durable_at(&mut running, Txid(1)).await;
    insert(&app, 3, 700);
    durable_at(&mut running, Txid(2)).await;
    drop(app);
    let finished = running.finish(BUDGET).await;
    std::fs::write(world.ltx_path(0, 2, 2), b"damaged").unwrap();
    levels::mark_damaged(&world.state()).unwrap();
    let base = Base::Current { txid: finished.txid, etag: finished.etag };
    let (running, _) = start(&world, &store, LevelSettings::default(), base, None).await;
    until("a snapshot mends it", || !files(&world, 9).is_empty()).await;
    until("it is known to be mended", || running.status().compaction.is_none()).await;
    assert!(!levels::is_marked_damaged(&world.state()));
    let finished = running.finish(BUDGET).await;
    assert!(finished.clean, "{finished:?}");
    world.txid = finished.txid;
    world.assert_restore_is_identical().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_foreign_file_beyond_ours_is_named_and_left_alone() {
    let world = World::new();
    let app = world.app(4096);
    let store = FaultyStore::new(world.store.clone(), &[]);
    let (mut running, _) = start(&world, &store, AUDITED, fresh(), None).await;
    durable_at(&mut running, Txid(1)).await;
    let foreign = world.ltx_path(0, u64::MAX, u64::MAX);
    std::fs::copy(world.ltx_path(0, 1, 1), &foreign).unwrap();
    insert(&app, 3, 700);
    let named = |why: &String| why.contains("ffffffffffffffff") && why.contains("move it away");
    until("it is told", || running.status().compaction.as_ref().is_some_and(named)).await;
    assert!(foreign.exists());
    assert_eq!(running.status().image_needed, None);
    std::fs::remove_file(&foreign).unwrap();
    insert(&app, 3, 700);
    until("it is over", || running.status().compaction.is_none()).await;
    drop(app);
    running.abandon();
}
