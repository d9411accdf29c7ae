use std::io::{BufRead as _, BufReader, Write as _};
use std::path::Path;
use std::process::{Child, Command, Stdio};

use super::*;
use crate::testkit::{World, insert};

#[tokio::test]
async fn every_page_size_survives_writes_growth_deletes_and_vacuum() {
    for shift in 9..=16 {
        let mut world = World::new();
        let app = world.app(1 << shift);
        let mut follower = world.follow(false);
        assert!(world.ship(&mut follower).await, "the first L0 is a full image");
        for round in 1..6 {
            insert(&app, 20 * round, 900);
            assert!(world.ship(&mut follower).await);
            app.execute_batch("DELETE FROM t WHERE id % 3 = 0").unwrap();
            assert!(world.ship(&mut follower).await);
        }
        app.execute_batch("DELETE FROM t WHERE id % 2 = 0; VACUUM").unwrap();
        assert!(world.ship(&mut follower).await);
        insert(&app, 50, 2000);
        assert!(world.ship(&mut follower).await);
        assert!(!world.ship(&mut follower).await, "nothing new, no L0");
        drop(app);
        follower.close_clean().unwrap();
        assert!(!wal_path(&world.db()).exists());
        world.assert_restore_is_identical().await;
    }
}

#[tokio::test]
async fn our_checkpoints_let_the_wal_restart_and_lose_nothing() {
    let mut world = World::new();
    let app = world.app(1024);
    let mut follower = world.follow(false);
    world.ship(&mut follower).await;
    let mut images = 0;
    for round in 0..40 {
        insert(&app, 100, 1500);
        if round % 3 == 0 {
            world.ship(&mut follower).await;
        }
        follower.poll().unwrap();
        images += u32::from(follower.image_needed().is_some());
        follower.seal().unwrap();
    }
    world.ship(&mut follower).await;
    assert_eq!(images, 0, "every generation followed from a sealed one");
    let wal = std::fs::metadata(wal_path(&world.db())).unwrap().len();
    assert!(wal < 3_000_000, "the WAL was reused: {wal}");
    drop(app);
    follower.close_clean().unwrap();
    world.assert_restore_is_identical().await;
}

#[tokio::test]
async fn checkpoints_of_the_app_cannot_take_frames_away() {
    let mut world = World::new();
    let app = world.app(4096);
    let mut follower = world.follow(false);
    world.ship(&mut follower).await;
    app.pragma_update(None, "busy_timeout", 0).unwrap();
    for mode in ["PASSIVE", "FULL", "RESTART", "TRUNCATE"] {
        for _ in 0..3 {
            insert(&app, 30, 500);
            app.query_row(&format!("PRAGMA wal_checkpoint({mode})"), (), |_| Ok(())).unwrap();
        }
        world.ship(&mut follower).await;
    }
    drop(app);
    follower.close_clean().unwrap();
    world.assert_restore_is_identical().await;
}

#[tokio::test]
async fn a_wake_after_a_clean_sleep_needs_no_full_image() {
    let mut world = World::new();
    let app = world.app(4096);
    insert(&app, 2000, 500);
    let mut follower = world.follow(false);
    world.ship(&mut follower).await;
    drop(app);
    follower.close_clean().unwrap();
    for round in 0..3 {
        let mut follower = world.follow(true);
        assert_eq!(follower.image_needed(), None);
        let app = world.app(4096);
        app.execute("UPDATE t SET a = ?1 WHERE id = 7", [round]).unwrap();
        assert!(world.ship(&mut follower).await);
        let size = std::fs::metadata(world.ltx_path(0, world.txid.0, world.txid.0)).unwrap().len();
        assert!(size < 20_000, "an increment, no image: {size}");
        drop(app);
        follower.close_clean().unwrap();
    }
    world.assert_restore_is_identical().await;
}

#[tokio::test]
async fn an_app_that_migrates_closes_and_reopens_at_start_loses_nothing() {
    let mut world = World::new();
    drop(world.app(4096));
    let mut follower = world.follow(false);
    world.ship(&mut follower).await;
    follower.close_clean().unwrap();
    let mut follower = world.follow(true);
    let app = world.app(4096);
    app.execute_batch("ALTER TABLE t ADD COLUMN b").unwrap();
    app.close().unwrap();
    let app = world.app(4096);
    insert(&app, 3, 10);
    world.ship(&mut follower).await;
    drop(app);
    follower.close_clean().unwrap();
    world.assert_restore_is_identical().await;
}

