//! Schedules that broke earlier wordings of the session protocol, each played once by a script.
//!
//! Those of the nine are played with manual takeover: where a schedule wants two live owners, an
//! operator's word is wrong, invariants 1 and 2 are off for the overthrown box, and 3 and 10 must
//! hold. With automatic takeover nothing is off: those schedules stand behind them.

use dormouse_core::event::Event;
use dormouse_core::ids::{Host, Slot};
use dormouse_sim::clock::S;
use dormouse_sim::proxies::Ended;
use dormouse_sim::rng::Rng;
use dormouse_sim::sabotage::Sabotage;
use dormouse_sim::story::{Story, Told};
use dormouse_sim::world::{BoxIndex, Fate, Plan, World, host};

const SLOT: Slot = Slot(0);

fn world(boxes: usize, sabotage: Option<Sabotage>) -> World {
    let mut world =
        World::new(Plan::quiet(boxes), Rng::new(1), sabotage, Story::new(Told::Last(80)));
    world.run_until(5 * S);
    world
}

fn the_host() -> Host {
    host(0)
}

/// A request that writes, served; what it wrote is durable a little later.
fn write(world: &mut World, b: BoxIndex) {
    let Some(id) = world.request(b, &the_host(), true) else { panic!("no proxy") };
    world.run_while(40 * S, |w| w.requests.get(&id).is_none_or(|r| r.ended.is_some()));
    let ended = world.requests.get(&id).and_then(|request| request.ended);
    assert_eq!(ended, Some(Ended::Served), "{}", story(world));
    world.run_until(world.time + 2 * S);
}

/// Removed, and so released, then added again.
fn release(world: &mut World, b: BoxIndex) {
    world.core_event(b, Event::Removed(SLOT));
    let gone = world.run_while(60 * S, |w| w.state_of(b, &the_host()) == "none");
    assert!(gone, "{}", story(world));
    world.run_until(world.time + S);
    world.add_missing(b);
}

fn take_over(world: &mut World, by: BoxIndex, target: BoxIndex) {
    let name = world.boxes[target].name.clone();
    world.core_event(by, Event::Takeover(name));
    let ended = |w: &World| w.boxes[by].activator.as_ref().is_some_and(|a| !a.takeovers.is_empty());
    assert!(world.run_while(60 * S, ended), "{}", story(world));
}

/// Runs in small steps until a write of the box is on its way, then makes it late.
fn hold_next_write(world: &mut World, b: BoxIndex, late: u64) {
    for _ in 0..20_000 {
        world.run_until(world.time + S / 1000);
        if world.hold_writes(b, late) > 0 {
            return;
        }
    }
    panic!("no write was sent: {}", story(world));
}

fn file_is_sent(world: &mut World, b: BoxIndex) {
    for _ in 0..40_000 {
        world.run_until(world.time + S / 1000);
        if world.is_sending_file(b) {
            return;
        }
    }
    panic!("no file was sent: {}", story(world));
}

/// When a file of this box is on its way, everything late of the other lands before it.
fn late_writes_land_before_the_next_file(world: &mut World, late: BoxIndex, b: BoxIndex) {
    file_is_sent(world, b);
    world.land_late_writes(late);
}

/// A file is sent, and arrives when the script says so.
fn hold_next_file(world: &mut World, b: BoxIndex) {
    file_is_sent(world, b);
    world.hold_writes(b, 5000 * S);
}

fn count(world: &World, what: &str) -> u64 {
    world.ledger.counts.get(what).copied().unwrap_or(0)
}

fn state_comes(world: &mut World, b: BoxIndex, state: &str) {
    let came = world.run_while(60 * S, |w| w.state_of(b, &the_host()) == state);
    assert!(came, "{state} never came: {}", story(world));
}

fn story(world: &World) -> String {
    world.story.lines().collect::<Vec<_>>().join("\n")
}

fn holds(world: &World) {
    assert_eq!(world.violation, None, "{}", story(world));
}

