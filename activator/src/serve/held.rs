//! What an activator that comes after this one needs, to take over what serves: each run's lease and
//! first process, and until when the session counts.
//!
//! Written without fsync: it is of use only while the machine is up, which the boot id proves. Beside
//! the position and not in the run directory, where an app can make files.

use std::path::{Path, PathBuf};
use std::{fs, io};

use dormouse_core::event::Held;
use dormouse_core::ids::{ETag, Run};
use dormouse_core::time::Deadline;
use dormouse_instances::LeaderId;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

const VERSION: u32 = 1;

/// A run that serves.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct HeldFile {
    version: u32,
    boot_id: String,
    run: u64,
    pid: i32,
    began: u64,
    /// The host's record, as it was written.
    record: String,
    etag: String,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct DeadlineFile {
    version: u32,
    boot_id: String,
    deadline: Deadline,
}

fn held_path(state_dir: &Path) -> PathBuf {
    state_dir.join("held.json")
}

fn deadline_path(data: &Path) -> PathBuf {
    data.join("deadline.json")
}

/// Keeps the lease of a run that serves.
pub(crate) fn keep(
    state_dir: &Path,
    boot_id: &str,
    run: Run,
    leader: LeaderId,
    held: &Held,
) -> io::Result<()> {
    let record = String::from_utf8(held.record.clone()).map_err(io::Error::other)?;
    let file = HeldFile {
        version: VERSION,
        boot_id: boot_id.to_owned(),
        run: run.0,
        pid: leader.pid,
        began: leader.began,
        record,
        etag: held.etag.0.clone(),
    };
    write(&held_path(state_dir), &file)
}

/// The lease of this very run, if it was kept since the machine came up.
pub(crate) fn of(state_dir: &Path, boot_id: &str, run: Run) -> Option<(Held, LeaderId)> {
    let file: HeldFile = read(&held_path(state_dir))?;
    let is_it = file.version == VERSION && file.boot_id == boot_id && file.run == run.0;
    let leader = LeaderId { pid: file.pid, began: file.began };
    is_it.then(|| (Held { record: file.record.into_bytes(), etag: ETag(file.etag) }, leader))
}

/// Keeps the session's deadline.
pub(crate) fn keep_deadline(data: &Path, boot_id: &str, deadline: Deadline) -> io::Result<()> {
    let file = DeadlineFile { version: VERSION, boot_id: boot_id.to_owned(), deadline };
    write(&deadline_path(data), &file)
}

/// The session's deadline, if it was told since the machine came up.
pub(crate) fn deadline(data: &Path, boot_id: &str) -> Option<Deadline> {
    let file: DeadlineFile = read(&deadline_path(data))?;
    (file.version == VERSION && file.boot_id == boot_id).then_some(file.deadline)
}

fn write(path: &Path, file: &impl Serialize) -> io::Result<()> {
    let fresh = path.with_extension("json.tmp");
    fs::write(&fresh, serde_json::to_vec(file).map_err(io::Error::other)?)?;
    fs::rename(fresh, path)
}

fn read<T: DeserializeOwned>(path: &Path) -> Option<T> {
    serde_json::from_slice(&fs::read(path).ok()?).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lease_is_of_one_run_and_one_boot() {
        let dir = tempfile::tempdir().unwrap();
        let held = Held { record: b"{}".to_vec(), etag: ETag("\"t\"".to_owned()) };
        let leader = LeaderId { pid: 4, began: 5 };
        keep(dir.path(), "boot", Run(7), leader, &held).unwrap();
        assert_eq!(of(dir.path(), "boot", Run(7)), Some((held, leader)));
        assert_eq!(of(dir.path(), "boot", Run(8)), None);
        assert_eq!(of(dir.path(), "another boot", Run(7)), None);
        fs::write(held_path(dir.path()), "torn").unwrap();
        assert_eq!(of(dir.path(), "boot", Run(7)), None);
    }

    #[test]
    fn a_deadline_is_of_one_boot() {
        let dir = tempfile::tempdir().unwrap();
        let deadline =
            Deadline::after(dormouse_core::time::Now::default(), dormouse_core::time::Nanos(5));
        keep_deadline(dir.path(), "boot", deadline).unwrap();
        assert_eq!(super::deadline(dir.path(), "boot"), Some(deadline));
        assert_eq!(super::deadline(dir.path(), "another boot"), None);
    }
}
