//! The atomic steps of the wake table, pure over one word and one set of counters.
//!
//! Each side says what it does, fences, then reads what the other does:
//!
//! | proxy | activator |
//! | --- | --- |
//! | [`enter`]: count + 1, fence, read the word | [`try_stop`]: publish stopping, fence, read counts |
//! | [`request`]: set the bit, fence, read the word | [`resolve`]: clear the bits, fence, publish |
//!
//! With the fences at least one of the two sees the other: a request counts before the stop looks,
//! or it sees the stop. Every bit that is set has a post on its way, until the activator clears it.

use crate::sync::{AtomicU32, AtomicU64, Ordering, fence};
use crate::word::{RunNumber, Word};

/// What one proxy process says about one slot. 64 bytes apart: two hosts share no cache line.
#[derive(Debug)]
#[repr(C, align(64))]
pub struct Counters {
    inflight: AtomicU32,
    requested: AtomicU32,
    last_payload_ns: AtomicU64,
    last_out_ns: AtomicU64,
}

impl Counters {
    /// All zero, as fresh shared memory is.
    #[must_use]
    pub fn new() -> Self {
        Self {
            inflight: AtomicU32::new(0),
            requested: AtomicU32::new(0),
            last_payload_ns: AtomicU64::new(0),
            last_out_ns: AtomicU64::new(0),
        }
    }

    /// Requests in flight that are not a sidecar's.
    #[must_use]
    pub fn inflight(&self) -> u32 {
        self.inflight.load(Ordering::Acquire)
    }

    /// Whether a wake is requested and not yet answered.
    #[must_use]
    pub fn requested(&self) -> bool {
        self.requested.load(Ordering::Acquire) != 0
    }

    /// MONOTONIC ns of the last client payload that a proxy stamped; 0 = never.
    #[must_use]
    pub fn last_payload_ns(&self) -> u64 {
        self.last_payload_ns.load(Ordering::Acquire)
    }

    /// MONOTONIC ns of the last count-out; 0 = never.
    #[must_use]
    pub fn last_out_ns(&self) -> u64 {
        self.last_out_ns.load(Ordering::Acquire)
    }

    /// Stamps client payload, where no kernel part does it. Stamps never go back.
    pub fn stamp_payload(&self, now_ns: u64) {
        self.last_payload_ns.fetch_max(now_ns, Ordering::Relaxed);
    }

    /// Counts `requests` that are in flight already, when a loop moves to a new table.
    pub fn carry_over(&self, requests: u32) {
        self.inflight.fetch_add(requests, Ordering::SeqCst);
        fence();
    }

    /// Takes a bit back whose waiters have all given up, so that the next one posts again.
    pub fn forget_request(&self) {
        self.requested.store(0, Ordering::Release);
    }
}

impl Default for Counters {
    fn default() -> Self {
        Self::new()
    }
}

/// A word that can only be read: what a proxy has.
#[derive(Clone, Copy, Debug)]
pub struct ReadWord<'a>(&'a AtomicU64);

impl<'a> ReadWord<'a> {
    /// Reads this atomic as a word.
    #[must_use]
    pub fn over(word: &'a AtomicU64) -> Self {
        Self(word)
    }

    /// What the word says now.
    #[must_use]
    #[inline]
    pub fn load(self) -> Word {
        Word::unpack(self.0.load(Ordering::Acquire))
    }
}

/// A word that its owner, the activator, also publishes.
#[derive(Clone, Copy, Debug)]
pub struct OwnWord<'a>(&'a AtomicU64);

impl<'a> OwnWord<'a> {
    /// Owns this atomic as a word.
    #[must_use]
    pub fn over(word: &'a AtomicU64) -> Self {
        Self(word)
    }

    /// What the word says now.
    #[must_use]
    pub fn load(self) -> Word {
        Word::unpack(self.0.load(Ordering::Acquire))
    }

    /// The same word, for reading only.
    #[must_use]
    pub fn reader(self) -> ReadWord<'a> {
        ReadWord(self.0)
    }

    fn swap(self, from: Word, to: Word) -> Result<(), Word> {
        self.0
            .compare_exchange(from.pack(), to.pack(), Ordering::SeqCst, Ordering::SeqCst)
            .map(drop)
            .map_err(Word::unpack)
    }
}

/// Outcome of [`enter`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Entry {
    /// Counted; send to this run, then [`leave`].
    Counted {
        /// The run that serves.
        run: RunNumber,
    },
    /// Not awake, and not counted.
    NotAwake(Word),
}

/// Proxy: counts a request in, if the host is awake. No lock, no system call.
#[inline]
pub fn enter(word: ReadWord<'_>, counters: &Counters) -> Entry {
    counters.inflight.fetch_add(1, Ordering::Relaxed);
    fence();
    match word.load() {
        Word::Awake { run } => Entry::Counted { run },
        other @ (Word::Asleep | Word::Waking | Word::Stopping { .. } | Word::Refusing { .. }) => {
            counters.inflight.fetch_sub(1, Ordering::Release);
            Entry::NotAwake(other)
        }
    }
}

/// Proxy: counts a request out, when request and answer have ended.
#[inline]
pub fn leave(counters: &Counters, now_ns: u64) {
    // Before the subtraction: who reads zero must see the stamp, or a host looks idle too early.
    counters.last_out_ns.fetch_max(now_ns, Ordering::Relaxed);
    let before = counters.inflight.fetch_sub(1, Ordering::Release);
    debug_assert_ne!(before, 0, "invariant 8: a request left that never entered");
}

