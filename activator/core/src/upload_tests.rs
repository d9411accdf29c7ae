use alloc::vec;

use super::*;
use crate::time::{Boot, MILLI_NS, Wall};

fn at(ms: u64) -> Now {
    let ns = ms * MILLI_NS;
    Now { mono: Mono(ns), boot: Boot(ns), wall: Wall(ms) }
}

fn until(ms: u64) -> Deadline {
    let now = at(ms);
    Deadline { mono: now.mono, boot: now.boot, wall: now.wall }
}

fn file(txid: u64) -> Spooled {
    Spooled { txid: Txid(txid), nonce: Nonce::from("ours") }
}

fn etag() -> ETag {
    ETag::from("\"e\"")
}

fn done() -> UploadInput {
    UploadInput::Put(PutAnswer::Done { etag: etag() })
}

struct World {
    uploader: Uploader,
}

impl World {
    fn new(class: Class, deadline: Option<Deadline>) -> Self {
        let settings = UploadSettings { class, ..UploadSettings::default() };
        Self { uploader: Uploader::new(settings, at(0), deadline) }
    }

    fn step(&mut self, ms: u64, input: UploadInput) -> Vec<UploadOutput> {
        let mut out = Vec::new();
        self.uploader.step(at(ms), input, &mut out);
        out
    }

    /// Up to the point where the first file is in flight.
    fn sending(deadline: Option<Deadline>) -> Self {
        let mut world = Self::new(Class::Stream, deadline);
        assert_eq!(world.step(0, UploadInput::Committed), vec![UploadOutput::Spool]);
        let out = world.step(1, UploadInput::Spooled(Some(file(1))));
        assert_eq!(out, vec![UploadOutput::Put(file(1))]);
        world
    }
}

#[test]
fn the_first_commit_after_quiet_goes_at_once_and_becomes_durable() {
    let mut world = World::sending(None);
    let out = world.step(5, done());
    assert_eq!(out, vec![UploadOutput::Durable { txid: Txid(1), etag: etag() }]);
    assert!(world.uploader.is_settled());
    assert_eq!(world.uploader.next_due(), None, "an idle host is never due");
}

#[test]
fn commits_during_an_upload_join_the_next_one() {
    let mut world = World::sending(None);
    assert_eq!(world.step(2, UploadInput::Committed), vec![]);
    assert_eq!(world.step(3, UploadInput::Committed), vec![]);
    let out = world.step(5, done());
    let durable = UploadOutput::Durable { txid: Txid(1), etag: etag() };
    assert_eq!(out, vec![durable, UploadOutput::Spool]);
}

#[test]
fn a_busy_host_spends_its_burst_and_then_one_upload_a_second() {
    let mut world = World::new(Class::Stream, None);
    let mut uploads = 0;
    for ms in 0..20_000 {
        let mut inputs = vec![UploadInput::Committed];
        while let Some(input) = inputs.pop() {
            for output in world.step(ms, input) {
                match output {
                    UploadOutput::Spool => {
                        uploads += 1;
                        inputs.push(UploadInput::Spooled(Some(file(uploads))));
                    }
                    UploadOutput::Put(_) => inputs.push(done()),
                    UploadOutput::Durable { .. } => (),
                    UploadOutput::Compare(_)
                    | UploadOutput::StandDown { .. }
                    | UploadOutput::Refused { .. } => panic!("unexpected {output:?}"),
                }
            }
        }
    }
    assert!((29..=30).contains(&uploads), "10 at once and 19 or 20 more: {uploads}");
}

#[test]
fn a_batched_host_gathers_from_its_first_commit() {
    let every = Nanos::from_secs(30);
    let mut world = World::new(Class::Batched { every }, None);
    assert_eq!(world.step(1_000, UploadInput::Committed), vec![]);
    assert_eq!(world.step(20_000, UploadInput::Committed), vec![]);
    assert_eq!(world.uploader.next_due(), Some(at(31_000).mono));
    assert_eq!(world.step(31_000, UploadInput::Tick), vec![UploadOutput::Spool]);
}

