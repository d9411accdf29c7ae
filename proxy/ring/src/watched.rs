//! Readiness of a descriptor, under either engine.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

/// A non-blocking descriptor whose readiness can be waited for. Dropping a wait loses nothing.
#[derive(Debug)]
pub struct Watched(AsyncFd<OwnedFd>);

impl Watched {
    /// Watches `fd`, which must not block.
    pub fn new(fd: OwnedFd) -> io::Result<Self> {
        let interest = Interest::READABLE | Interest::WRITABLE;
        // SAFETY: the descriptor is owned by the `AsyncFd`, which closes it after deregistering.
        let registered = unsafe { AsyncFd::register_with_interest(fd, interest) };
        Ok(Self(registered?))
    }

    /// Tries `operation` whenever the descriptor may be read, until it does not say `WouldBlock`.
    pub async fn read_with<T>(
        &self,
        mut operation: impl FnMut(BorrowedFd<'_>) -> io::Result<T>,
    ) -> io::Result<T> {
        loop {
            let mut ready = self.0.readable().await?;
            match ready.try_io(|fd| operation(fd.get_ref().as_fd())) {
                Ok(result) => return result,
                Err(_would_block) => (),
            }
        }
    }

    /// Tries `operation` whenever the descriptor may be written, until it does not say
    /// `WouldBlock`.
    pub async fn write_with<T>(
        &self,
        mut operation: impl FnMut(BorrowedFd<'_>) -> io::Result<T>,
    ) -> io::Result<T> {
        loop {
            let mut ready = self.0.writable().await?;
            match ready.try_io(|fd| operation(fd.get_ref().as_fd())) {
                Ok(result) => return result,
                Err(_would_block) => (),
            }
        }
    }
}
