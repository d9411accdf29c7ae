//! The simulated object store: records and L0 files under conditional PUTs.

use std::collections::BTreeMap;

use dormouse_core::effect::{Expect, RecordKey};
use dormouse_core::event::{Got, Wrote};
use dormouse_core::ids::{ETag, Host, Nonce, Txid};
use dormouse_core::position::{Newest, RemoteTip};
use dormouse_core::record::{HostRecord, SessionRecord};
use dormouse_core::time::Nanos;
use dormouse_core::upload::{PutAnswer, Standing};

use crate::clock::{S, Time};
use crate::disk::history;
use crate::objects::{Condition, Objects, Tags};
use crate::rng::mix;

/// One committed write of an app: its number is its content.
pub type Write = u64;

/// What an L0 file holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Body {
    /// The whole database.
    Image(Vec<Write>),
    /// What came after a history with this hash; a fence is one without writes.
    Step {
        /// Hash of the history that it is built on: known to checkers only.
        parent: u64,
        /// What came after it.
        writes: Vec<Write>,
    },
}

/// An L0 file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct File {
    /// Its number.
    pub txid: Txid,
    /// The nonce in its metadata, which its tag does not depend on.
    pub nonce: Nonce,
    /// It holds a number against an earlier owner: never deleted.
    pub fence: bool,
    /// Its content.
    pub body: Body,
}

/// What a restore gives.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Restored {
    /// Newest number.
    pub tip: RemoteTip,
    /// All writes in order.
    pub content: Vec<Write>,
    /// The first number that was built on another history than stands before it.
    pub merged: Option<Txid>,
}

/// The store.
#[derive(Clone, Debug)]
pub struct Store {
    records: Objects<RecordKey, Vec<u8>>,
    /// Whether it tells how old a record is.
    tells_age: bool,
    files: Objects<(Host, Txid), File>,
    /// Full images at level 9, by their last number.
    snapshots: Objects<(Host, Txid), Vec<Write>>,
    /// Host records as they were last written.
    pub hosts: BTreeMap<Host, HostRecord>,
    /// Session records as they were last written.
    pub sessions: BTreeMap<String, SessionRecord>,
    /// Sabotage: conditions on records of hosts, of sessions, and on files.
    pub ignores: (bool, bool, bool),
}

impl Store {
    /// An empty one.
    #[must_use]
    pub const fn new(tags: Tags, tells_age: bool) -> Self {
        Self {
            records: Objects::new(tags),
            tells_age,
            files: Objects::new(tags),
            snapshots: Objects::new(tags),
            hosts: BTreeMap::new(),
            sessions: BTreeMap::new(),
            ignores: (false, false, false),
        }
    }

    /// Reads a record.
    #[must_use]
    pub fn get(&self, key: &RecordKey, now: Time) -> Got {
        self.records.get(key).map_or(Got::Absent, |object| Got::Found {
            body: object.value.clone(),
            etag: object.etag.clone(),
            // `Date` and `Last-Modified` are whole seconds.
            age: self.tells_age.then_some(Nanos(now / S * S - object.written / S * S)),
        })
    }

    /// Writes a record, if its condition holds.
    pub fn put_record(
        &mut self,
        key: &RecordKey,
        body: &[u8],
        expect: &Expect,
        now: Time,
    ) -> Wrote {
        let ignored = match key {
            RecordKey::Host(_) => self.ignores.0,
            RecordKey::Session(_) => self.ignores.1,
        };
        let condition = match expect {
            Expect::Absent => Condition::Absent,
            Expect::Tag(_) if ignored && self.records.get(key).is_some() => Condition::None,
            Expect::Tag(tag) => Condition::Tag(tag),
        };
        let content = body.iter().fold(3, |hash, byte| mix(hash, u64::from(*byte)));
        let put = self.records.put(key.clone(), body.to_vec(), content, condition, now);
        let Some(etag) = put else { return Wrote::ConditionFailed };
        match key {
            RecordKey::Host(host) => {
                if let Ok(record) = HostRecord::decode(body) {
                    self.hosts.insert(host.clone(), record);
                }
            }
            RecordKey::Session(name) => {
                if let Ok(record) = SessionRecord::decode(body) {
                    self.sessions.insert(name.0.clone(), record);
                }
            }
        }
        Wrote::Done(etag)
    }

    /// Writes a file, if its number is free.
    pub fn put_file(&mut self, host: &Host, file: &File) -> PutAnswer {
        let condition = if self.ignores.2 { Condition::None } else { Condition::Absent };
        let content = match &file.body {
            Body::Image(writes) => history(writes),
            Body::Step { parent, writes } => mix(*parent, history(writes)),
        };
        let key = (host.clone(), file.txid);
        let put = self.files.put(key, file.clone(), content, condition, 0);
        put.map_or(PutAnswer::ConditionFailed, |etag| PutAnswer::Done { etag })
    }

