//! A snapshot of every state × event: what the host becomes, and what is to be done.
//!
//! The table is `host_snapshots.txt`; after a change that is meant, `DORMOUSE_BLESS=1 cargo test -p
//! dormouse-core` writes it anew, and the diff is read like code.

extern crate std;

use alloc::collections::BTreeMap;
use alloc::format;
use alloc::string::String;
use alloc::vec::Vec;

use crate::Core;
use crate::effect::Effect;
use crate::event::{Answer, Cause, Event, Got, StoreProblem, Subject, Ticket, Uploaded, Wrote};
use crate::ids::{Attempt, Run};
use crate::rig::{Rig, SLOT, label};
use crate::session::Turn;
use crate::time::{Nanos, Now};

const TABLE: &str = include_str!("host_snapshots.txt");

#[test]
fn the_table_of_states_and_events_is_as_committed() {
    let table = table();
    if std::env::var_os("DORMOUSE_BLESS").is_some() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/src/host_snapshots.txt");
        return std::fs::write(path, table).unwrap();
    }
    for (line, (is, was)) in table.lines().zip(TABLE.lines()).enumerate() {
        assert_eq!(is, was, "line {}", line + 1);
    }
    assert_eq!(table, TABLE, "the table has other lines");
}

#[test]
fn the_table_has_every_state() {
    let states = states();
    for state in [
        "Asleep",
        "Leasing.AwaitSession",
        "Leasing.Reading",
        "Leasing.OwnerSession",
        "Leasing.Overthrowing",
        "Leasing.AskingAgain",
        "Leasing.Putting",
        "Leasing.Checking",
        "Leasing.Pausing",
        "Restoring.Inspecting",
        "Restoring.Listing",
        "Restoring.Fetching",
        "Restoring.Fencing",
        "Restoring.Applying",
        "Restoring.Imaging",
        "Restoring.Relisting",
        "Restoring.Adopting",
        "Restoring.Forking",
        "Opening",
        "Starting",
        "Attaching",
        "Resuming",
        "Awake",
        "Freezing",
        "Frozen",
        "Thawing",
        "Stopping.Taking",
        "Stopping.AskingAwake",
        "Stopping.Asking",
        "Stopping.Terminating",
        "Stopping.Killing",
        "Saving",
        "Parking.Putting",
        "Parking.Checking",
        "Parking.Pausing",
        "Fenced",
        "Unproven",
        "Backoff",
    ] {
        assert!(states.contains_key(state), "{state} was not met");
    }
}

/// A core for each state of its one host.
fn states() -> BTreeMap<String, (Core, Now)> {
    let mut met = BTreeMap::new();
    let paths: [fn(&mut Rig); 8] = [
        sleep_and_release,
        lease_trouble,
        over_another,
        keep,
        stop_trouble,
        broken,
        stood_down,
        restarted,
    ];
    for path in paths {
        let mut rig = Rig::new(None);
        path(&mut rig);
        collect(&mut met, rig);
    }
    for path in [overthrow, fork] {
        let mut rig = Rig::automatic();
        path(&mut rig);
        collect(&mut met, rig);
    }
    let mut frozen = Rig::new(Some(Nanos::from_secs(60)));
    request(&mut frozen);
    frozen.until("Frozen");
    request(&mut frozen);
    frozen.until("Awake");
    collect(&mut met, frozen);
    met
}

fn collect(met: &mut BTreeMap<String, (Core, Now)>, rig: Rig) {
    for (label, core) in rig.met {
        met.entry(label).or_insert(core);
    }
}

fn request(rig: &mut Rig) {
    rig.step(Event::Requested(SLOT, Cause::Client));
}

fn restarted(rig: &mut Rig) {
    request(rig);
    rig.until("Awake");
    rig.settle();
    rig.restart(true);
}

fn sleep_and_release(rig: &mut Rig) {
    request(rig);
    rig.until("Awake");
    rig.until("Asleep");
    rig.step(Event::Removed(SLOT));
    rig.until("Parking.Putting");
    rig.answer(Answer::Wrote(Wrote::ConditionFailed));
    rig.answer(Answer::Got(Got::Failed(StoreProblem::Broken("x".into()))));
    rig.until("Parking.Putting");
}

fn lease_trouble(rig: &mut Rig) {
    request(rig);
    rig.until("Leasing.Putting");
    rig.answer(Answer::Wrote(Wrote::Unknown));
    rig.until("Leasing.Putting");
    rig.answer(Answer::Wrote(Wrote::ConditionFailed));
    rig.answer(Answer::Got(Got::Absent));
}

fn over_another(rig: &mut Rig) {
    rig.foreign(true, 3);
    rig.remote(3);
    request(rig);
    rig.until("Restoring.Fencing");
    rig.answer(Answer::Uploaded(Uploaded::Taken { own: false }));
    rig.answer(Answer::Fetched(Ok(crate::position::RemoteTip::tagged(
        crate::ids::Txid(4),
        "\"late\"".into(),
    ))));
    rig.answer(Answer::Uploaded(Uploaded::Unknown));
    rig.until("Awake");
}

