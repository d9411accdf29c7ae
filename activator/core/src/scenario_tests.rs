//! Short stories of one host and its session, each of which went wrong once.

use alloc::string::ToString;
use alloc::vec::Vec;

use crate::effect::{Effect, Reason, RecordKey, TakeoverEnd, Word};
use crate::event::{Answer, Cause, Event, Saved, StoreProblem, Wrote};
use crate::ids::{Epoch, Run, Txid};
use crate::position::RemoteTip;
use crate::record::{HostRecord, HostState, SessionRecord};
use crate::rig::{HOST, Rig, SLOT, assert_backs_off};
use crate::time::Nanos;

fn request(rig: &mut Rig) {
    rig.step(Event::Requested(SLOT, Cause::Client));
}

fn said(rig: &Rig, is: impl Fn(&Effect) -> bool) -> usize {
    rig.said.iter().filter(|effect| is(effect)).count()
}

#[test]
fn a_request_wakes_and_idleness_puts_to_sleep() {
    let mut rig = Rig::new(None);
    request(&mut rig);
    rig.until("Awake");
    assert_eq!(said(&rig, |e| *e == Effect::Publish(SLOT, Word::Awake(Run(1)))), 1);
    rig.until("Asleep");
    let puts = said(&rig, |e| matches!(e, Effect::Put(_, RecordKey::Host(_), ..)));
    request(&mut rig);
    rig.until("Awake");
    let again = said(&rig, |e| matches!(e, Effect::Put(_, RecordKey::Host(_), ..)));
    assert_eq!(puts, again, "waking what this session owns asks the store nothing");
}

#[test]
fn a_released_record_names_the_newest_file_only_until_the_replica_is_opened() {
    let mut rig = Rig::new(None);
    // Another box released it at 3; this box runs it on to 5, and then sleeps unclean.
    rig.foreign(true, 3);
    let key = RecordKey::Host(HOST.into());
    let (body, etag) = rig.records.get(&key).cloned().unwrap();
    let record = HostRecord::decode(&body).unwrap();
    let record = HostRecord { state: HostState::Released, ..record };
    rig.records.insert(key, (record.encode(), etag));
    rig.remote(3);
    request(&mut rig);
    rig.until("Awake");
    rig.copy(8, 5, false);
    rig.remote(5);
    rig.saves = Some(Saved::Unclean { durable: Txid(5), why: "the store is away".into() });
    rig.step(Event::Rest(SLOT));
    rig.until("Asleep");
    request(&mut rig);
    rig.until("Awake");
    let image = said(&rig, |e| matches!(e, Effect::PutImage(_, _, Txid(6), _)));
    assert_eq!(image, 1, "kept, and uploaded above what this box wrote itself");
}

#[test]
fn a_clean_copy_over_another_boxs_unclean_record_is_fenced_before_it_runs() {
    let mut rig = Rig::new(None);
    rig.foreign(true, 3);
    rig.copy(6, 3, true);
    rig.remote(3);
    request(&mut rig);
    rig.until("Awake");
    let fence = said(&rig, |e| matches!(e, Effect::PutImage(_, _, Txid(4), _)));
    assert_eq!(fence, 1, "a late file 4 of the other box must find its number taken");
}

#[test]
fn a_restore_that_ends_with_a_snapshot_keeps_the_tag_that_the_list_gave() {
    let mut rig = Rig::new(None);
    rig.remote(3);
    let kept = rig.tip.clone().unwrap();
    request(&mut rig);
    rig.until("Restoring.Fetching");
    rig.answer(Answer::Fetched(Ok(RemoteTip { txid: Txid(3), etag: None })));
    rig.until("Awake");
    assert_eq!(said(&rig, |e| matches!(e, Effect::Adopt(.., tip) if *tip == kept)), 1);
}

#[test]
fn a_death_between_healthy_and_awake_is_not_missed() {
    let mut rig = Rig::new(None);
    request(&mut rig);
    rig.until("Attaching");
    rig.step(Event::Died(SLOT, Run(1)));
    rig.until("Backoff");
    assert_eq!(said(&rig, |e| *e == Effect::Publish(SLOT, Word::Awake(Run(1)))), 0);
}

#[test]
fn a_death_whose_news_overtakes_the_news_of_health_is_not_missed() {
    let mut rig = Rig::new(None);
    request(&mut rig);
    rig.until("Starting");
    rig.step(Event::Died(SLOT, Run(1)));
    rig.answer(Answer::Healthy(Run(1)));
    assert_eq!(rig.label(), "Stopping.Killing");
}

#[test]
fn a_death_during_the_question_of_the_table_stops_the_host() {
    let mut rig = Rig::new(None);
    request(&mut rig);
    rig.until("Stopping.Taking");
    rig.step(Event::Died(SLOT, Run(1)));
    rig.answer(Answer::StopBusy);
    assert_eq!(rig.label(), "Stopping.Terminating", "a dead instance is not busy");
}

