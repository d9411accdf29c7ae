//! Model check of the wake table: `RUSTFLAGS="--cfg loom" cargo test -p dormouse-link --test loom
//! --release`, bounded by `LOOM_MAX_PREEMPTIONS`, exhaustive without it.
#![cfg(loom)]
#![expect(unsafe_code, reason = "the cell whose access loom checks")]

use dormouse_link::protocol::{
    Counters, Entry, OwnWord, ReadWord, Request, enter, leave, request, resolve, try_stop,
};
use dormouse_link::{RunNumber, Word, with_fences};
use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use loom::thread;

const RUN: RunNumber = RunNumber(1);
const AWAKE: Word = Word::Awake { run: RUN };

/// The instance: a request reads it, the stop writes it; loom reports when both can happen at once.
struct World {
    word: AtomicU64,
    areas: [Counters; 2],
    instance: UnsafeCell<bool>,
}

fn a_request_races_a_stop() {
    loom::model(|| {
        let world = Arc::new(World {
            word: AtomicU64::new(AWAKE.pack()),
            areas: [Counters::new(), Counters::new()],
            instance: UnsafeCell::new(true),
        });
        let proxies: Vec<_> = (0..2)
            .map(|n| {
                let world = world.clone();
                thread::spawn(move || {
                    let area = &world.areas[n];
                    if let Entry::Counted { run } = enter(ReadWord::over(&world.word), area) {
                        assert_eq!(run, RUN);
                        world.instance.with(|up| {
                            // SAFETY: loom checks that no writer runs at the same time.
                            assert!(unsafe { *up }, "sent to a stopped instance");
                        });
                        leave(area, 1);
                    }
                })
            })
            .collect();
        if try_stop(OwnWord::over(&world.word), RUN, &world.areas).is_ok() {
            world.instance.with_mut(|up| {
                // SAFETY: loom checks that no reader runs at the same time.
                unsafe { *up = false }
            });
        }
        for proxy in proxies {
            proxy.join().unwrap();
        }
    });
}

#[test]
fn no_request_is_sent_to_a_stopped_instance() {
    with_fences(true, a_request_races_a_stop);
}

#[test]
#[should_panic(expected = "Causality violation")]
fn without_the_fences_loom_finds_the_violation() {
    with_fences(false, a_request_races_a_stop);
}

/// One loop's notices and what became of its waiter.
struct Loop {
    notice: AtomicBool,
    posted: AtomicBool,
    saw_awake: AtomicBool,
}

#[test]
fn no_waiter_is_lost() {
    loom::model(|| {
        let word = Arc::new(AtomicU64::new(Word::Asleep.pack()));
        // Two loops of one process share its area.
        let area = Arc::new(Counters::new());
        let loops: Arc<Vec<Loop>> = Arc::new(
            (0..2)
                .map(|_| Loop {
                    notice: AtomicBool::new(false),
                    posted: AtomicBool::new(false),
                    saw_awake: AtomicBool::new(false),
                })
                .collect(),
        );
        let threads: Vec<_> = (0..2)
            .map(|n| {
                let (word, area, loops) = (word.clone(), area.clone(), loops.clone());
                thread::spawn(move || {
                    let me = &loops[n];
                    // Notices handled before the waiter is listed do nothing for it.
                    me.notice.swap(false, Ordering::AcqRel);
                    match request(ReadWord::over(&word), &area) {
                        Request::Post => me.posted.store(true, Ordering::Release),
                        Request::AlreadyPosted => (),
                        Request::Awake { run, post } => {
                            assert_eq!(run, RUN);
                            me.saw_awake.store(true, Ordering::Release);
                            me.posted.store(post, Ordering::Release);
                        }
                    }
                })
            })
            .collect();
        // A wake that began by itself ends while the two arrive.
        resolve(OwnWord::over(&word), [&*area], Word::Asleep, AWAKE).unwrap();
        for each in loops.iter() {
            each.notice.store(true, Ordering::Release);
        }
        for thread in threads {
            thread.join().unwrap();
        }
        let posted = loops.iter().any(|each| each.posted.load(Ordering::Acquire));
        assert!(!area.requested() || posted, "a bit is set that nobody posted");
        for each in loops.iter() {
            let answered = each.saw_awake.load(Ordering::Acquire)
                || each.notice.load(Ordering::Acquire)
                || posted;
            assert!(answered, "invariant 5: a waiter that nobody answers");
        }
    });
}
