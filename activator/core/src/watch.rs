//! Is another box dead? Judged by one clock, never by comparing two boxes' (DESIGN section 5,
//! rule 5): the store's own, or the same record watched on our BOOTTIME.

use alloc::collections::BTreeMap;

use crate::ids::{BoxName, ETag, Nonce};
use crate::record::SessionRecord;
use crate::settings::Settings;
use crate::time::{Boot, MILLI_NS, Nanos, Now, SECOND_NS};

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
    pub(crate) fn is_dead(
        &mut self,
        record: &SessionRecord,
        etag: &ETag,
        age: Option<Nanos>,
        settings: &Settings,
        now: Now,
    ) -> bool {
        if is_old(record, age, settings) {
            return true;
        }
        match self.0.get(&record.name) {
            Some(seen) if seen.etag == *etag && seen.nonce == record.nonce => {
                now.boot.0.saturating_sub(seen.since.0) >= patience(record, settings).0
            }
            Some(_) | None => {
                let seen =
                    Seen { etag: etag.clone(), nonce: record.nonce.clone(), since: now.boot };
                self.0.insert(record.name.clone(), seen);
                false
            }
        }
    }
}
