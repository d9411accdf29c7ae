//! The link's messages. One datagram each; the first in each direction is a hello, whose magic and
//! version stand at fixed places so that any two versions can name their mismatch.
//!
//! The proxy connects and says [`ProxyHello`]; the activator answers [`ActivatorHello`] with two
//! descriptors (words for reading, this process's area), the routes, and [`ToProxy::RoutesDone`].

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::table::{ProcessId, TableId};
use crate::word::{Refusal, RunNumber, Slot};

/// Version of all messages; raised whenever one changes.
pub const VERSION: u32 = 1;
/// Bound of one message: a host name is at most 253 bytes, a page of statistics about 4 KiB.
pub const MESSAGE_BYTES_MAX: usize = 64 * 1024;
/// Descriptors that come with an [`ActivatorHello`]: words, area.
pub const HELLO_FDS: usize = 2;

const MAGIC: [u8; 8] = *b"DMSELINK";
const HEAD: usize = 12;

/// The first message of a proxy.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProxyHello {
    /// Which process this is; the activator keeps one area for it over reconnects.
    pub process: ProcessId,
}

/// The first message of an activator; comes with [`HELLO_FDS`] descriptors.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ActivatorHello {
    /// The table that the descriptors hold.
    pub table: TableId,
    /// Its slots.
    pub slots: u32,
    /// Where the instances' sockets are, see [`instance_socket`].
    pub run_dir: String,
    /// This box's name.
    pub box_name: String,
}

/// What a route allows.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RouteLimits {
    /// Longest request body, bytes.
    pub body_bytes: u64,
    /// Most waiters at once, over all loops of one proxy.
    pub waiters: u32,
    /// A waiter's deadline, milliseconds.
    pub wake_wait_ms: u32,
}

/// From the activator.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ToProxy {
    /// A host lives at a slot; sent again when its limits change. Answered by
    /// [`ToActivator::RouteAck`] when it comes after [`ToProxy::RoutesDone`].
    Route {
        /// Its slot.
        slot: Slot,
        /// Its canonical name.
        host: String,
        /// What it allows.
        limits: RouteLimits,
    },
    /// The host is gone; answered by [`ToActivator::UnrouteAck`].
    Unroute {
        /// Its slot.
        slot: Slot,
        /// Its name.
        host: String,
    },
    /// Every route was sent; routes of an earlier connection that were not repeated are gone.
    RoutesDone,
    /// The slot's word changed, or a post was answered: look again.
    Notify {
        /// The slot.
        slot: Slot,
    },
    /// The wake failed for all that wait for this slot now.
    Refused {
        /// The slot.
        slot: Slot,
        /// Why.
        reason: Refusal,
        /// For the header `Retry-After`.
        retry_after_s: u32,
    },
    /// Nothing is left in this table; its mappings may go.
    RetireTable {
        /// The old table.
        table: TableId,
    },
}

/// From a proxy.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ToActivator {
    /// Every loop counts in this table now.
    TableAck {
        /// The table.
        table: TableId,
    },
    /// Every loop knows the route that was sent after [`ToProxy::RoutesDone`].
    RouteAck {
        /// Its slot.
        slot: Slot,
    },
    /// No loop uses this slot for that host any more: it may go to another host.
    UnrouteAck {
        /// The slot.
        slot: Slot,
    },
    /// Someone waits for this slot.
    Wake {
        /// The slot.
        slot: Slot,
    },
    /// The run's socket was missing or refused: the instance is dead or going.
    InstanceGone {
        /// The slot.
        slot: Slot,
        /// The run that was tried.
        run: RunNumber,
    },
    /// Counters by name, as they stand now.
    Stats(Vec<(String, u64)>),
}

/// Why bytes are no message.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum MessageError {
    /// The peer does not speak this protocol at all.
    #[error("link: the peer's hello has a wrong magic; is this the link's socket?")]
    Magic,
    /// The peer speaks another version.
    #[error(
        "link: the peer speaks version {theirs}, this program {VERSION}; restart the older one"
    )]
    Version {
        /// The peer's version.
        theirs: u32,
    },
    /// Longer than [`MESSAGE_BYTES_MAX`].
    #[error("link: a message of {0} bytes exceeds {MESSAGE_BYTES_MAX}")]
    TooLong(usize),
    /// Not what this version expects.
    #[error("link: a message cannot be read: {0}")]
    Garbled(postcard::Error),
    /// Bytes follow the message.
    #[error("link: {0} bytes follow a message")]
    Trailing(usize),
}

/// Encodes a message after the hellos.
pub fn encode<T: Serialize>(message: &T) -> Result<Vec<u8>, MessageError> {
    bounded(postcard::to_allocvec(message).map_err(MessageError::Garbled)?)
}

/// Decodes a message after the hellos.
pub fn decode<'a, T: Deserialize<'a>>(bytes: &'a [u8]) -> Result<T, MessageError> {
    if bytes.len() > MESSAGE_BYTES_MAX {
        return Err(MessageError::TooLong(bytes.len()));
    }
    match postcard::take_from_bytes(bytes).map_err(MessageError::Garbled)? {
        (message, []) => Ok(message),
        (_, rest) => Err(MessageError::Trailing(rest.len())),
    }
}

