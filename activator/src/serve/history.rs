//! The event log: every input of the core, so that a production history can be replayed.
//!
//! Buffered, not fsynced: it explains, it does not protect. Three files of at most
//! [`FILE_BYTES_MAX`]; each begins with the settings, the oldest that is left need not begin with
//! a boot.

use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

use dormouse_core::Settings;
use dormouse_core::event::{Event, Line};
use dormouse_core::time::Now;

/// One file's size; two older ones are kept: 48 MiB in all.
const FILE_BYTES_MAX: u64 = 16 * 1024 * 1024;

/// The log, open for appending.
#[derive(Debug)]
pub(crate) struct History {
    path: PathBuf,
    file: BufWriter<File>,
    written: u64,
    settings: Settings,
}

impl History {
    /// Moves an earlier process's log aside and begins a new one.
    pub(crate) fn open(path: &Path, settings: Settings) -> io::Result<Self> {
        rotate(path)?;
        let file = BufWriter::new(File::create(path)?);
        let mut history = Self { path: path.to_owned(), file, written: 0, settings };
        history.head()?;
        Ok(history)
    }

    fn head(&mut self) -> io::Result<()> {
        let line = Line::Settings(self.settings.clone());
        self.write(&line)
    }

    fn write(&mut self, line: &Line) -> io::Result<()> {
        let mut text = serde_json::to_vec(line)?;
        text.push(b'\n');
        self.written = self.written.saturating_add(u64::try_from(text.len()).unwrap_or(0));
        self.file.write_all(&text)
    }

    /// Notes one input.
    pub(crate) fn note(&mut self, now: Now, event: &Event) -> io::Result<()> {
        self.write(&Line::Step(now, event.clone()))?;
        if self.written > FILE_BYTES_MAX {
            self.file.flush()?;
            rotate(&self.path)?;
            self.file = BufWriter::new(File::create(&self.path)?);
            self.written = 0;
            self.head()?;
        }
        Ok(())
    }

    /// Hands what is buffered to the kernel; called when there is nothing else to do.
    pub(crate) fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

fn rotate(path: &Path) -> io::Result<()> {
    let older = |n: u32| path.with_extension(format!("log.{n}"));
    for (from, to) in [(older(1), older(2)), (path.to_owned(), older(1))] {
        match fs::rename(from, to) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            other => other?,
        }
    }
    Ok(())
}
