//! Objects under conditional writes: the one place where the simulated store decides who wins.
//!
//! The contract suite of the real stores runs on it (`tests/contract.rs`).

use std::collections::BTreeMap;
use std::ops::RangeBounds;

use dormouse_core::ids::ETag;

use crate::clock::Time;
use crate::rng::mix;

/// How the store makes tags.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Tags {
    /// Never twice the same.
    Random,
    /// Equal content, equal tag.
    Content,
}

/// What must hold for a write or a delete.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Condition<'a> {
    /// Nothing.
    None,
    /// The key is free.
    Absent,
    /// The object has this tag.
    Tag(&'a ETag),
}

/// One object.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Object<V> {
    /// Its content.
    pub value: V,
    /// Its tag.
    pub etag: ETag,
    /// When it was written.
    pub written: Time,
}

/// Objects by key.
#[derive(Clone, Debug, Hash)]
pub struct Objects<K, V> {
    tags: Tags,
    /// Random tags that were given out.
    given: u64,
    by_key: BTreeMap<K, Object<V>>,
}

impl<K: Ord, V> Objects<K, V> {
    /// None.
    #[must_use]
    pub const fn new(tags: Tags) -> Self {
        Self { tags, given: 0, by_key: BTreeMap::new() }
    }

    /// One of them.
    pub fn get(&self, key: &K) -> Option<&Object<V>> {
        self.by_key.get(key)
    }

    /// Some of them, in order.
    pub fn range(
        &self,
        range: impl RangeBounds<K>,
    ) -> impl DoubleEndedIterator<Item = (&K, &Object<V>)> {
        self.by_key.range(range)
    }

    /// Their keys, in order.
    pub fn keys(&self) -> impl Iterator<Item = &K> {
        self.by_key.keys()
    }

    fn holds(&self, key: &K, condition: Condition<'_>) -> bool {
        match (condition, self.by_key.get(key)) {
            (Condition::None, _) | (Condition::Absent, None) => true,
            (Condition::Tag(tag), Some(object)) => object.etag == *tag,
            (Condition::Absent, Some(_)) | (Condition::Tag(_), None) => false,
        }
    }

    /// Writes it if the condition holds, else nothing; `content` is a hash of what is written.
    pub fn put(
        &mut self,
        key: K,
        value: V,
        content: u64,
        condition: Condition<'_>,
        now: Time,
    ) -> Option<ETag> {
        if !self.holds(&key, condition) {
            return None;
        }
        let text = match self.tags {
            Tags::Random => {
                self.given += 1;
                mix(self.given, 11)
            }
            Tags::Content => content,
        };
        let etag = ETag(format!("\"{text:x}\""));
        self.by_key.insert(key, Object { value, etag: etag.clone(), written: now });
        Some(etag)
    }

    /// Deletes it if the condition holds; whether it did.
    pub fn delete(&mut self, key: &K, condition: Condition<'_>) -> bool {
        let holds = self.holds(key, condition);
        if holds {
            self.by_key.remove(key);
        }
        holds
    }
}
