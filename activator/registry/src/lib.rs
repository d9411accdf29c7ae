//! The registry: routes and due times in SQLite.
