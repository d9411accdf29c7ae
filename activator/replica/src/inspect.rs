//! A look at the local copy, for the core's table; and setting it aside.
//!
//! Looks by `lstat` alone: opening and closing the database would drop our own locks on it.

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use dormouse_core::ids::{Generation, Txid};
use dormouse_core::position::{FileId, LocalCopy};

use crate::follow::wal_path;
use crate::position_file::{self, PositionFileError};
use crate::restore::side_files;
use crate::spool::{self, sync_dir};

/// Looks at database, `-wal`, position file and spool. Blocks.
pub fn inspect(database: &Path, state_dir: &Path) -> Result<LocalCopy, PositionFileError> {
    let position = position_file::load(state_dir)?;
    let file = stat(database)?;
    let wal_bytes = stat(&wal_path(database))?.map_or(0, |wal| wal.size);
    let spool = spool::left_over(state_dir).map_err(|source| {
        let path = spool::dir(state_dir);
        PositionFileError::Io { path, source }
    })?;
    let spool = spool.into_iter().map(|(_, nonce)| nonce).collect();
    Ok(LocalCopy { file, position, wal_bytes, spool })
}

/// What tells this file from others; none when there is none. Blocks.
pub fn stat(path: &Path) -> Result<Option<FileId>, PositionFileError> {
    match fs::symlink_metadata(path) {
        Ok(stat) => {
            let seconds = u64::try_from(stat.ctime()).unwrap_or(0);
            let nanos = u64::try_from(stat.ctime_nsec()).unwrap_or(0);
            let ctime_ns = seconds.saturating_mul(1_000_000_000).saturating_add(nanos);
            Ok(Some(FileId { inode: stat.ino(), size: stat.size(), ctime_ns }))
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(source) => Err(PositionFileError::Io { path: path.to_owned(), source }),
    }
}

/// Renames the database and its side files to `.fork-<generation>-<txid>`, and forgets the
/// position. Never overwrites an earlier fork. Returns the fork's path. Blocks.
pub fn set_aside(
    database: &Path,
    state_dir: &Path,
    generation: Generation,
    txid: Txid,
) -> Result<PathBuf, PositionFileError> {
    let fail = |source| PositionFileError::Io { path: database.to_owned(), source };
    let parent = database.parent().unwrap_or(Path::new("/"));
    let mut n = 1_u32;
    let fork = loop {
        let again = if n == 1 { String::new() } else { format!(".{n}") };
        let name = format!("{}.fork-{generation}-{txid}{again}", database.display());
        let fork = PathBuf::from(name);
        if fs::symlink_metadata(&fork).is_err() {
            break fork;
        }
        n += 1;
    };
    // The WAL goes first: a database without its WAL is never left under the old name.
    for (from, to) in side_files(database).iter().zip(side_files(&fork)) {
        match fs::rename(from, to) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(fail(error)),
            Ok(()) | Err(_) => (),
        }
    }
    fs::rename(database, &fork).map_err(fail)?;
    sync_dir(parent).map_err(fail)?;
    position_file::clear(state_dir)?;
    Ok(fork)
}

/// Copies of this database that were set aside; what cannot be listed is not told.
#[must_use]
pub fn forks(database: &Path) -> Vec<PathBuf> {
    let (Some(parent), Some(name)) = (database.parent(), database.file_name()) else {
        return Vec::new();
    };
    let start = format!("{}.fork-", name.to_string_lossy());
    let is_fork = |path: &PathBuf| {
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let side = ["-wal", "-shm", "-journal"].iter().any(|ending| name.ends_with(ending));
        name.starts_with(&start) && !side
    };
    let Ok(entries) = fs::read_dir(parent) else { return Vec::new() };
    entries.flatten().map(|entry| entry.path()).filter(is_fork).collect()
}

#[cfg(test)]
mod tests {
    use dormouse_core::position::{POSITION_VERSION, Position};

    use super::*;

    #[test]
    fn the_local_copy_is_seen_with_position_and_wal() {
        let dir = tempfile::tempdir().unwrap();
        let db = dir.path().join("db");
        assert_eq!(inspect(&db, dir.path()).unwrap(), LocalCopy::default());
        fs::write(&db, b"12345").unwrap();
        fs::write(wal_path(&db), b"123").unwrap();
        let file = stat(&db).unwrap().unwrap();
        let position = Position {
            version: POSITION_VERSION,
            generation: Generation(3),
            txid: Txid(9),
            etag: None,
            file,
            page_count: 1,
            page_size: 512,
            clean: true,
        };
        position_file::save(dir.path(), &position).unwrap();
        let copy = inspect(&db, dir.path()).unwrap();
        assert_eq!((copy.file, copy.wal_bytes), (Some(file), 3));
        assert_eq!(copy.position, Some(position));
        position_file::mark_unclean(dir.path()).unwrap();
        assert!(!inspect(&db, dir.path()).unwrap().position.unwrap().clean);
    }

    #[test]
    fn a_torn_position_file_is_an_error_that_names_it() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("position.json"), b"{\"version\":1,").unwrap();
        let error = inspect(&dir.path().join("db"), dir.path()).unwrap_err();
        assert!(error.to_string().contains("position.json"), "{error}");
    }

    #[test]
    fn a_fork_keeps_its_wal_and_earlier_forks() {
        let dir = tempfile::tempdir().unwrap();
        let db = dir.path().join("db");
        let mut forks = Vec::new();
        for n in 0..2 {
            fs::write(&db, [n]).unwrap();
            fs::write(wal_path(&db), [n]).unwrap();
            forks.push(set_aside(&db, dir.path(), Generation(4), Txid(7)).unwrap());
            assert!(!db.exists() && !wal_path(&db).exists());
        }
        let mut found = super::forks(&db);
        found.sort();
        assert_eq!(found, forks, "their side files are not forks of their own");
        assert!(forks[0].to_str().unwrap().ends_with("db.fork-4-7"));
        for (n, fork) in (0..).zip(forks) {
            assert_eq!(fs::read(&fork).unwrap(), [n]);
            assert_eq!(fs::read(wal_path(&fork)).unwrap(), [n]);
        }
    }
}
