//! A line of the log that clients could repeat at will is written once a minute, with a count.

use std::cell::Cell;
use std::time::Duration;

use tokio::time::Instant;

/// Between two lines.
const EVERY: Duration = Duration::from_mins(1);

/// What was said last, on one loop.
#[derive(Debug, Default)]
pub(crate) struct Quiet {
    told: Cell<Option<Instant>>,
    untold: Cell<u64>,
}

impl Quiet {
    /// One more. How many there were since the last line, this one included, where a line is due.
    pub(crate) fn due(&self, now: Instant) -> Option<u64> {
        let times = self.untold.get().saturating_add(1);
        if self.told.get().is_some_and(|told| now.duration_since(told) < EVERY) {
            self.untold.set(times);
            return None;
        }
        self.told.set(Some(now));
        self.untold.set(0);
        Some(times)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clock;

    #[test]
    fn a_line_at_once_and_then_a_count_a_minute() {
        let (quiet, begin) = (Quiet::default(), clock::now());
        assert_eq!(quiet.due(begin), Some(1));
        for _ in 0..1000 {
            assert_eq!(quiet.due(begin + EVERY / 2), None);
        }
        assert_eq!(quiet.due(begin + EVERY), Some(1001));
        assert_eq!(quiet.due(begin + EVERY), None);
    }
}
