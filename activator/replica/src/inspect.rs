//! A look at the local copy, for the core's table; and setting it aside.
//!
//! Looks by `lstat`, and reads no more than a header: of a file that is not what the position says,
//! which nobody of this process has open. (Closing one that is open would drop our locks on it.)

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use dormouse_core::ids::{Generation, Txid};
use dormouse_core::position::{FileId, LocalCopy};

use crate::follow::{SQLITE_HEADER_LEN, page_size, wal_path};
use crate::position_file::{self, PositionFileError};
use crate::restore::side_files;
use crate::spool::{self, sync_dir};
use crate::wal::read_up_to;

/// Looks at database, `-wal`, position file and spool. Blocks.
pub fn inspect(database: &Path, state_dir: &Path) -> Result<LocalCopy, PositionFileError> {
    let position = position_file::load(state_dir)?;
    // An empty file is none: SQLite makes a database of it, and there is nothing to keep.
    let file = stat(database)?.filter(|file| file.size > 0);
    let wal_bytes = stat(&wal_path(database))?.map_or(0, |wal| wal.size);
    let spool = spool::left_over(state_dir).map_err(|source| {
        let path = spool::dir(state_dir);
        PositionFileError::Io { path, source }
    })?;
    let spool = spool.into_iter().map(|(_, nonce)| nonce).collect();
    let changed = position.as_ref().zip(file).filter(|(position, file)| position.file != *file);
    let damaged = match changed {
        Some((_, file)) => is_damaged(database, file)
            .map_err(|source| PositionFileError::Io { path: database.to_owned(), source })?,
        None => false,
    };
    Ok(LocalCopy { file, position, wal_bytes, spool, damaged })
}

/// Whether this is no database, or less than its header says. With a WAL or a journal beside it the
/// header may be ahead of the file.
fn is_damaged(database: &Path, file: FileId) -> io::Result<bool> {
    if !fs::symlink_metadata(database)?.is_file() {
        // Refused by name where it is opened for good.
        return Ok(false);
    }
    let mut head = [0; SQLITE_HEADER_LEN];
    let got = read_up_to(&File::open(database)?, &mut head, 0)?;
    let Some(page_size) = page_size(&head).filter(|_| got == head.len()) else { return Ok(true) };
    let is_settled = side_files(database)
        .iter()
        .filter(|side| side.extension().is_none_or(|name| name != "shm"))
        .all(|side| fs::symlink_metadata(side).map_or(0, |side| side.len()) == 0);
    // Programs that do not know of the count leave an old one, with the change counter of then.
    let is_counted = head[24..28] == head[92..96];
    let count = u32::from_be_bytes([head[28], head[29], head[30], head[31]]);
    let whole = u64::from(page_size.get()).saturating_mul(u64::from(count));
    Ok(is_settled && is_counted && file.size < whole)
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
    fn a_database_that_was_cut_or_overwritten_is_seen_and_one_that_was_edited_is_none() {
        let dir = tempfile::tempdir().unwrap();
        let db = dir.path().join("db");
        let app = rusqlite::Connection::open(&db).unwrap();
        app.execute_batch(
            "PRAGMA journal_mode = wal; CREATE TABLE t (x); INSERT INTO t VALUES (1)",
        )
        .unwrap();
        drop(app);
        let position = Position {
            version: POSITION_VERSION,
            generation: Generation(3),
            txid: Txid(9),
            etag: None,
            file: stat(&db).unwrap().unwrap(),
            page_count: 2,
            page_size: 4096,
            clean: true,
        };
        position_file::save(dir.path(), &position).unwrap();
        let seen = || inspect(&db, dir.path()).unwrap();
        assert!(!seen().damaged);
        let edit = rusqlite::Connection::open(&db).unwrap();
        edit.execute_batch("INSERT INTO t VALUES (zeroblob(9000))").unwrap();
        drop(edit);
        assert!(!seen().damaged, "an edit");
        let whole = fs::read(&db).unwrap();
        fs::write(&db, &whole[..whole.len() - 4096]).unwrap();
        assert!(seen().damaged, "cut off");
        fs::write(dir.path().join("db-journal"), b"its pages").unwrap();
        assert!(!seen().damaged, "SQLite rolls it back");
        fs::remove_file(dir.path().join("db-journal")).unwrap();
        for garbage in [&b"garbage"[..], &[7; 9000], &whole[..50]] {
            fs::write(&db, garbage).unwrap();
            assert!(seen().damaged, "overwritten");
        }
        fs::write(&db, b"").unwrap();
        assert_eq!((seen().file, seen().damaged), (None, false), "as if it were not there");
        position_file::clear(dir.path()).unwrap();
        fs::write(&db, b"garbage").unwrap();
        assert!(!seen().damaged, "never followed: nobody knows what it is");
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
