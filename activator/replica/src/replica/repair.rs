//! A replica that lacks files is mended from the local copy.

use dormouse_core::upload::UploadInput;
use dormouse_store::Store;

use super::driver::Driver;

impl<S: Store> Driver<S> {
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
}
