//! A line of the log that clients could repeat at will is written once a minute, with a count.

use std::cell::Cell;

/// Between two lines, nanoseconds.
const EVERY_NS: u64 = 60_000_000_000;

/// What was said last. Times are nanoseconds of one clock.
#[derive(Debug, Default)]
pub struct Quiet {
    told_ns: Cell<Option<u64>>,
    untold: Cell<u64>,
}

impl Quiet {
    /// One more. How many there were since the last line, this one included, where a line is due.
    pub fn due(&self, now_ns: u64) -> Option<u64> {
        let times = self.untold.get().saturating_add(1);
        if self.told_ns.get().is_some_and(|told| now_ns.saturating_sub(told) < EVERY_NS) {
            self.untold.set(times);
            return None;
        }
        self.told_ns.set(Some(now_ns));
        self.untold.set(0);
        Some(times)
    }

    /// The next one is told at once.
    pub fn hurry(&self) {
        self.told_ns.set(None);
    }

    /// How many no line has told yet.
    #[must_use]
    pub fn untold(&self) -> u64 {
        self.untold.get()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_at_once_and_then_a_count_a_minute() {
        let (quiet, begin) = (Quiet::default(), 7);
        assert_eq!(quiet.due(begin), Some(1));
        for _ in 0..1000 {
            assert_eq!(quiet.due(begin + EVERY_NS / 2), None);
        }
        assert_eq!(quiet.due(begin + EVERY_NS), Some(1001));
        assert_eq!(quiet.due(begin + EVERY_NS), None);
        quiet.hurry();
        assert_eq!((quiet.untold(), quiet.due(begin + EVERY_NS)), (1, Some(2)));
    }
}