/// Encodes a hello: magic, version (little endian), then its fields.
pub fn encode_hello<T: Serialize>(hello: &T) -> Result<Vec<u8>, MessageError> {
    let mut bytes = Vec::from(MAGIC);
    bytes.extend(VERSION.to_le_bytes());
    bytes.extend(postcard::to_allocvec(hello).map_err(MessageError::Garbled)?);
    bounded(bytes)
}

/// Decodes a hello; magic and version are judged before anything else is read.
pub fn decode_hello<'a, T: Deserialize<'a>>(bytes: &'a [u8]) -> Result<T, MessageError> {
    let (head, body) = bytes.split_first_chunk::<HEAD>().ok_or(MessageError::Magic)?;
    let [m0, m1, m2, m3, m4, m5, m6, m7, v0, v1, v2, v3] = *head;
    if [m0, m1, m2, m3, m4, m5, m6, m7] != MAGIC {
        return Err(MessageError::Magic);
    }
    let theirs = u32::from_le_bytes([v0, v1, v2, v3]);
    if theirs != VERSION {
        return Err(MessageError::Version { theirs });
    }
    decode(body)
}

fn bounded(bytes: Vec<u8>) -> Result<Vec<u8>, MessageError> {
    if bytes.len() > MESSAGE_BYTES_MAX {
        return Err(MessageError::TooLong(bytes.len()));
    }
    Ok(bytes)
}

/// Where a run of a host listens: `{run_dir}/{host}/{run}.sock`.
#[must_use]
pub fn instance_socket(run_dir: &Path, host: &str, run: RunNumber) -> PathBuf {
    run_dir.join(host).join(format!("{run}.sock"))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn samples() -> Vec<ToProxy> {
        let slot = Slot(70_000);
        let limits = RouteLimits { body_bytes: 1 << 30, waiters: 256, wake_wait_ms: 30_000 };
        vec![
            ToProxy::Route { slot, host: "a.test".into(), limits },
            ToProxy::Unroute { slot, host: "a.test".into() },
            ToProxy::RoutesDone,
            ToProxy::Notify { slot },
            ToProxy::Refused { slot, reason: Refusal::Broken, retry_after_s: 5 },
            ToProxy::RetireTable { table: TableId(9) },
        ]
    }

    #[test]
    fn every_message_survives_the_way() {
        for message in samples() {
            assert_eq!(decode::<ToProxy>(&encode(&message).unwrap()), Ok(message));
        }
        let slot = Slot(1);
        for message in [
            ToActivator::TableAck { table: TableId(9) },
            ToActivator::RouteAck { slot },
            ToActivator::UnrouteAck { slot },
            ToActivator::Wake { slot },
            ToActivator::InstanceGone { slot, run: RunNumber(4) },
            ToActivator::Stats(vec![("requests".into(), 7)]),
        ] {
            assert_eq!(decode::<ToActivator>(&encode(&message).unwrap()), Ok(message));
        }
    }

    #[test]
    fn a_hello_of_another_version_is_named() {
        let hello = ProxyHello { process: ProcessId { pid: 1, start_time: 2 } };
        let mut bytes = encode_hello(&hello).unwrap();
        assert_eq!(decode_hello::<ProxyHello>(&bytes), Ok(hello));
        bytes[8] = 77;
        assert_eq!(decode_hello::<ProxyHello>(&bytes), Err(MessageError::Version { theirs: 77 }));
        bytes[0] = b'X';
        assert_eq!(decode_hello::<ProxyHello>(&bytes), Err(MessageError::Magic));
        assert_eq!(decode_hello::<ProxyHello>(b"GET / HTTP"), Err(MessageError::Magic));
    }

    #[test]
    fn a_message_has_a_bound_and_an_end() {
        let long = ToActivator::Stats(vec![("x".repeat(MESSAGE_BYTES_MAX), 0)]);
        assert!(matches!(encode(&long), Err(MessageError::TooLong(_))));
        let mut bytes = encode(&ToProxy::RoutesDone).unwrap();
        bytes.push(0);
        assert_eq!(decode::<ToProxy>(&bytes), Err(MessageError::Trailing(1)));
    }

    #[test]
    fn an_instance_socket_has_one_place() {
        let path = instance_socket(Path::new("/run/dormouse"), "a.test", RunNumber(12));
        assert_eq!(path, Path::new("/run/dormouse/a.test/12.sock"));
    }

    proptest! {
        #[test]
        fn foreign_bytes_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..600)) {
            drop(decode::<ToProxy>(&bytes));
            drop(decode::<ToActivator>(&bytes));
            drop(decode_hello::<ActivatorHello>(&bytes));
            let mut hello = encode_hello(&()).unwrap();
            hello.extend(&bytes);
            drop(decode_hello::<ActivatorHello>(&hello));
        }
    }
}
