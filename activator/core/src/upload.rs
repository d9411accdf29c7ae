//! When to spool and upload a host's commits, and what an answer means.
//!
//! One upload is in flight a host. An unknown outcome repeats the same file with the same nonce;
//! a failed condition is success only if the store's file carries that very nonce. Nothing counts
//! as durable unless its answer came within the session; past the deadline uploads wait.

use alloc::vec::Vec;

use crate::ids::{ETag, Nonce, Txid};
use crate::time::{Deadline, Mono, Nanos, Now};

/// How long a commit may wait for its upload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Class {
    /// At once after quiet; under load as the token bucket allows.
    Stream,
    /// Gathered for this long.
    Batched {
        /// From the first commit to its upload.
        every: Nanos,
    },
    /// As batched, with a day in mind: a sleep uploads earlier.
    Daily {
        /// From the first commit to its upload.
        every: Nanos,
    },
}

/// Settings of one host's uploads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UploadSettings {
    /// Replication class.
    pub class: Class,
    /// Uploads that may follow each other at once (`Stream`).
    pub burst: u32,
    /// Time in which one more upload is allowed (`Stream`).
    pub refill: Nanos,
    /// First wait after an unclear answer; doubles.
    pub retry_min: Nanos,
    /// Longest such wait.
    pub retry_max: Nanos,
}

impl Default for UploadSettings {
    /// A busy host: 10 at once, then 3,600 an hour.
    fn default() -> Self {
        Self {
            class: Class::Stream,
            burst: 10,
            refill: Nanos::from_secs(1),
            retry_min: Nanos::from_millis(100),
            retry_max: Nanos::from_secs(30),
        }
    }
}

/// A spooled file: written once, sent as often as it takes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Spooled {
    /// Its number.
    pub txid: Txid,
    /// The nonce in its metadata, the same in every repeat.
    pub nonce: Nonce,
}

/// How a PUT was answered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PutAnswer {
    /// Written.
    Done {
        /// Tag of the file.
        etag: ETag,
    },
    /// The name is taken.
    ConditionFailed,
    /// A concurrent write won, or the store failed: the same again.
    Again,
    /// No answer: the same again.
    Unknown,
    /// The store says no; it is asked again, seldom, and the operator is told.
    Refused,
}

/// What stands in the store under a taken name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Standing {
    /// A file with this nonce, or with none.
    File {
        /// Its nonce.
        nonce: Option<Nonce>,
        /// Its tag.
        etag: ETag,
    },
    /// Nothing after all.
    Absent,
    /// The store did not say.
    Unclear,
}

/// What happened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum UploadInput {
    /// The database was written to.
    Committed,
    /// The answer to [`UploadOutput::Spool`]; none when there was nothing to spool.
    Spooled(Option<Spooled>),
    /// Spooling failed (full disk): tried again later.
    SpoolFailed,
    /// The answer to [`UploadOutput::Put`].
    Put(PutAnswer),
    /// The answer to [`UploadOutput::Compare`].
    Compared(Standing),
    /// The session's deadline; none without a time limit.
    DeadlineSet(Option<Deadline>),
    /// Upload what there is without gathering: the host goes to sleep.
    Flush,
    /// Time has passed.
    Tick,
}

/// What to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum UploadOutput {
    /// Copy what was committed into the next file.
    Spool,
    /// Send this file (the same bytes and nonce at every repeat).
    Put(Spooled),
    /// Read tag and nonce of what stands under this file's name.
    Compare(Spooled),
    /// This number is durable.
    Durable {
        /// Newest acknowledged file.
        txid: Txid,
        /// Its tag.
        etag: ETag,
    },
    /// Another writer owns this number: this host's data must not be written on.
    StandDown {
        /// The number that was taken.
        txid: Txid,
    },
    /// The store refuses this file.
    Refused {
        /// The file's number.
        txid: Txid,
    },
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Phase {
    /// Nothing spooled, nothing in flight.
    Idle,
    Spooling,
    /// Sent; the answer is awaited.
    Sending {
        file: Spooled,
        backoff: Nanos,
    },
    /// The name was taken; whose file it is, is awaited.
    Comparing {
        file: Spooled,
        backoff: Nanos,
    },
    /// Sent again at `until`, if the session allows it then.
    Waiting {
        file: Spooled,
        until: Mono,
        backoff: Nanos,
    },
    /// Past the deadline: sent again once it is moved.
    Held {
        file: Spooled,
        backoff: Nanos,
    },
    /// Spooling failed; tried again at `until`.
    SpoolWaiting {
        until: Mono,
        backoff: Nanos,
    },
    StoodDown,
}

