//! What happened, for people: the last lines, or all of them.

use std::collections::VecDeque;

use crate::clock::{MS, S, Time};

/// How much is kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Told {
    /// Nothing: lines cost more than the steps that they tell of.
    Nothing,
    /// The last lines, up to this many.
    Last(usize),
    /// Everything.
    All,
}

/// The lines that are kept.
#[derive(Clone, Debug)]
pub struct Story {
    told: Told,
    lines: VecDeque<String>,
}

impl Story {
    /// An empty one.
    #[must_use]
    pub const fn new(told: Told) -> Self {
        Self { told, lines: VecDeque::new() }
    }

    /// Whether lines are worth making.
    #[must_use]
    pub fn is_told(&self) -> bool {
        self.told != Told::Nothing
    }

    /// One more line.
    pub fn add(&mut self, step: u64, time: Time, line: &str) {
        let (seconds, millis) = (time / S, time % S / MS);
        self.lines.push_back(format!("{step:>6} {seconds:>4}.{millis:03}s {line}"));
        if let Told::Last(most) = self.told
            && self.lines.len() > most
        {
            self.lines.pop_front();
        }
    }

    /// All that was kept.
    pub fn lines(&self) -> impl Iterator<Item = &str> {
        self.lines.iter().map(String::as_str)
    }
}
