use std::os::unix::fs::FileExt as _;

use super::*;
use crate::ltx::{LtxFault, Pgno};
use crate::testkit::{PREFIX, World, insert};

async fn replica_of(files: u32) -> World {
    let mut world = World::new();
    let app = world.app(4096);
    let mut follower = world.follow(false);
    world.ship(&mut follower).await;
    for _ in 1..files {
        insert(&app, 10, 900);
        world.ship(&mut follower).await;
    }
    drop(app);
    follower.close_clean().unwrap();
    world
}

#[tokio::test]
async fn a_torn_file_refuses_the_restore() {
    let world = replica_of(4).await;
    let path = world.ltx_path(0, 3, 3);
    let len = fs::metadata(&path).unwrap().len();
    fs::File::options().write(true).open(&path).unwrap().set_len(len - 5).unwrap();
    let error = world.restore(Target::Latest).await.unwrap_err();
    assert!(matches!(&error, RestoreError::Ltx(e) if matches!(e.fault, LtxFault::Torn)), "{error}");
}

#[tokio::test]
async fn a_corrupt_file_refuses_the_restore_even_where_its_pages_are_overwritten() {
    let world = replica_of(4).await;
    let path = world.ltx_path(0, 1, 1);
    let file = fs::File::options().read(true).write(true).open(&path).unwrap();
    let len = file.metadata().unwrap().len();
    let mut byte = [0];
    file.read_exact_at(&mut byte, len / 2).unwrap();
    file.write_all_at(&[byte[0] ^ 0x40], len / 2).unwrap();
    let error = world.restore(Target::Latest).await.unwrap_err();
    assert!(matches!(&error, RestoreError::Ltx(_)), "{error}");
    assert!(error.to_string().contains("0000000000000001-0000000000000001.ltx at byte"));
}

#[tokio::test]
async fn a_gap_refuses_the_restore() {
    let world = replica_of(4).await;
    fs::remove_file(world.ltx_path(0, 2, 2)).unwrap();
    let error = world.restore(Target::Latest).await.unwrap_err();
    assert!(matches!(error, RestoreError::Gap { have: Txid(1), next: Txid(3) }), "{error}");
}

#[tokio::test]
async fn changed_pages_of_another_size_refuse_the_restore() {
    let world = replica_of(2).await;
    let mut other = World::new();
    let app = other.app(8192);
    let mut follower = other.follow(false);
    for _ in 0..3 {
        insert(&app, 10, 900);
        other.ship(&mut follower).await;
    }
    fs::copy(other.ltx_path(0, 3, 3), world.ltx_path(0, 3, 3)).unwrap();
    let error = world.restore(Target::Latest).await.unwrap_err();
    assert!(error.to_string().contains("another page size"), "{error}");
}

#[tokio::test]
async fn a_file_under_another_number_refuses_the_restore() {
    let world = replica_of(3).await;
    fs::rename(world.ltx_path(0, 3, 3), world.ltx_path(0, 4, 4)).unwrap();
    fs::copy(world.ltx_path(0, 2, 2), world.ltx_path(0, 3, 3)).unwrap();
    let error = world.restore(Target::Latest).await.unwrap_err();
    assert!(matches!(error, RestoreError::Misfit { .. }), "{error}");
}

#[tokio::test]
async fn every_txid_can_be_restored() {
    let world = replica_of(5).await;
    let mut sizes = Vec::new();
    for txid in 1..=5 {
        let restored = world.restore(Target::Txid(Txid(txid))).await.unwrap();
        assert_eq!(restored.txid, Txid(txid));
        sizes.push(restored.page_count);
    }
    assert!(sizes.is_sorted() && sizes[0] < sizes[4], "{sizes:?}");
    let error = world.restore(Target::Timestamp(999)).await.unwrap_err();
    assert!(matches!(error, RestoreError::TooOld { wanted_ms: 999, oldest_ms: 1_000 }), "{error}");
    assert!(error.to_string().contains("is of 1970-01-01T00:00:01"), "{error}");
    assert_eq!(world.restore(Target::Timestamp(1_000)).await.unwrap().txid, Txid(5));
}

#[tokio::test]
async fn a_file_of_many_chunks_is_restored() {
    let mut world = World::new();
    let app = world.app(4096);
    insert(&app, 9000, 1000);
    let mut follower = world.follow(false);
    world.ship(&mut follower).await;
    assert!(fs::metadata(world.ltx_path(0, 1, 1)).unwrap().len() > 5 << 20);
    drop(app);
    follower.close_clean().unwrap();
    world.assert_restore_is_identical().await;
}

#[tokio::test]
async fn adopting_removes_stale_side_files_first() {
    let world = replica_of(2).await;
    let restored = world.restore(Target::Latest).await.unwrap();
    for stale in side_files(&world.db()) {
        fs::write(stale, b"stale").unwrap();
    }
    restored.adopt(&world.db(), None).unwrap();
    assert!(side_files(&world.db()).iter().all(|file| !file.exists()));
    let conn = rusqlite::Connection::open(world.db()).unwrap();
    let rows: u32 = conn.query_row("SELECT count(*) FROM t", (), |row| row.get(0)).unwrap();
    assert_eq!(rows, 10);
}

#[tokio::test]
async fn an_empty_remote_is_stood_for_by_a_database_of_one_page() {
    let world = World::new();
    let made = Restored::empty(&world.dir.path().join("empty")).await.unwrap();
    let bytes = fs::read(&made.path).unwrap();
    assert_eq!((bytes.len(), bytes[18], bytes[19]), (4096, 2, 2));
    assert!(matches!(world.restore(Target::Latest).await, Err(RestoreError::Empty)));
}