/// Proxy: looks at the word for a request that is not counted (a sidecar's).
#[inline]
#[must_use]
pub fn peek(word: ReadWord<'_>) -> Word {
    word.load()
}

/// Outcome of [`request`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Request {
    /// This one set the bit: it posts the wake.
    Post,
    /// A post is on its way already.
    AlreadyPosted,
    /// Awake meanwhile: [`enter`] again. Whoever set the bit posts all the same, since a bit
    /// without a post would silence all later waiters.
    Awake {
        /// The run that serves.
        run: RunNumber,
        /// Whether this one set the bit.
        post: bool,
    },
}

/// Proxy: asks for a wake. The waiter is listed **before**, or the notice could miss it.
pub fn request(word: ReadWord<'_>, counters: &Counters) -> Request {
    let first = counters.requested.swap(1, Ordering::AcqRel) == 0;
    fence();
    match (word.load(), first) {
        (Word::Awake { run }, post) => Request::Awake { run, post },
        (Word::Asleep | Word::Waking | Word::Stopping { .. } | Word::Refusing { .. }, true) => {
            Request::Post
        }
        (Word::Asleep | Word::Waking | Word::Stopping { .. } | Word::Refusing { .. }, false) => {
            Request::AlreadyPosted
        }
    }
}

/// Activator: publishes a word, if it still says `from`; else what it says.
pub fn publish(word: OwnWord<'_>, from: Word, to: Word) -> Result<(), Word> {
    word.swap(from, to)
}

/// Why an idle stop did not happen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NotStopped {
    /// The word says something else than awake with this run.
    Changed(Word),
    /// Requests are in flight; the word says awake again.
    InFlight(u32),
}

/// Activator: the idle stop. On success the word says stopping and nothing is in flight, nor can
/// anything enter. Waiters that met the short "stopping" have posted, and are answered as usual.
pub fn try_stop<'a>(
    word: OwnWord<'_>,
    run: RunNumber,
    areas: impl IntoIterator<Item = &'a Counters>,
) -> Result<(), NotStopped> {
    word.swap(Word::Awake { run }, Word::Stopping { run }).map_err(NotStopped::Changed)?;
    fence();
    let inflight = areas.into_iter().fold(0_u32, |sum, area| sum.saturating_add(area.inflight()));
    if inflight == 0 {
        return Ok(());
    }
    word.swap(Word::Stopping { run }, Word::Awake { run }).map_err(NotStopped::Changed)?;
    Err(NotStopped::InFlight(inflight))
}

/// Activator: answers the requests for a slot. Clears the bits, fences, publishes; the caller then
/// notifies every proxy, in that order. `from == to` answers a post for a host that is awake.
pub fn resolve<'a>(
    word: OwnWord<'_>,
    areas: impl IntoIterator<Item = &'a Counters>,
    from: Word,
    to: Word,
) -> Result<(), Word> {
    for area in areas {
        area.requested.store(0, Ordering::Release);
    }
    fence();
    word.swap(from, to)
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    const RUN: RunNumber = RunNumber(7);
    const AWAKE: Word = Word::Awake { run: RUN };

    #[test]
    fn a_request_counts_only_while_its_host_is_awake() {
        let (word, area) = (AtomicU64::new(0), Counters::new());
        let (own, read) = (OwnWord::over(&word), ReadWord::over(&word));
        assert_eq!(enter(read, &area), Entry::NotAwake(Word::Asleep));
        assert_eq!(area.inflight(), 0);
        publish(own, Word::Asleep, AWAKE).unwrap();
        assert_eq!(enter(read, &area), Entry::Counted { run: RUN });
        assert_eq!(try_stop(own, RUN, [&area]), Err(NotStopped::InFlight(1)));
        assert_eq!(own.load(), AWAKE, "a busy stop is taken back");
        leave(&area, 5);
        assert_eq!(area.last_out_ns(), 5);
        assert_eq!(try_stop(own, RUN, [&area]), Ok(()));
        assert_eq!(
            enter(read, &area),
            Entry::NotAwake(Word::Stopping { run: RUN }),
            "nothing enters a host that is stopping"
        );
    }

    #[test]
    fn only_the_first_waiter_posts() {
        let (word, area) = (AtomicU64::new(0), Counters::new());
        let (own, read) = (OwnWord::over(&word), ReadWord::over(&word));
        assert_eq!(request(read, &area), Request::Post);
        assert_eq!(request(read, &area), Request::AlreadyPosted);
        resolve(own, [&area], Word::Asleep, AWAKE).unwrap();
        assert!(!area.requested());
        assert_eq!(request(read, &area), Request::Awake { run: RUN, post: true });
        assert_eq!(request(read, &area), Request::Awake { run: RUN, post: false });
    }

    #[test]
    fn a_stop_of_another_run_changes_nothing() {
        let word = AtomicU64::new(AWAKE.pack());
        let own = OwnWord::over(&word);
        let other = RunNumber(6);
        assert_eq!(try_stop(own, other, []), Err(NotStopped::Changed(AWAKE)));
        assert_eq!(own.load(), AWAKE);
    }

    #[test]
    fn hosts_share_no_cache_line() {
        assert_eq!(size_of::<Counters>(), 64);
    }
}
