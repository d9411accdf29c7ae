//! Hosts that an outside supervisor runs, for people: the truth is the host's record in the store, and
//! what was last seen of it is kept in `<data>/.state/<host>/outside`, so that `status` tells it without
//! a request, also after a restart. Nothing is decided by it.

use std::path::{Path, PathBuf};
use std::{fs, io};

use dormouse_core::HostView;
use dormouse_core::effect::{Failure, Reason};
use dormouse_core::ids::Slot;

use super::driver::Driver;
use super::paths::Paths;

/// What `status` says of such a host, beside the core's own words.
pub(crate) const OUTSIDE: &str = "outside";

fn mark(paths: &Paths, host: &str) -> PathBuf {
    paths.state_dir(host).join("outside")
}

/// Whether its record was last seen to say so.
pub(crate) fn is_marked(paths: &Paths, host: &str) -> bool {
    mark(paths, host).exists()
}

fn set_mark(path: &Path, outside: bool) -> io::Result<()> {
    if outside {
        return fs::write(path, "its record in the store says outside\n");
    }
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        Ok(()) | Err(_) => Ok(()),
    }
}

impl Driver {
    /// The record was seen to say so, or not to.
    pub(crate) fn note_outside(&mut self, slot: Slot, outside: bool) {
        let Some(hosted) = self.hosts.get_mut(&slot) else { return };
        if hosted.outside == outside {
            return;
        }
        hosted.outside = outside;
        if let Err(error) = set_mark(&mark(&self.parts.paths, &hosted.host), outside) {
            tracing::warn!(%error, host = hosted.host, outside, "not kept over a restart");
        }
    }

    /// What a refused wake saw of the record.
    pub(crate) fn see_outside(&mut self, slot: Slot, failure: &Failure) {
        match failure.reason {
            // On its way out, it is not out yet.
            Reason::Outside if self.handing.contains_key(&slot) => {}
            Reason::Outside => self.note_outside(slot, true),
            Reason::Elsewhere => self.note_outside(slot, false),
            Reason::StoreDown
            | Reason::NoSession
            | Reason::Replica
            | Reason::Database
            | Reason::Disk
            | Reason::Broken
            | Reason::Unproven
            | Reason::TimedOut
            | Reason::Lost
            | Reason::Leaving
            | Reason::Removed => {}
        }
    }

    /// The state for people.
    pub(crate) fn state_of(&self, view: &HostView) -> &'static str {
        let outside = self.hosted(view.slot).is_some_and(|hosted| hosted.outside);
        let rests = matches!(view.state, "asleep" | "backoff");
        if outside && rests && view.generation.is_none() { OUTSIDE } else { view.state }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mark_is_set_and_taken_away_and_neither_twice_is_an_error() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("outside");
        for outside in [false, true, true, false] {
            set_mark(&path, outside).unwrap();
            assert_eq!(path.exists(), outside);
        }
    }
}
