//! A child's environment: a fixed allow-list, then the app's and the host's own. Never ours.

use std::collections::BTreeMap;
use std::io;
use std::path::Path;

/// Why an environment file was not taken.
#[derive(Debug, thiserror::Error)]
pub enum EnvError {
    /// It cannot be read.
    #[error("{path}: cannot be read: {source}")]
    Read {
        /// The file.
        path: String,
        /// Why.
        source: io::Error,
    },
    /// A line is not `KEY=VALUE`.
    #[error("{path}: line {line}: not KEY=VALUE; allowed: letters, digits and _ before the =")]
    Line {
        /// The file.
        path: String,
        /// The line, from 1.
        line: usize,
    },
}

/// The fixed part: PATH, LANG and TZ as ours are; homes and temporary files in the host's own
/// directory, so that nothing of one host lands in another's.
#[must_use]
pub fn environment_of(dir: &Path, host: &str) -> BTreeMap<String, String> {
    let mut environment = BTreeMap::new();
    for name in ["PATH", "LANG", "TZ"] {
        if let Ok(value) = std::env::var(name) {
            environment.insert(name.to_owned(), value);
        }
    }
    let own = dir.display().to_string();
    for name in ["HOME", "TMPDIR", "SQLITE_TMPDIR"] {
        environment.insert(name.to_owned(), own.clone());
    }
    environment.insert("DORMOUSE_HOST".to_owned(), host.to_owned());
    environment
}

/// Reads a file of `KEY=VALUE` lines; blank lines and `#` lines are passed over, a missing file is
/// empty. Values are taken as they stand. No value ever appears in an error.
pub fn parse_env_file(path: &Path) -> Result<BTreeMap<String, String>, EnvError> {
    let shown = || path.display().to_string();
    let text = match std::fs::read_to_string(path) {
        Ok(text) => text,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(BTreeMap::new()),
        Err(source) => return Err(EnvError::Read { path: shown(), source }),
    };
    let mut environment = BTreeMap::new();
    for (index, line) in text.lines().enumerate() {
        let line = line.trim();
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        let allowed = |c: char| c.is_ascii_alphanumeric() || c == '_';
        match line.split_once('=') {
            Some((key, value)) if !key.is_empty() && key.chars().all(allowed) => {
                environment.insert(key.to_owned(), value.to_owned());
            }
            Some(_) | None => return Err(EnvError::Line { path: shown(), line: index + 1 }),
        }
    }
    Ok(environment)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_env_file_gives_its_pairs_and_a_bad_line_is_named_without_its_value() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("env");
        std::fs::write(&path, "# a comment\n\nTOKEN=a=b c\nEMPTY=\n").unwrap();
        let env = parse_env_file(&path).unwrap();
        assert_eq!(env["TOKEN"], "a=b c");
        assert_eq!(env["EMPTY"], "");
        std::fs::write(&path, "OK=1\nhunter2\n").unwrap();
        let error = parse_env_file(&path).unwrap_err().to_string();
        assert!(error.contains("line 2") && !error.contains("hunter2"), "{error}");
        assert!(parse_env_file(&dir.path().join("none")).unwrap().is_empty());
    }

    #[test]
    fn the_activators_own_environment_stays_its_own() {
        let env = environment_of(Path::new("/data/a.test"), "a.test");
        let allowed = ["PATH", "LANG", "TZ", "HOME", "TMPDIR", "SQLITE_TMPDIR", "DORMOUSE_HOST"];
        assert!(env.keys().all(|key| allowed.contains(&key.as_str())), "{env:?}");
        assert_eq!(env["TMPDIR"], "/data/a.test");
    }
}