fn keep(rig: &mut Rig) {
    request(rig);
    rig.until("Awake");
    rig.saves =
        Some(crate::event::Saved::Unclean { durable: crate::ids::Txid(1), why: "x".into() });
    rig.remote(1);
    rig.step(Event::Rest(SLOT));
    rig.until("Asleep");
    request(rig);
    rig.until("Restoring.Imaging");
    rig.answer(Answer::Uploaded(Uploaded::Taken { own: true }));
}

fn stop_trouble(rig: &mut Rig) {
    request(rig);
    rig.until("Awake");
    rig.step(Event::Rest(SLOT));
    rig.until("Stopping.Terminating");
    // Nobody answers: the grace ends, then the proof's time.
    for _ in 0..2 {
        rig.pass(Nanos::from_secs(30));
        rig.step(Event::Sweep(Vec::new()));
    }
}

fn broken(rig: &mut Rig) {
    request(rig);
    rig.until("Starting");
    rig.answer(Answer::StartFailed("x".into()));
    rig.until("Backoff");
}

fn stood_down(rig: &mut Rig) {
    request(rig);
    rig.until("Awake");
    rig.step(Event::StoodDown(SLOT));
}

fn overthrow(rig: &mut Rig) {
    rig.foreign(false, 3);
    rig.remote(3);
    rig.age = Some(Nanos::from_secs(60));
    request(rig);
    rig.until("Leasing.Overthrowing");
    rig.answer(Answer::Wrote(Wrote::Unknown));
    rig.until("Awake");
}

fn fork(rig: &mut Rig) {
    request(rig);
    rig.until("Awake");
    rig.step(Event::StoodDown(SLOT));
    rig.foreign(false, 3);
    rig.until("Restoring.Forking");
}

type Input = fn(&mut Core, Now, &mut Vec<Effect>);

const INPUTS: [(&str, Input); 13] = [
    ("a request", |core, now, fx| core.step(now, Event::Requested(SLOT, Cause::Client), fx)),
    ("due", |core, now, fx| core.step(now, Event::Requested(SLOT, Cause::Due), fx)),
    ("rest", |core, now, fx| core.step(now, Event::Rest(SLOT), fx)),
    ("removed", |core, now, fx| core.step(now, Event::Removed(SLOT), fx)),
    ("died", |core, now, fx| core.step(now, Event::Died(SLOT, Run(1)), fx)),
    ("another died", |core, now, fx| core.step(now, Event::Died(SLOT, Run(99)), fx)),
    ("stood down", |core, now, fx| core.step(now, Event::StoodDown(SLOT), fx)),
    ("shutdown", |core, now, fx| core.step(now, Event::Shutdown, fx)),
    ("hand out", |core, now, fx| core.step(now, Event::HandOut(SLOT), fx)),
    ("take in", |core, now, fx| core.step(now, Event::TakeIn(SLOT), fx)),
    ("session lost", |core, now, fx| core.turn(now, Turn::Lost, fx)),
    ("an hour passes", |core, now, fx| {
        let span = Nanos::from_secs(3600);
        let later = Now { mono: now.mono + span, boot: now.boot + span, wall: now.wall + span };
        core.step(later, Event::Sweep(Vec::new()), fx);
    }),
    ("an old answer", |core, now, fx| {
        let ticket = Ticket { subject: Subject::Host(SLOT), attempt: Attempt(0) };
        core.step(now, Event::Answer(ticket, Answer::Empty), fx);
    }),
];

/// One line a state and event: the event, the state after it, the effects on the host.
fn table() -> String {
    let mut table = String::new();
    for (state, (core, now)) in states() {
        table.push_str(&state);
        table.push('\n');
        for (input, act) in &INPUTS {
            let (mut core, mut effects) = (core.clone(), Vec::new());
            act(&mut core, now, &mut effects);
            let done: Vec<String> = effects.iter().map(name).collect();
            let line = format!("  {input:<15} {:<21} {}", label(&core), done.join(", "));
            table.push_str(line.trim_end());
            table.push('\n');
        }
    }
    table
}

/// An effect by its name; words, records and reasons with theirs.
fn name(effect: &Effect) -> String {
    let text = if let Effect::Publish(_, word) = effect {
        format!("Publish {word:?}")
    } else if let Effect::Refuse(_, failure) = effect {
        format!("Refuse {:?}", failure.reason)
    } else if let Effect::Get(_, key) = effect {
        format!("Get {key:?}")
    } else if let Effect::Put(_, key, ..) = effect {
        format!("Put {key:?}")
    } else {
        format!("{effect:?}")
    };
    let short = |c: &char| c.is_ascii_alphanumeric() || *c == ' ';
    text.chars().take_while(short).collect::<String>().trim().into()
}
