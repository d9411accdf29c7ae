//! What every part of the core may look at: settings, nonces, counters, mode.

use alloc::collections::BTreeMap;
use alloc::format;
use alloc::string::String;

use crate::ids::{ETag, Nonce};
use crate::record::SessionRecord;
use crate::settings::{Settings, TakeoverMode};
use crate::time::{Mono, Nanos, Now};
use crate::watch::{Judged, Watches};

/// Whether the activator stays.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Mode {
    /// It does.
    Staying,
    /// It puts everything to sleep and goes.
    Leaving,
}

/// Nonces of this process.
#[derive(Clone, Debug, Default, Hash)]
pub(crate) struct Nonces {
    base: String,
    next: u64,
}

impl Nonces {
    pub(crate) const fn new(base: String) -> Self {
        Self { base, next: 0 }
    }

    pub(crate) fn base(&self) -> &str {
        &self.base
    }

    pub(crate) fn fresh(&mut self) -> Nonce {
        self.next = self.next.saturating_add(1);
        Nonce(format!("{}.{}", self.base, self.next))
    }
}

/// Whether `nonce` is `base`, a dot, and more.
pub(crate) fn starts_with(nonce: &Nonce, base: &str) -> bool {
    nonce.0.strip_prefix(base).is_some_and(|rest| rest.starts_with('.'))
}

/// Counters by name; they only rise.
#[derive(Clone, Debug, Default)]
pub struct Counters(BTreeMap<&'static str, u64>);

/// How often something happened decides nothing: two cores that differ in it alone are the same to an
/// exploration.
impl core::hash::Hash for Counters {
    fn hash<H: core::hash::Hasher>(&self, _state: &mut H) {}
}

impl Counters {
    pub(crate) fn add(&mut self, name: &'static str) {
        let count = self.0.entry(name).or_default();
        *count = count.saturating_add(1);
    }

    /// All of them, by name.
    pub fn iter(&self) -> impl Iterator<Item = (&'static str, u64)> + '_ {
        self.0.iter().map(|(name, count)| (*name, *count))
    }

    /// One of them.
    #[must_use]
    pub fn get(&self, name: &str) -> u64 {
        self.0.get(name).copied().unwrap_or_default()
    }
}

/// What every part of the core may look at.
#[derive(Clone, Debug, Hash)]
pub(crate) struct Shared {
    pub(crate) settings: Settings,
    pub(crate) nonces: Nonces,
    pub(crate) counters: Counters,
    /// Sessions of other boxes, as they were last seen.
    pub(crate) watches: Watches,
    pub(crate) mode: Mode,
    /// Memory runs short: what is idle is stopped and not frozen.
    pub(crate) pressed: bool,
}

impl Shared {
    /// When a store request is repeated whose outcome is not definite. The first pause is
    /// `settings.retry`; each makes the next one twice as long.
    pub(crate) fn again(&self, pause: &mut Nanos, nonce: &Nonce, now: Now) -> Mono {
        let until = now.mono + pause.jittered(nonce);
        *pause = pause.doubled(self.settings.retry_max);
        until
    }

    /// What replaces a dead session's record.
    pub(crate) fn fence_of(&mut self, dead: SessionRecord) -> SessionRecord {
        SessionRecord {
            nonce: self.nonces.fresh(),
            fenced_by: Some(self.settings.identity.name.clone()),
            ..dead
        }
    }

    /// Whether another box's session, just read, may be fenced for its age; remembers the sighting.
    pub(crate) fn judge(
        &mut self,
        record: &SessionRecord,
        etag: &ETag,
        age: Option<Nanos>,
        now: Now,
    ) -> Judged {
        if self.is_automatic() {
            self.watches.judge(record, etag, age, &self.settings, now)
        } else {
            Judged::Manual
        }
    }

    /// Whether sessions end by time.
    pub(crate) fn is_automatic(&self) -> bool {
        self.settings.takeover == TakeoverMode::Automatic
    }
}
