//! The project's own commands: demo, test, check, tidy, sim, replay, bench.

fn main() {}
