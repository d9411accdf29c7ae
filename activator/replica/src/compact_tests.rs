use super::*;
use crate::clock::system_now;
use crate::faulty::FaultyStore;
use crate::put::META_FENCE;
use crate::restore::Listing;
use crate::testkit::{PREFIX, World, insert};
use dormouse_core::ids::Nonce;

async fn slept(
    base_rows: u32,
    increments: u32,
) -> (World, Closed, Place<dormouse_store::DirectoryStore>) {
    let mut world = World::new();
    let app = world.app(4096);
    insert(&app, base_rows, 1000);
    let mut follower = world.follow(false);
    world.ship(&mut follower).await;
    for n in 0..increments {
        app.execute("UPDATE t SET a = ?1 WHERE id = 1 + ?1", [n]).unwrap();
        world.ship(&mut follower).await;
    }
    drop(app);
    let (page_size, page_count) = (follower.page_size(), follower.page_count());
    follower.close_clean().unwrap();
    let closed = Closed {
        database: world.db(),
        state_dir: world.state(),
        generation: Generation(1),
        txid: world.txid,
        page_size,
        page_count,
    };
    let store = world.store.clone();
    let place = Place { store, prefix: PREFIX.to_owned(), host: world.host.clone() };
    (world, closed, place)
}

fn terms() -> Terms {
    let (deadline, receiver) = watch::channel(None);
    drop(deadline);
    Terms {
        settings: LevelSettings::default(),
        budget: Budget::default(),
        deadline: receiver,
        clock: system_now,
    }
}

async fn sleep(
    place: &Place<dormouse_store::DirectoryStore>,
    closed: &Closed,
) -> Result<Compacted, CompactError> {
    compact(place, closed, Inventory::unknown(), &terms()).await
}

async fn l0s(world: &World) -> Vec<u64> {
    let listing = Listing::read(&world.store, PREFIX, &world.host).await.unwrap();
    listing.files.iter().filter(|f| f.key.level == 0).map(|f| f.key.max.0).collect()
}

fn key(level: u8, min: u64, max: u64) -> LtxKey {
    LtxKey { level, min: Txid(min), max: Txid(max) }
}

#[tokio::test]
async fn a_cheap_restore_is_left_alone() {
    let (_world, closed, place) = slept(10, 2).await;
    assert_eq!(sleep(&place, &closed).await.unwrap(), Compacted::default());
}

#[tokio::test]
async fn a_small_replica_becomes_a_snapshot_so_that_a_restore_is_four_requests() {
    let (world, closed, place) = slept(300, 3).await;
    let done = sleep(&place, &closed).await.unwrap();
    assert_eq!(done.written, [key(9, 1, 4)]);
    let listing = Listing::read(&world.store, PREFIX, &world.host).await.unwrap();
    assert_eq!(listing.plan(Target::Latest).unwrap().len(), 1);
    world.assert_restore_is_identical().await;
}

#[tokio::test]
async fn a_tag_is_that_of_the_l0_or_none_when_another_level_was_read_last() {
    let (world, closed, place) = slept(300, 3).await;
    let newest = world.restore(Target::Latest).await.unwrap();
    let meta = place.store.head(&place.key(&key(0, 4, 4))).await.unwrap();
    assert_eq!((newest.txid, newest.etag), (Txid(4), Some(meta.etag)));
    sleep(&place, &closed).await.unwrap();
    let snapshot = world.restore(Target::Latest).await.unwrap();
    assert_eq!((snapshot.txid, snapshot.etag), (Txid(4), None));
}

#[tokio::test]
async fn many_l0s_become_a_file_of_level_1_and_go_once_they_are_old() {
    // Their time is that of the test kit, long ago.
    let (world, closed, place) = slept(20, 20).await;
    let done = sleep(&place, &closed).await.unwrap();
    assert_eq!(done.written, [key(1, 1, 21)]);
    assert_eq!(done.deleted, 20);
    assert_eq!(l0s(&world).await, [21]);
    world.assert_restore_is_identical().await;
}

