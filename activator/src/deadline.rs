//! Until when the session counts, for the guard and for the next activator. In the run directory, which
//! is memory on most machines: a full disk must not keep it from being renewed.

use std::path::{Path, PathBuf};
use std::{fs, io};

use dormouse_core::time::Deadline;
use serde::{Deserialize, Serialize};

use crate::kept;

const VERSION: u32 = 1;
/// The file's name in the run directory.
pub(crate) const NAME: &str = "deadline.json";

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct DeadlineFile {
    version: u32,
    boot_id: String,
    deadline: Deadline,
}

fn path(run: &Path) -> PathBuf {
    run.join(NAME)
}

/// Keeps the session's deadline.
pub(crate) fn keep(run: &Path, boot_id: &str, deadline: Deadline) -> io::Result<()> {
    let file = DeadlineFile { version: VERSION, boot_id: boot_id.to_owned(), deadline };
    kept::write(&path(run), &file)
}

/// The session's deadline, if it was told since the machine came up.
pub(crate) fn kept(run: &Path, boot_id: &str) -> Option<Deadline> {
    let file: DeadlineFile = kept::read(&path(run))?;
    (file.version == VERSION && file.boot_id == boot_id).then_some(file.deadline)
}

/// There is none any more: nothing is ended by time.
pub(crate) fn forget(run: &Path) -> io::Result<()> {
    match fs::remove_file(path(run)) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        Ok(()) | Err(_) => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use dormouse_core::time::{Nanos, Now};

    use super::*;

    #[test]
    fn a_deadline_is_of_one_boot() {
        let dir = tempfile::tempdir().unwrap();
        let deadline = Deadline::after(Now::default(), Nanos(5));
        keep(dir.path(), "boot", deadline).unwrap();
        assert_eq!(kept(dir.path(), "boot"), Some(deadline));
        assert_eq!(kept(dir.path(), "another boot"), None);
        forget(dir.path()).unwrap();
        assert_eq!(kept(dir.path(), "boot"), None);
        forget(dir.path()).unwrap();
    }
}
