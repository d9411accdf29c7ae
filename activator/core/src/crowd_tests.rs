//! Many hosts at once: wakes in turn, and sleeps for want of memory.

use alloc::vec::Vec;

use crate::event::{Cause, Event, HostSeed, Policy, Sample};
use crate::ids::Slot;
use crate::rig::{Rig, SLOT};
use crate::time::{Boot, Mono, Nanos, Now, Wall};
use crate::{Core, Identity, Settings};

fn request(rig: &mut Rig) {
    rig.step(Event::Requested(SLOT, Cause::Client));
}

fn core(hosts: u32, wakes_max: u32) -> (Core, Now) {
    let identity = Identity { name: "box1".into(), id: "id1".into(), boot_id: "b".into() };
    let settings = Settings { wakes_max, ..Settings::new(identity) };
    let now = Now { mono: Mono(1), boot: Boot(1), wall: Wall(1_000_000) };
    let mut core = Core::new(settings);
    let seed = |slot| HostSeed {
        slot: Slot(slot),
        host: alloc::format!("{slot}.test").as_str().into(),
        policy: Policy { idle: Nanos::from_secs(60), frozen: None, asks_due: false },
        due: None,
        leftover: None,
        releasing: None,
        unsynced: false,
    };
    let hosts = (0..hosts).map(seed).collect();
    core.step(now, Event::Boot { base: "n".into(), memo: None, hosts }, &mut Vec::new());
    (core, now)
}

fn states(core: &Core) -> Vec<&'static str> {
    core.hosts().map(|view| view.state).collect()
}

#[test]
fn wakes_over_the_limit_wait_and_begin_in_the_order_of_their_requests() {
    let (mut core, now) = core(4, 2);
    let step = |core: &mut Core, event| core.step(now, event, &mut Vec::new());
    for slot in [3, 0, 2, 0, 1] {
        step(&mut core, Event::Requested(Slot(slot), Cause::Client));
    }
    assert_eq!(states(&core), ["leasing", "queued", "queued", "leasing"]);
    assert_eq!(core.counters().get("wakes_queued"), 2);
    // One of them comes to an end: who asked first is next.
    step(&mut core, Event::Rest(Slot(3)));
    assert_eq!(states(&core), ["leasing", "queued", "leasing", "asleep"]);
    // Who is called off does not wait any more.
    step(&mut core, Event::Rest(Slot(1)));
    step(&mut core, Event::Rest(Slot(0)));
    assert_eq!(states(&core), ["asleep", "asleep", "leasing", "asleep"]);
}

#[test]
fn without_a_limit_nobody_waits() {
    let (mut core, now) = core(3, 0);
    for slot in 0..3 {
        core.step(now, Event::Requested(Slot(slot), Cause::Client), &mut Vec::new());
    }
    assert_eq!(states(&core), ["leasing"; 3]);
}

fn pressure(rig: &mut Rig, permille: u32, in_flight: u64) {
    let sample = Sample { slot: SLOT, in_flight, last_active: Mono(0), stalled: false };
    rig.step(Event::Pressure(permille, Vec::from([sample])));
}

#[test]
fn under_pressure_an_idle_host_sleeps_before_its_window_is_over() {
    let mut rig = Rig::new(None);
    request(&mut rig);
    rig.until("Awake");
    pressure(&mut rig, 500, 0);
    assert_eq!(rig.label(), "Awake", "woken just now");
    rig.pass(Nanos::from_secs(6));
    pressure(&mut rig, 500, 1);
    assert_eq!(rig.label(), "Awake", "something is in flight");
    pressure(&mut rig, 500, 0);
    assert_eq!(rig.label(), "Stopping.Taking");
    assert_eq!(rig.core.counters().get("pressure_sleeps"), 1);
}

#[test]
fn pressure_begins_at_the_upper_level_and_ends_below_the_lower_one() {
    let mut rig = Rig::new(None);
    request(&mut rig);
    rig.until("Awake");
    rig.pass(Nanos::from_secs(6));
    pressure(&mut rig, 99, 0);
    assert!(rig.label() == "Awake" && !rig.core.is_pressed(), "not enough of it");
    pressure(&mut rig, 100, 1);
    pressure(&mut rig, 50, 1);
    assert!(rig.core.is_pressed(), "in between it goes on");
    pressure(&mut rig, 49, 0);
    assert!(rig.label() == "Awake" && !rig.core.is_pressed(), "over");
    pressure(&mut rig, 70, 0);
    assert_eq!(rig.label(), "Awake", "in between it does not begin");
}

#[test]
fn under_pressure_a_frozen_host_is_stopped_and_none_is_frozen() {
    let mut rig = Rig::new(Some(Nanos::from_secs(3600)));
    request(&mut rig);
    rig.until("Frozen");
    pressure(&mut rig, 500, 0);
    assert_eq!(rig.label(), "Stopping.Asking");
    rig.until("Asleep");
    request(&mut rig);
    rig.until("Awake");
    rig.until("Stopping.Taking");
    rig.until("Stopping.Asking");
}