#[tokio::test]
async fn an_inventory_that_is_complete_is_not_listed_again_and_is_kept() {
    let (world, closed, place) = slept(20, 3).await;
    let listing = Listing::read(&world.store, PREFIX, &world.host).await.unwrap();
    let store = FaultyStore::new(world.store.clone(), &[]);
    let place =
        Place { store: store.clone(), prefix: place.prefix.clone(), host: place.host.clone() };
    let inventory = Inventory::listed(&listing, 5);
    let done = compact(&place, &closed, inventory, &terms()).await.unwrap();
    assert_eq!(done.written, [key(9, 1, 4)]);
    assert_eq!(store.lists(), 0);
    let kept = Inventory::take(&world.state(), Generation(1), Txid(4)).unwrap();
    assert!(kept.listing().files.iter().any(|file| file.key == key(9, 1, 4)));
}

#[tokio::test]
async fn a_fence_is_never_deleted() {
    let (world, closed, place) = slept(20, 20).await;
    let path = world.ltx_path(0, 5, 5);
    let bytes = fs::read(&path).unwrap();
    fs::remove_file(&path).unwrap();
    let as_fence = world.dir.path().join("fence");
    fs::write(&as_fence, bytes).unwrap();
    let put = place.put(&key(0, 5, 5), &as_fence, &Nonce::from("f"), 1, Kind::Fence).await.0;
    assert!(matches!(put, PutAnswer::Done { .. }));
    let meta = place.store.head(&place.key(&key(0, 5, 5))).await.unwrap();
    assert!(meta.metadata.contains_key(META_FENCE));
    sleep(&place, &closed).await.unwrap();
    assert_eq!(l0s(&world).await, [5, 21]);
    world.assert_restore_is_identical().await;
}

#[tokio::test]
async fn past_the_deadline_nothing_is_written_and_nothing_is_deleted() {
    let (world, closed, place) = slept(20, 20).await;
    let past = Deadline::after(system_now(), dormouse_core::time::Nanos(0));
    let (_sender, deadline) = watch::channel(Some(past));
    let terms = Terms { deadline, ..terms() };
    let error = compact(&place, &closed, Inventory::unknown(), &terms).await.unwrap_err();
    assert!(matches!(error, CompactError::Waits), "{error}");
    let listing = Listing::read(&world.store, PREFIX, &world.host).await.unwrap();
    assert_eq!(listing.files.len(), 21);
}

#[tokio::test]
async fn a_replica_that_went_on_elsewhere_is_not_compacted() {
    let (_world, mut closed, place) = slept(20, 20).await;
    closed.txid = Txid(20);
    let error = sleep(&place, &closed).await.unwrap_err();
    assert!(matches!(error, CompactError::Moved { remote: Txid(21), local: Txid(20) }));
}

#[tokio::test]
async fn a_gap_in_the_store_is_mended_by_the_closed_database() {
    for gone in [3, 5] {
        let (world, closed, place) = slept(20, 4).await;
        fs::remove_file(world.ltx_path(0, gone, gone)).unwrap();
        let done = sleep(&place, &closed).await.unwrap();
        assert_eq!(done.written, [key(9, 1, 5)]);
        world.assert_restore_is_identical().await;
    }
}

#[tokio::test]
async fn a_foreign_file_that_no_restore_gets_past_is_named() {
    let (world, closed, place) = slept(20, 2).await;
    let last = u64::MAX;
    fs::copy(world.ltx_path(0, 1, 1), world.ltx_path(0, last, last)).unwrap();
    let error = sleep(&place, &closed).await.unwrap_err();
    assert!(matches!(error, CompactError::Fault(Fault::Foreign { .. })), "{error}");
}

#[tokio::test]
async fn an_audit_is_made_at_a_sleep_when_it_is_due_and_not_before() {
    let (world, closed, place) = slept(20, 2).await;
    let store = FaultyStore::new(world.store.clone(), &[]);
    let place = Place { store: store.clone(), prefix: place.prefix, host: place.host };
    for (audit_ms, lists) in [(3_600_000, 0), (0, 1)] {
        let listing = Listing::read(&world.store, PREFIX, &world.host).await.unwrap();
        let mut inventory = Inventory::listed(&listing, system_now().wall.unix_ms());
        let age = Age::Of(system_now().wall.unix_ms());
        let known = Known { size: 1, age, is_fence: Some(false), is_image: false };
        inventory.acknowledged(key(0, 3, 3), known);
        let settings = LevelSettings { audit_ms, ..LevelSettings::default() };
        compact(&place, &closed, inventory, &Terms { settings, ..terms() }).await.unwrap();
        assert_eq!(store.lists(), lists);
    }
}
