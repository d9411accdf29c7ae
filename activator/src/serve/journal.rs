//! The fsynced journal: what must survive a crash and is in neither store nor registry.
//!
//! One JSON object a line, and a line without its newline is a
//! torn write of the last moment and is dropped, since nothing behind it was begun. The file is
//! written anew at each start, with what is still open.

use std::collections::BTreeMap;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use dormouse_core::effect::Entry;
use dormouse_core::event::SessionMemo;
use dormouse_core::ids::{Host, Nonce};

/// What a journal says when it is read from start to end.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Memory {
    /// The newest session.
    pub(crate) session: Option<SessionMemo>,
    /// Releases that were begun and are not definite.
    pub(crate) releasing: BTreeMap<Host, Nonce>,
}

/// Why the journal cannot be used.
#[derive(Debug, thiserror::Error)]
pub(crate) enum JournalError {
    #[error("journal {}: {source}", path.display())]
    Io { path: PathBuf, source: io::Error },
    #[error(
        "journal {}: line {line} is damaged ({source}): restore the file, or move it away; \
         without it this box starts a new session and takes its hosts again", path.display()
    )]
    Damaged { path: PathBuf, line: usize, source: serde_json::Error },
}

/// The journal, open for appending.
#[derive(Debug)]
pub(crate) struct Journal {
    file: File,
    path: PathBuf,
}

impl Memory {
    fn apply(&mut self, entry: Entry) {
        match entry {
            Entry::Session { epoch, base } => match &mut self.session {
                Some(memo) if memo.epoch == epoch => {
                    if !memo.bases.contains(&base) {
                        memo.bases.push(base);
                    }
                }
                session => {
                    *session = Some(SessionMemo { epoch, bases: vec![base], deadline: None });
                }
            },
            Entry::Releasing { host, nonce } => {
                self.releasing.insert(host, nonce);
            }
            Entry::Settled { host } => {
                self.releasing.remove(&host);
            }
        }
    }

    fn entries(&self) -> Vec<Entry> {
        let session = self.session.iter().flat_map(|memo| {
            let epoch = memo.epoch;
            memo.bases.iter().map(move |base| Entry::Session { epoch, base: base.clone() })
        });
        let releasing = self
            .releasing
            .iter()
            .map(|(host, nonce)| Entry::Releasing { host: host.clone(), nonce: nonce.clone() });
        session.chain(releasing).collect()
    }
}

impl Journal {
    /// Reads what is there, writes it anew without what is settled, and opens it for appending.
    pub(crate) fn open(path: &Path) -> Result<(Self, Memory), JournalError> {
        let io = |source| JournalError::Io { path: path.to_owned(), source };
        let memory = read(path)?;
        let fresh = path.with_extension("new");
        let mut file = File::create(&fresh).map_err(io)?;
        for entry in memory.entries() {
            file.write_all(&line(&entry)).map_err(io)?;
        }
        file.sync_all().map_err(io)?;
        fs::rename(&fresh, path).map_err(io)?;
        let directory = path.parent().unwrap_or(Path::new("/"));
        File::open(directory).and_then(|dir| dir.sync_all()).map_err(io)?;
        let file = OpenOptions::new().append(true).open(path).map_err(io)?;
        Ok((Self { file, path: path.to_owned() }, memory))
    }

    /// Makes an entry durable.
    pub(crate) fn append(&mut self, entry: &Entry) -> Result<(), JournalError> {
        let io = |source| JournalError::Io { path: self.path.clone(), source };
        let before = self.file.metadata().map_err(io)?.len();
        let written = self.file.write_all(&line(entry)).and_then(|()| self.file.sync_data());
        written.map_err(|source| {
            // Half a line would run into the next one.
            self.file.set_len(before).ok();
            io(source)
        })
    }
}

fn line(entry: &Entry) -> Vec<u8> {
    // Text and numbers always serialise.
    let mut line = serde_json::to_vec(entry).unwrap_or_default();
    line.push(b'\n');
    line
}

fn read(path: &Path) -> Result<Memory, JournalError> {
    let text = match fs::read(path) {
        Ok(text) => text,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Memory::default()),
        Err(source) => return Err(JournalError::Io { path: path.to_owned(), source }),
    };
    let whole = text.iter().rposition(|byte| *byte == b'\n').map_or(0, |end| end + 1);
    let mut memory = Memory::default();
    let lines = text.iter().take(whole).copied().collect::<Vec<u8>>();
    for (index, line) in lines.split(|byte| *byte == b'\n').enumerate() {
        if line.is_empty() {
            continue;
        }
        let entry = serde_json::from_slice(line).map_err(|source| JournalError::Damaged {
            path: path.to_owned(),
            line: index + 1,
            source,
        })?;
        memory.apply(entry);
    }
    Ok(memory)
}

#[cfg(test)]
mod tests {
    use dormouse_core::ids::Epoch;

    use super::*;

    fn session(epoch: u64, base: &str) -> Entry {
        Entry::Session { epoch: Epoch(epoch), base: base.to_owned() }
    }

    fn releasing(host: &str) -> Entry {
        Entry::Releasing { host: host.into(), nonce: "n".into() }
    }

    #[test]
    fn what_is_open_survives_a_crash_and_what_is_settled_does_not() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("journal");
        let (mut journal, memory) = Journal::open(&path).unwrap();
        assert_eq!(memory, Memory::default());
        for entry in [session(1, "a"), session(2, "b"), session(2, "c"), releasing("x.test")] {
            journal.append(&entry).unwrap();
        }
        journal.append(&releasing("y.test")).unwrap();
        journal.append(&Entry::Settled { host: "y.test".into() }).unwrap();
        // A torn last line: power went in the middle of a write.
        let mut file = OpenOptions::new().append(true).open(&path).unwrap();
        file.write_all(b"{\"Releasing\":{\"host\":").unwrap();
        for _ in 0..2 {
            let (_, memory) = Journal::open(&path).unwrap();
            let memo = memory.session.unwrap();
            assert_eq!((memo.epoch, memo.bases.len()), (Epoch(2), 2));
            assert_eq!(memory.releasing.len(), 1);
        }
    }

    #[test]
    fn a_damaged_line_is_named_and_nothing_is_guessed() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("journal");
        fs::write(&path, "{\"Session\":{\"epoch\":1,\"base\":\"a\"}}\nnonsense\n").unwrap();
        let error = Journal::open(&path).unwrap_err().to_string();
        assert!(error.contains("line 2") && error.contains("move it away"), "{error}");
    }
}
