//! Where things are on this box (DESIGN section 9).

use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::{fs, io};

use dormouse_core::ids::Txid;
use dormouse_link::RunNumber;
use dormouse_link::config::{App, ThisBox};
use dormouse_link::message::instance_socket;

use super::owner;

/// The box's directories.
#[derive(Clone, Debug)]
pub(crate) struct Paths {
    data: PathBuf,
    run: PathBuf,
    etc: PathBuf,
}

/// Longest path of a unix socket: `sun_path` holds 108 bytes, one of them the zero.
const SOCKET_PATH_MAX: usize = 107;
/// Digits of a run number: 2^56 has 17.
const RUN_DIGITS_MAX: usize = 17;

impl Paths {
    pub(crate) fn of(this_box: &ThisBox) -> Self {
        Self { data: this_box.data.clone(), run: this_box.run.clone(), etc: this_box.etc.clone() }
    }

    pub(crate) fn data(&self) -> &Path {
        &self.data
    }

    pub(crate) fn run(&self) -> &Path {
        &self.run
    }

    pub(crate) fn host_dir(&self, host: &str) -> PathBuf {
        self.data.join("hosts").join(host)
    }

    /// Position, spool and unfinished restores: outside the host's own directory, since an app must
    /// not be able to put a link where we create a file. On the same file system, for the rename.
    pub(crate) fn state_dir(&self, host: &str) -> PathBuf {
        self.data.join(".state").join(host)
    }

    /// A host's replica was found to be damaged: its next visit on this box mends it. False where the
    /// host was never awake here.
    pub(crate) fn mark_damaged(&self, host: &str) -> io::Result<bool> {
        let state_dir = self.state_dir(host);
        match fs::symlink_metadata(&state_dir) {
            Ok(_) => dormouse_replica::levels::mark_damaged(&state_dir).map(|()| true),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Newest number of a host that was acknowledged here; 0 where none is known.
    pub(crate) fn acknowledged(&self, host: &str) -> Txid {
        let position = dormouse_replica::position_file::load(&self.state_dir(host));
        position.ok().flatten().map_or(Txid(0), |position| position.txid)
    }

    pub(crate) fn database(&self, host: &str, app: &App) -> PathBuf {
        self.host_dir(host).join(&app.db)
    }

    pub(crate) fn log(&self, host: &str) -> PathBuf {
        self.host_dir(host).join("app.log")
    }

    pub(crate) fn socket(&self, host: &str, run: RunNumber) -> PathBuf {
        instance_socket(&self.run, host, run)
    }

    pub(crate) fn env_file(&self, host: &str) -> PathBuf {
        self.etc.join("hosts").join(host).join("env")
    }

    /// Whether a host's socket paths fit.
    pub(crate) fn fits(&self, host: &str) -> Result<(), String> {
        let longest = self.run.join(host).as_os_str().len() + RUN_DIGITS_MAX + "/.sock".len();
        if longest <= SOCKET_PATH_MAX {
            return Ok(());
        }
        Err(format!(
            "{host}: its socket paths below {} would have {longest} bytes; allowed: \
             {SOCKET_PATH_MAX}: choose a shorter box.run",
            self.run.display()
        ))
    }

    /// The box's own directories; the data is readable by us alone.
    pub(crate) fn make(&self) -> io::Result<()> {
        private_dir(&self.data)?;
        private_dir(&self.data.join("hosts"))?;
        fs::create_dir_all(&self.run)?;
        fs::set_permissions(&self.run, fs::Permissions::from_mode(0o755))
    }

    /// Lets the users of hosts pass on the way to their directories, and see nothing there.
    pub(crate) fn let_pass(&self) -> io::Result<()> {
        for dir in [self.data.clone(), self.data.join("hosts")] {
            fs::set_permissions(&dir, fs::Permissions::from_mode(0o711))?;
        }
        for dir in self.data.ancestors().chain(self.run.ancestors()) {
            if fs::metadata(dir)?.mode() & 0o001 == 0 {
                return Err(io::Error::other(format!(
                    "{}: the instances' own users cannot pass: chmod o+x, or another box.data or \
                     box.run, or instances.own_users = false",
                    dir.display()
                )));
            }
        }
        Ok(())
    }

    /// A host's directories, its own user's where it has one.
    pub(crate) fn make_host(&self, host: &str, user: Option<u32>) -> io::Result<()> {
        private_dir(&self.host_dir(host))?;
        private_dir(&self.state_dir(host))?;
        let run = self.run.join(host);
        fs::create_dir_all(&run)?;
        if let Some(user) = user {
            owner::give_all(&self.host_dir(host), user)?;
            owner::give_all(&run, user)?;
        }
        // The proxy connects as another user.
        fs::set_permissions(&run, fs::Permissions::from_mode(0o755))
    }

    /// Sockets of earlier runs.
    pub(crate) fn clear_sockets(&self, host: &str) -> io::Result<()> {
        for entry in fs::read_dir(self.run.join(host))? {
            let path = entry?.path();
            if path.extension().is_some_and(|extension| extension == "sock") {
                fs::remove_file(path)?;
            }
        }
        Ok(())
    }
}

/// Makes a directory that only we may enter; one that is there stays as it is.
pub(crate) fn private_dir(path: &Path) -> io::Result<()> {
    fs::DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(path)
        .map_err(|error| io::Error::new(error.kind(), format!("{}: {error}", path.display())))
}