#[tokio::test]
async fn the_next_file_of_another_writer_can_be_applied_to_the_unfinished_restore() {
    let world = replica_of(4).await;
    let mut restored = world.restore(Target::Txid(Txid(2))).await.unwrap();
    restored.apply_one(&world.store, PREFIX, &world.host).await.unwrap();
    restored.apply_one(&world.store, PREFIX, &world.host).await.unwrap();
    assert_eq!(restored.txid, Txid(4));
    assert_eq!(fs::read(&restored.path).unwrap(), fs::read(world.db()).unwrap());
    assert!(restored.apply_one(&world.store, PREFIX, &world.host).await.is_err());
}

#[test]
fn an_increment_must_hold_every_page_of_its_growth() {
    let dir = tempfile::tempdir().unwrap();
    let size = PageSize::new(512).unwrap();
    let mut header = Header::new(size, 3, Txid(2), Txid(2));
    header.wal_offset = 32;
    let mut encoder =
        crate::ltx::Encoder::new(Vec::new(), "x", header, crate::ltx::Encoding::Frame).unwrap();
    encoder.page(Pgno(1), &[0; 512]).unwrap();
    encoder.page(Pgno(3), &[0; 512]).unwrap();
    let (bytes, _) = encoder.finish().unwrap();
    let mut target = apply::Target::create(&dir.path().join("t")).unwrap();
    target.apply(&bytes[..], "x").unwrap();
    let error = target.finish().unwrap_err();
    assert!(matches!(error, RestoreError::MissingPage { page: Pgno(2), page_count: 3 }), "{error}");
}

#[tokio::test]
async fn a_file_that_vanishes_under_the_reader_means_list_and_plan_again() {
    let world = replica_of(4).await;
    let store = crate::faulty::FaultyStore::new(world.store.clone(), &[]);
    store.vanish_once("0000000000000003.ltx");
    let to = world.dir.path().join("again");
    let restored = restore(&store, PREFIX, &world.host, Target::Latest, &to).await.unwrap();
    assert_eq!(restored.txid, Txid(4));
    for _ in 0..PLANS_MAX {
        store.vanish_once("0000000000000003.ltx");
    }
    let error = restore(&store, PREFIX, &world.host, Target::Latest, &to).await.unwrap_err();
    assert!(error.is_stale_list(), "{error}");
}

#[tokio::test]
async fn a_restore_that_fails_leaves_nothing_behind() {
    let world = replica_of(4).await;
    let path = world.ltx_path(0, 4, 4);
    let len = fs::metadata(&path).unwrap().len();
    fs::File::options().write(true).open(&path).unwrap().set_len(len - 5).unwrap();
    world.restore(Target::Latest).await.unwrap_err();
    assert!(!world.dir.path().join("restored").exists());
}

#[tokio::test]
async fn a_plan_says_what_the_restore_then_reads() {
    let world = replica_of(4).await;
    let store = crate::faulty::FaultyStore::new(world.store.clone(), &[]);
    let planned = plan(&store, PREFIX, &world.host, Target::Latest).await.unwrap();
    assert_eq!((planned.txid, planned.files.len(), planned.requests), (Txid(4), 4, 5));
    assert_eq!(planned.timestamp_ms, 1_000);
    let before = store.counts();
    let to = world.dir.path().join("planned");
    restore(&store, PREFIX, &world.host, Target::Latest, &to).await.unwrap();
    let after = store.counts();
    assert_eq!((after.lists - before.lists, after.gets - before.gets), (1, 4));
}

#[tokio::test]
async fn files_of_others_under_the_prefix_are_ignored() {
    let world = replica_of(2).await;
    let dir = world.ltx_path(0, 1, 1).parent().unwrap().to_owned();
    for name in ["lock.json", "0000000000000009-0000000000000009.ltx.tmp", "note"] {
        fs::write(dir.join(name), b"not ours").unwrap();
    }
    fs::create_dir_all(dir.parent().unwrap().join("generations")).unwrap();
    fs::write(dir.parent().unwrap().join("generations/x"), b"old").unwrap();
    assert_eq!(world.restore(Target::Latest).await.unwrap().txid, Txid(2));
}

#[tokio::test]
async fn a_time_is_found_by_few_requests() {
    let mut world = World::new();
    let app = world.app(512);
    let mut follower = world.follow(false);
    for n in 1..=40 {
        insert(&app, 1, 10);
        follower.poll().unwrap();
        let nonce = dormouse_core::ids::Nonce::from("n");
        let file = follower.spool(Txid(n), &nonce, i64::try_from(n * 100).unwrap());
        let key = dormouse_store::LtxKey { level: 0, min: Txid(n), max: Txid(n) };
        world.put(&key, &file.unwrap().unwrap().path).await;
    }
    world.txid = Txid(40);
    let store = crate::faulty::FaultyStore::new(world.store.clone(), &[]);
    for (ms, txid) in [(100, 1), (1_750, 17), (3_999, 39), (9_999, 40)] {
        let before = store.counts().gets;
        let planned = plan(&store, PREFIX, &world.host, Target::Timestamp(ms)).await.unwrap();
        assert_eq!(planned.txid, Txid(txid));
        assert!(store.counts().gets - before <= 8, "a binary search");
    }
    // A file that vanishes while headers are read means list again, too.
    store.vanish_once(".ltx");
    let planned = plan(&store, PREFIX, &world.host, Target::Timestamp(1_750)).await.unwrap();
    assert_eq!(planned.txid, Txid(17));
}
