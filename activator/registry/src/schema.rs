//! The schema, and how an older one becomes the current one.

use std::path::Path;

use rusqlite::Connection;

use crate::RegistryError;

/// One script a version; `user_version` says how many have run.
const MIGRATIONS: [&str; 2] = [
    "
    CREATE TABLE routes (
        host   TEXT PRIMARY KEY,
        slot   INTEGER NOT NULL UNIQUE,
        app    TEXT NOT NULL,
        due_ms INTEGER
    ) STRICT, WITHOUT ROWID;
    CREATE INDEX routes_due ON routes (due_ms) WHERE due_ms IS NOT NULL;
    CREATE TABLE meta (next_run INTEGER NOT NULL) STRICT;
    INSERT INTO meta VALUES (1);
",
    // Never deleted: a host that is removed leaves files that its number owns.
    "
    CREATE TABLE users (
        host   TEXT PRIMARY KEY,
        number INTEGER NOT NULL UNIQUE
    ) STRICT, WITHOUT ROWID;
",
];

pub(crate) fn prepare(connection: &mut Connection, path: &Path) -> Result<(), RegistryError> {
    let sqlite = |source| RegistryError::Sqlite { path: path.to_owned(), source };
    let known = i64::try_from(MIGRATIONS.len()).unwrap_or(i64::MAX);
    let found: i64 =
        connection.query_row("PRAGMA user_version", [], |row| row.get(0)).map_err(sqlite)?;
    if found > known {
        return Err(RegistryError::Newer { path: path.to_owned(), found, known });
    }
    connection.pragma_update(None, "journal_mode", "wal").map_err(sqlite)?;
    // Durable when a call returns: a run number that was used must never come back.
    connection.pragma_update(None, "synchronous", "full").map_err(sqlite)?;
    let done = usize::try_from(found).unwrap_or(0);
    for (index, script) in MIGRATIONS.iter().enumerate().skip(done) {
        let transaction = connection.transaction().map_err(sqlite)?;
        transaction.execute_batch(script).map_err(sqlite)?;
        transaction
            .pragma_update(None, "user_version", i64::try_from(index + 1).unwrap_or(known))
            .map_err(sqlite)?;
        transaction.commit().map_err(sqlite)?;
    }
    Ok(())
}
