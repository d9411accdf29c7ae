//! A simulated world of one to three boxes around the real core, and the checkers of the invariants.
//!
//! Reads no clock, starts no thread, touches no file: a seed is an exact replay. The core, its
//! uploader and the steps of the wake table are the real ones; store, disks, instances, proxies,
//! clients and operators are simulated, and everything between them can be late, lost or repeated.

pub mod activator;
pub mod calm;
pub mod chaos;
pub mod checks;
pub mod clock;
pub mod copies;
pub mod disk;
pub mod explore;
pub mod guard;
pub mod instances;
pub mod network;
pub mod objects;
pub mod proxies;
pub mod replicas;
pub mod rng;
pub mod sabotage;
pub mod store;
pub mod story;
pub mod tables;
pub mod world;

use std::panic::{AssertUnwindSafe, catch_unwind};

use rng::Rng;
use sabotage::Sabotage;
use story::{Story, Told};
use world::{Plan, Violation, World};

/// What became of one seed.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// The first violation.
    pub violation: Option<Violation>,
    /// Steps that were simulated.
    pub steps: u64,
    /// Times that something happened, by what.
    pub counts: Vec<(&'static str, u64)>,
    /// Lines of the story that were kept.
    pub story: Vec<String>,
}

/// Simulates one seed: a storm, then calm. A panic of the core is a violation with number 0, or
/// with the number that its message begins with.
#[must_use]
pub fn run(seed: u64, sabotage: Option<Sabotage>, told: Told) -> Outcome {
    let mut rng = Rng::new(seed);
    let plan = Plan::by_chance(&mut rng);
    let mut world = World::new(plan, rng, sabotage, Story::new(told));
    let whole = catch_unwind(AssertUnwindSafe(|| {
        world.begin_storm();
        world.run_until(plan.storm);
        if world.violation.is_none() {
            world.calm();
        }
    }));
    let panicked = whole.err().map(|payload| {
        let text = payload.downcast_ref::<String>().cloned();
        let text = text.or_else(|| payload.downcast_ref::<&str>().map(|t| (*t).to_owned()));
        let message = text.unwrap_or_default();
        let number = message.strip_prefix("invariant ").and_then(|rest| rest.split(':').next());
        let invariant = number.and_then(|number| number.parse().ok()).unwrap_or(0);
        Violation { invariant, message, step: world.step }
    });
    Outcome {
        violation: panicked.or_else(|| world.violation.clone()),
        steps: world.step,
        counts: counts(&world),
        story: world.story.lines().map(str::to_owned).collect(),
    }
}

fn counts(world: &World) -> Vec<(&'static str, u64)> {
    let sum = |sizes: &mut dyn Iterator<Item = usize>| {
        u64::try_from(sizes.sum::<usize>()).unwrap_or(u64::MAX)
    };
    let mut counts: Vec<_> = world.ledger.counts.iter().map(|(k, v)| (*k, *v)).collect();
    counts.extend([
        ("commits", sum(&mut world.ledger.committed.values().map(std::collections::BTreeSet::len))),
        ("durable", sum(&mut world.ledger.durable.values().map(std::collections::BTreeSet::len))),
        ("activators", world.boxes.iter().map(|b| b.lives).sum()),
        ("runs", world.boxes.iter().map(|b| b.disk.runs).sum()),
        ("generations", world.store.hosts.values().map(|r| r.generation.0).sum()),
    ]);
    counts
}