#[test]
fn a_flush_does_not_wait_for_tokens_or_batches() {
    let mut world = World::new(Class::Daily { every: Nanos::from_secs(86_400) }, None);
    world.step(0, UploadInput::Committed);
    assert_eq!(world.step(1, UploadInput::Flush), vec![UploadOutput::Spool]);
}

#[test]
fn an_unknown_outcome_repeats_the_same_file_until_it_is_definite() {
    let mut world = World::sending(None);
    assert_eq!(world.step(10, UploadInput::Put(PutAnswer::Unknown)), vec![]);
    assert!(!world.uploader.is_settled());
    let due = world.uploader.next_due().unwrap();
    assert!(due >= at(110).mono && due <= at(135).mono, "a tenth of a second and jitter");
    assert_eq!(world.step(200, UploadInput::Tick), vec![UploadOutput::Put(file(1))]);
    let out = world.step(210, UploadInput::Put(PutAnswer::ConditionFailed));
    assert_eq!(out, vec![UploadOutput::Compare(file(1))]);
    let standing = Standing::File { nonce: Some(Nonce::from("ours")), etag: etag() };
    let out = world.step(220, UploadInput::Compared(standing));
    assert_eq!(out, vec![UploadOutput::Durable { txid: Txid(1), etag: etag() }]);
}

#[test]
fn a_taken_number_with_another_nonce_or_none_means_stand_down_for_good() {
    for nonce in [Some(Nonce::from("theirs")), None] {
        let mut world = World::sending(None);
        world.step(10, UploadInput::Put(PutAnswer::ConditionFailed));
        let out = world.step(20, UploadInput::Compared(Standing::File { nonce, etag: etag() }));
        assert_eq!(out, vec![UploadOutput::StandDown { txid: Txid(1) }]);
        assert_eq!(world.step(30, UploadInput::Committed), vec![]);
        assert!(!world.uploader.is_settled());
    }
}

#[test]
fn a_taken_number_that_cannot_be_read_is_asked_about_again() {
    let mut world = World::sending(None);
    world.step(10, UploadInput::Put(PutAnswer::ConditionFailed));
    assert_eq!(world.step(20, UploadInput::Compared(Standing::Unclear)), vec![]);
    assert_eq!(world.step(500, UploadInput::Tick), vec![UploadOutput::Put(file(1))]);
}

#[test]
fn an_answer_past_the_deadline_does_not_count_until_the_session_is_renewed() {
    let mut world = World::sending(Some(until(100)));
    assert_eq!(world.step(100, done()), vec![]);
    assert_eq!(world.uploader.next_due(), None, "nothing is due past the deadline");
    assert_eq!(world.step(5_000, UploadInput::Tick), vec![]);
    let out = world.step(6_000, UploadInput::DeadlineSet(Some(until(9_000))));
    assert_eq!(out, vec![UploadOutput::Put(file(1))]);
    world.step(6_010, UploadInput::Put(PutAnswer::ConditionFailed));
    let standing = Standing::File { nonce: Some(Nonce::from("ours")), etag: etag() };
    let out = world.step(6_020, UploadInput::Compared(standing));
    assert_eq!(out, vec![UploadOutput::Durable { txid: Txid(1), etag: etag() }]);
}

#[test]
fn past_the_deadline_a_commit_is_spooled_but_not_sent() {
    let mut world = World::new(Class::Stream, Some(until(100)));
    assert_eq!(world.step(200, UploadInput::Committed), vec![UploadOutput::Spool]);
    assert_eq!(world.step(201, UploadInput::Spooled(Some(file(1)))), vec![]);
    let out = world.step(300, UploadInput::DeadlineSet(None));
    assert_eq!(out, vec![UploadOutput::Put(file(1))]);
}