fn trips(world: &World, invariants: &[u8]) {
    let violation = world.violation.as_ref();
    let number = violation.map(|violation| violation.invariant);
    assert!(number.is_some_and(|n| invariants.contains(&n)), "{violation:?} {}", story(world));
}

fn another_boxes_turn(sabotage: Option<Sabotage>) -> World {
    let mut world = world(2, sabotage);
    write(&mut world, 0);
    release(&mut world, 0);
    write(&mut world, 1);
    release(&mut world, 1);
    if let Some(id) = world.request(0, &the_host(), true) {
        world.run_while(40 * S, |w| w.requests.get(&id).is_none_or(|r| r.ended.is_some()));
    }
    world.run_until(world.time + 5 * S);
    world
}

#[test]
fn a_copy_from_before_another_boxs_turn_is_not_used_in_the_same_session() {
    let mut world = another_boxes_turn(None);
    holds(&world);
    world.calm();
    holds(&world);
    trips(&another_boxes_turn(Some(Sabotage::WarmCacheTrusted)), &[3, 10]);
}

#[test]
fn a_release_that_lands_after_a_restart_releases_nothing_that_runs() {
    let mut world = world(1, None);
    write(&mut world, 0);
    world.core_event(0, Event::Removed(SLOT));
    state_comes(&mut world, 0, "parking");
    hold_next_write(&mut world, 0, 40 * S);
    world.kill_activator(0);
    world.start_activator(0);
    world.run_until(world.time + 6 * S);
    for _ in 0..20 {
        world.request(0, &the_host(), true);
        world.run_until(world.time + 3 * S);
    }
    holds(&world);
    assert!(world.is_served(0, &the_host()), "{}", story(&world));
    world.calm();
    holds(&world);
}

/// The first box dies with a file on its way, the second takes over and dies before its fence is
/// definite; then the first one's file lands.
fn restart_before_the_fence(sabotage: Option<Sabotage>) -> World {
    let mut world = world(2, sabotage);
    write(&mut world, 0);
    world.request(0, &the_host(), true);
    hold_next_file(&mut world, 0);
    world.crash(0, Fate::Kept, 1000 * S);
    take_over(&mut world, 1, 0);
    world.request(1, &the_host(), true);
    // The fence is sent, and never arrives.
    hold_next_file(&mut world, 1);
    world.kill_activator(1);
    world.start_activator(1);
    // Its waiter is still there, and posted again.
    late_writes_land_before_the_next_file(&mut world, 0, 1);
    for _ in 0..5 {
        world.request(1, &the_host(), true);
        world.run_until(world.time + 4 * S);
    }
    world
}

#[test]
fn a_restored_file_has_no_clean_position_before_its_fence_is_definite() {
    let mut world = restart_before_the_fence(None);
    holds(&world);
    assert!(count(&world, "met by a late file") > 0, "{}", story(&world));
    world.calm();
    holds(&world);
    trips(&restart_before_the_fence(Some(Sabotage::PositionBeforeFence)), &[10]);
}

#[test]
fn a_stale_fencer_does_not_chase_the_new_owner_through_the_numbers() {
    let mut world = world(3, None);
    write(&mut world, 0);
    world.crash(0, Fate::Kept, 1000 * S);
    take_over(&mut world, 1, 0);
    world.request(1, &the_host(), true);
    state_comes(&mut world, 1, "restoring");
    // It stands still in the middle of its wake, and is declared gone as well.
    world.pause(1, 60 * S, true);
    take_over(&mut world, 2, 1);
    write(&mut world, 2);
    world.run_until(world.time + 60 * S);
    holds(&world);
    assert!(world.boxes[1].activator.is_some(), "it lives");
    world.calm();
    holds(&world);
}

#[test]
fn a_resumed_box_does_not_write_above_the_new_owners_fence() {
    let mut world = world(2, None);
    write(&mut world, 0);
    // Unclean: the next wake of the first box lists, and uploads an image above what it found.
    world.kill_activator(0);
    // It has no lease to show: stopped first, and not taken over.
    world.boxes[0].disk.held.clear();
    world.start_activator(0);
    world.run_until(world.time + 20 * S);
    world.request(0, &the_host(), true);
    state_comes(&mut world, 0, "restoring");
    world.pause(0, 60 * S, true);
    take_over(&mut world, 1, 0);
    write(&mut world, 1);
    world.run_until(world.time + 60 * S);
    write(&mut world, 1);
    holds(&world);
    world.calm();
    holds(&world);
}

