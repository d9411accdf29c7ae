//! Codecs of the store's two records: a box's session, and who owns a host.
//!
//! `lock.json` keeps the three fields that Litestream 0.5's leaser reads (`generation`,
//! `expires_at`, `owner`); the others are ours, and unknown ones are ignored on reading.

use alloc::format;
use alloc::string::String;
use alloc::vec::Vec;

use serde::{Deserialize, Serialize};

use crate::ids::{BoxId, BoxName, ETag, Epoch, Generation, Nonce, Txid};

/// `<prefix>/sessions/<box>.json`: one box's standing right to run hosts.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct SessionRecord {
    /// The box's name.
    #[serde(rename = "box")]
    pub name: BoxName,
    /// The box's random identity.
    pub id: BoxId,
    /// Fencing number; rises at each start that cannot prove continuity.
    pub epoch: Epoch,
    /// Names this very write.
    pub nonce: Nonce,
    /// How long a renewal lasts, milliseconds.
    pub ttl_ms: u64,
    /// The kernel's boot id when it was written.
    pub boot_id: String,
    /// The session ended properly: nobody need wait for it.
    #[serde(default)]
    pub ended: bool,
    /// The box that fenced this one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fenced_by: Option<BoxName>,
}

/// What a host record says of its host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum HostState {
    /// A session may run it.
    Owned,
    /// Its last owner let it go, all data uploaded.
    Released,
    /// An outside supervisor runs it.
    Outside,
}

/// Who holds a host: `box/epoch`.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Owner {
    /// The box.
    pub name: BoxName,
    /// Its session's epoch.
    pub epoch: Epoch,
}

impl core::fmt::Display for Owner {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "{}/{}", self.name, self.epoch)
    }
}

/// `<prefix>/<host>/lock.json`.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct HostRecord {
    /// Fencing number; rises at every acquisition, never resets.
    pub generation: Generation,
    /// Who holds, or last held it.
    pub owner: Owner,
    /// Names this very write.
    pub nonce: Nonce,
    /// Identity of the owner's box.
    pub id: BoxId,
    /// Owned, released or outside.
    pub state: HostState,
    /// First generation of unbroken ownership by `id`.
    pub since: Generation,
    /// Newest L0 when the record was written; 0 when unknown.
    pub txid: Txid,
    /// Its entity tag.
    pub etag: Option<ETag>,
    /// The build that ran.
    pub build: Option<String>,
}

#[derive(Serialize, Deserialize)]
struct HostJson {
    generation: Generation,
    expires_at: String,
    #[serde(default)]
    owner: String,
    nonce: Option<Nonce>,
    id: Option<BoxId>,
    state: Option<HostState>,
    since: Option<Generation>,
    #[serde(default)]
    txid: Txid,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    etag: Option<ETag>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    build: Option<String>,
}

/// Far ahead: a session, not a time, ends our ownership.
const NEVER: &str = "9999-12-31T23:59:59Z";
/// Long past: stock tools see a free lease.
const LONG_AGO: &str = "1970-01-01T00:00:01Z";

/// Why a record was not taken.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct RecordError(pub String);

impl core::fmt::Display for RecordError {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str(&self.0)
    }
}

impl core::error::Error for RecordError {}

impl SessionRecord {
    /// Whether its box may not go on with it.
    #[must_use]
    pub const fn has_ended(&self) -> bool {
        self.ended || self.fenced_by.is_some()
    }

    /// Whether what a session of this epoch owned can be taken.
    #[must_use]
    pub fn is_over(&self, epoch: Epoch) -> bool {
        self.has_ended() || self.epoch > epoch
    }

    /// As JSON.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        serde_json::to_vec(self).unwrap_or_default()
    }

    /// From JSON.
    pub fn decode(bytes: &[u8]) -> Result<Self, RecordError> {
        serde_json::from_slice(bytes)
            .map_err(|e| RecordError(format!("session record is malformed: {e}")))
    }
}

impl HostRecord {
    /// As JSON, `generation`, `expires_at` and `owner` first.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let expires_at = match self.state {
            HostState::Owned | HostState::Outside => NEVER,
            HostState::Released => LONG_AGO,
        };
        let json = HostJson {
            generation: self.generation,
            expires_at: expires_at.into(),
            owner: format!("{}", self.owner),
            nonce: Some(self.nonce.clone()),
            id: Some(self.id.clone()),
            state: Some(self.state),
            since: Some(self.since),
            txid: self.txid,
            etag: self.etag.clone(),
            build: self.build.clone(),
        };
        serde_json::to_vec(&json).unwrap_or_default()
    }

    /// From JSON. A record that another program wrote (no `state`) is an error that says so:
    /// its time-limited lease means nothing to a session.
    pub fn decode(bytes: &[u8]) -> Result<Self, RecordError> {
        let json: HostJson = serde_json::from_slice(bytes)
            .map_err(|e| RecordError(format!("host record is malformed: {e}")))?;
        let foreign = || {
            RecordError(format!(
                "host record of {:?} was written by another program: stop it, then delete its \
                 lock.json",
                json.owner
            ))
        };
        let (name, epoch) = json.owner.rsplit_once('/').ok_or_else(foreign)?;
        let epoch = epoch.parse().map_err(|_| foreign())?;
        Ok(Self {
            generation: json.generation,
            owner: Owner { name: name.into(), epoch: Epoch(epoch) },
            nonce: json.nonce.clone().ok_or_else(foreign)?,
            id: json.id.clone().ok_or_else(foreign)?,
            state: json.state.ok_or_else(foreign)?,
            since: json.since.ok_or_else(foreign)?,
            txid: json.txid,
            etag: json.etag.clone(),
            build: json.build.clone(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(state: HostState) -> HostRecord {
        HostRecord {
            generation: Generation(7),
            owner: Owner { name: "box-1".into(), epoch: Epoch(3) },
            nonce: "n".into(),
            id: "id".into(),
            state,
            since: Generation(5),
            txid: Txid(9),
            etag: Some("\"e\"".into()),
            build: None,
        }
    }

    #[test]
    fn a_host_record_survives_its_codec() {
        for state in [HostState::Owned, HostState::Released, HostState::Outside] {
            let record = record(state);
            assert_eq!(HostRecord::decode(&record.encode()).unwrap(), record);
        }
    }

    #[test]
    fn a_stock_leaser_reads_its_three_fields_first() {
        let owned = String::from_utf8(record(HostState::Owned).encode()).unwrap();
        let start = r#"{"generation":7,"expires_at":"9999-12-31T23:59:59Z","owner":"box-1/3""#;
        assert!(owned.starts_with(start), "{owned}");
        let released = String::from_utf8(record(HostState::Released).encode()).unwrap();
        assert!(released.contains("1970-01-01"), "{released}");
    }

    #[test]
    fn a_foreign_lease_is_named_and_never_guessed_at() {
        let foreign = br#"{"generation":1,"expires_at":"2026-12-01T09:22:47.695Z","owner":"h:12"}"#;
        let error = HostRecord::decode(foreign).unwrap_err();
        assert!(error.0.contains("another program"), "{error}");
        assert!(HostRecord::decode(b"{").unwrap_err().0.contains("malformed"));
    }

    #[test]
    fn a_session_record_survives_its_codec() {
        let record = SessionRecord {
            name: "box-1".into(),
            id: "id".into(),
            epoch: Epoch(2),
            nonce: "n".into(),
            ttl_ms: 30_000,
            boot_id: "b".into(),
            ended: false,
            fenced_by: Some("box-2".into()),
        };
        assert_eq!(SessionRecord::decode(&record.encode()).unwrap(), record);
    }
}
