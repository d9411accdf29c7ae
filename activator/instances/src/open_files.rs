//! /proc, read for the files that an instance has open: one that no name leads to is seen nowhere else.

use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

use crate::instance::Instance;

/// What the kernel adds to the path of a file that lost its name (proc(5), `fd`).
const DELETED: &str = " (deleted)";

impl Instance {
    /// Whether a process of it has a database open that stands no more under `database`: one that lost
    /// this name, or its WAL; or one that had an inode of `former` and was renamed, as long as none has
    /// the file open that stands there now. What may not be looked at counts as none. Blocks.
    #[must_use]
    pub fn holds_former(&self, database: &Path, former: &[u64]) -> bool {
        holds_former(&self.pids(), database, former)
    }
}

fn holds_former(pids: &[i32], database: &Path, former: &[u64]) -> bool {
    // The kernel tells paths without links.
    let dir = database.parent().and_then(|dir| fs::canonicalize(dir).ok());
    let (Some(dir), Some(name)) = (dir, database.file_name()) else { return false };
    let device = fs::metadata(&dir).map_or(0, |stat| stat.dev());
    let path = dir.join(name);
    let gone = ["", "-wal"].map(|part| {
        let mut text = path.clone().into_os_string();
        text.push(part);
        text.push(DELETED);
        text
    });
    let now = fs::metadata(&path).ok().map(|stat| stat.ino());
    let (mut has_former, mut has_now) = (false, false);
    for pid in pids {
        let Ok(files) = fs::read_dir(format!("/proc/{pid}/fd")) else { continue };
        for file in files.flatten().map(|file| file.path()) {
            if fs::read_link(&file).is_ok_and(|to| gone.iter().any(|gone| to == *gone)) {
                return true;
            }
            let Ok(stat) = fs::metadata(&file) else { continue };
            if stat.dev() == device {
                has_former |= former.contains(&stat.ino());
                has_now |= now == Some(stat.ino());
            }
        }
    }
    has_former && !has_now
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::path::PathBuf;

    use super::*;

    /// What this very process has open: it plays the instance.
    fn holds(database: &Path, former: &[u64]) -> bool {
        holds_former(&[i32::try_from(std::process::id()).unwrap()], database, former)
    }

    fn inode(path: &Path) -> u64 {
        fs::metadata(path).unwrap().ino()
    }

    #[test]
    fn a_file_that_lost_its_name_is_found_and_one_that_was_let_go_is_not() {
        let dir = tempfile::tempdir().unwrap();
        let database = dir.path().join("app.db");
        for name in ["app.db", "app.db-wal"] {
            let path: PathBuf = dir.path().join(name);
            fs::write(&database, b"1").unwrap();
            fs::write(&path, b"1").unwrap();
            let open = File::open(&path).unwrap();
            assert!(!holds(&database, &[inode(&database)]));
            fs::remove_file(&path).unwrap();
            fs::write(&path, b"2").unwrap();
            assert!(holds(&database, &[]), "{name}");
            drop(open);
            assert!(!holds(&database, &[]), "{name}");
        }
    }

    #[test]
    fn a_file_that_was_renamed_counts_until_the_one_in_its_place_is_opened() {
        let dir = tempfile::tempdir().unwrap();
        let database = dir.path().join("app.db");
        fs::write(&database, b"1").unwrap();
        let _open = File::open(&database).unwrap();
        let former = [inode(&database)];
        fs::rename(&database, dir.path().join("kept.db")).unwrap();
        assert!(holds(&database, &former), "nothing stands there");
        fs::write(&database, b"2").unwrap();
        assert!(holds(&database, &former));
        assert!(!holds(&database, &[]));
        let _now = File::open(&database).unwrap();
        assert!(!holds(&database, &former));
    }
}
