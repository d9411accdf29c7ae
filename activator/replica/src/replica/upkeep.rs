//! What keeps a database and its replica in order: checkpoints at the right moment, and a whole image
//! where the replica lacks files.

use dormouse_core::time::Nanos;
use dormouse_core::upload::UploadInput;
use dormouse_store::Store;

use super::driver::{Driver, blocking_io};
use crate::follow::{FollowError, Follower, ImageWhy, WalSize};
use crate::levels;

/// A checkpoint waits so long for a pause of the writer.
const NO_PAUSE: Nanos = Nanos::from_secs(1);

impl<S: Store> Driver<S> {
    /// A writer that makes no pause is held up for a checkpoint now and then.
    pub(super) async fn look_at_length(&mut self) {
        let now = self.now().mono;
        let size = self.follower.as_mut().map_or(WalSize::Short, Follower::wal_size);
        let is_due = match size {
            WalSize::Short => {
                self.long_since = None;
                false
            }
            WalSize::Long => *self.long_since.get_or_insert(now) + NO_PAUSE <= now,
            WalSize::TooLong => true,
        };
        if is_due {
            self.long_since = None;
            self.maintain().await;
        }
    }

    pub(super) async fn on_pause(&mut self) {
        self.long_since = None;
        if let Some(follower) = &mut self.follower
            && let Err(error) = follower.let_checkpoints()
        {
            return self.detach(&error);
        }
        self.maintain().await;
    }

    async fn maintain(&mut self) {
        let result = self
            .blocking(|follower| {
                follower.poll()?;
                follower.maintain()
            })
            .await;
        match result {
            Some(Ok(()) | Err(FollowError::Locked { .. })) | None => (),
            Some(Err(error)) => return self.detach(&error),
        }
        let lost = self.follower.as_ref().and_then(Follower::image_needed);
        if let Some(why @ (ImageWhy::WalTooLong | ImageWhy::DiskLow)) = lost {
            self.trouble(format!("the read lock was let go ({why:?}): a full image follows"));
        }
        if lost.is_some() && self.uploader.dirty_since().is_none() {
            self.step(UploadInput::Committed).await;
        }
    }

    /// Makes the next L0 a whole image, which then becomes a snapshot, if the replica needs it.
    pub(super) async fn mend(&mut self) {
        if !self.gatherer.wants_image() {
            return;
        }
        let Some(follower) = &mut self.follower else { return };
        if follower.image_needed().is_none() {
            follower.need_image();
            self.step(UploadInput::Committed).await;
        }
    }

    /// The database has other pages than the chain so far: a merge of both is none, so a snapshot
    /// is to divide them.
    pub(super) async fn refit(&mut self) {
        let state_dir = self.settings.state_dir.clone();
        if let Err(error) = blocking_io(move || levels::mark_damaged(&state_dir)).await {
            // The visit mends it all the same; only the next one would not know.
            self.trouble(error.to_string());
        }
        let newest = self.spooled.as_ref().map_or(self.durable.0, |file| file.txid);
        self.gatherer.damaged_since(newest);
    }
}
