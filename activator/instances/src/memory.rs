//! How this process keeps memory: what many hosts' starts leave free is used for the next ones.

/// Blocks from this size on are given back to the system when they are freed.
#[cfg(target_env = "gnu")]
const MAPPED: i32 = 64 << 10; // bytes

/// One heap for all threads, before there is a second one. By default each thread that works on
/// hosts fills a heap of its own, and what it frees is of use to none of the others. Best effort.
pub fn share_heap() {
    #[cfg(target_env = "gnu")]
    for (option, value) in [
        (libc::M_ARENA_MAX, 1),
        (libc::M_MMAP_THRESHOLD, MAPPED),
        (libc::M_TRIM_THRESHOLD, 2 * MAPPED),
    ] {
        // SAFETY: mallopt takes two numbers and no memory of ours; no other thread runs yet.
        unsafe { libc::mallopt(option, value) };
    }
}
