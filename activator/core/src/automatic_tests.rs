//! Stories of automatic takeover: who may end whose session, and what a box does at its own deadline.

use crate::effect::{Effect, Reason, RecordKey};
use crate::event::{Cause, Event};
use crate::ids::Txid;
use crate::record::{HostRecord, SessionRecord};
use crate::rig::{HOST, Rig, SLOT, assert_backs_off};
use crate::time::Nanos;

/// TTL + margin of the defaults.
const PATIENCE: Nanos = Nanos::from_secs(35);

fn request(rig: &mut Rig) {
    rig.step(Event::Requested(SLOT, Cause::Client));
}

fn said(rig: &Rig, is: impl Fn(&Effect) -> bool) -> usize {
    rig.said.iter().filter(|effect| is(effect)).count()
}

fn refused(rig: &Rig, reason: Reason) -> usize {
    said(rig, |e| matches!(e, Effect::Refuse(_, failure) if failure.reason == reason))
}

fn session_of(rig: &Rig, name: &str) -> SessionRecord {
    let (body, _) = rig.records.get(&RecordKey::Session(name.into())).unwrap();
    SessionRecord::decode(body).unwrap()
}

fn generation(rig: &Rig) -> u64 {
    let (body, _) = rig.records.get(&RecordKey::Host(HOST.into())).unwrap();
    HostRecord::decode(body).unwrap().generation.0
}

/// Awake on this box, and then the store does not answer until the deadline has passed.
fn awake_past_the_deadline(rig: &mut Rig) {
    request(rig);
    rig.until("Awake");
    rig.away = true;
    for _ in 0..30 {
        if rig.label() != "Awake" {
            break;
        }
        rig.settle();
        rig.pass(Nanos::from_secs(1));
        rig.step(Event::Sweep(alloc::vec::Vec::new()));
    }
}

#[test]
fn a_dead_box_is_fenced_after_its_record_was_watched_for_long_enough() {
    let mut rig = Rig::automatic();
    rig.foreign(false, 3);
    rig.remote(3);
    request(&mut rig);
    rig.until("Backoff");
    assert_eq!(refused(&rig, Reason::Elsewhere), 1, "it may be alive");
    rig.pass(Nanos(PATIENCE.0 - 1));
    request(&mut rig);
    rig.until("Backoff");
    assert_eq!(session_of(&rig, "box2").fenced_by, None, "a nanosecond too early");
    rig.pass(Nanos::from_secs(2));
    request(&mut rig);
    rig.until("Awake");
    assert_eq!(session_of(&rig, "box2").fenced_by, Some("box1".into()));
    assert_eq!(generation(&rig), 8);
    let fences = said(&rig, |e| matches!(e, Effect::PutFence(_, _, Txid(4), _)));
    assert_eq!(fences, 1, "its data is fenced too");
}

/// Retry-After of the newest refusal, and what was said.
fn newest_refusal(rig: &Rig) -> (Nanos, alloc::string::String) {
    let mut told = rig.said.iter().rev().filter_map(|effect| {
        let Effect::Refuse(_, failure) = effect else { return None };
        Some((failure.retry_after, failure.detail.clone()))
    });
    told.next().unwrap()
}

#[test]
fn who_comes_again_when_the_refusal_says_so_is_served_however_often_others_came_between() {
    for others_come in [false, true] {
        let mut rig = Rig::automatic();
        rig.foreign(false, 3);
        rig.remote(3);
        request(&mut rig);
        rig.until("Backoff");
        let (retry_after, told) = newest_refusal(&rig);
        assert_eq!(retry_after, PATIENCE);
        assert!(told.contains("unchanged for 0 s, and is taken over in 35 s"), "{told}");
        for second in 1..35 {
            rig.pass(Nanos::from_secs(1));
            if others_come {
                request(&mut rig);
                rig.settle();
                let (retry_after, told) = newest_refusal(&rig);
                assert_eq!(retry_after, Nanos::from_secs(35 - second), "{told}");
                let what = alloc::format!("unchanged for {second} s");
                assert!(told.contains(&what), "{told}");
                assert_eq!(rig.core.host(SLOT).unwrap().problem, Some(told));
            }
        }
        rig.pass(Nanos::from_secs(1));
        request(&mut rig);
        rig.until("Awake");
        let its = RecordKey::Session("box2".into());
        let reads = said(&rig, |e| matches!(e, Effect::Get(_, key) if *key == its));
        assert!(reads <= 5, "the other box is not asked at each request: {reads}");
    }
}

#[test]
fn by_the_stores_own_clock_the_refusal_says_when_too() {
    let mut rig = Rig::automatic();
    rig.foreign(false, 3);
    rig.remote(3);
    rig.age = Some(Nanos::from_secs(20));
    request(&mut rig);
    rig.until("Backoff");
    let (retry_after, told) = newest_refusal(&rig);
    assert_eq!(retry_after, Nanos::from_secs(17));
    assert!(told.contains("unchanged for 20 s, and is taken over in 17 s"), "{told}");
    rig.pass(retry_after);
    rig.age = Some(Nanos::from_secs(37));
    request(&mut rig);
    rig.until("Awake");
}

#[test]
fn a_box_that_renews_is_never_fenced() {
    let mut rig = Rig::automatic();
    rig.foreign(false, 3);
    for n in 0..10 {
        request(&mut rig);
        rig.until("Backoff");
        rig.pass(PATIENCE);
        let key = RecordKey::Session("box2".into());
        let (body, _) = rig.records.get(&key).cloned().unwrap();
        let nonce = alloc::format!("r{n}").as_str().into();
        let record = SessionRecord { nonce, ..SessionRecord::decode(&body).unwrap() };
        // The same tag: it may be a hash of something else.
        rig.records.insert(key, (record.encode(), "\"s\"".into()));
    }
    assert_eq!(session_of(&rig, "box2").fenced_by, None);
}

