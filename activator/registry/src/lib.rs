//! The registry: routes and due times in SQLite.
//!
//! One writer, the activator. Every change is durable when its call returns. Run numbers are given
//! out from here and are never repeated: they are reserved in blocks, so that most starts write
//! nothing, and what a crash leaves unused is skipped.

use std::ops::Range;
use std::path::{Path, PathBuf};

use rusqlite::{Connection, OptionalExtension, params};

mod name;
mod schema;

pub use name::{NameError, canonical_host};

/// A host's row.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Route {
    /// Served name, canonical.
    pub host: String,
    /// Index in the wake table.
    pub slot: u32,
    /// Config section of its app.
    pub app: String,
    /// When it must wake by itself, milliseconds since 1970.
    pub due_ms: Option<u64>,
}

/// Why the registry did not do it.
#[derive(Debug, thiserror::Error)]
pub enum RegistryError {
    /// SQLite says no.
    #[error("registry {}: {source}", path.display())]
    Sqlite {
        /// The file.
        path: PathBuf,
        /// Why.
        source: rusqlite::Error,
    },
    /// Written by a newer program.
    #[error(
        "registry {} is of version {found}, this program knows up to {known}: \
         use the newer program, nothing was changed",
        path.display()
    )]
    Newer {
        /// The file.
        path: PathBuf,
        /// Its version.
        found: i64,
        /// Ours.
        known: i64,
    },
    /// The host is there already.
    #[error("host {host} is already served, by app {app}")]
    Exists {
        /// The host.
        host: String,
        /// Its app.
        app: String,
    },
    /// No such host.
    #[error("host {0} is not in the registry: `dormouse list` shows those that are")]
    Unknown(String),
    /// Every slot is taken.
    #[error("all {0} slots are taken: remove a host first")]
    Full(u32),
}

/// The registry of one box.
#[derive(Debug)]
pub struct Registry {
    connection: Connection,
    path: PathBuf,
}

impl Registry {
    /// Opens or makes it, and brings it to the current version.
    pub fn open(path: &Path) -> Result<Self, RegistryError> {
        let sqlite = |source| RegistryError::Sqlite { path: path.to_owned(), source };
        let mut connection = Connection::open(path).map_err(sqlite)?;
        schema::prepare(&mut connection, path)?;
        Ok(Self { connection, path: path.to_owned() })
    }

    fn sqlite(&self) -> impl Fn(rusqlite::Error) -> RegistryError + use<> {
        let path = self.path.clone();
        move |source| RegistryError::Sqlite { path: path.clone(), source }
    }

    /// All routes, by name.
    pub fn routes(&self) -> Result<Vec<Route>, RegistryError> {
        let sqlite = self.sqlite();
        let mut statement = self
            .connection
            .prepare_cached("SELECT host, slot, app, due_ms FROM routes ORDER BY host")
            .map_err(&sqlite)?;
        let rows = statement
            .query_map([], |row| {
                Ok(Route {
                    host: row.get(0)?,
                    slot: row.get(1)?,
                    app: row.get(2)?,
                    due_ms: row.get::<_, Option<i64>>(3)?.and_then(|due| u64::try_from(due).ok()),
                })
            })
            .map_err(&sqlite)?;
        rows.collect::<Result<_, _>>().map_err(sqlite)
    }

    /// Adds a host on the lowest slot below `slots` that is free and not `held` (a slot is held
    /// until every proxy has forgotten its former host).
    pub fn add(
        &mut self,
        host: &str,
        app: &str,
        slots: u32,
        held: impl Fn(u32) -> bool,
    ) -> Result<Route, RegistryError> {
        let routes = self.routes()?;
        if let Some(route) = routes.iter().find(|route| route.host == host) {
            return Err(RegistryError::Exists { host: host.to_owned(), app: route.app.clone() });
        }
        let taken: std::collections::BTreeSet<u32> = routes.iter().map(|r| r.slot).collect();
        let slot = (0..slots)
            .find(|slot| !taken.contains(slot) && !held(*slot))
            .ok_or(RegistryError::Full(slots))?;
        // Run numbers of a host that was here before are never repeated.
        self.connection
            .execute(
                "INSERT INTO routes (host, slot, app) VALUES (?1, ?2, ?3)",
                params![host, slot, app],
            )
            .map_err(self.sqlite())?;
        Ok(Route { host: host.to_owned(), slot, app: app.to_owned(), due_ms: None })
    }

    /// Removes a host.
    pub fn remove(&mut self, host: &str) -> Result<(), RegistryError> {
        let removed = self
            .connection
            .execute("DELETE FROM routes WHERE host = ?1", [host])
            .map_err(self.sqlite())?;
        if removed == 0 {
            return Err(RegistryError::Unknown(host.to_owned()));
        }
        Ok(())
    }

    /// Keeps a due time.
    pub fn set_due(&mut self, host: &str, due_ms: Option<u64>) -> Result<(), RegistryError> {
        let due = due_ms.map(|due| i64::try_from(due).unwrap_or(i64::MAX));
        self.connection
            .execute("UPDATE routes SET due_ms = ?2 WHERE host = ?1", params![host, due])
            .map_err(self.sqlite())?;
        Ok(())
    }

