//! Keys from a file: TOML, readable by its owner alone, and read again every minute.

use std::io::Read as _;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use aws_credential_types::Credentials;
use aws_credential_types::provider::error::CredentialsError;
use aws_credential_types::provider::{ProvideCredentials, future};
use serde::Deserialize;

/// A file is read again after this long: keys are changed without a restart.
const READ_AGAIN: Duration = Duration::from_mins(1);

/// Why a file gave no keys.
#[derive(Debug, thiserror::Error)]
pub enum CredentialsFileError {
    /// It cannot be read.
    #[error("credentials file {}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: std::io::Error,
    },
    /// Others than its owner may read or write it.
    #[error(
        "credentials file {}: mode {mode:04o} lets others than its owner at it: chmod 600 {}",
        path.display(),
        path.display()
    )]
    Open {
        /// The file.
        path: PathBuf,
        /// Its permission bits.
        mode: u32,
    },
    /// It is not what it must be. The parser's words are left out: they quote the file.
    #[error(
        "credentials file {}: not TOML with access_key_id, secret_access_key and, where needed, \
         session_token (line {line})",
        path.display()
    )]
    Shape {
        /// The file.
        path: PathBuf,
        /// Line of the first mistake.
        line: usize,
    },
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Keys {
    access_key_id: String,
    secret_access_key: String,
    session_token: Option<String>,
}

/// Reads the file at once.
pub(crate) fn read(path: &Path) -> Result<Credentials, CredentialsFileError> {
    let io = |source| CredentialsFileError::Io { path: path.to_owned(), source };
    let mut file = std::fs::File::open(path).map_err(io)?;
    let mode = file.metadata().map_err(io)?.permissions().mode() & 0o7777;
    if mode & 0o077 != 0 {
        return Err(CredentialsFileError::Open { path: path.to_owned(), mode });
    }
    let mut text = String::new();
    file.read_to_string(&mut text).map_err(io)?;
    let keys: Keys = toml::from_str(&text).map_err(|error| {
        let before = error.span().and_then(|span| text.get(..span.start)).unwrap_or_default();
        let line = before.lines().count().max(1);
        CredentialsFileError::Shape { path: path.to_owned(), line }
    })?;
    #[expect(clippy::disallowed_methods, reason = "the SDK compares it with the clock itself")]
    let until = SystemTime::now().checked_add(READ_AGAIN);
    let Keys { access_key_id, secret_access_key, session_token } = keys;
    Ok(Credentials::new(access_key_id, secret_access_key, session_token, until, "file"))
}

/// Gives the SDK what stands in the file.
#[derive(Debug)]
pub(crate) struct FromFile(pub(crate) PathBuf);

impl ProvideCredentials for FromFile {
    fn provide_credentials<'a>(&'a self) -> future::ProvideCredentials<'a>
    where
        Self: 'a,
    {
        // A small file, once a minute.
        future::ProvideCredentials::ready(read(&self.0).map_err(CredentialsError::not_loaded))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(text: &str, mode: u32) -> (tempfile::TempDir, PathBuf) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("keys.toml");
        std::fs::write(&path, text).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).unwrap();
        (dir, path)
    }

    const GOOD: &str = "access_key_id = \"id\"\nsecret_access_key = \"geheim\"\n";

    #[test]
    fn a_file_of_the_owner_alone_is_read() {
        let (_dir, path) = file(GOOD, 0o600);
        let keys = read(&path).unwrap();
        assert_eq!((keys.access_key_id(), keys.secret_access_key()), ("id", "geheim"));
    }

    #[test]
    fn a_file_that_others_can_read_is_refused() {
        for mode in [0o640, 0o604, 0o620] {
            let (_dir, path) = file(GOOD, mode);
            let error = read(&path).unwrap_err().to_string();
            assert!(error.contains("chmod 600"), "{mode:o}: {error}");
        }
    }

    #[test]
    fn a_damaged_file_is_refused_without_its_words() {
        for text in [
            "secret_access_key = geheim",
            "access_key_id = \"id\"",
            "[default]\naws_secret_access_key = geheim",
            "access_key_id = \"id\"\nsecret_access_key = \"x\"\ngeheim = 1",
        ] {
            let (_dir, path) = file(text, 0o600);
            let error = read(&path).unwrap_err();
            let said = format!("{error} {error:?}");
            assert!(said.contains("access_key_id") && !said.contains("geheim"), "{said}");
        }
    }
}
