//! The kernel's word that something waited for memory: a trigger on a file of pressure stall information
//! (kernel documentation, `accounting/psi.rst`; Linux 5.2+).

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write as _};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

/// Its window, microseconds: the shortest that needs no privilege.
const WINDOW_US: u32 = 2_000_000;

/// A trigger that is set.
#[derive(Debug)]
pub struct StallTrigger {
    told: AsyncFd<File>,
}

impl StallTrigger {
    /// Tells when, within 2 s, something waited for so many hundredths of them.
    ///
    /// # Errors
    /// This file tells nothing by itself: a plain one, or an older kernel's.
    pub fn set(file: &Path, percent: u32) -> io::Result<Self> {
        // A file with a length is not the kernel's.
        if fs::metadata(file)?.len() > 0 {
            return Err(io::Error::other("a plain file tells nothing by itself"));
        }
        let nonblocking = libc::O_NONBLOCK;
        let mut told =
            OpenOptions::new().read(true).write(true).custom_flags(nonblocking).open(file)?;
        let stalled_us = WINDOW_US / 100 * percent;
        told.write_all(format!("some {stalled_us} {WINDOW_US}\0").as_bytes())?;
        // SAFETY: the file is owned by the `AsyncFd` and closed with it.
        let told = unsafe { AsyncFd::register_with_interest(told, Interest::PRIORITY) }?;
        Ok(Self { told })
    }

    /// Returns when it was so; at most once a window.
    ///
    /// # Errors
    /// The file is gone, as with its cgroup.
    pub async fn told(&self) -> io::Result<()> {
        self.told.ready(Interest::PRIORITY).await?.clear_ready();
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_plain_file_cannot_tell_and_is_left_as_it_is() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("memory");
        fs::write(&path, "some avg10=0.00").unwrap();
        assert!(StallTrigger::set(&path, 10).is_err());
        assert_eq!(fs::read_to_string(&path).unwrap(), "some avg10=0.00");
    }
}