#[test]
fn a_wal_that_is_there_at_the_start_calls_for_a_full_image() {
    let world = World::new();
    let app = world.app(4096);
    insert(&app, 1, 1);
    let follower = world.follow(true);
    assert_eq!(follower.image_needed(), Some(ImageWhy::NoHistory));
}

#[tokio::test]
async fn a_generation_that_nobody_sealed_calls_for_a_full_image() {
    let mut world = World::new();
    let app = world.app(4096);
    let mut follower = world.follow(false);
    world.ship(&mut follower).await;
    insert(&app, 5, 500);
    world.ship(&mut follower).await;
    // What a lost lock would allow: the app backfills everything and starts the WAL anew.
    follower.reader.execute_batch("COMMIT").unwrap();
    app.query_row("PRAGMA wal_checkpoint(PASSIVE)", (), |_| Ok(())).unwrap();
    insert(&app, 1, 10);
    follower.poll().unwrap();
    assert_eq!(follower.image_needed(), Some(ImageWhy::Generation));
    assert!(world.ship(&mut follower).await);
    drop(app);
    follower.close_clean().unwrap();
    world.assert_restore_is_identical().await;
}

#[test]
fn links_and_other_kinds_of_files_are_refused() {
    let world = World::new();
    drop(world.app(4096));
    let open = |path: &Path| Follower::open(path, &world.state(), false).unwrap_err();
    let link = world.dir.path().join("data/link");
    std::os::unix::fs::symlink(world.db(), &link).unwrap();
    assert!(matches!(open(&link), FollowError::Unsafe { why: "a symbolic link", .. }));
    assert!(matches!(open(&world.dir.path().join("data")), FollowError::Unsafe { .. }));
    assert!(matches!(open(&world.dir.path().join("data/none")), FollowError::Absent { .. }));
    std::fs::hard_link(world.db(), world.dir.path().join("data/second")).unwrap();
    assert!(matches!(open(&world.db()), FollowError::Unsafe { .. }));
}

#[test]
fn other_journal_modes_and_other_files_are_named() {
    let world = World::new();
    let app = world.app(4096);
    app.pragma_update(None, "journal_mode", "delete").unwrap();
    drop(app);
    let open = |path: &Path| Follower::open(path, &world.state(), false).unwrap_err();
    assert!(matches!(open(&world.db()), FollowError::NotWal { .. }));
    let other = world.dir.path().join("data/other");
    std::fs::write(&other, vec![7; 8192]).unwrap();
    assert!(matches!(open(&other), FollowError::NotSqlite { .. }));
}

#[test]
fn an_exclusive_lock_is_named() {
    let world = World::new();
    drop(world.app(4096));
    let mut child = child("exclusive", &world.db());
    let error = Follower::open(&world.db(), &world.state(), false).unwrap_err();
    assert!(matches!(error, FollowError::Locked { .. }), "{error}");
    end(&mut child);
}

#[test]
fn a_replaced_file_is_noticed() {
    let world = World::new();
    let app = world.app(4096);
    let mut follower = world.follow(false);
    drop(app);
    std::fs::copy(world.db(), world.dir.path().join("data/copy")).unwrap();
    std::fs::rename(world.dir.path().join("data/copy"), world.db()).unwrap();
    assert!(matches!(follower.poll(), Err(FollowError::Replaced { .. })));
}

#[tokio::test]
async fn another_process_that_writes_and_checkpoints_all_the_time_is_followed() {
    let mut world = World::new();
    drop(world.app(4096));
    let mut follower = world.follow(false);
    world.ship(&mut follower).await;
    let mut child = child("write", &world.db());
    let mut images = 0;
    // By its progress: on a busy machine it may come to nothing for a while.
    let (mut rounds, first) = (0, world.txid.0);
    while rounds < 20 || world.txid.0 < first + 5 {
        world.ship(&mut follower).await;
        images += u32::from(follower.image_needed().is_some());
        follower.seal().unwrap();
        rounds += 1;
    }
    end(&mut child);
    world.ship(&mut follower).await;
    assert_eq!(images, 0);
    follower.close_clean().unwrap();
    world.assert_restore_is_identical().await;
}