#[test]
fn a_box_that_lost_its_disk_takes_over_its_former_self() {
    let mut rig = Rig::new(None);
    rig.foreign(false, 0);
    let key = RecordKey::Session("box2".into());
    let (body, etag) = rig.records.remove(&key).unwrap();
    let session = SessionRecord { name: "box1".into(), ..SessionRecord::decode(&body).unwrap() };
    rig.records.insert(RecordKey::Session("box1".into()), (session.encode(), etag));
    rig.settle();
    assert_eq!(rig.core.session(rig.now).0, "refused", "the name is another box's");
    rig.step(Event::Takeover("box1".into()));
    for _ in 0..200 {
        rig.settle();
        rig.pass_time();
    }
    let fenced = Effect::TakeoverEnded("box1".into(), TakeoverEnd::Fenced);
    assert_eq!(said(&rig, |e| *e == fenced), 1, "{:?}", rig.said);
    assert_eq!(rig.core.session(rig.now).0, "live");
}

#[test]
fn a_box_does_not_take_itself_over() {
    let mut rig = Rig::new(None);
    rig.settle();
    rig.step(Event::Takeover("box1".into()));
    rig.settle();
    let refused = |e: &Effect| matches!(e, Effect::TakeoverEnded(_, TakeoverEnd::Refused(_)));
    assert_eq!(said(&rig, refused), 1);
}

#[test]
fn a_lost_session_does_not_lift_the_deadline_of_uploads() {
    let mut rig = Rig::new(None);
    request(&mut rig);
    rig.until("Awake");
    let key = RecordKey::Session("box1".into());
    let (body, _) = rig.records.get(&key).cloned().unwrap();
    let record = SessionRecord::decode(&body).unwrap();
    let fence = SessionRecord { nonce: "z".into(), fenced_by: Some("box2".into()), ..record };
    rig.records.insert(key, (fence.encode(), "\"fence\"".to_string().as_str().into()));
    rig.pass(Nanos::from_secs(11));
    rig.step(Event::Sweep(Vec::new()));
    rig.until("Fenced");
    assert_eq!(said(&rig, |e| *e == Effect::Deadline(None)), 0, "none would mean: no limit");
}

fn record(rig: &Rig) -> HostRecord {
    let (body, _) = rig.records.get(&RecordKey::Host(HOST.into())).cloned().unwrap();
    HostRecord::decode(&body).unwrap()
}

#[test]
fn a_host_goes_to_an_outside_supervisor_and_comes_back_with_what_was_written_there() {
    let mut rig = Rig::new(None);
    request(&mut rig);
    rig.until("Awake");
    rig.copy(1, 2, true);
    rig.remote(2);
    rig.step(Event::HandOut(SLOT));
    rig.settle();
    assert_eq!(said(&rig, |e| *e == Effect::Handed(SLOT, Ok(()))), 1, "{:?}", rig.said);
    assert_eq!((record(&rig).state, record(&rig).txid), (HostState::Outside, Txid(2)));
    // A visit wakes nobody; another box refuses by the same record.
    request(&mut rig);
    rig.until("Backoff");
    assert_eq!(said(&rig, |e| matches!(e, Effect::Spawn(..))), 1);
    // The outside supervisor writes.
    rig.local.file = Some(crate::position::FileId { inode: 1, size: 8192, ctime_ns: 9 });
    rig.step(Event::TakeIn(SLOT));
    rig.settle();
    assert_eq!(said(&rig, |e| *e == Effect::Handed(SLOT, Ok(()))), 2, "{:?}", rig.said);
    assert_eq!(said(&rig, |e| matches!(e, Effect::PutImage(_, _, Txid(3), _))), 1);
    assert_eq!((record(&rig).state, record(&rig).generation.0), (HostState::Owned, 2));
    request(&mut rig);
    rig.until("Awake");
}

