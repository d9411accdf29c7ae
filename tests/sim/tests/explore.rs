//! The exhaustive exploration: small bounds are clean and complete, and it finds what is broken.

use dormouse_sim::explore::{BOUNDS, Bounds, Break, Budget, explore};

#[test]
fn a_small_world_is_clean_in_every_schedule() {
    for (_, bounds) in BOUNDS {
        let report = explore(&Bounds { horizon_s: 1, ..bounds });
        assert_eq!(report.violation, None);
        assert!(report.complete && report.states > 5_000, "{report:?}");
    }
}

/// What a broken rule leads to.
fn breach(automatic: bool, budget: Budget, sabotage: Break) -> String {
    let sabotage = Some(sabotage);
    let bounds = Bounds { automatic, budget, horizon_s: 8, states_max: 2_000_000, sabotage };
    let report = explore(&bounds);
    report
        .violation
        .map_or_else(|| format!("nothing in {} states", report.states), |(what, _)| what)
}

fn trips(automatic: bool, budget: Budget, sabotage: Break, invariants: &[&str]) {
    let found = breach(automatic, budget, sabotage);
    let is = |number: &&str| found.starts_with(&format!("invariant {number}:"));
    assert!(invariants.iter().any(is), "{sabotage:?}: {found}");
}

const ONE: Budget = Budget { faults: 1, requests: 1, commits: 1, rests: 0, takeovers: 0 };

#[test]
fn a_missing_guard_is_found() {
    trips(true, ONE, Break::GuardOmitted, &["1", "2"]);
}

#[test]
fn a_missing_fence_is_found() {
    trips(true, Budget { commits: 2, ..ONE }, Break::FenceOmitted, &["3", "10"]);
}

#[test]
fn a_store_that_ignores_if_none_match_is_found() {
    trips(true, Budget { commits: 2, ..ONE }, Break::NoneMatchIgnored, &["3", "10"]);
}

#[test]
fn a_store_that_ignores_if_match_is_found() {
    trips(true, Budget { requests: 2, ..ONE }, Break::HostMatchIgnored, &["1", "2", "3", "10"]);
}

#[test]
fn a_nonce_that_nobody_looks_at_is_found() {
    trips(true, Budget { requests: 2, ..ONE }, Break::NonceUnchecked, &["1", "2"]);
}
