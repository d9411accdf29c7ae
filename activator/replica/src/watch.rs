//! One inotify descriptor for all hosts, armed for one event at a time.
//!
//! A watch fires once and is armed again by its host, so that a busy writer costs no event a
//! commit. A slow poll of file lengths and times finds what inotify cannot see.

use std::collections::HashMap;
use std::fs;
use std::io;
use std::os::fd::AsFd as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use inotify::{Inotify, WatchMask, Watches};
use tokio::net::unix::pipe::Receiver;
use tokio::sync::Notify;

/// Room for a few hundred events of files without names.
const EVENT_BYTES: usize = 16 * 1024;

/// The process's watcher. Clones share it; it ends when the last one is dropped.
#[derive(Clone, Debug)]
pub struct Watcher {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    watches: Watches,
    hosts: Mutex<HashMap<i32, Vec<Weak<Host>>>>,
    all: Mutex<Vec<Weak<Host>>>,
}

#[derive(Debug)]
struct Host {
    wal: PathBuf,
    changed: Notify,
    seen: Mutex<Option<Stamp>>,
}

type Stamp = (u64, u64, i64, i64);

/// A host's part of the watcher.
#[derive(Debug)]
pub struct Subscription {
    shared: Arc<Shared>,
    host: Arc<Host>,
}

impl Watcher {
    /// Starts the task that reads events and polls; call within a tokio runtime.
    pub fn start(poll: Duration) -> io::Result<Self> {
        let inotify = Inotify::init()?;
        let shared = Arc::new(Shared {
            watches: inotify.watches(),
            hosts: Mutex::new(HashMap::new()),
            all: Mutex::new(Vec::new()),
        });
        // Any readable descriptor will do for a `Receiver`; it only reads bytes.
        let events = Receiver::from_owned_fd_unchecked(inotify.as_fd().try_clone_to_owned()?)?;
        tokio::spawn(run(Arc::downgrade(&shared), events, poll));
        Ok(Self { shared })
    }

    /// Watches a WAL file, which need not exist yet. Not armed.
    #[must_use]
    pub fn subscribe(&self, wal: &Path) -> Subscription {
        let host = Arc::new(Host {
            wal: wal.to_owned(),
            changed: Notify::new(),
            seen: Mutex::new(stamp(wal)),
        });
        lock(&self.shared.all).push(Arc::downgrade(&host));
        Subscription { shared: Arc::clone(&self.shared), host }
    }
}

impl Subscription {
    /// Arms the watch for one event: a write to the WAL, or its creation where there is none.
    /// What happened before is not seen: look at the WAL after arming.
    pub fn arm(&self) -> io::Result<()> {
        // ATTRIB: the last link went while somebody has the file open.
        let on_file = WatchMask::MODIFY | WatchMask::MOVE_SELF | WatchMask::ATTRIB;
        let on_dir = WatchMask::CREATE | WatchMask::MOVED_TO;
        let mut watches = self.shared.watches.clone();
        // Held over the registration: the event may be read before the map knows the watch.
        let mut hosts = lock(&self.shared.hosts);
        let once = WatchMask::ONESHOT;
        let watch = match watches.add(&self.host.wal, on_file | once) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                let dir = self.host.wal.parent().unwrap_or(Path::new("/"));
                watches.add(dir, on_dir | once)?
            }
            result => result?,
        };
        let entry = hosts.entry(watch.get_watch_descriptor_id()).or_default();
        entry.retain(|host| host.strong_count() > 0);
        if !entry.iter().any(|host| host.as_ptr() == Arc::as_ptr(&self.host)) {
            entry.push(Arc::downgrade(&self.host));
        }
        *lock(&self.host.seen) = stamp(&self.host.wal);
        Ok(())
    }

    /// Waits for the event. Cancel safe.
    pub async fn fired(&self) {
        self.host.changed.notified().await;
    }
}

async fn run(shared: Weak<Shared>, events: Receiver, poll: Duration) {
    let mut buffer = vec![0; EVENT_BYTES];
    let mut ticks = tokio::time::interval(poll);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            ready = events.readable() => {
                let Some(shared) = shared.upgrade() else { return };
                if ready.is_err() {
                    return;
                }
                while let Ok(got) = events.try_read(&mut buffer) {
                    notify(&shared, &buffer[..got]);
                }
            }
            _ = ticks.tick() => {
                let Some(shared) = shared.upgrade() else { return };
                poll_all(&shared);
            }
        }
    }
}

/// Takes `struct inotify_event`s apart (inotify(7)): watch, mask, cookie, length of the name.
fn notify(shared: &Shared, mut bytes: &[u8]) {
    while let Some((head, rest)) = bytes.split_first_chunk::<16>() {
        let [w0, w1, w2, w3, .., l0, l1, l2, l3] = *head;
        let watch = i32::from_ne_bytes([w0, w1, w2, w3]);
        let name_len = usize::try_from(u32::from_ne_bytes([l0, l1, l2, l3])).unwrap_or(usize::MAX);
        bytes = rest.get(name_len..).unwrap_or_default();
        let hosts = lock(&shared.hosts).remove(&watch);
        for host in hosts.into_iter().flatten().filter_map(|host| host.upgrade()) {
            host.changed.notify_one();
        }
    }
}

fn poll_all(shared: &Shared) {
    lock(&shared.all).retain(|host| {
        let Some(host) = host.upgrade() else { return false };
        let now = stamp(&host.wal);
        let mut seen = lock(&host.seen);
        if *seen != now {
            *seen = now;
            host.changed.notify_one();
        }
        true
    });
}

fn stamp(wal: &Path) -> Option<Stamp> {
    let stat = fs::symlink_metadata(wal).ok()?;
    Some((stat.ino(), stat.len(), stat.mtime(), stat.mtime_nsec()))
}

/// No invariant spans a panic under these locks.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    const LONG: Duration = Duration::from_hours(1);
    const LIMIT: Duration = Duration::from_secs(20);

    async fn fires(subscription: &Subscription) -> bool {
        tokio::time::timeout(LIMIT, subscription.fired()).await.is_ok()
    }

    #[tokio::test]
    async fn a_write_fires_once_until_it_is_armed_again() {
        let dir = tempfile::tempdir().unwrap();
        let wal = dir.path().join("db-wal");
        fs::write(&wal, b"1").unwrap();
        let watcher = Watcher::start(LONG).unwrap();
        let subscription = watcher.subscribe(&wal);
        for text in [b"2", b"3"] {
            subscription.arm().unwrap();
            fs::write(&wal, text).unwrap();
            assert!(fires(&subscription).await);
        }
    }

    #[tokio::test]
    async fn a_wal_that_appears_fires() {
        let dir = tempfile::tempdir().unwrap();
        let wal = dir.path().join("db-wal");
        let watcher = Watcher::start(LONG).unwrap();
        let subscription = watcher.subscribe(&wal);
        subscription.arm().unwrap();
        fs::write(&wal, b"1").unwrap();
        assert!(fires(&subscription).await);
    }

    #[tokio::test]
    async fn the_slow_poll_finds_what_no_event_told() {
        let dir = tempfile::tempdir().unwrap();
        let wal = dir.path().join("db-wal");
        let watcher = Watcher::start(Duration::from_millis(5)).unwrap();
        let subscription = watcher.subscribe(&wal);
        fs::write(&wal, b"1").unwrap();
        assert!(fires(&subscription).await, "never armed, found by polling");
    }
}
