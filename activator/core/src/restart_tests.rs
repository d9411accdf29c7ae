//! Stories of an activator that is started again while its instance runs on.

use alloc::string::String;
use alloc::vec::Vec;

use crate::effect::{Effect, Reason, RecordKey, Word};
use crate::event::{Answer, Cause, Event, ReplicaProblem};
use crate::ids::{Epoch, Generation, Run};
use crate::record::SessionRecord;
use crate::rig::{Rig, SLOT};
use crate::time::Nanos;

fn awake(rig: &mut Rig) {
    rig.step(Event::Requested(SLOT, Cause::Client));
    rig.until("Awake");
    rig.settle();
}

fn asks(rig: &Rig, is: fn(&Effect) -> bool) -> usize {
    rig.said.iter().filter(|effect| is(effect)).count()
}

fn session(rig: &Rig) -> SessionRecord {
    let (body, _) = &rig.records[&RecordKey::Session("box1".into())];
    SessionRecord::decode(body).unwrap()
}

fn is_stopped(effect: &Effect) -> bool {
    matches!(
        effect,
        Effect::Terminate(..) | Effect::Kill(..) | Effect::Publish(_, Word::Stopping(_))
    )
}

#[test]
fn what_runs_is_taken_over_in_the_same_epoch_and_generation() {
    let mut rig = Rig::new(None);
    awake(&mut rig);
    let before = rig.core.host(SLOT).unwrap();
    rig.restart(true);
    assert_eq!(rig.label(), "Resuming");
    let serves = |effect: &Effect| *effect == Effect::Publish(SLOT, Word::Awake(Run(1)));
    assert_eq!(asks(&rig, serves), 1, "it serves before its replica is found again");
    rig.until("Awake");
    rig.settle();
    assert_eq!(asks(&rig, is_stopped), 0);
    assert_eq!(rig.core.session(rig.now).0, "live");
    assert_eq!(session(&rig).epoch, Epoch(1));
    let after = rig.core.host(SLOT).unwrap();
    assert_eq!((after.run, after.generation), (before.run, Some(Generation(1))));
    let leases = |effect: &Effect| matches!(effect, Effect::Put(_, RecordKey::Host(_), ..));
    assert_eq!(asks(&rig, leases), 0, "the lease is held, not taken");
    assert_eq!(rig.core.counters().get("instances_taken_over"), 1);
}

#[test]
fn it_sleeps_and_wakes_as_its_own_afterwards() {
    let mut rig = Rig::new(None);
    awake(&mut rig);
    rig.restart(true);
    rig.until("Awake");
    rig.settle();
    rig.step(Event::Rest(SLOT));
    rig.until("Asleep");
    rig.copy(1, 1, true);
    rig.said.clear();
    awake(&mut rig);
    let asked = |effect: &Effect| matches!(effect, Effect::Get(..) | Effect::List(..));
    assert_eq!(asks(&rig, asked), 0, "a host that is owned asks the store nothing");
}

#[test]
fn what_has_no_lease_to_show_is_stopped_first() {
    let mut rig = Rig::new(None);
    awake(&mut rig);
    rig.restart(false);
    assert_eq!(rig.label(), "Stopping.Terminating");
    rig.until("Asleep");
    rig.settle();
    assert_eq!(rig.core.counters().get("leftovers_stopped"), 1);
}

#[test]
fn a_session_that_was_fenced_in_the_gap_ends_what_was_taken_over() {
    let mut rig = Rig::automatic();
    awake(&mut rig);
    let fenced = SessionRecord { fenced_by: Some("box2".into()), ..session(&rig) };
    let key = RecordKey::Session("box1".into());
    rig.records.insert(key, (fenced.encode(), "\"f\"".into()));
    rig.restart(true);
    rig.until("Fenced");
    rig.until("Asleep");
    rig.settle();
    assert!(session(&rig).epoch > Epoch(1), "a new epoch, once nothing ran");
    assert_eq!(rig.core.counters().get("session_lost"), 1);
}

#[test]
fn a_deadline_that_passes_before_the_session_is_claimed_ends_it_too() {
    let mut rig = Rig::automatic();
    awake(&mut rig);
    rig.restart(true);
    rig.away = true;
    rig.pass(Nanos::from_secs(30));
    rig.step(Event::Sweep(Vec::new()));
    assert_eq!(rig.label(), "Fenced");
    assert_eq!(rig.core.counters().get("session_expired"), 1);
}

#[test]
fn a_deadline_that_has_passed_already_lets_nothing_be_taken_over() {
    let mut rig = Rig::automatic();
    awake(&mut rig);
    rig.pass(Nanos::from_secs(30));
    rig.restart(true);
    assert_eq!(rig.label(), "Stopping.Terminating");
}

#[test]
fn with_manual_takeover_it_serves_on_while_the_store_is_away() {
    let mut rig = Rig::new(None);
    awake(&mut rig);
    rig.restart(true);
    rig.away = true;
    for _ in 0..20 {
        rig.settle();
        rig.pass(Nanos::from_secs(30));
        rig.step(Event::Sweep(Vec::new()));
    }
    assert_eq!(asks(&rig, is_stopped), 0);
    rig.away = false;
    for _ in 0..20 {
        rig.settle();
        rig.pass_time();
    }
    assert_eq!(rig.core.session(rig.now).0, "live");
    assert_eq!(session(&rig).epoch, Epoch(1));
}

#[test]
fn a_replica_that_is_not_found_again_stops_it_politely_and_is_synced() {
    let mut rig = Rig::new(None);
    awake(&mut rig);
    rig.restart(true);
    let problem = ReplicaProblem::Local(String::from("no descriptor"));
    rig.answer(Answer::Attached(Err(problem)));
    assert_eq!(rig.label(), "Stopping.Terminating");
    assert!(rig.said.contains(&Effect::Abandon(SLOT)));
    rig.answer(Answer::Empty);
    assert!(rig.core.host(SLOT).unwrap().unsynced);
}

#[test]
fn one_that_dies_while_it_is_taken_over_wakes_for_the_next_request() {
    let mut rig = Rig::new(None);
    awake(&mut rig);
    rig.restart(true);
    rig.step(Event::Died(SLOT, Run(1)));
    assert!(rig.said.contains(&Effect::Abandon(SLOT)));
    rig.step(Event::Requested(SLOT, Cause::Client));
    rig.until("Awake");
    let refused = |effect: &Effect| matches!(effect, Effect::Refuse(_, failure) if failure.reason == Reason::Lost);
    assert_eq!(asks(&rig, refused), 0);
}
