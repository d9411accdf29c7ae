//! Every schedule within small bounds: two boxes, one host, the real core, a few faults.
//!
//! Over all orders in which requests land, answers come, writes are late, boxes die or
//! stand still. Time goes in steps of a second and only when nothing is on its way, so that a state
//! is finite; tags are content hashes, as on the least helpful stores. The uploader is a model of
//! its own here (one file in flight, deadline before send and after the answer); the core is not.

mod effects;
mod moves;
mod state;

use std::collections::HashSet;
use std::panic::{AssertUnwindSafe, catch_unwind};

pub use moves::Move;
pub use state::{Break, Budget, State};

/// What is explored.
#[derive(Clone, Copy, Debug)]
pub struct Bounds {
    /// Whether sessions end by time.
    pub automatic: bool,
    /// How often what may happen.
    pub budget: Budget,
    /// Seconds after the start.
    pub horizon_s: u64,
    /// States after which it gives up.
    pub states_max: usize,
    /// The rule that is broken on purpose.
    pub sabotage: Option<Break>,
}

/// What was found.
#[derive(Clone, Debug)]
pub struct Report {
    /// Different states.
    pub states: usize,
    /// Moves that were tried.
    pub moves: u64,
    /// The longest way that was gone.
    pub depth: u16,
    /// Whether every state within the bounds was met.
    pub complete: bool,
    /// The first violation, and the way to it.
    pub violation: Option<(String, Vec<Move>)>,
}

const fn bounds(automatic: bool, budget: Budget, horizon_s: u64) -> Bounds {
    Bounds { automatic, budget, horizon_s, states_max: usize::MAX, sabotage: None }
}

/// What is explored completely, in a minute.
pub const BOUNDS: [(&str, Bounds); 3] = [
    (
        "automatic takeover, one fault, 6 s",
        bounds(true, Budget { faults: 1, requests: 1, commits: 1, rests: 0, takeovers: 0 }, 6),
    ),
    (
        "automatic takeover, one fault and a sleep, 5 s",
        bounds(true, Budget { faults: 1, requests: 1, commits: 1, rests: 1, takeovers: 0 }, 5),
    ),
    (
        "manual takeover, one fault, 5 s",
        bounds(false, Budget { faults: 1, requests: 1, commits: 1, rests: 0, takeovers: 1 }, 5),
    ),
];

/// What takes longer.
pub const WIDE_BOUNDS: [(&str, Bounds); 3] = [
    (
        "manual takeover, one fault, 6 s",
        bounds(false, Budget { faults: 1, requests: 1, commits: 1, rests: 0, takeovers: 1 }, 6),
    ),
    (
        "automatic takeover, two faults, 5 s",
        bounds(true, Budget { faults: 2, requests: 1, commits: 1, rests: 0, takeovers: 0 }, 5),
    ),
    (
        "manual takeover, two faults, 5 s",
        bounds(false, Budget { faults: 2, requests: 1, commits: 0, rests: 0, takeovers: 1 }, 5),
    ),
];

const ONE: Budget = Budget { faults: 1, requests: 1, commits: 1, rests: 0, takeovers: 0 };

/// Broken rules, and the invariants of which one must be found violated.
pub const BREAKS: [(Break, Budget, &[u8]); 5] = [
    (Break::GuardOmitted, ONE, &[1, 2]),
    (Break::FenceOmitted, Budget { commits: 2, ..ONE }, &[3, 10]),
    (Break::NoneMatchIgnored, Budget { commits: 2, ..ONE }, &[3, 10]),
    (Break::HostMatchIgnored, Budget { requests: 2, ..ONE }, &[1, 2, 3, 10]),
    (Break::NonceUnchecked, Budget { requests: 2, ..ONE }, &[1, 2]),
];

/// What a broken rule leads to: an error where nothing, or something else, is found.
pub fn found(sabotage: Break, budget: Budget, invariants: &[u8]) -> Result<Report, String> {
    let sabotage = Some(sabotage);
    let report =
        explore(&Bounds { automatic: true, budget, horizon_s: 8, states_max: 2_000_000, sabotage });
    let what = report.violation.as_ref().map_or("nothing", |(what, _)| what.as_str());
    if invariants.iter().any(|number| what.starts_with(&format!("invariant {number}:"))) {
        return Ok(report);
    }
    Err(format!("{sabotage:?}: {what} in {} states", report.states))
}

/// How a state was first met; small, for there are millions.
struct Visited {
    parent: u32,
    depth: u16,
    by: Option<Move>,
}

/// Explores from a host that is awake on the first box, with one durable write; depth first, which
/// needs little memory.
#[must_use]
pub fn explore(bounds: &Bounds) -> Report {
    let start = State::awake(bounds);
    let mut seen = HashSet::from([start.fingerprint()]);
    let mut visited = vec![Visited { parent: 0, by: None, depth: 0 }];
    let mut queue = vec![(0_u32, start)];
    let mut report = Report { states: 1, moves: 0, depth: 0, complete: true, violation: None };
    while let Some((at, state)) = queue.pop() {
        for step in state.moves() {
            report.moves += 1;
            let mut next = state.clone();
            let tried = catch_unwind(AssertUnwindSafe(|| {
                next.go(step);
                next.check()
            }));
            let violation = match tried {
                Ok(violation) => violation,
                Err(payload) => Some(panicked(payload.as_ref())),
            };
            if let Some(what) = violation {
                report.violation = Some((what, way(&visited, at, step)));
                report.complete = false;
                return report;
            }
            if !seen.insert(next.fingerprint()) {
                continue;
            }
            let depth = visited_at(&visited, at).depth.saturating_add(1);
            report.depth = report.depth.max(depth);
            visited.push(Visited { parent: at, by: Some(step), depth });
            report.states = visited.len();
            if report.states >= bounds.states_max {
                report.complete = false;
                return report;
            }
            let Ok(number) = u32::try_from(visited.len() - 1) else {
                report.complete = false;
                return report;
            };
            queue.push((number, next));
        }
    }
    report
}

fn visited_at(visited: &[Visited], at: u32) -> &Visited {
    &visited[usize::try_from(at).unwrap_or(usize::MAX)]
}

/// The moves from the start to a state, and the last one.
fn way(visited: &[Visited], mut at: u32, last: Move) -> Vec<Move> {
    let mut moves = vec![last];
    while let Some(step) = visited_at(visited, at).by {
        moves.push(step);
        at = visited_at(visited, at).parent;
    }
    moves.reverse();
    moves
}

fn panicked(payload: &(dyn std::any::Any + Send)) -> String {
    let text = payload.downcast_ref::<String>().cloned();
    let text = text.or_else(|| payload.downcast_ref::<&str>().map(|text| (*text).to_owned()));
    text.unwrap_or_else(|| "a panic".into())
}
