//! Custody of shared mappings: the only place that turns mapped memory into references.

use std::ffi::c_void;
use std::num::NonZeroUsize;
use std::os::fd::BorrowedFd;
use std::ptr::NonNull;
use std::slice;
use std::sync::atomic::AtomicU64;

use nix::errno::Errno;
use nix::sys::mman::{MapFlags, ProtFlags, mmap, munmap};

use crate::protocol::Counters;

/// Types that may lie in shared memory.
///
/// # Safety
/// Any bytes must be a valid value, all access must be atomic, and the alignment must divide a
/// page.
pub(crate) unsafe trait Shared {}

// SAFETY: an atomic integer; any 8 bytes are valid.
unsafe impl Shared for AtomicU64 {}
// SAFETY: atomic integers and padding, aligned to 64.
unsafe impl Shared for Counters {}

/// Whether a mapping may be written through.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Access {
    Read,
    Write,
}

/// A shared mapping of a sealed memfd, unmapped on drop.
#[derive(Debug)]
pub(crate) struct Mapping {
    base: NonNull<c_void>,
    len: usize,
}

// SAFETY: the mapping belongs to no thread; all access through it is atomic (`Shared`).
unsafe impl Send for Mapping {}
// SAFETY: as above; `&Mapping` gives out only references to `Shared` types.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps `len` bytes from the start of `fd`, which must be sealed against shrinking: a shrunk
    /// file would turn a later load into SIGBUS.
    pub(crate) fn new(fd: BorrowedFd<'_>, len: usize, access: Access) -> Result<Self, Errno> {
        let size = NonZeroUsize::new(len).ok_or(Errno::EINVAL)?;
        let prot = match access {
            Access::Read => ProtFlags::PROT_READ,
            Access::Write => ProtFlags::PROT_READ | ProtFlags::PROT_WRITE,
        };
        // SAFETY: a fresh mapping at an address of the kernel's choice replaces no memory of ours.
        let base = unsafe { mmap(None, size, prot, MapFlags::MAP_SHARED, fd, 0) }?;
        Ok(Self { base, len })
    }

    /// `count` values from byte `offset` on.
    ///
    /// # Panics
    /// When they do not lie inside the mapping at their alignment: a mistake in this crate.
    pub(crate) fn array<T: Shared>(&self, offset: usize, count: usize) -> &[T] {
        let end = count.checked_mul(size_of::<T>()).and_then(|len| len.checked_add(offset));
        assert!(end.is_some_and(|end| end <= self.len), "array outside its mapping");
        let first = self.base.cast::<u8>().as_ptr().wrapping_add(offset).cast::<T>();
        assert!(first.is_aligned(), "array at a wrong alignment");
        // SAFETY: in bounds and aligned as asserted; `Shared` promises validity for any bytes and
        // atomic access; the seal keeps the pages there; `self` keeps the mapping.
        unsafe { slice::from_raw_parts(first, count) }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: mapped by `new` with this length, and every reference borrowed from `self`.
        let unmapped = unsafe { munmap(self.base, self.len) };
        debug_assert_eq!(unmapped, Ok(()));
    }
}
