//! The database: entries, and one due time.

use std::path::Path;

use rusqlite::{Connection, OptionalExtension, params};
use serde::Serialize;

/// One entry.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Entry {
    pub(crate) id: i64,
    pub(crate) name: String,
    pub(crate) text: String,
}

/// The guestbook.
pub(crate) struct Book {
    connection: Connection,
}

impl Book {
    pub(crate) fn open(path: &Path, exclusive: bool) -> rusqlite::Result<Self> {
        let connection = Connection::open(path)?;
        if exclusive {
            connection.pragma_update(None, "locking_mode", "exclusive")?;
        }
        connection.pragma_update(None, "journal_mode", "wal")?;
        connection.pragma_update(None, "synchronous", "normal")?;
        connection.busy_timeout(std::time::Duration::from_secs(5))?;
        connection.execute_batch(
            "CREATE TABLE IF NOT EXISTS entries (
                 id INTEGER PRIMARY KEY, name TEXT NOT NULL, text TEXT NOT NULL);
             CREATE TABLE IF NOT EXISTS due (at INTEGER NOT NULL);",
        )?;
        Ok(Self { connection })
    }

    pub(crate) fn add(&self, name: &str, text: &str) -> rusqlite::Result<Entry> {
        self.connection
            .prepare_cached("INSERT INTO entries (name, text) VALUES (?1, ?2)")?
            .execute(params![name, text])?;
        let id = self.connection.last_insert_rowid();
        Ok(Entry { id, name: name.to_owned(), text: text.to_owned() })
    }

    pub(crate) fn count(&self) -> rusqlite::Result<i64> {
        self.connection.query_row("SELECT count(*) FROM entries", [], |row| row.get(0))
    }

    /// The newest entries, newest first.
    pub(crate) fn newest(&self, limit: u32) -> rusqlite::Result<Vec<Entry>> {
        self.connection
            .prepare_cached("SELECT id, name, text FROM entries ORDER BY id DESC LIMIT ?1")?
            .query_map([limit], |row| {
                Ok(Entry { id: row.get(0)?, name: row.get(1)?, text: row.get(2)? })
            })?
            .collect()
    }

    /// Unix seconds of the next due work.
    pub(crate) fn next_due(&self) -> rusqlite::Result<Option<i64>> {
        self.connection
            .query_row("SELECT at FROM due ORDER BY at LIMIT 1", [], |row| row.get(0))
            .optional()
    }

    pub(crate) fn set_due(&self, at: Option<i64>) -> rusqlite::Result<()> {
        self.connection.execute("DELETE FROM due", [])?;
        if let Some(at) = at {
            self.connection.execute("INSERT INTO due VALUES (?1)", [at])?;
        }
        Ok(())
    }
}