    /// Writes a snapshot, if there is none up to this number.
    pub fn put_snapshot(&mut self, host: &Host, txid: Txid, content: &[Write]) -> PutAnswer {
        let (key, hash) = ((host.clone(), txid), history(content));
        let put = self.snapshots.put(key, content.to_vec(), hash, Condition::Absent, 0);
        put.map_or(PutAnswer::ConditionFailed, |etag| PutAnswer::Done { etag })
    }

    /// L0 files that a snapshot covers and that may go: never the newest, never a fence.
    #[must_use]
    pub fn covered(&self, host: &Host, txid: Txid, fences_too: bool) -> Vec<Txid> {
        let newest = self.list(host).map_or(Txid(0), |tip| tip.txid);
        let range = (host.clone(), Txid(0))..=(host.clone(), txid);
        self.files
            .range(range)
            .filter(|((_, number), file)| *number < newest && (fences_too || !file.value.fence))
            .map(|((_, number), _)| *number)
            .collect()
    }

    /// Deletes an L0 file.
    pub fn delete_file(&mut self, host: &Host, txid: Txid) {
        self.files.delete(&(host.clone(), txid), Condition::None);
    }

    /// What stands under a number.
    #[must_use]
    pub fn standing(&self, host: &Host, txid: Txid) -> Standing {
        self.files.get(&(host.clone(), txid)).map_or(Standing::Absent, |file| Standing::File {
            nonce: Some(file.value.nonce.clone()),
            etag: file.etag.clone(),
        })
    }

    /// A file and its tag.
    #[must_use]
    pub fn file(&self, host: &Host, txid: Txid) -> Option<(File, ETag)> {
        let file = self.files.get(&(host.clone(), txid))?;
        Some((file.value.clone(), file.etag.clone()))
    }

    /// The newest number.
    #[must_use]
    pub fn list(&self, host: &Host) -> Option<RemoteTip> {
        let range = (host.clone(), Txid(0))..=(host.clone(), Txid(u64::MAX));
        let ((_, txid), file) = self.files.range(range).next_back()?;
        Some(RemoteTip { txid: *txid, etag: Some(file.etag.clone()) })
    }

    /// The newest file, with its nonce.
    #[must_use]
    pub fn newest(&self, host: &Host) -> Option<Newest> {
        let tip = self.list(host)?;
        let nonce = self.files.get(&(host.clone(), tip.txid)).map(|file| file.value.nonce.clone());
        Some(Newest { tip, nonce })
    }

    /// All files of a host, merged in order; an error for a gap, none when there is nothing.
    pub fn restore(&self, host: &Host) -> Result<Option<Restored>, String> {
        let Some(tip) = self.list(host) else { return Ok(None) };
        let range = (host.clone(), Txid(0))..=(host.clone(), Txid(u64::MAX));
        let base = self.snapshots.range(range).next_back();
        let (base, content) =
            base.map_or((Txid(0), Vec::new()), |((_, t), c)| (*t, c.value.clone()));
        let mut restored = Restored { tip: tip.clone(), content, merged: None };
        if base == tip.txid {
            // The L0 of that number was not read.
            restored.tip.etag = None;
        }
        let mut number = base.next();
        while number <= tip.txid {
            let Some(file) = self.files.get(&(host.clone(), number)) else {
                return Err(format!("{host} has no file {number}, but {}", tip.txid));
            };
            restored.apply(&file.value);
            number = number.next();
        }
        Ok(Some(restored))
    }

    /// Tag of a snapshot.
    #[must_use]
    pub fn snapshot_tag(&self, host: &Host, txid: Txid) -> Option<ETag> {
        self.snapshots.get(&(host.clone(), txid)).map(|snapshot| snapshot.etag.clone())
    }

    /// Hosts that have files.
    #[must_use]
    pub fn replicated(&self) -> Vec<Host> {
        let mut hosts: Vec<Host> = self.files.keys().map(|(host, _)| host.clone()).collect();
        hosts.dedup();
        hosts
    }
}

impl Restored {
    /// One more file.
    pub fn apply(&mut self, file: &File) {
        match &file.body {
            Body::Image(writes) => self.content.clone_from(writes),
            Body::Step { parent, writes } => {
                if *parent != history(&self.content) {
                    self.merged.get_or_insert(file.txid);
                }
                self.content.extend(writes);
            }
        }
    }
}