#[test]
fn an_own_late_file_where_the_own_image_was_to_stand_is_not_taken_for_it() {
    let mut world = world(1, None);
    write(&mut world, 0);
    world.request(0, &the_host(), true);
    hold_next_file(&mut world, 0);
    world.kill_activator(0);
    world.boxes[0].disk.held.clear();
    world.start_activator(0);
    world.run_until(world.time + 6 * S);
    state_comes(&mut world, 0, "asleep");
    world.request(0, &the_host(), true);
    late_writes_land_before_the_next_file(&mut world, 0, 0);
    world.run_until(world.time + 5 * S);
    assert_eq!(count(&world, "met by own late file"), 1, "{}", story(&world));
    holds(&world);
    assert!(world.is_served(0, &the_host()), "{}", story(&world));
    world.calm();
    holds(&world);
}

#[test]
fn an_instance_that_is_taken_over_sends_what_was_spooled_before_first() {
    let mut world = world(1, None);
    write(&mut world, 0);
    let run = world.instances.values().map(|instance| instance.run).next();
    world.request(0, &the_host(), true);
    hold_next_file(&mut world, 0);
    world.kill_activator(0);
    world.start_activator(0);
    late_writes_land_before_the_next_file(&mut world, 0, 0);
    state_comes(&mut world, 0, "awake");
    write(&mut world, 0);
    assert_eq!(count(&world, "instances taken over"), 1, "{}", story(&world));
    assert_eq!(world.instances.values().map(|instance| instance.run).next(), run);
    holds(&world);
    world.calm();
    holds(&world);
}

#[test]
fn a_takeover_of_a_box_that_lives_leaves_no_hole() {
    let mut world = world(2, None);
    write(&mut world, 0);
    // It serves and commits on, and cannot renew.
    world.boxes[0].outage = world.time + 80 * S;
    for _ in 0..4 {
        world.request(0, &the_host(), true);
        world.run_until(world.time + 2 * S);
    }
    take_over(&mut world, 1, 0);
    write(&mut world, 1);
    for _ in 0..30 {
        world.request(0, &the_host(), true);
        world.request(1, &the_host(), true);
        world.run_until(world.time + 3 * S);
    }
    holds(&world);
    world.calm();
    holds(&world);
}

fn power_loss(sabotage: Option<Sabotage>) -> World {
    let mut world = world(1, sabotage);
    for _ in 0..5 {
        write(&mut world, 0);
    }
    world.crash(0, Fate::Kept, 5 * S);
    world.run_until(world.time + 15 * S);
    world.request(0, &the_host(), true);
    world.run_until(world.time + 20 * S);
    world
}

#[test]
fn what_was_acknowledged_survives_a_loss_of_power() {
    let mut world = power_loss(None);
    holds(&world);
    world.calm();
    holds(&world);
    trips(&power_loss(Some(Sabotage::SpoolUnsynced)), &[3, 10]);
}

/// The first box is cut off with a commit that it cannot upload; the second takes over, compacts,
/// and then the first one's file is sent again.
fn fence_under_a_snapshot(sabotage: Option<Sabotage>, outage: u64) -> World {
    let mut world = world(2, sabotage);
    write(&mut world, 0);
    world.boxes[0].outage = world.time + outage * S;
    world.request(0, &the_host(), true);
    world.run_until(world.time + 2 * S);
    take_over(&mut world, 1, 0);
    write(&mut world, 1);
    write(&mut world, 1);
    let replica = world.hosted(1, SLOT).and_then(|hosted| hosted.replica());
    let Some(replica) = replica else { panic!("no replica: {}", story(&world)) };
    world.compact(1, SLOT, replica);
    world.run_until(world.time + 60 * S);
    world
}

