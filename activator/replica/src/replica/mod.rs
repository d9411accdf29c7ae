//! One host's replication, from before its app starts until after it is gone.
//!
//! ```text
//! open (read lock, position marked unclean) → start → set_deadline… → finish or abandon
//! ```
//!
//! A task a host on the runtime; what blocks (`SQLite`, encoding, fsync) runs on the runtime's
//! blocking pool, and an idle host has neither a timer nor a thread.

mod attach;
mod driver;
mod finish;
mod gather;
mod resume;
mod upkeep;

use std::path::PathBuf;
use std::sync::Arc;

use dormouse_core::ids::{ETag, Generation, Nonce, Txid};
use dormouse_core::time::{Deadline, Mono, Nanos, Now};
use dormouse_core::upload::UploadSettings;
use dormouse_store::Store;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::JoinHandle;

use crate::follow::{
    self, FollowError, Follower, FreshMark, ImageWhy, Keeper, Limits, SpooledFile, wal_path,
};
use crate::holders::Holders;
use crate::inspect;
use crate::levels::{self, Budget, Inventory, LevelSettings};
use crate::position_file::{self, PositionFileError};
use crate::put::Place;
use crate::spool;
use crate::watch::Watcher;
use driver::Driver;

/// Commands that wait for the task.
const COMMANDS_MAX: usize = 8;

/// How one host is replicated.
#[derive(Clone, Debug)]
pub struct Settings {
    /// The app's database.
    pub database: PathBuf,
    /// Where position and spool are; on the same file system is not needed. Must exist.
    pub state_dir: PathBuf,
    /// Generation of the lease, for the position file.
    pub generation: Generation,
    /// Class and bounds of the uploads.
    pub upload: UploadSettings,
    /// What replication may cost the app's disk.
    pub limits: Limits,
    /// When levels are made and how long their files are kept.
    pub levels: LevelSettings,
    /// What all hosts of this box share.
    pub budget: Budget,
    /// Reads the clocks.
    pub clock: fn() -> Now,
    /// Who keeps our locks beyond the end of this process, where there is somebody.
    pub keeper: Option<Arc<dyn Keeper>>,
}

/// What the local database is, by the core's table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Base {
    /// It equals this acknowledged L0: the next one is an increment.
    Current {
        /// The L0.
        txid: Txid,
        /// Its tag.
        etag: Option<ETag>,
    },
    /// It does not: the next L0 is a full image after this one (0: over an empty replica).
    Image {
        /// Newest L0 of the store.
        after: Txid,
    },
}

impl Base {
    fn txid(&self) -> Txid {
        match self {
            Self::Current { txid, .. } | Self::Image { after: txid } => *txid,
        }
    }
}

/// What [`Replica::open`] found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Opened {
    /// The read lock is held; the next L0 is an increment after this one.
    Continuing {
        /// Newest acknowledged L0.
        txid: Txid,
    },
    /// The first L0 will be a full image.
    NeedsFullImage,
}

/// What the driver of the activator is told.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// Everything up to this L0 is durable.
    Durable {
        /// The L0.
        txid: Txid,
        /// Its tag.
        etag: ETag,
    },
    /// Another writer owns our number: stop the app, upload nothing more.
    StoodDown {
        /// The number.
        txid: Txid,
        /// The nonce that stands there is one that an earlier process of this box left in the
        /// spool: list again, take the next number.
        was_ours: bool,
    },
    /// The store refuses uploads.
    Refused {
        /// The store's words.
        reason: String,
    },
    /// Replication does not get on; tried again.
    Stalled {
        /// What is in the way.
        reason: String,
    },
}

/// State of a host's replication.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum State {
    /// The database cannot be followed yet, or no longer; the reason is an error's text.
    Detached {
        /// What is in the way.
        reason: String,
    },
    /// Following.
    Following,
    /// Another writer owns the replica.
    StoodDown,
}

/// What `status` shows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Status {
    /// Newest acknowledged L0.
    pub durable: Txid,
    /// Its tag.
    pub etag: Option<ETag>,
    /// Since when something is not durable; none: no lag.
    pub behind_since: Option<Mono>,
    /// Bytes of these, as far as they are known: of the file that waits for its acknowledgement,
    /// and of the WAL behind it.
    pub behind_bytes: u64,
    /// Since when the store has not answered an upload.
    pub asked_since: Option<Mono>,
    /// Until when uploads count.
    pub deadline: Option<Deadline>,
    /// State.
    pub state: State,
    /// The read lock is held.
    pub is_attached: bool,
    /// The next L0 is a full image, and why.
    pub image_needed: Option<ImageWhy>,
    /// Last thing in the way of an upload.
    pub trouble: Option<String>,
    /// Last thing in the way of a compaction; the replica is as good as before.
    pub compaction: Option<String>,
}

