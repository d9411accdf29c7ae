use super::*;

const SETTINGS: LevelSettings = LevelSettings {
    windows_ms: [30, 300, 3600],
    snapshot_ms: 86_400,
    l0_retention_ms: 300,
    retention_ms: 86_400,
    local_bytes_max: 0,
    merge_bytes_max: 1 << 20,
    audit_ms: i64::MAX,
    retry_ms: 1,
};

fn key(level: u8, min: u64, max: u64) -> LtxKey {
    LtxKey { level, min: Txid(min), max: Txid(max) }
}

fn inventory(files: &[(LtxKey, i64)]) -> Inventory {
    let mut inventory = Inventory::empty();
    for (key, ms) in files {
        let age = Age::Of(*ms);
        let is_image = key.min == Txid(1);
        let size = if is_image { 100 } else { 10 };
        inventory.add(*key, Known { size, age, is_fence: Some(false), is_image });
    }
    inventory
}

fn keys(files: &[RemoteFile]) -> Vec<LtxKey> {
    files.iter().map(|file| file.key).collect()
}

#[test]
fn one_file_is_never_due_and_two_are_at_the_end_of_the_window() {
    assert_eq!(inventory(&[]).next_due(&SETTINGS, 0), None);
    assert_eq!(inventory(&[(key(0, 1, 1), 5)]).next_due(&SETTINGS, 1 << 40), None);
    let two = inventory(&[(key(0, 1, 1), 5), (key(0, 2, 2), 29)]);
    let due = two.next_due(&SETTINGS, 6).unwrap();
    let Job::Merge { level: 1, inputs } = due.job else { panic!("{due:?}") };
    assert_eq!((due.at_ms, keys(&inputs)), (30, vec![key(0, 1, 1), key(0, 2, 2)]));
}

#[test]
fn a_level_gathers_what_it_does_not_hold_yet() {
    let files = [(key(1, 1, 3), 25), (key(1, 4, 6), 55), (key(2, 1, 3), 25), (key(1, 7, 9), 85)];
    let due = inventory(&files).next_due(&SETTINGS, 0).unwrap();
    let Job::Merge { level: 2, inputs } = due.job else { panic!("{due:?}") };
    assert_eq!((due.at_ms, keys(&inputs)), (300, vec![key(1, 4, 6), key(1, 7, 9)]));
}

#[test]
fn a_gap_is_never_gathered_over() {
    let files = [(key(9, 1, 2), 1), (key(0, 3, 3), 1), (key(0, 4, 4), 1), (key(0, 6, 6), 1)];
    let due = inventory(&files).next_due(&SETTINGS, 0).unwrap();
    let Job::Merge { level: 1, inputs } = due.job else { panic!("{due:?}") };
    assert_eq!(keys(&inputs), [key(0, 3, 3), key(0, 4, 4)]);
}

#[test]
fn a_heavy_image_becomes_a_snapshot_and_level_1_goes_on_behind_it() {
    let mut files = inventory(&[(key(0, 1, 1), 5), (key(0, 2, 2), 6), (key(0, 3, 3), 7)]);
    let heavy = Known { size: 1 << 20, age: Age::Of(8), is_fence: Some(true), is_image: true };
    files.add(key(0, 4, 4), heavy);
    files.add(key(0, 5, 5), Known { size: 1, is_image: false, ..heavy });
    let due = files.next_due(&SETTINGS, 0).unwrap();
    let Job::Merge { level: 1, inputs } = due.job else { panic!("{due:?}") };
    assert_eq!(keys(&inputs), [key(0, 1, 1), key(0, 2, 2), key(0, 3, 3)]);
    let merged = Known { size: 3, age: Age::Of(7), is_fence: Some(false), is_image: false };
    files.add(key(1, 1, 3), merged);
    let due = files.next_due(&SETTINGS, 0).unwrap();
    let Job::Snapshot { inputs } = due.job else { panic!("{due:?}") };
    assert_eq!(keys(&inputs), [key(0, 4, 4)]);
    files.add(key(9, 1, 4), Known { size: 1 << 20, ..merged });
    files.add(key(0, 6, 6), merged);
    let due = files.next_due(&SETTINGS, 0).unwrap();
    let Job::Merge { level: 1, inputs } = due.job else { panic!("{due:?}") };
    assert_eq!(keys(&inputs), [key(0, 5, 5), key(0, 6, 6)]);
}

fn deleted(inventory: &Inventory, now_ms: i64) -> Vec<LtxKey> {
    match inventory.deletes(&SETTINGS, now_ms) {
        Some(Due { job: Job::Delete { files }, .. }) => files.iter().map(|(key, _)| *key).collect(),
        Some(other) => panic!("{other:?}"),
        None => Vec::new(),
    }
}

