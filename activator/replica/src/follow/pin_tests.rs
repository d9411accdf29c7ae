use std::sync::{Mutex, PoisonError};

use dormouse_core::ids::Txid;
use rusqlite::Connection;

use super::*;
use crate::follow::{Follower, ImageWhy, WalMark};
use crate::testkit::{World, insert};

/// Holds descriptors as another process does.
#[derive(Debug, Default)]
pub(crate) struct Shelf(Mutex<Vec<OwnedFd>>);

impl Shelf {
    fn held(&self) -> std::sync::MutexGuard<'_, Vec<OwnedFd>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Keeper for Shelf {
    fn take(&self) -> Vec<OwnedFd> {
        self.held().iter().map(|fd| fd.try_clone().unwrap()).collect()
    }

    fn keep(&self, descriptors: &[BorrowedFd<'_>]) {
        *self.held() = descriptors.iter().map(|fd| fd.try_clone_to_owned().unwrap()).collect();
    }

    fn forget(&self) {
        self.held().clear();
    }
}

fn again(world: &World, keeper: Option<&Arc<dyn Keeper>>) -> Follower {
    let mark = WalMark::load(&world.state(), world.txid);
    assert!(mark.is_some(), "the newest L0 has a mark");
    Follower::open_again(&world.db(), &world.state(), mark.as_ref(), None, keeper).unwrap()
}

async fn followed(world: &mut World, keeper: Option<&Arc<dyn Keeper>>) -> (Follower, Connection) {
    let app = world.app(4096);
    insert(&app, 400, 3000);
    let mut follower = world.follow(false);
    if let Some(keeper) = keeper {
        follower.pin(Arc::clone(keeper));
    }
    world.ship(&mut follower).await;
    insert(&app, 10, 3000);
    world.ship(&mut follower).await;
    assert_eq!(follower.image_needed(), None);
    (follower, app)
}

/// More than the app's own checkpoints leave in a WAL; pages that were written before, too.
fn write_much(app: &Connection) {
    write(app, 60);
}

fn write(app: &Connection, rounds: u32) {
    for _ in 0..rounds {
        insert(app, 100, 3000);
        app.execute_batch("UPDATE t SET a = randomblob(3000) WHERE id % 50 = 0").unwrap();
    }
}

async fn ends_equal(mut world: World, mut follower: Follower, app: Connection) {
    world.ship(&mut follower).await;
    drop(app);
    follower.close_clean().unwrap();
    world.assert_restore_is_identical().await;
}

#[tokio::test]
async fn a_wal_that_was_pinned_is_followed_over_a_gap_however_much_is_written() {
    for is_pinned in [true, false] {
        let mut world = World::new();
        let shelf: Arc<dyn Keeper> = Arc::new(Shelf::default());
        let keeper = is_pinned.then_some(&shelf);
        let (follower, app) = followed(&mut world, keeper).await;
        follower.die();
        write_much(&app);
        let follower = again(&world, keeper);
        let wanted = (!is_pinned).then_some(ImageWhy::NoHistory);
        assert_eq!(follower.image_needed(), wanted);
        ends_equal(world, follower, app).await;
    }
}

#[tokio::test]
async fn a_finished_wal_that_was_pinned_is_followed_into_the_next_one() {
    for is_pinned in [true, false] {
        let mut world = World::new();
        let shelf: Arc<dyn Keeper> = Arc::new(Shelf::default());
        let keeper = is_pinned.then_some(&shelf);
        let (mut follower, app) = followed(&mut world, keeper).await;
        follower.seal().unwrap();
        follower.die();
        write_much(&app);
        let follower = again(&world, keeper);
        let wanted = (!is_pinned).then_some(ImageWhy::NoHistory);
        assert_eq!(follower.image_needed(), wanted);
        ends_equal(world, follower, app).await;
    }
}

#[tokio::test]
async fn over_many_gaps_and_checkpoints_nothing_is_lost() {
    let mut world = World::new();
    let keeper: Arc<dyn Keeper> = Arc::new(Shelf::default());
    let (mut follower, app) = followed(&mut world, Some(&keeper)).await;
    for round in 0..12 {
        if round % 3 != 0 {
            follower.seal().unwrap();
        }
        if round % 4 != 0 {
            follower.die();
            write(&app, 12);
            follower = again(&world, Some(&keeper));
        }
        assert_eq!(follower.image_needed(), None, "round {round}");
        world.ship(&mut follower).await;
        insert(&app, 1, 10);
        world.ship(&mut follower).await;
    }
    ends_equal(world, follower, app).await;
}

#[tokio::test]
async fn a_finished_wal_is_followed_after_a_short_gap_without_any_pin() {
    let mut world = World::new();
    let (mut follower, app) = followed(&mut world, None).await;
    follower.seal().unwrap();
    drop(follower);
    let follower = again(&world, None);
    insert(&app, 1, 10);
    ends_equal(world, follower, app).await;
}

#[tokio::test]
async fn commits_behind_the_newest_l0_that_a_checkpoint_swallowed_call_for_an_image() {
    let mut world = World::new();
    let keeper: Arc<dyn Keeper> = Arc::new(Shelf::default());
    let (mut follower, app) = followed(&mut world, Some(&keeper)).await;
    insert(&app, 10, 3000);
    follower.seal().unwrap();
    follower.die();
    insert(&app, 1, 10);
    let follower = again(&world, Some(&keeper));
    assert_eq!(follower.image_needed(), Some(ImageWhy::NoHistory));
    ends_equal(world, follower, app).await;
}

#[tokio::test]
async fn what_ends_well_leaves_no_lock_and_no_descriptor() {
    let mut world = World::new();
    let shelf = Arc::new(Shelf::default());
    let keeper: Arc<dyn Keeper> = shelf.clone();
    let (follower, app) = followed(&mut world, Some(&keeper)).await;
    let copies = shelf.take();
    assert_eq!(copies.len(), 2);
    drop(app);
    follower.close_clean().unwrap();
    assert!(shelf.held().is_empty());
    let of = |fd: OwnedFd| {
        let path = format!("/proc/self/fdinfo/{}", fd.as_raw_fd());
        locks(&fs::read_to_string(path).unwrap()).count()
    };
    assert_eq!(copies.into_iter().map(of).sum::<usize>(), 0);
    world.assert_restore_is_identical().await;
}

#[tokio::test]
async fn what_is_let_go_lets_the_app_remove_its_wal() {
    let mut world = World::new();
    let keeper: Arc<dyn Keeper> = Arc::new(Shelf::default());
    let (follower, app) = followed(&mut world, Some(&keeper)).await;
    follower.die();
    let_go(keeper.as_ref());
    drop(app);
    assert!(!crate::follow::wal_path(&world.db()).exists());
    assert!(keeper.take().is_empty());
    assert!(world.txid > Txid(0));
}

#[test]
fn locks_are_read_as_the_kernel_tells_them() {
    let told = "pos:\t0\nflags:\t02\nlock:\t1: OFDLCK ADVISORY  READ -1 08:01:5 123 123\n\
                lock:\t2: POSIX  ADVISORY  WRITE 4 08:01:5 1 EOF\n\
                lock:\t3: OFDLCK ADVISORY  READ -1 08:01:5 7 EOF\n";
    assert_eq!(locks(told).collect::<Vec<_>>(), [(123, 123), (7, off_t::MAX)]);
}