/// How [`Running::finish`] ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finished {
    /// Newest acknowledged L0.
    pub txid: Txid,
    /// Its tag.
    pub etag: Option<ETag>,
    /// Everything is durable, and the position file says so: the record may be released.
    pub clean: bool,
    /// Why not clean.
    pub reason: Option<String>,
}

/// Why replication could not be opened.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// The database must not be used.
    #[error(transparent)]
    Follow(#[from] FollowError),
    /// The position file could not be written.
    #[error(transparent)]
    Position(#[from] PositionFileError),
    /// The spool could not be used.
    #[error("{}: {source}", path.display())]
    Spool {
        /// The host's state directory.
        path: PathBuf,
        /// The cause.
        source: std::io::Error,
    },
    /// What an earlier process left says that its replica was not open, or was another one.
    #[error("replication cannot go on: {0}")]
    NotOpen(String),
    /// The runtime is going down.
    #[error("the runtime ended")]
    Runtime,
}

impl OpenError {
    /// The database is none that can be replicated; else this box is in the way.
    #[must_use]
    pub fn blames_database(&self) -> bool {
        match self {
            Self::Follow(error) => !error.blames_disk(),
            Self::Position(_) | Self::Spool { .. } | Self::NotOpen(_) | Self::Runtime => false,
        }
    }
}

enum Command {
    SetDeadline(Option<Deadline>),
    Finish { budget: Nanos, reply: oneshot::Sender<Finished> },
}

/// A host's replication that has its lock but does not run yet.
#[derive(Debug)]
pub struct Replica<S> {
    place: Place<S>,
    watcher: Watcher,
    settings: Settings,
    base: Base,
    follower: Option<Follower>,
    /// Nonces of an earlier process.
    own_nonces: Vec<Nonce>,
    /// What the last visit left.
    inventory: Option<Inventory>,
    /// What an earlier process spooled, and may have sent.
    unsent: Option<SpooledFile>,
    holders: Holders,
    /// Inodes of what was followed before, where that is known.
    former: Vec<u64>,
}

/// What opening finds on the disk.
struct Found {
    follower: Option<Follower>,
    own_nonces: Vec<Nonce>,
    inventory: Option<Inventory>,
}

impl<S: Store> Replica<S> {
    /// Before the app starts: marks the position unclean and takes the read lock on an existing
    /// database in WAL mode. Any other database is attached to after [`Replica::start`].
    pub async fn open(
        place: Place<S>,
        watcher: Watcher,
        settings: Settings,
        base: Base,
    ) -> Result<(Self, Opened), OpenError> {
        let (own, known) = (settings.clone(), base.clone());
        let work = move || find(&own, &known);
        let Found { follower, own_nonces, inventory } =
            tokio::task::spawn_blocking(work).await.map_err(|_| OpenError::Runtime)??;
        let continues = follower.as_ref().is_some_and(|f| f.image_needed().is_none());
        let opened = if continues {
            Opened::Continuing { txid: base.txid() }
        } else {
            Opened::NeedsFullImage
        };
        let this = Self {
            place,
            watcher,
            settings,
            base,
            follower,
            own_nonces,
            inventory,
            unsent: None,
            holders: Holders::default(),
            former: Vec::new(),
        };
        Ok((this, opened))
    }

    /// Who knows what files the app has open.
    #[must_use]
    pub fn held_by(self, holders: Holders) -> Self {
        Self { holders, ..self }
    }

    /// After the app is healthy: replication begins. `deadline` is the session's.
    pub fn start(self, deadline: Option<Deadline>) -> Running {
        let (commands, inbox) = mpsc::channel(COMMANDS_MAX);
        let (outbox, events) = mpsc::unbounded_channel();
        let etag = match &self.base {
            Base::Current { etag, .. } => etag.clone(),
            Base::Image { .. } => None,
        };
        let status = Status {
            durable: self.base.txid(),
            etag,
            behind_since: None,
            behind_bytes: 0,
            asked_since: None,
            deadline,
            state: State::Following,
            is_attached: self.follower.is_some(),
            image_needed: self.follower.as_ref().and_then(Follower::image_needed),
            trouble: None,
            compaction: None,
        };
        let (publish, status) = watch::channel(status);
        let subscription = self.watcher.subscribe(&wal_path(&self.settings.database));
        let driver = Driver::new(self, subscription, deadline, outbox, publish);
        let task = tokio::spawn(driver.run(inbox));
        Running { commands, events, status, task: Arc::new(task) }
    }
}

/// Looks at spool, position and inventory, and takes the read lock. Blocks.
fn find(settings: &Settings, base: &Base) -> Result<Found, OpenError> {
    let state_dir = &settings.state_dir;
    let spooled = |source| OpenError::Spool { path: state_dir.clone(), source };
    let is_current = matches!(base, Base::Current { .. });
    let left = spool::left_over(state_dir).map_err(spooled)?;
    position_file::mark_unclean(state_dir)?;
    if is_current {
        spool::clear(state_dir).map_err(spooled)?;
    }
    levels::clear(state_dir).map_err(spooled)?;
    let inventory = Inventory::take(state_dir, settings.generation, base.txid());
    let own_nonces = left.into_iter().map(|(_, nonce)| nonce).collect();
    let follower = match open_follower(settings, is_current) {
        Ok(follower) => Some(follower),
        Err(FollowError::Absent { .. } | FollowError::NotWal { .. }) => None,
        Err(error) => return Err(error.into()),
    };
    // Without it a gap calls for a whole image: no reason to stop here.
    let file = inspect::stat(&settings.database).ok().flatten();
    match file.filter(|_| follower.as_ref().is_some_and(Follower::is_fresh)) {
        Some(file) => FreshMark::new(base.txid(), file).save(state_dir).ok(),
        None => FreshMark::remove(state_dir).ok(),
    };
    Ok(Found { follower, own_nonces, inventory })
}

fn open_follower(settings: &Settings, is_current: bool) -> Result<Follower, FollowError> {
    let Settings { database, state_dir, limits, keeper, .. } = settings;
    if let Some(keeper) = keeper {
        follow::let_go(keeper.as_ref());
    }
    let mut follower = Follower::open(database, state_dir, is_current)?;
    follower.set_limits(*limits);
    if let Some(keeper) = keeper {
        follower.pin(Arc::clone(keeper));
    }
    Ok(follower)
}

/// A host's replication that runs.
#[derive(Debug)]
pub struct Running {
    commands: mpsc::Sender<Command>,
    events: mpsc::UnboundedReceiver<Event>,
    status: watch::Receiver<Status>,
    task: Arc<JoinHandle<()>>,
}

impl Running {
    /// The next event; none after the end.
    pub async fn event(&mut self) -> Option<Event> {
        self.events.recv().await
    }

    /// The next event, if it has come already.
    pub fn event_at_once(&mut self) -> Option<Event> {
        self.events.try_recv().ok()
    }

    /// The state as it is now.
    #[must_use]
    pub fn status(&self) -> Status {
        self.status.borrow().clone()
    }

    /// Follows the state.
    #[must_use]
    pub fn watch(&self) -> watch::Receiver<Status> {
        self.status.clone()
    }

    /// Waits until the database is followed; after `within` the reason why it is not (no WAL
    /// mode, exclusive lock, no database yet …). Replication goes on trying either way.
    pub async fn attached(&self, within: std::time::Duration) -> Result<(), String> {
        let mut status = self.status.clone();
        let followed = status.wait_for(|status| status.is_attached);
        if matches!(tokio::time::timeout(within, followed).await, Ok(Ok(_))) {
            return Ok(());
        }
        match self.status().state {
            State::Detached { reason } => Err(reason),
            State::StoodDown => Err("another writer owns the replica".to_owned()),
            State::Following => Err("the database could not be opened in time".to_owned()),
        }
    }

    /// The session was renewed: uploads count until then. None: no time limit.
    pub async fn set_deadline(&self, deadline: Option<Deadline>) {
        // A task that has ended uploads nothing.
        drop(self.commands.send(Command::SetDeadline(deadline)).await);
    }

    /// After the app is proven gone: uploads the rest, empties the WAL, writes the position.
    /// Dropped before its end, it is not taken back: [`Running::abandon`] ends it.
    pub fn finish(&self, budget: Nanos) -> impl Future<Output = Finished> + Send + use<> {
        let (commands, status) = (self.commands.clone(), self.status.clone());
        async move {
            let (reply, answer) = oneshot::channel();
            let sent = commands.send(Command::Finish { budget, reply }).await.is_ok();
            let finished = if sent { answer.await.ok() } else { None };
            finished.unwrap_or_else(|| {
                let status = status.borrow();
                let reason = Some("the replication task had ended".to_owned());
                Finished { txid: status.durable, etag: status.etag.clone(), clean: false, reason }
            })
        }
    }

    /// Lets go without uploading or checkpointing anything; what is spooled stays. The position
    /// stays unclean.
    pub fn abandon(self) {
        self.task.abort();
    }
}

#[cfg(test)]
mod gather_tests;
#[cfg(test)]
mod tests;