#[test]
fn an_l0_goes_when_it_is_covered_and_old_but_never_the_newest_and_never_a_fence() {
    let l0s = [(key(0, 1, 1), 10), (key(0, 2, 2), 20), (key(0, 3, 3), 30)];
    assert_eq!(deleted(&inventory(&l0s), i64::MAX), []);
    let mut files = inventory(&l0s);
    files.add(
        key(1, 1, 3),
        Known { size: 1, age: Age::Of(30), is_fence: Some(false), is_image: true },
    );
    assert_eq!(deleted(&files, 309), []);
    assert_eq!(deleted(&files, 310), [key(0, 1, 1)]);
    assert_eq!(deleted(&files, i64::MAX), [key(0, 1, 1), key(0, 2, 2)]);
    for (name, is_fence) in [(1, Some(true)), (2, None)] {
        let fence = Known { size: 1, age: Age::Of(10), is_fence, is_image: false };
        files.add(key(0, name, name), fence);
    }
    assert_eq!(deleted(&files, i64::MAX), [key(0, 2, 2)], "asked for, and then looked at");
}

#[test]
fn what_a_restore_within_the_retention_may_need_is_kept() {
    let day = SETTINGS.retention_ms;
    let files = inventory(&[
        (key(9, 1, 10), 1000),
        (key(9, 1, 20), 2000),
        (key(9, 1, 30), 3000),
        (key(1, 1, 15), 1500),
        (key(1, 16, 25), 2500),
        (key(1, 26, 35), 3500),
        (key(0, 8, 8), 800),
        (key(0, 36, 36), 3600),
    ]);
    // A restore to any time after 2500 begins at the snapshot of time 2000.
    let gone = deleted(&files, day + 2500);
    assert_eq!(gone, [key(0, 8, 8), key(1, 1, 15), key(9, 1, 10)]);
    let gone = deleted(&files, i64::MAX);
    assert!(!gone.contains(&key(9, 1, 30)) && !gone.contains(&key(1, 26, 35)), "never the last");
    assert!(gone.contains(&key(9, 1, 20)) && gone.contains(&key(1, 16, 25)));
}

#[test]
fn an_unknown_replica_is_listed_once_this_visit_has_something_to_gather() {
    let mut unknown = Inventory::unknown();
    let known = Known { size: 1, age: Age::Of(5), is_fence: Some(false), is_image: false };
    unknown.add(key(0, 7, 7), known);
    assert_eq!(unknown.next_due(&SETTINGS, 1 << 40), None);
    unknown.add(key(0, 8, 8), known);
    assert_eq!(unknown.next_due(&SETTINGS, 0), Some(Due { at_ms: 30, job: Job::List }));
}

#[test]
fn every_settled_inventory_comes_to_rest() {
    let mut files = inventory(&[(key(0, 1, 1), 5), (key(0, 2, 2), 6), (key(0, 3, 3), 31)]);
    let mut jobs = 0;
    let mut now = 0;
    while let Some(due) = files.next_due(&SETTINGS, now) {
        jobs += 1;
        assert!(jobs < 20, "{due:?}");
        if now < due.at_ms {
            now = due.at_ms;
            continue;
        }
        let known =
            |ms| Known { size: 50, age: Age::Of(ms), is_fence: Some(false), is_image: false };
        match due.job {
            Job::List => panic!("it is complete"),
            Job::Merge { level, inputs } => {
                let (first, last) = (inputs[0].key, inputs[inputs.len() - 1].key);
                let ms = files.files[&last].age.ms();
                files.add(LtxKey { level, min: first.min, max: last.max }, known(ms));
            }
            Job::Snapshot { inputs } => {
                let last = inputs[inputs.len() - 1].key;
                files.add(LtxKey { level: 9, min: Txid(1), max: last.max }, known(now));
            }
            Job::Delete { files: gone } => {
                assert!(!gone.is_empty());
                for (key, _) in &gone {
                    files.remove(key);
                }
            }
        }
    }
    assert_eq!(files.tip(), Txid(3));
}

#[test]
fn after_a_doubt_a_list_is_due_at_once() {
    let mut files = inventory(&[(key(0, 1, 1), 5)]);
    files.doubt();
    assert_eq!(files.next_due(&SETTINGS, 77), Some(Due { at_ms: 77, job: Job::List }));
    files.merge_list(&files.listing(), 78, (Txid(0), Txid(0)));
    assert_eq!(files.next_due(&SETTINGS, 79), None);
}
