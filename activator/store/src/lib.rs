//! The object store port, and the directory store.