/// The uploads of one host.
#[derive(Clone, Debug)]
pub struct Uploader {
    settings: UploadSettings,
    phase: Phase,
    /// First commit that no spooled file holds.
    dirty_since: Option<Mono>,
    deadline: Option<Deadline>,
    tokens: u32,
    refilled_at: Mono,
    gathers: bool,
}

impl Uploader {
    /// Nothing spooled, a full bucket.
    #[must_use]
    pub const fn new(settings: UploadSettings, now: Now, deadline: Option<Deadline>) -> Self {
        Self {
            settings,
            phase: Phase::Idle,
            dirty_since: None,
            deadline,
            tokens: settings.burst,
            refilled_at: now.mono,
            gathers: true,
        }
    }

    /// Goes on with a file that an earlier process spooled and may have sent.
    pub fn resume(&mut self, now: Now, file: Spooled) {
        let backoff = self.settings.retry_min;
        self.phase = Phase::Waiting { file, until: now.mono, backoff };
    }

    /// Everything committed is durable, and no outcome is unknown.
    #[must_use]
    pub fn is_settled(&self) -> bool {
        self.phase == Phase::Idle && self.dirty_since.is_none()
    }

    /// When the oldest commit came that no spooled file holds.
    #[must_use]
    pub const fn dirty_since(&self) -> Option<Mono> {
        self.dirty_since
    }

    /// Another writer owns our number.
    #[must_use]
    pub fn has_stood_down(&self) -> bool {
        self.phase == Phase::StoodDown
    }

    /// A file was spooled or sent and is not known to be durable.
    #[must_use]
    pub const fn in_flight(&self) -> Option<&Spooled> {
        match &self.phase {
            Phase::Sending { file, .. }
            | Phase::Comparing { file, .. }
            | Phase::Waiting { file, .. }
            | Phase::Held { file, .. } => Some(file),
            Phase::Idle | Phase::Spooling | Phase::SpoolWaiting { .. } | Phase::StoodDown => None,
        }
    }

    /// When to call again with [`UploadInput::Tick`].
    #[must_use]
    pub fn next_due(&self) -> Option<Mono> {
        match &self.phase {
            Phase::Idle => self.dirty_since.map(|since| self.spool_due(since)),
            Phase::Waiting { until, .. } | Phase::SpoolWaiting { until, .. } => Some(*until),
            Phase::Spooling
            | Phase::Sending { .. }
            | Phase::Comparing { .. }
            | Phase::Held { .. }
            | Phase::StoodDown => None,
        }
    }

    /// One step.
    pub fn step(&mut self, now: Now, input: UploadInput, out: &mut Vec<UploadOutput>) {
        match input {
            UploadInput::Committed => {
                self.dirty_since.get_or_insert(now.mono);
            }
            UploadInput::Spooled(file) => self.on_spooled(now, file),
            UploadInput::SpoolFailed => self.on_spool_failed(now),
            UploadInput::Put(answer) => self.on_put(now, answer, out),
            UploadInput::Compared(standing) => self.on_compared(now, standing, out),
            UploadInput::DeadlineSet(deadline) => self.on_deadline(now, deadline),
            UploadInput::Flush => self.gathers = false,
            UploadInput::Tick => (),
        }
        self.advance(now, out);
    }

    /// A renewal was answered: the store is there, and what waited for it goes at once. The pause
    /// after another failure is as long as it would have been.
    fn on_deadline(&mut self, now: Now, deadline: Option<Deadline>) {
        self.deadline = deadline;
        if let Phase::Waiting { until, .. } = &mut self.phase
            && deadline.is_some_and(|deadline| !deadline.passed(now))
        {
            *until = (*until).min(now.mono);
        }
    }

    fn on_spooled(&mut self, now: Now, file: Option<Spooled>) {
        if self.phase == Phase::Spooling {
            self.phase = match file {
                Some(file) => {
                    Phase::Waiting { file, until: now.mono, backoff: self.settings.retry_min }
                }
                None => Phase::Idle,
            };
        }
    }

    fn on_spool_failed(&mut self, now: Now) {
        if self.phase == Phase::Spooling {
            let backoff = self.settings.retry_max.min(Nanos::from_secs(1));
            self.phase = Phase::SpoolWaiting { until: now.mono + backoff, backoff };
        }
    }

