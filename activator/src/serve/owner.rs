//! The users of instances: each host has one of its own, who owns the host's directories and database.
//!
//! Root gives them away where no process of the host runs, and never through a link: what an app has
//! put in a file's place stays its own.

use std::fs;
use std::io;
use std::os::unix::fs::{MetadataExt, lchown};
use std::path::Path;

use dormouse_core::position::Position;
use dormouse_link::config::Instances;
use dormouse_registry::Registry;
use dormouse_replica::{inspect, position_file};
use nix::unistd::Uid;

/// Whether hosts have users of their own on this box.
pub(crate) fn are_own(instances: &Instances) -> bool {
    instances.own_users && Uid::effective().is_root()
}

/// The user of a host; none where all run as we do.
pub(crate) fn of(
    host: &str,
    instances: &Instances,
    registry: &mut Registry,
) -> anyhow::Result<Option<u32>> {
    if !are_own(instances) {
        return Ok(None);
    }
    let number = registry.user_number(host)?;
    Ok(Some(instances.first_user.saturating_add(number)))
}

/// Gives one file or directory, if it is another's; a link itself, not what it names.
pub(crate) fn give(path: &Path, user: u32) -> io::Result<()> {
    let meta = fs::symlink_metadata(path)?;
    // A file with a second name may be somebody else's.
    let is_ours_to_give = meta.is_dir() || meta.nlink() == 1;
    if (meta.uid(), meta.gid()) == (user, user) || !is_ours_to_give {
        return Ok(());
    }
    lchown(path, Some(user), Some(user))
        .map_err(|error| io::Error::new(error.kind(), format!("{}: {error}", path.display())))
}

/// Gives a directory, and, where that was another's, all that is in it.
pub(crate) fn give_all(dir: &Path, user: u32) -> io::Result<()> {
    let was = fs::symlink_metadata(dir)?.uid();
    give(dir, user)?;
    if was == user {
        return Ok(());
    }
    let mut folders = vec![dir.to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder)? {
            let path = entry?.path();
            give(&path, user)?;
            if fs::symlink_metadata(&path)?.is_dir() {
                folders.push(path);
            }
        }
    }
    Ok(())
}

/// Gives a sleeping host's directory and database. A position that fits the file fits it afterwards:
/// a new owner is no change of what is in it, though the kernel counts it as one.
pub(crate) fn give_copy(database: &Path, state_dir: &Path, user: u32) -> io::Result<()> {
    let Some(dir) = database.parent() else { return Ok(()) };
    let before = inspect::stat(database).map_err(io::Error::other)?;
    give_all(dir, user)?;
    for name in ["", "-wal", "-shm", "-journal"] {
        let mut file = database.as_os_str().to_owned();
        file.push(name);
        match give(Path::new(&file), user) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            Ok(()) | Err(_) => {}
        }
    }
    let after = inspect::stat(database).map_err(io::Error::other)?;
    let (Some(before), Some(after)) = (before, after) else { return Ok(()) };
    let position = position_file::load(state_dir).map_err(io::Error::other)?;
    match position.filter(|position| position.file == before && before != after) {
        Some(position) => position_file::save(state_dir, &Position { file: after, ..position })
            .map_err(io::Error::other),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use dormouse_core::ids::{Generation, Txid};
    use dormouse_core::position::POSITION_VERSION;

    use super::*;

    const USER: u32 = 2_000_000_007;

    fn owner(path: &Path) -> u32 {
        fs::symlink_metadata(path).unwrap().uid()
    }

    #[test]
    fn a_copy_is_given_with_its_folder_and_its_position_still_fits() {
        assert!(Uid::effective().is_root(), "files are given away by root alone");
        let dir = tempfile::tempdir().unwrap();
        let (host, state) = (dir.path().join("host"), dir.path().join("state"));
        fs::create_dir_all(host.join("uploads")).unwrap();
        fs::create_dir(&state).unwrap();
        let (database, upload) = (host.join("app.db"), host.join("uploads/1"));
        fs::write(&database, "a database").unwrap();
        fs::write(&upload, "an upload").unwrap();
        let position = Position {
            version: POSITION_VERSION,
            generation: Generation(1),
            txid: Txid(4),
            etag: None,
            file: inspect::stat(&database).unwrap().unwrap(),
            page_count: 1,
            page_size: 4096,
            clean: true,
        };
        position_file::save(&state, &position).unwrap();
        give_copy(&database, &state, USER).unwrap();
        assert_eq!([owner(&host), owner(&database), owner(&upload)], [USER; 3]);
        let after = position_file::load(&state).unwrap().unwrap();
        assert_eq!(Some(after.file), inspect::stat(&database).unwrap());
        assert!(after.clean && after.txid == Txid(4));
        // One that did not fit before is not made to fit.
        fs::write(&database, "another database").unwrap();
        lchown(&database, Some(0), Some(0)).unwrap();
        give_copy(&database, &state, USER).unwrap();
        assert_eq!(position_file::load(&state).unwrap(), Some(after));
    }

    #[test]
    fn what_a_link_names_and_what_has_two_names_is_not_given() {
        assert!(Uid::effective().is_root(), "files are given away by root alone");
        let dir = tempfile::tempdir().unwrap();
        let (host, other) = (dir.path().join("host"), dir.path().join("other.db"));
        fs::create_dir(&host).unwrap();
        fs::write(&other, "another's").unwrap();
        std::os::unix::fs::symlink(&other, host.join("app.db")).unwrap();
        fs::hard_link(&other, host.join("twin")).unwrap();
        give_copy(&host.join("app.db"), dir.path(), USER).unwrap();
        assert_eq!(owner(&other), 0);
        assert_eq!(owner(&host.join("app.db")), USER, "the link itself");
    }
}
