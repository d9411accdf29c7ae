//! Whether an app still has the file open that stood under its database's name before.
//!
//! Who can look at the app's processes says so. It is asked only after the file or its WAL became
//! another one: nothing is looked at while a database is as it was.

use std::fmt;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::sync::Arc;

use crate::follow::{FollowError, wal_path};

type Look = dyn Fn(&Path, &[u64]) -> bool + Send + Sync;

/// Asks for the files that an app has open. Clones share it.
#[derive(Clone)]
pub struct Holders(Arc<Look>);

impl fmt::Debug for Holders {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Holders")
    }
}

impl Default for Holders {
    /// Nobody can tell: what stands under the name counts.
    fn default() -> Self {
        Self::new(|_, _| false)
    }
}

impl Holders {
    /// `look` is given the database and the inodes that it and its WAL had; it blocks.
    pub fn new(look: impl Fn(&Path, &[u64]) -> bool + Send + Sync + 'static) -> Self {
        Self(Arc::new(look))
    }

    /// As [`Holders::check`]; asks only where other files stand there now.
    pub(crate) fn check_changed(&self, database: &Path, former: &[u64]) -> Result<(), FollowError> {
        let inode = |path: &Path| Some(std::fs::symlink_metadata(path).ok()?.ino());
        let now = [inode(database), inode(&wal_path(database))];
        let is_same = former.iter().all(|inode| now.contains(&Some(*inode)));
        if is_same { Ok(()) } else { self.check(database, former) }
    }

    /// An error while the app goes on with a former file. Blocks.
    pub(crate) fn check(&self, database: &Path, former: &[u64]) -> Result<(), FollowError> {
        if (self.0)(database, former) {
            return Err(FollowError::Former { path: database.to_owned() });
        }
        Ok(())
    }
}