    /// The number of a host's own user, from 0: given at its first call, the same for ever, no other
    /// host's.
    pub fn user_number(&mut self, host: &str) -> Result<u32, RegistryError> {
        let sqlite = self.sqlite();
        let known = self
            .connection
            .query_row("SELECT number FROM users WHERE host = ?1", [host], |row| row.get(0))
            .optional()
            .map_err(&sqlite)?;
        if let Some(number) = known {
            return Ok(number);
        }
        self.connection
            .query_row(
                "INSERT INTO users (host, number)
                 VALUES (?1, (SELECT coalesce(max(number) + 1, 0) FROM users)) RETURNING number",
                [host],
                |row| row.get(0),
            )
            .map_err(sqlite)
    }

    /// Takes `count` run numbers out of circulation, for ever.
    pub fn reserve_runs(&mut self, count: u32) -> Result<Range<u64>, RegistryError> {
        let first: Option<i64> = self
            .connection
            .query_row(
                "UPDATE meta SET next_run = next_run + ?1 RETURNING next_run - ?1",
                [count],
                |row| row.get(0),
            )
            .optional()
            .map_err(self.sqlite())?;
        let first = first.and_then(|first| u64::try_from(first).ok()).unwrap_or(1);
        Ok(first..first.saturating_add(u64::from(count)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn open(dir: &tempfile::TempDir) -> Registry {
        Registry::open(&dir.path().join("registry.db")).unwrap()
    }

    #[test]
    fn a_route_survives_a_reopen_and_its_slot_is_the_lowest_free_one() {
        let dir = tempfile::tempdir().unwrap();
        let mut registry = open(&dir);
        for host in ["a.test", "b.test", "c.test"] {
            registry.add(host, "app", 16, |_| false).unwrap();
        }
        registry.remove("b.test").unwrap();
        registry.set_due("c.test", Some(42)).unwrap();
        drop(registry);
        let mut registry = open(&dir);
        let held = registry.add("d.test", "app", 16, |slot| slot == 1).unwrap();
        assert_eq!(held.slot, 3, "a held slot is not given away");
        assert_eq!(registry.add("e.test", "app", 16, |_| false).unwrap().slot, 1);
        let routes = registry.routes().unwrap();
        assert_eq!(routes.len(), 4);
        assert_eq!(routes.iter().find(|r| r.host == "c.test").unwrap().due_ms, Some(42));
    }

    #[test]
    fn what_cannot_be_done_says_which_host_and_why() {
        let dir = tempfile::tempdir().unwrap();
        let mut registry = open(&dir);
        registry.add("a.test", "app", 1, |_| false).unwrap();
        let exists = registry.add("a.test", "app", 1, |_| false).unwrap_err().to_string();
        assert!(exists.contains("a.test"), "{exists}");
        assert!(matches!(registry.add("b.test", "app", 1, |_| false), Err(RegistryError::Full(1))));
        assert!(matches!(registry.remove("b.test"), Err(RegistryError::Unknown(_))));
    }

    #[test]
    fn a_host_has_a_user_of_its_own_for_ever() {
        let dir = tempfile::tempdir().unwrap();
        let mut registry = open(&dir);
        registry.add("a.test", "app", 16, |_| false).unwrap();
        assert_eq!(registry.user_number("a.test").unwrap(), 0);
        assert_eq!(registry.user_number("b.test").unwrap(), 1);
        registry.remove("a.test").unwrap();
        assert_eq!(registry.user_number("c.test").unwrap(), 2, "no number is given twice");
        drop(registry);
        assert_eq!(open(&dir).user_number("a.test").unwrap(), 0);
        assert_eq!(open(&dir).user_number("b.test").unwrap(), 1);
    }

    #[test]
    fn run_numbers_are_never_given_out_twice() {
        let dir = tempfile::tempdir().unwrap();
        let first = open(&dir).reserve_runs(64).unwrap();
        let second = open(&dir).reserve_runs(64).unwrap();
        assert_eq!(first, 1..65);
        assert_eq!(second, 65..129);
    }

    #[test]
    fn a_registry_of_a_newer_version_is_refused_and_left_alone() {
        let dir = tempfile::tempdir().unwrap();
        drop(open(&dir));
        let path = dir.path().join("registry.db");
        let connection = Connection::open(&path).unwrap();
        connection.pragma_update(None, "user_version", 99).unwrap();
        drop(connection);
        let error = Registry::open(&path).unwrap_err().to_string();
        assert!(error.contains("version 99") && error.contains("newer program"), "{error}");
    }

    #[test]
    fn a_file_that_is_no_database_is_a_clear_error() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("registry.db");
        std::fs::write(&path, "this is not a database, is it now? no it is not.").unwrap();
        let error = Registry::open(&path).unwrap_err().to_string();
        assert!(error.contains("registry.db") && error.contains("not a database"), "{error}");
    }
}