#[tokio::test]
async fn an_app_in_another_process_cannot_reset_the_wal_while_we_hold_it() {
    let mut world = World::new();
    drop(world.app(4096));
    let mut follower = world.follow(false);
    world.ship(&mut follower).await;
    let mut child = child("truncate", &world.db());
    for _ in 0..20 {
        world.ship(&mut follower).await;
    }
    assert_eq!(follower.image_needed(), None);
    end(&mut child);
    world.ship(&mut follower).await;
    follower.close_clean().unwrap();
    world.assert_restore_is_identical().await;
}

#[tokio::test]
async fn after_a_gap_in_which_the_app_wrote_a_full_image_heals_the_chain() {
    let mut world = World::new();
    let app = world.app(4096);
    let mut follower = world.follow(false);
    world.ship(&mut follower).await;
    insert(&app, 10, 500);
    world.ship(&mut follower).await;
    // Our process dies: the app goes on, checkpoints, and restarts its WAL.
    drop(follower);
    for _ in 0..3 {
        insert(&app, 10, 500);
        app.query_row("PRAGMA wal_checkpoint(RESTART)", (), |_| Ok(())).unwrap();
    }
    let mut follower = world.follow(true);
    assert!(follower.image_needed().is_some(), "there is a WAL that nobody watched");
    insert(&app, 10, 500);
    world.ship(&mut follower).await;
    insert(&app, 10, 500);
    world.ship(&mut follower).await;
    drop(app);
    follower.close_clean().unwrap();
    world.assert_restore_is_identical().await;
}

#[tokio::test]
async fn a_full_disk_of_the_spool_loses_nothing() {
    let mut world = World::new();
    let app = world.app(4096);
    let mut follower = world.follow(false);
    world.ship(&mut follower).await;
    insert(&app, 10, 500);
    // A directory that cannot be made stands for a disk that is full.
    let spool = crate::spool::dir(&world.state());
    std::fs::remove_dir_all(&spool).unwrap();
    std::fs::write(&spool, b"in the way").unwrap();
    assert!(follower.poll().unwrap());
    let nonce = Nonce::from("n");
    assert!(follower.spool(world.txid.next(), &nonce, 0).is_err());
    assert!(follower.has_pending());
    std::fs::remove_file(&spool).unwrap();
    assert!(world.ship(&mut follower).await);
    drop(app);
    follower.close_clean().unwrap();
    world.assert_restore_is_identical().await;
}

#[tokio::test]
async fn past_a_bound_the_lock_is_let_go_and_a_full_image_follows() {
    let low = Limits { wal_bytes_max: 0, disk_free_min: 0 };
    let full = Limits { wal_bytes_max: u64::MAX, disk_free_min: u64::MAX };
    for (limits, why) in [(low, ImageWhy::WalTooLong), (full, ImageWhy::DiskLow)] {
        let mut world = World::new();
        let app = world.app(512);
        let mut follower = world.follow(false);
        world.ship(&mut follower).await;
        follower.set_limits(limits);
        // A reader of the app keeps the checkpoint from completing.
        let reader = Connection::open(world.db()).unwrap();
        reader.execute_batch("BEGIN; SELECT count(*) FROM t").unwrap();
        insert(&app, 2000, 500);
        follower.poll().unwrap();
        assert_ne!(follower.wal_size(), WalSize::Short);
        follower.maintain().unwrap();
        assert_eq!(follower.image_needed(), Some(why));
        assert!(follower.reader.is_autocommit(), "the lock is gone");
        let nonce = Nonce::from("n");
        if why == ImageWhy::DiskLow {
            assert!(follower.spool(world.txid.next(), &nonce, 0).is_err(), "no room for it");
        }
        follower.set_limits(Limits { disk_free_min: 0, ..Limits::default() });
        assert!(world.ship(&mut follower).await);
        drop((app, reader));
        follower.close_clean().unwrap();
        world.assert_restore_is_identical().await;
    }
}

