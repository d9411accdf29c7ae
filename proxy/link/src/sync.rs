//! Atomics of std, or of loom when the protocol is model-checked (`--cfg loom`).

#[cfg(loom)]
pub(crate) use loom::sync::atomic::{AtomicU32, AtomicU64, Ordering};
#[cfg(not(loom))]
pub(crate) use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// The sequentially consistent fence between "say what I do" and "read what you do".
#[cfg(not(loom))]
#[inline]
pub(crate) fn fence() {
    std::sync::atomic::fence(Ordering::SeqCst);
}

#[cfg(loom)]
std::thread_local! {
    // All threads of a loom model are coroutines of one OS thread, so this reaches each of them.
    static FENCES: std::cell::Cell<bool> = const { std::cell::Cell::new(true) };
}

#[cfg(loom)]
pub(crate) fn fence() {
    if FENCES.get() {
        loom::sync::atomic::fence(Ordering::SeqCst);
    }
}

/// Runs `model` with the protocol's fences, or without them to see that loom finds the violation.
#[cfg(loom)]
pub fn with_fences(fences: bool, model: impl FnOnce()) {
    FENCES.set(fences);
    model();
    FENCES.set(true);
}
