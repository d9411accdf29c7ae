//! How a database comes to be followed, and what happens when it cannot be any more.

use dormouse_core::ids::Txid;
use dormouse_core::time::Nanos;
use dormouse_core::upload::UploadInput;
use dormouse_store::Store;

use super::driver::{Driver, Watch};
use super::{Event, open_follower};
use crate::follow::FollowError;

/// A database that cannot be followed is tried again after this, doubled up to the longest.
pub(super) const ATTACH_MIN: Nanos = Nanos::from_millis(100);
const ATTACH_MAX: Nanos = Nanos::from_secs(5);

impl<S: Store> Driver<S> {
    pub(super) async fn try_attach(&mut self) {
        let settings = self.settings.clone();
        let (holders, former) = (self.holders.clone(), self.former.clone());
        let open = move || {
            // Before anything is opened: that would make a WAL beside the one that the app has.
            holders.check_changed(&settings.database, &former)?;
            open_follower(&settings, false)
        };
        match tokio::task::spawn_blocking(open).await {
            Ok(Ok(follower)) => {
                let size = follower.page_size();
                if self.page_size.replace(size).is_some_and(|before| before != size) {
                    self.refit().await;
                }
                self.follower = Some(follower);
                self.attach = None;
                self.detached = None;
                self.watch = Watch::Rearm(self.now().mono);
                self.step(UploadInput::Committed).await;
            }
            Ok(Err(error)) => self.detach(&error),
            Err(error) => self.trouble(error.to_string()),
        }
    }

    /// The database cannot be followed: says why, and tries again from a full image. What the app
    /// writes from here on is not durable.
    pub(super) fn detach(&mut self, error: &FollowError) {
        if let Some(follower) = self.follower.take() {
            self.former = follower.inodes();
        }
        self.is_empty = self.durable.0 == Txid(0) && error.is_before_the_first_write();
        if !self.is_empty {
            self.behind_since.get_or_insert((self.settings.clock)().mono);
        }
        let reason = error.to_string();
        if self.detached.as_ref() != Some(&reason) {
            self.send(Event::Stalled { reason: reason.clone() });
        }
        self.detached = Some(reason);
        let wait = self.attach.map_or(ATTACH_MIN, |(_, wait)| wait.doubled(ATTACH_MAX));
        self.attach = Some((self.now().mono + wait, wait));
    }
}
