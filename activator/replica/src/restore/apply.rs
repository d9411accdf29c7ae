//! Writing LTX files into a database file, in order, in constant memory: a later file's pages
//! overwrite, and the last file's size cuts.

use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use super::error::RestoreError;
use crate::ltx::{Decoder, Header, PageSize, Pgno};

/// Neighbouring pages that are written at once.
const RUN_BYTES_MAX: usize = 256 * 1024;

/// The unfinished database file.
#[derive(Debug)]
pub(super) struct Target {
    path: PathBuf,
    file: File,
    page_size: Option<PageSize>,
    commit: u32,
    /// One bit a page that was written: 32 KiB a gigabyte of 4 KiB pages.
    written: Vec<u64>,
    run: Vec<u8>,
    run_at: Pgno,
}

impl Target {
    pub(super) fn create(path: &Path) -> Result<Self, RestoreError> {
        let file = File::options()
            .read(true)
            .write(true)
            .create(true)
            .truncate(true)
            // It may hold what its app shows to nobody else.
            .mode(0o600)
            .open(path)
            .map_err(|error| RestoreError::io(path, error))?;
        Ok(Self::over(path, file, None, 0))
    }

    /// Goes on with a file that [`Target::finish`] has completed.
    pub(super) fn reopen(path: &Path, size: PageSize, commit: u32) -> Result<Self, RestoreError> {
        let file = File::options()
            .read(true)
            .write(true)
            .open(path)
            .map_err(|error| RestoreError::io(path, error))?;
        let mut target = Self::over(path, file, Some(size), commit);
        for page in 1..=commit {
            target.mark(Pgno(page));
        }
        Ok(target)
    }

    fn over(path: &Path, file: File, page_size: Option<PageSize>, commit: u32) -> Self {
        Self {
            path: path.to_owned(),
            file,
            page_size,
            commit,
            written: Vec::new(),
            run: Vec::new(),
            run_at: Pgno(0),
        }
    }

    /// Applies one file; returns its header. Nothing counts if this fails.
    pub(super) fn apply(&mut self, from: impl Read, name: &str) -> Result<Header, RestoreError> {
        let mut decoder = Decoder::new(from, name)?;
        let header = *decoder.header();
        // Only a whole database may have other pages than what it follows.
        let is_anew = self.page_size.is_some_and(|size| size != header.page_size);
        if is_anew {
            self.file.set_len(0).map_err(|error| self.fail(error))?;
            self.written.clear();
        }
        self.page_size = Some(header.page_size);
        let mut page = Vec::new();
        while let Some(pgno) = decoder.next_page(&mut page)? {
            self.put(pgno, &page, header.page_size).map_err(|error| self.fail(error))?;
        }
        self.flush(header.page_size).map_err(|error| self.fail(error))?;
        self.commit = header.commit;
        if is_anew && self.missing(header.page_size).is_some() {
            let file = name.to_owned();
            return Err(RestoreError::Misfit { file, why: "another page size than before" });
        }
        Ok(header)
    }

    /// Checks that every page is there, cuts to size and makes the file durable.
    pub(super) fn finish(self) -> Result<(PageSize, u32), RestoreError> {
        let Some(size) = self.page_size else { return Err(RestoreError::Empty) };
        if let Some(page) = self.missing(size) {
            return Err(RestoreError::MissingPage { page, page_count: self.commit });
        }
        let len = u64::from(self.commit) * u64::from(size.get());
        self.file.set_len(len).map_err(|error| self.fail(error))?;
        self.file.sync_all().map_err(|error| self.fail(error))?;
        Ok((size, self.commit))
    }

    /// The first page of the database that no file held.
    fn missing(&self, size: PageSize) -> Option<Pgno> {
        let mut page = size.next_stored(Pgno(0));
        while page.0 <= self.commit {
            if !self.is_marked(page) {
                return Some(page);
            }
            page = size.next_stored(page);
        }
        None
    }

    fn put(&mut self, pgno: Pgno, page: &[u8], size: PageSize) -> io::Result<()> {
        let pages_in_run = u32::try_from(self.run.len() / size.buffer_len()).unwrap_or(u32::MAX);
        let continues = !self.run.is_empty() && pgno.0 == self.run_at.0 + pages_in_run;
        if !continues || self.run.len() + page.len() > RUN_BYTES_MAX {
            self.flush(size)?;
            self.run_at = pgno;
        }
        self.run.extend_from_slice(page);
        self.mark(pgno);
        Ok(())
    }

    fn flush(&mut self, size: PageSize) -> io::Result<()> {
        if !self.run.is_empty() {
            self.file.write_all_at(&self.run, size.offset_of(self.run_at))?;
            self.run.clear();
        }
        Ok(())
    }

    fn mark(&mut self, page: Pgno) {
        let (word, bit) = place(page);
        if self.written.len() <= word {
            self.written.resize(word + 1, 0);
        }
        self.written[word] |= bit;
    }

    fn is_marked(&self, page: Pgno) -> bool {
        let (word, bit) = place(page);
        self.written.get(word).is_some_and(|bits| bits & bit != 0)
    }

    fn fail(&self, error: io::Error) -> RestoreError {
        RestoreError::io(&self.path, error)
    }
}

fn place(page: Pgno) -> (usize, u64) {
    (usize::try_from(page.0 / 64).unwrap_or(usize::MAX), 1 << (page.0 % 64))
}
