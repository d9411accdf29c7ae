//! Temporary files of the directory store, and their sweep after a crash.
//!
//! Every live temporary file is locked by its maker; what can be locked by somebody else was
//! left behind. A sweep may win the race against a maker that has not locked yet: the maker sees
//! it (no lock, or no link) and takes another name.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

const TRIES: u32 = 16;

/// A locked temporary file; its name is removed when it is dropped.
#[derive(Debug)]
pub(crate) struct Scratch {
    pub(crate) file: File,
    pub(crate) path: PathBuf,
}

impl Scratch {
    pub(crate) fn create(dir: &Path) -> io::Result<Self> {
        for _ in 0..TRIES {
            let path = dir.join(random_text()?);
            let file = OpenOptions::new().read(true).write(true).create_new(true).open(&path)?;
            if lock_won(&file)? && file.metadata()?.nlink() == 1 {
                return Ok(Self { file, path });
            }
        }
        Err(io::Error::other("temporary files are swept as fast as they are made"))
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        // Gone already after a rename; a leftover name is swept at the next open.
        drop(fs::remove_file(&self.path));
    }
}

/// Removes what crashed writers left in `dir`.
pub(crate) fn sweep(dir: &Path) -> io::Result<()> {
    for entry in fs::read_dir(dir)? {
        let path = entry?.path();
        match File::open(&path) {
            Ok(file) => {
                if lock_won(&file)? {
                    drop(fs::remove_file(&path));
                }
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => (),
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

fn lock_won(file: &File) -> io::Result<bool> {
    match file.try_lock() {
        Ok(()) => Ok(true),
        Err(TryLockError::WouldBlock) => Ok(false),
        Err(TryLockError::Error(error)) => Err(error),
    }
}

/// 128 random bits as 32 hex digits.
pub(crate) fn random_text() -> io::Result<String> {
    let mut bytes = [0_u8; 16];
    getrandom::fill(&mut bytes).map_err(|error| io::Error::other(error.to_string()))?;
    Ok(format!("{:032x}", u128::from_be_bytes(bytes)))
}
