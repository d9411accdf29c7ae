//! A simulated world of boxes around the real core, and the checkers of the invariants.