#[test]
fn the_stores_own_clock_proves_a_death_at_once() {
    for (age, is_dead) in [(PATIENCE.0 + 1_000_000_000, false), (PATIENCE.0 + 1_000_000_001, true)]
    {
        let mut rig = Rig::automatic();
        rig.foreign(false, 3);
        rig.remote(3);
        rig.age = Some(Nanos(age));
        request(&mut rig);
        rig.until(if is_dead { "Awake" } else { "Backoff" });
    }
}

#[test]
fn with_manual_takeover_no_age_is_a_death() {
    let mut rig = Rig::new(None);
    rig.foreign(false, 3);
    rig.age = Some(Nanos::from_secs(1_000_000));
    request(&mut rig);
    rig.until("Backoff");
    assert_eq!(session_of(&rig, "box2").fenced_by, None);
}

#[test]
fn at_its_own_deadline_a_box_stops_its_hosts_and_uploads_nothing() {
    let mut rig = Rig::automatic();
    awake_past_the_deadline(&mut rig);
    assert_eq!(rig.label(), "Fenced");
    assert!(said(&rig, |e| matches!(e, Effect::Kill(..))) == 1, "no question, no drain");
    assert_eq!(said(&rig, |e| *e == Effect::Abandon(SLOT)), 1);
    assert_eq!(said(&rig, |e| matches!(e, Effect::Save(..) | Effect::Terminate(..))), 0);
    assert_eq!(rig.core.session(rig.now).0, "lost");
}

#[test]
fn what_was_not_uploaded_is_uploaded_when_the_host_is_ours_again() {
    let mut rig = Rig::automatic();
    awake_past_the_deadline(&mut rig);
    rig.remote(1);
    rig.copy(1, 1, false);
    rig.until("Asleep");
    assert!(rig.core.host(SLOT).unwrap().unsynced);
    rig.away = false;
    for _ in 0..60 {
        rig.settle();
        rig.pass_time();
    }
    assert_eq!(rig.core.session(rig.now).0, "live");
    let images = said(&rig, |e| matches!(e, Effect::PutImage(_, _, Txid(2), _)));
    assert_eq!(images, 1, "nobody asked for it");
    assert!(!rig.core.host(SLOT).unwrap().unsynced);
}

#[test]
fn what_was_not_uploaded_is_set_aside_when_the_host_went_to_another_box() {
    let mut rig = Rig::automatic();
    awake_past_the_deadline(&mut rig);
    rig.copy(1, 1, false);
    rig.until("Asleep");
    rig.foreign(false, 9);
    rig.away = false;
    for _ in 0..60 {
        rig.settle();
        rig.pass_time();
    }
    let view = rig.core.host(SLOT).unwrap();
    assert!(!view.unsynced);
    assert!(view.problem.unwrap().contains("db.fork"), "people are told where it is");
    assert_eq!(said(&rig, |e| matches!(e, Effect::PutImage(..) | Effect::PutFence(..))), 0);
}

#[test]
fn a_renewal_whose_answer_comes_after_the_deadline_is_not_heard() {
    let mut rig = Rig::automatic();
    request(&mut rig);
    rig.until("Awake");
    rig.pass(Nanos::from_secs(11));
    rig.step(Event::Sweep(alloc::vec::Vec::new()));
    // The renewal is on its way; the box stands still, and its answer is the first thing it hears.
    rig.pass(Nanos::from_secs(60));
    rig.settle();
    assert_eq!(said(&rig, |e| matches!(e, Effect::Kill(..))), 1);
    assert_eq!(rig.core.counters().get("session_expired"), 1);
}

#[test]
fn with_manual_takeover_no_deadline_stops_an_app() {
    let mut rig = Rig::new(None);
    awake_past_the_deadline(&mut rig);
    assert_eq!(rig.label(), "Awake");
    assert_eq!(rig.core.session(rig.now).0, "unrenewed");
}

#[test]
fn a_box_that_lost_its_disk_has_its_name_back_when_its_former_self_is_dead() {
    let mut rig = Rig::automatic();
    rig.foreign(false, 0);
    let key = RecordKey::Session("box2".into());
    let (body, etag) = rig.records.remove(&key).unwrap();
    let session = SessionRecord { name: "box1".into(), ..SessionRecord::decode(&body).unwrap() };
    rig.records.insert(RecordKey::Session("box1".into()), (session.encode(), etag));
    rig.settle();
    assert_eq!(rig.core.session(rig.now).0, "refused", "the name is another box's");
    for _ in 0..4 {
        rig.pass_time();
        rig.settle();
    }
    assert_eq!(rig.core.session(rig.now).0, "live");
    assert_eq!(session_of(&rig, "box1").epoch.0, 2);
}

#[test]
fn a_fence_over_a_dead_session_that_stays_unknown_is_repeated_ever_more_slowly() {
    let mut rig = Rig::automatic();
    rig.foreign(false, 3);
    rig.remote(3);
    rig.age = Some(Nanos::from_secs(60));
    request(&mut rig);
    rig.until("Leasing.Overthrowing");
    let is_fence =
        |e: &Effect| matches!(e, Effect::Put(_, RecordKey::Session(name), ..) if name.0 == "box2");
    let times = rig.repeats("Leasing", is_fence);
    assert_backs_off(&times);
    assert_eq!(refused(&rig, Reason::TimedOut), 1);
}