#[test]
fn a_fence_under_a_snapshot_is_not_deleted() {
    // Which of its file and its session's renewal is sent again first depends on the moment.
    let outages = 60..80;
    for outage in outages.clone() {
        let mut world = fence_under_a_snapshot(None, outage);
        let compacted = count(&world, "snapshots") > 0 && count(&world, "deletes") > 0;
        assert!(compacted, "{}", story(&world));
        holds(&world);
        world.calm();
        holds(&world);
    }
    let broken = |outage| fence_under_a_snapshot(Some(Sabotage::FencesDeleted), outage);
    let tripped = outages.map(broken).find(|world| world.violation.is_some());
    trips(&tripped.expect("an upload that counts under a snapshot"), &[3]);
}

fn automatic(sabotage: Option<Sabotage>, tells_age: bool) -> World {
    let plan = Plan { automatic: true, tells_age, ..Plan::quiet(2) };
    let mut world = World::new(plan, Rng::new(1), sabotage, Story::new(Told::Last(80)));
    world.run_until(5 * S);
    world
}

/// Clients ask the second box again and again while the first is cut off, or stands still.
fn taken_by_time(world: &mut World) {
    for _ in 0..1200 {
        world.request(1, &the_host(), true);
        world.run_until(world.time + S / 10);
        if world.violation.is_some() {
            return;
        }
    }
}

#[test]
fn a_box_that_is_cut_off_is_stopped_before_another_takes_its_host() {
    for tells_age in [false, true] {
        let mut world = automatic(None, tells_age);
        write(&mut world, 0);
        world.boxes[0].outage = world.time + 100 * S;
        for _ in 0..4 {
            world.request(0, &the_host(), true);
            world.run_until(world.time + S);
        }
        taken_by_time(&mut world);
        holds(&world);
        assert!(world.is_served(1, &the_host()), "{}", story(&world));
        assert!(!world.boxes[0].overthrown, "no invariant was off");
        world.calm();
        holds(&world);
        assert_eq!(count(&world, "forks of lost hosts"), 1, "{}", story(&world));
    }
}

/// The first box is cut off at some moment between two renewals, and its app dies slowly.
fn cut_off(at: u64) -> World {
    let mut world = automatic(None, false);
    write(&mut world, 0);
    for _ in 0..at {
        world.request(1, &the_host(), true);
        world.run_until(world.time + S / 2);
    }
    world.boxes[0].outage = world.time + 100 * S;
    taken_by_time(&mut world);
    world
}

#[test]
fn the_margin_covers_the_time_to_kill() {
    for at in 20..40 {
        let mut world = cut_off(at);
        holds(&world);
        assert!(world.is_served(1, &the_host()), "{}", story(&world));
        world.calm();
        holds(&world);
    }
}

fn activator_stands_still(sabotage: Option<Sabotage>) -> World {
    let mut world = automatic(sabotage, true);
    write(&mut world, 0);
    world.pause(0, 100 * S, false);
    taken_by_time(&mut world);
    world
}

#[test]
fn the_guard_kills_for_an_activator_that_stands_still() {
    let mut world = activator_stands_still(None);
    holds(&world);
    assert!(world.is_served(1, &the_host()), "{}", story(&world));
    world.calm();
    holds(&world);
    trips(&activator_stands_still(Some(Sabotage::GuardOmitted)), &[1, 2]);
}

#[test]
fn a_suspended_box_that_goes_on_uploads_nothing_that_counts() {
    let mut world = automatic(None, true);
    write(&mut world, 0);
    world.request(0, &the_host(), true);
    hold_next_file(&mut world, 0);
    world.pause(0, 90 * S, true);
    taken_by_time(&mut world);
    assert!(world.is_served(1, &the_host()), "{}", story(&world));
    // Its file lands at last, and then it goes on.
    world.land_late_writes(0);
    world.run_until(world.time + 30 * S);
    let running = world.instances.values().any(|instance| instance.b == 0);
    assert!(!running, "its instance was stopped: {}", story(&world));
    holds(&world);
    world.calm();
    holds(&world);
}