#[tokio::test]
async fn every_l0_is_one_that_stock_replicate_can_go_on_from() {
    let mut world = World::new();
    let app = world.app(4096);
    let mut follower = world.follow(false);
    world.ship(&mut follower).await;
    for _ in 0..6 {
        insert(&app, 40, 900);
        world.ship(&mut follower).await;
        follower.seal().unwrap();
    }
    drop(app);
    follower.close_clean().unwrap();
    let mut follower = world.follow(true);
    let app = world.app(4096);
    insert(&app, 1, 1);
    world.ship(&mut follower).await;
    for txid in 1..=world.txid.0 {
        let file = std::fs::File::open(world.ltx_path(0, txid, txid)).unwrap();
        let header = *crate::ltx::Decoder::new(BufReader::new(file), "l0").unwrap().header();
        assert_eq!((header.min, header.max), (Txid(txid), Txid(txid)));
        // Below 32 stock computes a frame before the first, for ever.
        assert!(header.wal_offset >= 32, "{header:?}");
        assert_eq!(header.pre_apply, 0, "a checksum that is tracked fails stock's restore");
    }
}

#[tokio::test]
async fn an_app_that_is_killed_and_never_closes_loses_nothing() {
    let mut world = World::new();
    drop(world.app(4096));
    let mut follower = world.follow(false);
    world.ship(&mut follower).await;
    let mut child = child("write", &world.db());
    for _ in 0..5 {
        world.ship(&mut follower).await;
    }
    child.kill().unwrap();
    child.wait().unwrap();
    world.ship(&mut follower).await;
    assert_eq!(follower.image_needed(), None);
    follower.close_clean().unwrap();
    world.assert_restore_is_identical().await;
}

#[tokio::test]
async fn a_finished_wal_that_the_app_begins_anew_without_a_commit_is_closed_clean() {
    for mode in ["RESTART", "TRUNCATE"] {
        let mut world = World::new();
        let app = world.app(4096);
        let mut follower = world.follow(false);
        insert(&app, 100, 500);
        world.ship(&mut follower).await;
        insert(&app, 1, 10);
        world.ship(&mut follower).await;
        follower.seal().unwrap();
        let sql = format!("PRAGMA wal_checkpoint({mode})");
        let busy: i64 = app.query_row(&sql, (), |row| row.get(0)).unwrap();
        assert_eq!(busy, 0, "{mode}");
        assert!(!follower.poll().unwrap());
        drop(app);
        follower.close_clean().unwrap();
        world.assert_restore_is_identical().await;
    }
}

/// A commit whose writer was killed before it told the wal-index: valid frames in the WAL that no
/// connection knows of. Made by a copy of the database that goes on from the same WAL.
fn append_untold_commit(world: &World) {
    let other = World::new();
    std::fs::copy(world.db(), other.db()).unwrap();
    std::fs::copy(wal_path(&world.db()), wal_path(&other.db())).unwrap();
    let before = std::fs::read(wal_path(&other.db())).unwrap();
    let app = Connection::open(other.db()).unwrap();
    insert(&app, 3, 900);
    // The same up to the new frames, which an older generation may have left room for.
    let after = std::fs::read(wal_path(&other.db())).unwrap();
    assert_ne!(before, after);
    let wal = std::fs::File::options().write(true).open(wal_path(&world.db())).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&wal, &after, 0).unwrap();
}

#[tokio::test]
async fn a_commit_of_a_killed_writer_that_only_the_wal_knows_is_in_file_and_replica_alike() {
    let mut world = World::new();
    let app = world.app(4096);
    let mut follower = world.follow(false);
    world.ship(&mut follower).await;
    insert(&app, 5, 500);
    world.ship(&mut follower).await;
    drop(app);
    append_untold_commit(&world);
    assert!(world.ship(&mut follower).await);
    follower.close_clean().unwrap();
    world.assert_restore_is_identical().await;
}

#[tokio::test]
async fn a_commit_that_another_writer_has_overwritten_calls_for_a_full_image() {
    for seals in [false, true] {
        let mut world = World::new();
        let app = world.app(4096);
        let mut follower = world.follow(false);
        world.ship(&mut follower).await;
        insert(&app, 5, 500);
        world.ship(&mut follower).await;
        append_untold_commit(&world);
        assert!(world.ship(&mut follower).await);
        if seals {
            assert!(follower.seal().is_err(), "SQLite knows fewer frames");
        } else {
            // The next writer begins where the untold commit began.
            insert(&app, 30, 900);
            assert!(follower.poll().unwrap());
        }
        assert!(follower.image_needed().is_some());
        world.ship(&mut follower).await;
        drop(app);
        follower.close_clean().unwrap();
        world.assert_restore_is_identical().await;
    }
}