#[test]
fn repeats_back_off_up_to_the_longest_wait() {
    let mut world = World::sending(None);
    let mut now = at(10).mono.0 / MILLI_NS;
    let mut waits = Vec::new();
    for _ in 0..12 {
        world.step(now, UploadInput::Put(PutAnswer::Again));
        let due = world.uploader.next_due().unwrap().0.div_ceil(MILLI_NS);
        waits.push(due - now);
        now = due;
        assert_eq!(world.step(now, UploadInput::Tick), vec![UploadOutput::Put(file(1))]);
    }
    assert!(waits.is_sorted() && *waits.last().unwrap() <= 37_500, "{waits:?}");
}

#[test]
fn a_refusal_is_told_and_tried_again_seldom() {
    let mut world = World::sending(None);
    let out = world.step(10, UploadInput::Put(PutAnswer::Refused));
    assert_eq!(out, vec![UploadOutput::Refused { txid: Txid(1) }]);
    assert!(world.uploader.next_due().unwrap() >= at(30_000).mono);
}

#[test]
fn nothing_to_spool_leaves_the_host_idle() {
    let mut world = World::new(Class::Stream, None);
    world.step(0, UploadInput::Committed);
    assert_eq!(world.step(1, UploadInput::Spooled(None)), vec![]);
    assert!(world.uploader.is_settled());
}

#[test]
fn a_failed_spool_is_tried_again() {
    let mut world = World::new(Class::Stream, None);
    world.step(0, UploadInput::Committed);
    assert_eq!(world.step(1, UploadInput::SpoolFailed), vec![]);
    assert!(!world.uploader.is_settled());
    assert_eq!(world.step(1_001, UploadInput::Tick), vec![UploadOutput::Spool]);
}

#[test]
fn a_file_of_an_earlier_process_is_sent_again_first() {
    let mut world = World::new(Class::Stream, None);
    world.uploader.resume(at(0), file(7));
    world.step(0, UploadInput::Committed);
    assert_eq!(world.uploader.in_flight(), Some(&file(7)));
    let mut world = World::new(Class::Stream, None);
    world.uploader.resume(at(0), file(7));
    assert_eq!(world.step(0, UploadInput::Tick), vec![UploadOutput::Put(file(7))]);
}

#[test]
fn a_deadline_that_passed_by_one_clock_alone_holds_the_upload_without_a_busy_loop() {
    let mut world = World::new(Class::Stream, Some(until(100)));
    let woken = Now { boot: Boot(200 * MILLI_NS), ..at(50) };
    let mut out = Vec::new();
    world.uploader.step(woken, UploadInput::Committed, &mut out);
    world.uploader.step(woken, UploadInput::Spooled(Some(file(1))), &mut out);
    assert_eq!(out, vec![UploadOutput::Spool]);
    assert_eq!(world.uploader.next_due(), None);
}

#[test]
fn a_commit_of_a_held_host_does_not_wake_anyone() {
    let mut world = World::new(Class::Stream, Some(until(100)));
    world.step(200, UploadInput::Committed);
    world.step(201, UploadInput::Spooled(Some(file(1))));
    assert_eq!(world.step(300, UploadInput::Committed), vec![]);
    assert_eq!(world.uploader.next_due(), None);
}

#[test]
fn a_renewed_session_sends_what_waits_at_once_and_a_passed_one_does_not() {
    let waiting = || {
        let mut world = World::sending(Some(until(60_000)));
        for ms in [10, 1_000, 4_000, 12_000] {
            world.step(ms, UploadInput::Tick);
            world.step(ms, UploadInput::Put(PutAnswer::Again));
        }
        world
    };
    let mut world = waiting();
    assert_eq!(world.step(12_100, UploadInput::Tick), vec![], "it waits longer than that");
    let out = world.step(12_100, UploadInput::DeadlineSet(Some(until(90_000))));
    assert_eq!(out, vec![UploadOutput::Put(file(1))]);
    let mut world = waiting();
    assert_eq!(world.step(12_100, UploadInput::DeadlineSet(Some(until(12_000)))), vec![]);
}
