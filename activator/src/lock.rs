//! One process a file: locks of open file descriptions (fcntl(2), `F_OFD_SETLK`), which end with the
//! process, and which others can ask about without taking them for a moment.

use std::fs::File;
use std::io;
use std::path::Path;

use anyhow::{Context as _, bail};
use nix::errno::Errno;
use nix::fcntl::{FcntlArg, fcntl};
use nix::libc;

/// Held until it is dropped.
#[derive(Debug)]
pub(crate) struct Lock {
    _file: File,
}

/// Takes it; `taken` says what it means that another process has it.
pub(crate) fn take(path: &Path, taken: &str) -> anyhow::Result<Lock> {
    let file = File::create(path).with_context(|| path.display().to_string())?;
    match fcntl(&file, FcntlArg::F_OFD_SETLK(&whole_file())) {
        Ok(_) => Ok(Lock { _file: file }),
        Err(Errno::EAGAIN | Errno::EACCES) => bail!("{}: {taken}; stop it first", path.display()),
        Err(errno) => bail!("{}: cannot be locked: {errno}", path.display()),
    }
}

/// Whether another process has it.
pub(crate) fn is_taken(path: &Path) -> io::Result<bool> {
    let file = match File::open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(false),
        Err(error) => return Err(error),
    };
    let mut found = whole_file();
    fcntl(&file, FcntlArg::F_OFD_GETLK(&mut found))?;
    Ok(i32::from(found.l_type) != libc::F_UNLCK)
}

fn whole_file() -> libc::flock {
    // Small constants, which libc has in a wider type than its own fields.
    let narrow = |constant: i32| i16::try_from(constant).unwrap_or_default();
    libc::flock {
        l_type: narrow(libc::F_WRLCK),
        l_whence: narrow(libc::SEEK_SET),
        l_start: 0,
        l_len: 0,
        l_pid: 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_has_it_and_others_can_ask() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("lock");
        assert!(!is_taken(&path).unwrap());
        let lock = take(&path, "taken").unwrap();
        assert!(is_taken(&path).unwrap());
        let refused = take(&path, "another runs").unwrap_err().to_string();
        assert!(refused.contains("another runs; stop it first"), "{refused}");
        drop(lock);
        assert!(!is_taken(&path).unwrap());
        take(&path, "taken").unwrap();
    }
}