#[test]
fn a_handover_that_cannot_be_says_why_and_changes_nothing() {
    let handed = |rig: &Rig| {
        rig.said.iter().rev().find_map(|e| {
            let Effect::Handed(_, how) = e else { return None };
            Some(how.clone())
        })
    };
    let mut rig = Rig::new(None);
    rig.settle();
    rig.step(Event::TakeIn(SLOT));
    rig.settle();
    assert_eq!(handed(&rig), Some(Ok(())), "it was never outside: taken as it is");
    rig.step(Event::TakeIn(SLOT));
    assert!(handed(&rig).unwrap().unwrap_err().contains("not outside"));
    // What cannot be uploaded is not handed out.
    request(&mut rig);
    rig.until("Awake");
    rig.saves = Some(Saved::Unclean { durable: Txid(1), why: "the store is away".into() });
    rig.step(Event::HandOut(SLOT));
    rig.settle();
    assert!(handed(&rig).unwrap().unwrap_err().contains("the store is away"));
    assert_eq!(record(&rig).state, HostState::Owned);
    // A store that refuses the record ends it at once: the host stays ours.
    let mut rig = Rig::new(None);
    request(&mut rig);
    rig.until("Awake");
    rig.copy(1, 2, true);
    rig.remote(2);
    rig.step(Event::HandOut(SLOT));
    rig.until("Parking.Putting");
    rig.answer(Answer::Wrote(Wrote::Failed(StoreProblem::Broken("slow down".into()))));
    assert!(handed(&rig).unwrap().unwrap_err().contains("slow down"), "{:?}", handed(&rig));
    assert_eq!((rig.label(), record(&rig).state), ("Asleep".to_string(), HostState::Owned));
    request(&mut rig);
    rig.until("Awake");
    // Nor is an instance stopped for it while the session is not renewed.
    let mut rig = Rig::new(None);
    request(&mut rig);
    rig.until("Awake");
    rig.away = true;
    rig.pass(Nanos::from_secs(60));
    rig.step(Event::HandOut(SLOT));
    assert!(handed(&rig).unwrap().unwrap_err().contains("not renewed"), "{:?}", handed(&rig));
    assert_eq!(rig.label(), "Awake");
    // Out twice.
    let mut rig = Rig::new(None);
    request(&mut rig);
    rig.until("Awake");
    rig.step(Event::HandOut(SLOT));
    rig.settle();
    assert_eq!(handed(&rig), Some(Ok(())));
    rig.step(Event::HandOut(SLOT));
    rig.settle();
    let why = handed(&rig).unwrap().unwrap_err();
    assert!(why.starts_with("the host was not handed out: an outside supervisor"), "{why}");
    // Another box handed it out, and is alive; then it is gone.
    let mut rig = Rig::new(None);
    rig.settle();
    rig.foreign(true, 3);
    let outside = HostRecord { state: HostState::Outside, ..record(&rig) };
    let etag = "\"o\"".to_string();
    rig.records.insert(RecordKey::Host(HOST.into()), (outside.encode(), etag.as_str().into()));
    rig.remote(3);
    rig.step(Event::TakeIn(SLOT));
    rig.settle();
    assert_eq!(handed(&rig), Some(Ok(())), "its box is gone");
    assert_eq!(said(&rig, |e| matches!(e, Effect::PutFence(_, _, Txid(4), _))), 1);
}

#[test]
fn what_another_box_handed_out_stays_its_own_over_its_restarts() {
    for restarts in [0, 1] {
        let mut rig = Rig::new(None);
        rig.settle();
        rig.foreign(false, 3);
        let outside = HostRecord { state: HostState::Outside, ..record(&rig) };
        rig.records.insert(RecordKey::Host(HOST.into()), (outside.encode(), "\"o\"".into()));
        let key = RecordKey::Session("box2".into());
        let (body, etag) = rig.records.get(&key).cloned().unwrap();
        let session = SessionRecord::decode(&body).unwrap();
        let epoch = Epoch(session.epoch.0 + restarts);
        rig.records.insert(key, (SessionRecord { epoch, ..session }.encode(), etag));
        rig.step(Event::TakeIn(SLOT));
        rig.settle();
        let handed = rig.said.iter().rev().find_map(|effect| {
            let Effect::Handed(_, how) = effect else { return None };
            how.clone().err()
        });
        let why = handed.unwrap();
        assert!(why.contains("`dormouse hibernate h.test --on` on that box"), "{why}");
        assert!(why.contains("first run `dormouse takeover box2` here"), "{why}");
        assert_eq!(record(&rig).state, HostState::Outside);
    }
}

#[test]
fn a_store_that_is_away_is_told_to_those_who_wait_after_a_short_patience() {
    let mut rig = Rig::new(None);
    rig.away = true;
    rig.settle();
    request(&mut rig);
    assert_eq!(rig.label(), "Leasing.AwaitSession", "it may be a moment only");
    rig.until("Backoff");
    let told = |e: &Effect| {
        matches!(e, Effect::Refuse(_, failure)
            if failure.reason == Reason::StoreDown && failure.detail.contains("away"))
    };
    assert_eq!(said(&rig, told), 1);
    assert!(rig.core.session(rig.now).1.contains("away"), "{:?}", rig.core.session(rig.now));
    // It is back: the next try comes soon, and the next request is served.
    rig.away = false;
    rig.pass(Nanos::from_secs(10));
    rig.step(Event::Sweep(Vec::new()));
    rig.settle();
    assert_eq!(rig.core.session(rig.now).0, "live");
    assert_eq!(rig.label(), "Asleep", "nobody waits for a backoff that has no cause any more");
    request(&mut rig);
    rig.until("Awake");
}

