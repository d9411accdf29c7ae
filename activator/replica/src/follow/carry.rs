//! Pages that were taken out of the WAL before it may be reused, and wait for the next L0.
//!
//! One slot a page in a scratch file without a name, so that nothing is left after a crash; the
//! slot of a page that was written again is used anew. Never larger than the database.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};

use crate::ltx::PageSize;

/// The scratch file. Made at its first use.
#[derive(Debug)]
pub(super) struct Carry {
    dir: PathBuf,
    file: Option<File>,
    slots: u64,
    free: Vec<u64>,
}

impl Carry {
    pub(super) fn new(dir: &Path) -> Self {
        Self { dir: dir.to_owned(), file: None, slots: 0, free: Vec::new() }
    }

    /// Stores one page; returns its slot.
    pub(super) fn put(&mut self, page: &[u8], size: PageSize) -> io::Result<u64> {
        let slot = self.free.last().copied().unwrap_or(self.slots);
        if self.file.is_none() {
            self.file = Some(scratch(&self.dir)?);
        }
        let Some(file) = &self.file else { return Err(io::ErrorKind::NotFound.into()) };
        file.write_all_at(page, slot * u64::from(size.get()))?;
        if self.free.pop().is_none() {
            self.slots += 1;
        }
        Ok(slot)
    }

    pub(super) fn get(&self, slot: u64, size: PageSize, into: &mut [u8]) -> io::Result<()> {
        let Some(file) = &self.file else { return Err(io::ErrorKind::NotFound.into()) };
        file.read_exact_at(into, slot * u64::from(size.get()))
    }

    pub(super) fn free(&mut self, slot: u64) {
        self.free.push(slot);
    }

    /// Forgets everything.
    pub(super) fn clear(&mut self) {
        self.file = None;
        self.slots = 0;
        self.free.clear();
    }
}

fn scratch(dir: &Path) -> io::Result<File> {
    let path = dir.join("carry.tmp");
    let file = File::options().read(true).write(true).create(true).truncate(true).open(&path)?;
    std::fs::remove_file(&path)?;
    Ok(file)
}