/// Runs `child_process` below in a process of its own, until its standard input closes.
fn child(what: &str, db: &Path) -> Child {
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "follow::tests::child_process", "--nocapture"])
        .env("DORMOUSE_TEST_CHILD", what)
        .env("DORMOUSE_TEST_DB", db)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stdout.as_mut().unwrap()).lines();
    lines.find(|line| line.as_ref().unwrap().contains("child is ready")).unwrap().unwrap();
    child
}

fn end(child: &mut Child) {
    drop(child.stdin.take());
    assert!(child.wait().unwrap().success());
}

#[test]
fn child_process() {
    let Ok(what) = std::env::var("DORMOUSE_TEST_CHILD") else { return };
    let app = Connection::open(std::env::var("DORMOUSE_TEST_DB").unwrap()).unwrap();
    app.pragma_update(None, "busy_timeout", 5000).unwrap();
    if what == "exclusive" {
        app.pragma_update(None, "locking_mode", "exclusive").unwrap();
    }
    insert(&app, 1, 10);
    println!("child is ready");
    std::io::stdout().flush().unwrap();
    let (send, ended) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        std::io::stdin().lines().for_each(drop);
        send.send(()).unwrap();
    });
    if what == "exclusive" {
        ended.recv().unwrap();
        return;
    }
    while ended.try_recv().is_err() {
        insert(&app, 5, 700);
        app.execute_batch("DELETE FROM t WHERE id % 7 = 0").unwrap();
        if what == "truncate" {
            app.pragma_update(None, "busy_timeout", 0).unwrap();
            app.query_row("PRAGMA wal_checkpoint(TRUNCATE)", (), |_| Ok(())).unwrap();
            app.pragma_update(None, "busy_timeout", 5000).unwrap();
        }
    }
}

/// What `PRAGMA wal_checkpoint` says of being busy.
fn tries_checkpoint(app: &Connection) -> bool {
    app.query_row("PRAGMA wal_checkpoint(PASSIVE)", (), |row| row.get::<_, i64>(0)).unwrap() == 0
}

#[tokio::test]
async fn while_an_app_writes_much_its_checkpoints_are_kept_out_and_in_a_pause_they_are_not() {
    let mut world = World::new();
    let app = world.app(4096);
    let mut follower = world.follow(false);
    world.ship(&mut follower).await;
    insert(&app, 10, 100);
    follower.keep_checkpoints_out();
    assert!(!follower.keeps_checkpoints_out(), "a short WAL is the app's own affair");
    insert(&app, 300, 4000);
    follower.keep_checkpoints_out();
    assert!(follower.keeps_checkpoints_out() && !tries_checkpoint(&app));
    follower.let_checkpoints().unwrap();
    assert!(tries_checkpoint(&app));
    // Ours needs the same lock.
    follower.keep_checkpoints_out();
    follower.seal().unwrap();
    assert!(!follower.keeps_checkpoints_out());
    world.ship(&mut follower).await;
    // It ends with the follower.
    insert(&app, 300, 4000);
    follower.keep_checkpoints_out();
    drop(follower);
    assert!(tries_checkpoint(&app));
}

#[tokio::test]
async fn a_wal_that_began_anew_is_as_long_as_its_index_says() {
    let mut world = World::new();
    let app = world.app(4096);
    let mut follower = world.follow(false);
    world.ship(&mut follower).await;
    insert(&app, 1500, 4000);
    assert_eq!(follower.wal_size(), WalSize::Long);
    follower.poll().unwrap();
    follower.maintain().unwrap();
    world.ship(&mut follower).await;
    insert(&app, 1, 10);
    let wal = std::fs::metadata(wal_path(&world.db())).unwrap().len();
    assert!(wal > 1500 * 4096, "the file keeps its length: {wal}");
    assert_eq!(follower.wal_size(), WalSize::Short);
    insert(&app, 1500, 4000);
    assert_eq!(follower.wal_size(), WalSize::Long);
    follower.set_limits(Limits { wal_bytes_max: 1 << 20, ..Limits::default() });
    assert_eq!(follower.wal_size(), WalSize::TooLong);
    world.ship(&mut follower).await;
    drop(app);
    follower.close_clean().unwrap();
    world.assert_restore_is_identical().await;
}