#[test]
fn a_shutdown_during_the_question_of_the_table_is_not_taken_back() {
    let mut rig = Rig::new(None);
    request(&mut rig);
    rig.until("Stopping.Taking");
    rig.step(Event::Shutdown);
    rig.answer(Answer::StopBusy);
    assert_eq!(rig.label(), "Stopping.Asking");
}

#[test]
fn a_request_while_the_host_is_being_frozen_thaws_it() {
    let mut rig = Rig::new(Some(Nanos::from_secs(60)));
    request(&mut rig);
    rig.until("Freezing");
    request(&mut rig);
    assert_eq!(rig.label(), "Thawing");
    rig.until("Awake");
}

#[test]
fn a_host_is_asked_for_its_due_time_before_it_is_frozen_and_thawed_by_it() {
    let mut rig = Rig::new(Some(Nanos::from_secs(3600)));
    request(&mut rig);
    rig.until("Stopping.AskingAwake");
    let due = rig.now.wall + Nanos::from_secs(600);
    rig.answer(Answer::Due(Ok(Some(due))));
    rig.until("Frozen");
    // In the middle of the frost.
    rig.until("Thawing");
    assert!(rig.now.wall >= due && rig.now.wall < due + Nanos::from_secs(60));
    rig.until("Awake");
}

#[test]
fn a_request_during_the_question_before_the_frost_finds_it_awake() {
    let mut rig = Rig::new(Some(Nanos::from_secs(3600)));
    request(&mut rig);
    rig.until("Stopping.AskingAwake");
    request(&mut rig);
    rig.answer(Answer::Due(Ok(None)));
    assert_eq!(rig.label(), "Awake");
}

#[test]
fn an_instance_that_dies_during_the_question_before_the_frost_is_stopped() {
    let mut rig = Rig::new(Some(Nanos::from_secs(3600)));
    request(&mut rig);
    rig.until("Stopping.AskingAwake");
    let run = rig.core.host(SLOT).and_then(|view| view.run).expect("it runs");
    rig.step(Event::Died(SLOT, run));
    assert_eq!(rig.label(), "Stopping.Terminating");
}

#[test]
fn a_host_whose_upload_is_on_its_way_is_not_released() {
    let mut rig = Rig::new(None);
    rig.copy(1, 0, false);
    rig.local.position = None;
    request(&mut rig);
    rig.until("Restoring.Imaging");
    rig.step(Event::Removed(SLOT));
    assert_eq!(rig.label(), "Gone", "the record stays owned: whoever comes next fences it");
    let releases =
        said(&rig, |e| matches!(e, Effect::Journal(crate::effect::Entry::Releasing { .. })));
    assert_eq!(releases, 0);
}

#[test]
fn a_lease_that_is_on_its_way_when_its_host_is_removed_is_taken_and_given_back() {
    let mut rig = Rig::new(None);
    request(&mut rig);
    rig.until("Leasing.Putting");
    rig.step(Event::Removed(SLOT));
    assert_eq!(rig.label(), "Leasing.Putting", "its write may still land");
    rig.settle();
    assert_eq!(said(&rig, |e| *e == Effect::Retired(SLOT)), 1);
    let (body, _) = rig.records.get(&RecordKey::Host(HOST.into())).cloned().unwrap();
    let record = HostRecord::decode(&body).unwrap();
    assert_eq!(record.state, HostState::Released, "another box may take it");
    assert_eq!(said(&rig, |e| matches!(e, Effect::Spawn(..))), 0);
}

#[test]
fn an_image_whose_outcome_stays_unknown_is_repeated_ever_more_slowly() {
    let mut rig = Rig::new(None);
    request(&mut rig);
    rig.until("Awake");
    rig.saves = Some(Saved::Unclean { durable: Txid(1), why: "the store is away".into() });
    rig.remote(1);
    rig.step(Event::Rest(SLOT));
    rig.until("Asleep");
    request(&mut rig);
    rig.until("Restoring.Imaging");
    let times = rig.repeats("Restoring.Imaging", |e| matches!(e, Effect::PutImage(..)));
    assert_backs_off(&times);
    let late = |e: &Effect| matches!(e, Effect::Refuse(_, f) if f.reason == Reason::TimedOut);
    assert_eq!(said(&rig, late), 1, "and who waits is told at the end of the wake's budget");
}

#[test]
fn a_fence_whose_outcome_stays_unknown_is_repeated_ever_more_slowly() {
    let mut rig = Rig::new(None);
    rig.foreign(true, 3);
    rig.remote(3);
    request(&mut rig);
    rig.until("Restoring.Fencing");
    let times = rig.repeats("Restoring.Fencing", |e| matches!(e, Effect::PutFence(..)));
    assert_backs_off(&times);
    rig.lost = |_| false;
    rig.until("Asleep");
    request(&mut rig);
    rig.until("Awake");
}
