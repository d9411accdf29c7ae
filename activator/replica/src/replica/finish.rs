//! The end of a host's replication, after its app is gone.

use std::io;

use dormouse_core::ids::Txid;
use dormouse_store::Store;

use super::Finished;
use super::driver::{Driver, blocking_io};
use crate::position_file;

impl<S: Store> Driver<S> {
    /// Empties the WAL and writes the clean position, if everything is durable.
    pub(super) async fn conclude(&mut self) -> Finished {
        let reason = self.close().await.err();
        let (txid, etag) = self.durable.clone();
        Finished { txid, etag, clean: reason.is_none(), reason }
    }

    async fn close(&mut self) -> Result<(), String> {
        if !self.is_settled() {
            let why = self.trouble.clone().or_else(|| self.detached.clone());
            return Err(why.unwrap_or_else(|| "not everything was uploaded in time".to_owned()));
        }
        let Some(position) = self.position(true) else {
            let never_made = std::fs::symlink_metadata(&self.settings.database)
                .is_err_and(|error| error.kind() == io::ErrorKind::NotFound);
            return match (never_made, self.durable.0) {
                // The app never made a database, and there never was one.
                (true, Txid(0)) => Ok(()),
                (true, Txid(_)) => Err("the database file is gone".to_owned()),
                (false, _) => {
                    Err(self.detached.clone().unwrap_or_else(|| "not followed".to_owned()))
                }
            };
        };
        let Some(follower) = self.follower.take() else { return Err("not followed".to_owned()) };
        let (database, state_dir) =
            (self.settings.database.clone(), self.settings.state_dir.clone());
        let (inventory, generation) = (self.gatherer.conclude(), self.settings.generation);
        blocking_io(move || {
            // The last look: a commit after the last L0 must not be called durable.
            let mut follower = follower;
            if follower.poll().map_err(io::Error::other)? {
                return Err(io::Error::other("the database was written to after the last upload"));
            }
            follower.close_clean().map_err(io::Error::other)?;
            let file = crate::inspect::stat(&database).map_err(io::Error::other)?;
            let Some(file) = file else { return Err(io::ErrorKind::NotFound.into()) };
            let position = dormouse_core::position::Position { file, ..position };
            position_file::save(&state_dir, &position).map_err(io::Error::other)?;
            crate::spool::clear(&state_dir)?;
            // Without it the next visit lists: no reason to call this one unclean.
            inventory.save(&state_dir, generation).ok();
            Ok(())
        })
        .await
        .map_err(|error| error.to_string())
    }
}
