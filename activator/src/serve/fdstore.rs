//! systemd's file descriptor store: what holds the locks of awake apps' databases while there is no
//! activator. Each host's two descriptors have its name.

use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::sync::{Arc, Mutex, PoisonError};

use dormouse_replica::follow::{Keeper, let_go};
use libsystemd::daemon::{NotifyState, notify_with_fds};

use super::signals::is_started_by_systemd;

/// The store. Whether systemd has room in it (`FileDescriptorStoreMax=`) is not told.
#[derive(Debug)]
pub(crate) struct FdStore {
    /// What an earlier activator left, by name.
    found: Mutex<BTreeMap<String, Vec<OwnedFd>>>,
}

/// One host's part of it.
#[derive(Debug)]
struct HostPart {
    store: Arc<FdStore>,
    host: String,
}

impl FdStore {
    /// With all that an earlier activator left; none where no systemd started us.
    pub(crate) fn open() -> Option<Arc<Self>> {
        if !is_started_by_systemd() || std::env::var_os("NOTIFY_SOCKET").is_none() {
            return None;
        }
        let mut found: BTreeMap<String, Vec<OwnedFd>> = BTreeMap::new();
        for (name, descriptor) in dormouse_instances::take_inherited() {
            found.entry(name).or_default().push(descriptor);
        }
        Some(Arc::new(Self { found: Mutex::new(found) }))
    }

    pub(crate) fn of(self: &Arc<Self>, host: &str) -> Arc<dyn Keeper> {
        Arc::new(HostPart { store: Arc::clone(self), host: host.to_owned() })
    }

    /// Lets go of what is not of these hosts.
    pub(crate) fn keep_only(self: &Arc<Self>, hosts: &BTreeSet<String>) {
        let names: Vec<String> = self.found().keys().cloned().collect();
        for name in names.into_iter().filter(|name| !hosts.contains(name)) {
            let_go(self.of(&name).as_ref());
        }
    }

    fn found(&self) -> std::sync::MutexGuard<'_, BTreeMap<String, Vec<OwnedFd>>> {
        self.found.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Keeper for HostPart {
    fn take(&self) -> Vec<OwnedFd> {
        self.store.found().remove(&self.host).unwrap_or_default()
    }

    fn keep(&self, descriptors: &[BorrowedFd<'_>]) {
        let numbers: Vec<RawFd> = descriptors.iter().map(AsRawFd::as_raw_fd).collect();
        tell(&[NotifyState::Fdstore, NotifyState::Fdname(self.host.clone())], &numbers);
    }

    fn forget(&self) {
        tell(&[NotifyState::FdstoreRemove, NotifyState::Fdname(self.host.clone())], &[]);
    }
}

/// Without it, a restart may call for a whole image: no reason to stop.
fn tell(states: &[NotifyState], descriptors: &[RawFd]) {
    if let Err(error) = notify_with_fds(false, states, descriptors) {
        tracing::warn!(%error, "systemd cannot be told of descriptors to store");
    }
}
