//! Upstream connections that served a request and can serve another, of one run.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::task::{Context, Waker};
use std::time::Duration;

use dormouse_link::RunNumber;
use dormouse_ring::Stream;
use tokio::time::Instant;

use crate::clock;

/// Kept connections of one host on one loop.
const KEPT_MAX: usize = 64;
/// Shorter than the keep-alive of common app servers (5 s): the app rarely closes under us.
const KEPT_FOR: Duration = Duration::from_secs(4);
/// A request that may not be sent twice goes only to a connection that was just used.
const FRESH_FOR: Duration = Duration::from_millis(500);
/// Read size while an answer's head is awaited.
pub(crate) const HEAD_READ: usize = 16 * 1024;

/// Idle connections, newest last.
pub(crate) struct Pool<S> {
    run: Cell<RunNumber>,
    idle: RefCell<Vec<(S, Instant)>>,
}

impl<S: Stream> Pool<S> {
    pub(crate) fn new() -> Self {
        Self { run: Cell::new(RunNumber(0)), idle: RefCell::new(Vec::new()) }
    }

    /// A connection to this run on which nothing was said since its last answer.
    pub(crate) fn take(&self, run: RunNumber, repeatable: bool, now: Instant) -> Option<S> {
        if self.run.get() != run {
            self.clear();
            return None;
        }
        let age_max = if repeatable { KEPT_FOR } else { FRESH_FOR };
        loop {
            let (mut stream, since) = self.idle.borrow_mut().pop()?;
            if now.duration_since(since) > age_max {
                // The rest is older still.
                if repeatable {
                    self.clear();
                } else {
                    self.idle.borrow_mut().push((stream, since));
                }
                return None;
            }
            if is_silent(&mut stream) {
                return Some(stream);
            }
        }
    }

    /// Keeps a connection to this run. Gives whether it is the only one.
    fn put(&self, run: RunNumber, mut stream: S, now: Instant) -> bool {
        if self.run.get() != run {
            self.clear();
            self.run.set(run);
        }
        // Puts a read in flight, so that an end is known when the connection is taken again.
        if stream.writing() > 0 || !is_silent(&mut stream) {
            return false;
        }
        let mut idle = self.idle.borrow_mut();
        if idle.len() >= KEPT_MAX {
            return false;
        }
        idle.push((stream, now));
        idle.len() == 1
    }

    /// Drops what is too old. Gives whether something is left.
    fn sweep(&self, now: Instant) -> bool {
        let mut idle = self.idle.borrow_mut();
        idle.retain(|(_, since)| now.duration_since(*since) < KEPT_FOR);
        !idle.is_empty()
    }

    /// Drops all.
    pub(crate) fn clear(&self) {
        self.idle.borrow_mut().clear();
    }
}

/// Keeps a connection to a run for a while.
pub(crate) fn keep<S: Stream>(pool: &Rc<Pool<S>>, run: RunNumber, stream: S) {
    if !pool.put(run, stream, clock::now()) {
        return;
    }
    let pool = pool.clone();
    tokio::task::spawn_local(async move {
        while pool.sweep(clock::now()) {
            tokio::time::sleep(KEPT_FOR).await;
        }
    });
}

/// Whether neither bytes nor an end wait to be read: both make an idle connection useless.
fn is_silent<S: Stream>(stream: &mut S) -> bool {
    let mut cx = Context::from_waker(Waker::noop());
    stream.poll_unexpected(&mut cx, HEAD_READ).is_pending()
}
