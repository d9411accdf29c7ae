//! The position file: written whole, made durable, then named.

use std::fs::{self, File};
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};

use dormouse_core::position::{Position, PositionError};

use crate::restore::remove;
use crate::spool::sync_dir;

const NAME: &str = "position.json";

/// Why the position file could not be used.
#[derive(Debug, thiserror::Error)]
pub enum PositionFileError {
    /// It could not be read or written.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// It is not what this program wrote.
    #[error("{}: {source}", path.display())]
    Content {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        source: PositionError,
    },
}

/// Reads the position beside a database; none when there is no such file. Blocks.
pub fn load(state_dir: &Path) -> Result<Option<Position>, PositionFileError> {
    let path = state_dir.join(NAME);
    match fs::read(&path) {
        Ok(bytes) => match Position::decode(&bytes) {
            Ok(position) => Ok(Some(position)),
            Err(source) => Err(PositionFileError::Content { path, source }),
        },
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(source) => Err(PositionFileError::Io { path, source }),
    }
}

/// Replaces the position, durably. Blocks.
pub fn save(state_dir: &Path, position: &Position) -> Result<(), PositionFileError> {
    let path = state_dir.join(NAME);
    write(state_dir, &path, &position.encode())
        .map_err(|source| PositionFileError::Io { path, source })
}

/// Before an app may write: the file on disk no longer equals the position for sure. Blocks.
pub fn mark_unclean(state_dir: &Path) -> Result<(), PositionFileError> {
    match load(state_dir)? {
        Some(position) if position.clean => save(state_dir, &Position { clean: false, ..position }),
        Some(_) | None => Ok(()),
    }
}

/// Removes the position, durably. Blocks.
pub fn clear(state_dir: &Path) -> Result<(), PositionFileError> {
    let path = state_dir.join(NAME);
    remove(&path)
        .and_then(|()| sync_dir(state_dir))
        .map_err(|source| PositionFileError::Io { path, source })
}

fn write(dir: &Path, path: &Path, bytes: &[u8]) -> io::Result<()> {
    let temporary = dir.join("position.json.tmp");
    let mut file = File::create(&temporary)?;
    file.write_all(bytes)?;
    file.sync_all()?;
    fs::rename(&temporary, path)?;
    sync_dir(dir)
}
