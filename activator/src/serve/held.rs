//! What an activator that comes after this one needs, to take over what serves: each run's lease and
//! first process.
//!
//! Written without fsync: it is of use only while the machine is up, which the boot id proves. Beside
//! the position and not in the run directory, where an app can make files.

use std::io;
use std::path::{Path, PathBuf};

use dormouse_core::event::Held;
use dormouse_core::ids::{ETag, Run};
use dormouse_instances::LeaderId;
use serde::{Deserialize, Serialize};

use crate::kept::{read, write};

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

fn held_path(state_dir: &Path) -> PathBuf {
    state_dir.join("held.json")
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
        std::fs::write(held_path(dir.path()), "torn").unwrap();
        assert_eq!(of(dir.path(), "boot", Run(7)), None);
    }
}
