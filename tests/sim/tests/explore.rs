//! The exhaustive exploration, in small; `cargo xtask sim --explore` goes further.

use dormouse_sim::explore::{BOUNDS, BREAKS, Bounds, explore, found};

#[test]
fn a_small_world_is_clean_in_every_schedule() {
    for (_, bounds) in BOUNDS {
        let report = explore(&Bounds { horizon_s: 1, ..bounds });
        assert_eq!(report.violation, None);
        assert!(report.complete && report.states > 5_000, "{report:?}");
    }
}

#[test]
fn a_broken_rule_is_found() {
    let (sabotage, budget, invariants) = BREAKS[0];
    assert!(found(sabotage, budget, invariants).is_ok());
}
