//! Descriptors that systemd hands over at the start (`LISTEN_FDS`): those that it stored for us.

use std::env;
use std::os::fd::{FromRawFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};

use nix::fcntl::{FcntlArg, FdFlag, fcntl};

/// The first that is handed over, after standard input, output and error.
const FIRST: i32 = 3;

static TAKEN: AtomicBool = AtomicBool::new(false);

/// Takes them over, each with its name; none at a second call. Instances do not inherit them.
#[must_use]
pub fn take_inherited() -> Vec<(String, OwnedFd)> {
    let is_for_us = env::var("LISTEN_PID").is_ok_and(|pid| pid == std::process::id().to_string());
    let count = env::var("LISTEN_FDS").ok().and_then(|count| count.parse::<i32>().ok());
    let Some(count) = count.filter(|_| is_for_us) else { return Vec::new() };
    if TAKEN.swap(true, Ordering::Relaxed) {
        return Vec::new();
    }
    let names = env::var("LISTEN_FDNAMES").unwrap_or_default();
    let mut names = names.split(':').map(str::to_owned);
    let mut taken = Vec::new();
    for number in FIRST..FIRST.saturating_add(count) {
        let name = names.next().unwrap_or_default();
        // SAFETY: the parent process opened it for us by this number, and `TAKEN` says that nobody
        // else owns it.
        let descriptor = unsafe { OwnedFd::from_raw_fd(number) };
        match fcntl(&descriptor, FcntlArg::F_SETFD(FdFlag::FD_CLOEXEC)) {
            Ok(_) => taken.push((name, descriptor)),
            // Not open after all, and so not ours to close.
            Err(_) => std::mem::forget(descriptor),
        }
    }
    taken
}