    fn on_put(&mut self, now: Now, answer: PutAnswer, out: &mut Vec<UploadOutput>) {
        let Phase::Sending { file, backoff } = self.phase.clone() else { return };
        match answer {
            PutAnswer::Done { etag } => self.settle(now, file, etag, out),
            PutAnswer::ConditionFailed => {
                out.push(UploadOutput::Compare(file.clone()));
                self.phase = Phase::Comparing { file, backoff };
            }
            PutAnswer::Again | PutAnswer::Unknown => self.wait(now, file, backoff),
            PutAnswer::Refused => {
                out.push(UploadOutput::Refused { txid: file.txid });
                self.wait(now, file, self.settings.retry_max);
            }
        }
    }

    fn on_compared(&mut self, now: Now, standing: Standing, out: &mut Vec<UploadOutput>) {
        let Phase::Comparing { file, backoff } = self.phase.clone() else { return };
        match standing {
            Standing::File { nonce, etag } if nonce.as_ref() == Some(&file.nonce) => {
                self.settle(now, file, etag, out);
            }
            Standing::File { .. } => {
                out.push(UploadOutput::StandDown { txid: file.txid });
                self.phase = Phase::StoodDown;
            }
            Standing::Absent | Standing::Unclear => self.wait(now, file, backoff),
        }
    }

    /// The file is in the store. An answer past the deadline does not count: another box may own
    /// the host by then. After a renewal the repeat finds our own nonce, and that counts.
    fn settle(&mut self, now: Now, file: Spooled, etag: ETag, out: &mut Vec<UploadOutput>) {
        if self.in_session(now) {
            out.push(UploadOutput::Durable { txid: file.txid, etag });
            self.phase = Phase::Idle;
        } else {
            self.phase = Phase::Waiting { file, until: now.mono, backoff: self.settings.retry_min };
        }
    }

    fn wait(&mut self, now: Now, file: Spooled, backoff: Nanos) {
        let until = now.mono + backoff.jittered(&file.nonce);
        let backoff = backoff.doubled(self.settings.retry_max);
        self.phase = Phase::Waiting { file, until, backoff };
    }

    fn advance(&mut self, now: Now, out: &mut Vec<UploadOutput>) {
        self.refill(now);
        match &self.phase {
            Phase::Idle => {
                if self.dirty_since.is_some_and(|since| self.spool_due(since) <= now.mono) {
                    self.spool(out);
                }
            }
            Phase::SpoolWaiting { until, .. } if *until <= now.mono => self.spool(out),
            Phase::Waiting { file, until, backoff } if *until <= now.mono => {
                let (file, backoff) = (file.clone(), *backoff);
                self.send(now, file, backoff, out);
            }
            Phase::Held { file, backoff } if self.in_session(now) => {
                let (file, backoff) = (file.clone(), *backoff);
                self.send(now, file, backoff, out);
            }
            Phase::SpoolWaiting { .. }
            | Phase::Waiting { .. }
            | Phase::Held { .. }
            | Phase::Spooling
            | Phase::Sending { .. }
            | Phase::Comparing { .. }
            | Phase::StoodDown => (),
        }
    }

    fn send(&mut self, now: Now, file: Spooled, backoff: Nanos, out: &mut Vec<UploadOutput>) {
        self.phase = if self.in_session(now) {
            out.push(UploadOutput::Put(file.clone()));
            Phase::Sending { file, backoff }
        } else {
            Phase::Held { file, backoff }
        };
    }

    fn spool(&mut self, out: &mut Vec<UploadOutput>) {
        self.tokens = self.tokens.saturating_sub(1);
        self.dirty_since = None;
        self.phase = Phase::Spooling;
        out.push(UploadOutput::Spool);
    }

    fn spool_due(&self, since: Mono) -> Mono {
        if !self.gathers {
            return since;
        }
        match self.settings.class {
            Class::Stream if self.tokens > 0 => since,
            Class::Stream => since.max(self.refilled_at + self.settings.refill),
            Class::Batched { every } | Class::Daily { every } => since + every,
        }
    }

    fn refill(&mut self, now: Now) {
        let span = self.settings.refill.0.max(1);
        let earned = now.mono.since(self.refilled_at).0 / span;
        let room = self.settings.burst.saturating_sub(self.tokens);
        if earned >= u64::from(room) {
            self.tokens = self.settings.burst;
            self.refilled_at = now.mono;
        } else {
            self.tokens = self.tokens.saturating_add(u32::try_from(earned).unwrap_or(room));
            self.refilled_at = self.refilled_at + Nanos(earned.saturating_mul(span));
        }
    }

    fn in_session(&self, now: Now) -> bool {
        self.deadline.is_none_or(|deadline| !deadline.passed(now))
    }
}

#[cfg(test)]
#[path = "upload_tests.rs"]
mod tests;
