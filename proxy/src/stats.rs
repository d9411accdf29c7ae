//! Counters of one loop, read by the link client.

use std::sync::atomic::{AtomicU64, Ordering};

macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        /// One loop's counters. A cache line's alignment keeps two loops apart.
        #[derive(Debug, Default)]
        #[repr(align(128))]
        pub(crate) struct Stats {
            $($(#[$doc])* pub(crate) $name: Counter,)*
        }

        impl Stats {
            /// Sums over all loops, by name.
            pub(crate) fn sum<'a>(all: impl Iterator<Item = &'a Self>) -> Vec<(String, u64)> {
                let mut sums = vec![$((concat!("proxy_", stringify!($name)).to_owned(), 0_u64)),*];
                for stats in all {
                    let values = [$(stats.$name.get()),*];
                    for (sum, value) in sums.iter_mut().zip(values) {
                        sum.1 = sum.1.saturating_add(value);
                    }
                }
                sums
            }
        }
    };
}

counters! {
    /// Accepted connections.
    connections,
    /// Requests that were read.
    requests,
    /// Requests that were answered by the proxy itself.
    refused,
    /// Heads and bodies that were rejected before a route was looked up show as refused too.
    unknown_host,
    /// Requests that waited for a wake.
    waited,
    /// Waiters whose deadline passed.
    wake_timed_out,
    /// Waiters that a bound kept out.
    too_many_waiters,
    /// Wakes asked for.
    wakes_posted,
    /// Upstream connections made.
    upstream_connects,
    /// Requests on an upstream connection that had served before.
    upstream_reused,
    /// Requests sent again after a stale connection.
    retried,
    /// Runs whose socket was missing or refused.
    instance_gone,
    /// Requests refused because the session's deadline had passed.
    session_expired,
    /// Time-outs of clients and apps.
    timed_out,
}

/// A counter.
#[derive(Debug, Default)]
pub(crate) struct Counter(AtomicU64);

impl Counter {
    /// Adds one.
    pub(crate) fn add(&self) {
        // Only this loop writes; a load and a store are cheaper than a locked add.
        self.0.store(self.get().wrapping_add(1), Ordering::Relaxed);
    }

    fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}
