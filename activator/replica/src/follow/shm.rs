//! The wal-index (`-shm`), as far as we need it: how many frames the WAL has, and a lock.
//!
//! The length of the WAL's file tells nothing: a WAL that begins anew overwrites the old one.
//!
//! Our read lock keeps the WAL from being reused, so an app whose WAL is long tries a checkpoint
//! after each commit, in vain: it takes and drops several locks, and on a finished WAL sorts all of
//! it. While we hold `SQLite`'s checkpoint lock, that try ends at its first lock. It is taken as an
//! open file description lock: it ends with our process, whatever happens. A process that must
//! rebuild the wal-index after a crash of another one needs it too; so it is held only while
//! commits keep coming.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, fcntl};
use nix::libc;

/// `UNIX_SHM_BASE` + `WAL_CKPT_LOCK` of `SQLite`'s unix VFS: part of the file format, for all
/// processes must agree.
const CHECKPOINT_BYTE: libc::off_t = 120 + 1;
/// Of `mxFrame` in the first copy of the header, a native 32-bit number.
const FRAMES_AT: usize = 16;
/// Of the first salt, as the WAL's header has it.
const SALT_AT: usize = 32;
/// Of `nBackfill`, a native 32-bit number.
const COPIED_AT: usize = 96;

/// The WAL, by its index.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Seen {
    /// Frames that count.
    pub(super) frames: u64,
    /// Tells one generation from the next.
    pub(super) salt: u32,
    /// Frames that are in the database file.
    pub(super) copied: u64,
}

/// The wal-index of one database. Its descriptor is kept to the end: closing it would drop the
/// locks of this process's connections.
#[derive(Debug)]
pub(super) struct WalIndex {
    path: PathBuf,
    file: Option<File>,
    is_held: bool,
}

impl WalIndex {
    /// Opens nothing yet: the file is there once a connection of ours is.
    pub(super) fn of(database: &Path) -> Self {
        let mut path = database.as_os_str().to_owned();
        path.push("-shm");
        Self { path: path.into(), file: None, is_held: false }
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    fn file(&mut self) -> io::Result<&File> {
        let file = match self.file.take() {
            Some(file) => file,
            None => OpenOptions::new()
                .read(true)
                .write(true)
                .custom_flags(libc::O_NOFOLLOW)
                .open(&self.path)?,
        };
        Ok(self.file.insert(file))
    }

    /// What `SQLite` counts of the WAL: a hint, for it may be written to just now.
    pub(super) fn seen(&mut self) -> io::Result<Seen> {
        let mut header = [0; COPIED_AT + 4];
        match self.file()?.read_exact_at(&mut header, 0) {
            // Made, and not initialised yet.
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => (),
            read => read?,
        }
        let word = |at: usize| header.get(at..at + 4).and_then(|word| word.try_into().ok());
        let number = |at| word(at).map_or(0, |word| u64::from(u32::from_ne_bytes(word)));
        Ok(Seen {
            frames: number(FRAMES_AT),
            salt: word(SALT_AT).map_or(0, u32::from_be_bytes),
            copied: number(COPIED_AT),
        })
    }

    pub(super) const fn keeps_checkpoints_out(&self) -> bool {
        self.is_held
    }

    /// Takes the checkpoint lock, if no checkpoint runs.
    pub(super) fn keep_checkpoints_out(&mut self) -> io::Result<()> {
        if self.is_held {
            return Ok(());
        }
        match fcntl(self.file()?, FcntlArg::F_OFD_SETLK(&range(libc::F_WRLCK))) {
            Ok(_) => self.is_held = true,
            Err(Errno::EAGAIN | Errno::EACCES) => (),
            Err(errno) => return Err(errno.into()),
        }
        Ok(())
    }

    /// Lets checkpoints run again.
    pub(super) fn let_checkpoints(&mut self) -> io::Result<()> {
        if self.is_held {
            fcntl(self.file()?, FcntlArg::F_OFD_SETLK(&range(libc::F_UNLCK)))?;
            self.is_held = false;
        }
        Ok(())
    }
}

fn range(kind: libc::c_int) -> libc::flock {
    let short = |n: libc::c_int| libc::c_short::try_from(n).unwrap_or_default();
    libc::flock {
        l_type: short(kind),
        l_whence: short(libc::SEEK_SET),
        l_start: CHECKPOINT_BYTE,
        l_len: 1,
        // An open file description lock must not name a process.
        l_pid: 0,
    }
}
