//! Waiting for what no event announces, with a deadline.

use std::time::{Duration, Instant};

use anyhow::{Result, bail};

/// Asks again and again until it holds; an error when the time is over, or at once when asking
/// fails.
pub fn until(limit: Duration, what: &str, mut holds: impl FnMut() -> Result<bool>) -> Result<()> {
    #[expect(clippy::disallowed_methods, reason = "a test's deadline is real time")]
    let end = Instant::now() + limit;
    loop {
        if holds()? {
            return Ok(());
        }
        #[expect(clippy::disallowed_methods, reason = "a test's deadline is real time")]
        if Instant::now() >= end {
            bail!("not within {limit:?}: {what}");
        }
        std::thread::park_timeout(Duration::from_millis(2));
    }
}
