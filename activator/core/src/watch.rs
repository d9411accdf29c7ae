//! Is another box dead? Judged by one clock, never by comparing two boxes' (DESIGN section 5,
//! rule 5): the store's own, or the same record watched on our BOOTTIME.

use alloc::collections::BTreeMap;
use alloc::format;
use alloc::string::String;

use crate::ids::{BoxName, ETag, Nonce};
use crate::record::SessionRecord;
use crate::settings::Settings;
use crate::time::{Boot, MILLI_NS, Nanos, Now, SECOND_NS};

/// How another box's session was judged.
#[derive(Clone, Debug)]
pub(crate) enum Judged {
    /// It may be fenced.
    Dead,
    /// Only an operator's word ends it.
    Manual,
    /// It is dead at a moment to come, unless it is renewed before.
    Watched(Watched),
}

/// Another box's session that is not dead yet.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Watched {
    name: BoxName,
    /// How long it had been unchanged when it was read, as far as is known.
    unchanged: Nanos,
    read: Boot,
    dead_at: Boot,
}

impl Watched {
    /// Until it is dead; a second at least, so that nobody asks in a loop.
    pub(crate) fn left(&self, now: Now) -> Nanos {
        Nanos(self.dead_at.0.saturating_sub(now.boot.0).max(SECOND_NS))
    }

    /// For people.
    pub(crate) fn told(&self, now: Now) -> String {
        let since = Nanos(now.boot.0.saturating_sub(self.read.0));
        format!(
            "box {} owns this host: wake it there. Its session has been seen unchanged for {} s, \
             and is taken over in {} s unless it is renewed",
            self.name,
            self.unchanged.0.saturating_add(since.0) / SECOND_NS,
            self.left(now).secs_up()
        )
    }
}

/// One sighting of a session record.
#[derive(Clone, Debug, Hash)]
struct Seen {
    etag: ETag,
    /// Entity tags may be content hashes.
    nonce: Nonce,
    since: Boot,
}

/// What was seen of other boxes' sessions.
#[derive(Clone, Debug, Default, Hash)]
pub(crate) struct Watches(BTreeMap<BoxName, Seen>);

/// How long a session record must stay unchanged: its own TTL, since its box may be configured
/// otherwise than this one, and our margin.
pub(crate) fn patience(record: &SessionRecord, settings: &Settings) -> Nanos {
    let ttl = record.ttl_ms.saturating_mul(MILLI_NS);
    Nanos(ttl.saturating_add(settings.margin.0))
}

/// Whether the store's own clock says that the record is older than that. Both of its readings
/// are whole seconds.
pub(crate) fn is_old(record: &SessionRecord, age: Option<Nanos>, settings: &Settings) -> bool {
    let least = patience(record, settings).0.saturating_add(SECOND_NS);
    age.is_some_and(|age| age.0 > least)
}

impl Watches {
    /// Whether the session that was just read is dead; remembers the sighting.
    pub(crate) fn judge(
        &mut self,
        record: &SessionRecord,
        etag: &ETag,
        age: Option<Nanos>,
        settings: &Settings,
        now: Now,
    ) -> Judged {
        if is_old(record, age, settings) {
            return Judged::Dead;
        }
        let seen = match self.0.get(&record.name) {
            Some(seen) if seen.etag == *etag && seen.nonce == record.nonce => seen.since,
            Some(_) | None => {
                let seen =
                    Seen { etag: etag.clone(), nonce: record.nonce.clone(), since: now.boot };
                self.0.insert(record.name.clone(), seen);
                now.boot
            }
        };
        let mut dead_at = seen + patience(record, settings);
        if dead_at <= now.boot {
            return Judged::Dead;
        }
        let mut unchanged = Nanos(now.boot.0.saturating_sub(seen.0));
        if let Some(age) = age {
            // The store's clock may prove it earlier. A second for each of its two readings.
            let least = patience(record, settings).0.saturating_add(2 * SECOND_NS);
            dead_at = dead_at.min(now.boot + Nanos(least.saturating_sub(age.0)));
            unchanged = unchanged.max(age);
        }
        let name = record.name.clone();
        Judged::Watched(Watched { name, unchanged, read: now.boot, dead_at })
    }
}
