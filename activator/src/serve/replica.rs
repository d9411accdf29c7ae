//! A host's copy and replica: what the core's effects on them are, step by step.
//!
//! Each host has a stage behind a lock of its own; its tasks follow each other, as the core orders
//! them. The position file is written before the file that it speaks of gets its name, marked
//! unclean: a crash between the two leaves a copy that is kept, never one that nobody knows.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex as StdMutex, PoisonError};
use std::time::Duration;

use dormouse_core::effect::Base;
use dormouse_core::event::{Answer, ReplicaProblem, Saved, StoreProblem, Ticket, Uploaded};
use dormouse_core::ids::{Generation, Nonce, Slot, Txid};
use dormouse_core::position::{FileId, Newest, POSITION_VERSION, Position, RemoteTip};
use dormouse_core::time::Nanos;
use dormouse_core::upload::{Standing, UploadSettings};
use dormouse_link::config::App;
use dormouse_replica::fence::{Fence, FenceOutcome};
use dormouse_replica::follow::{self, FollowError, Keeper};
use dormouse_replica::put::Place;
use dormouse_replica::replica::{self as running, Replica, Running, Settings};
use dormouse_replica::restore::{Listing, RestoreError, Restored, Target, restore};
use dormouse_replica::watch::Watcher;
use dormouse_replica::{clock, inspect, position_file, spool};
use dormouse_store::AnyStore;
use tokio::sync::{Mutex, mpsc, oneshot};

use super::driver::Driver;
use super::keeper::{Attach, Finish, keep};
use super::owner;
use super::paths::private_dir;
use super::records;
use super::rules::{Rules, upload_of};
use super::watched::Watched;

/// How far a host's copy has come.
#[derive(Debug, Default)]
enum Stage {
    #[default]
    Nothing,
    /// Under its temporary name.
    Unfinished(Restored),
    Opened(Box<Replica<AnyStore>>),
    Running(mpsc::Sender<Finish>),
}

/// A host's copy and replica. Clones share it.
#[derive(Clone, Debug)]
pub(crate) struct HostReplica {
    pub(crate) place: Place<AnyStore>,
    pub(crate) database: PathBuf,
    pub(crate) state_dir: PathBuf,
    upload: UploadSettings,
    pub(crate) rules: Rules,
    pub(crate) sync_budget: Nanos,
    set_wal: bool,
    stage: Arc<Mutex<Stage>>,
    /// A fence or image in the making; kept so that a repeat sends the same bytes.
    fence: Arc<Mutex<Option<Fence>>>,
    pub(crate) watched: Watched,
    /// Whose the copy is; absent: ours.
    owner: Option<u32>,
    /// Holds the database's locks beyond this process, where there is somebody.
    pub(crate) keeper: Option<Arc<dyn Keeper>>,
    /// Dropped, it ends the keeper of the running replica.
    end: Arc<StdMutex<Option<oneshot::Sender<()>>>>,
}

/// The unfinished restore inside it.
const UNFINISHED: &str = "restore.tmp";

impl HostReplica {
    pub(crate) fn new(
        place: Place<AnyStore>,
        database: PathBuf,
        state_dir: PathBuf,
        app: &App,
        rules: Rules,
        sync_budget: Nanos,
        owner: Option<u32>,
    ) -> Self {
        Self {
            place,
            database,
            state_dir,
            upload: upload_of(app),
            rules,
            sync_budget,
            set_wal: app.set_wal,
            stage: Arc::default(),
            fence: Arc::default(),
            watched: Watched::default(),
            owner,
            keeper: None,
            end: Arc::default(),
        }
    }

    /// Other settings, from the next open on.
    pub(crate) fn change(&mut self, app: &App, rules: Rules, sync_budget: Nanos) {
        self.upload = upload_of(app);
        self.set_wal = app.set_wal;
        self.rules = rules;
        self.sync_budget = sync_budget;
    }

    /// Whether the position says that the copy may be ahead of the store. Blocks.
    pub(crate) fn is_unclean(&self) -> bool {
        matches!(position_file::load(&self.state_dir), Ok(Some(position)) if !position.clean)
    }

    pub(crate) async fn inspect(self) -> Answer {
        let seen = blocking(move || {
            if let Some(keeper) = &self.keeper {
                // Nobody has gone on from it.
                follow::let_go(keeper.as_ref());
            }
            // A lost disk loses the directories too.
            for dir in [self.database.parent(), Some(self.state_dir.as_path())] {
                private_dir(dir.unwrap_or(Path::new("/"))).map_err(text)?;
            }
            if let Some(user) = self.owner {
                owner::give_copy(&self.database, &self.state_dir, user).map_err(text)?;
            }
            let seen = inspect::inspect(&self.database, &self.state_dir).map_err(text)?;
            // Never a file that is to be set aside, or that is as good as absent.
            let may_switch = self.set_wal && seen.file.is_some() && !seen.damaged;
            if may_switch && self.switch_to_wal()? {
                return inspect::inspect(&self.database, &self.state_dir).map_err(text);
            }
            Ok(seen)
        });
        Answer::Inspected(seen.await)
    }

    pub(crate) async fn list(self) -> Answer {
        let read = Listing::read(&self.place.store, &self.place.prefix, &self.place.host).await;
        let tip = match read {
            Err(error) => return Answer::Listed(Err(of_restore(error))),
            Ok(listing) => listing.max(),
        };
        if tip == Txid(0) {
            return Answer::Listed(Ok(None));
        }
        let key = dormouse_store::LtxKey::l0(tip);
        let (etag, nonce) = match self.place.standing(&key).await {
            Standing::File { etag, nonce } => (Some(etag), nonce),
            // Only a compaction holds the tip: its number alone is known.
            Standing::Absent => (None, None),
            Standing::Unclear => {
                let why = "the store did not tell the newest file's tag".to_owned();
                return Answer::Listed(Err(ReplicaProblem::Store(StoreProblem::Unreachable(why))));
            }
        };
        Answer::Listed(Ok(Some(Newest { tip: RemoteTip { txid: tip, etag }, nonce })))
    }

    pub(crate) async fn restore(self, set_aside: bool) -> Answer {
        let mut stage = self.stage.lock().await;
        self.fence.lock().await.take();
        if set_aside && let Err(why) = self.set_aside().await {
            return Answer::Fetched(Err(ReplicaProblem::Local(why)));
        }
        let temporary = self.state_dir.join(UNFINISHED);
        let Place { store, prefix, host } = &self.place;
        let restored = restore(store, prefix, host, Target::Latest, &temporary).await;
        Answer::Fetched(restored.map_err(of_restore).map(|restored| {
            let tip = RemoteTip { txid: restored.txid, etag: restored.etag.clone() };
            *stage = Stage::Unfinished(restored);
            tip
        }))
    }

    /// The host went to another box: the local copy is kept under another name.
    pub(crate) async fn fork(self) -> Answer {
        let stage = self.stage.lock().await;
        Answer::SetAside(match &*stage {
            Stage::Nothing | Stage::Unfinished(_) => self.set_aside().await,
            // A wake has overtaken the question: it decides.
            Stage::Opened(_) | Stage::Running(_) => Err("the copy is in use again".to_owned()),
        })
    }

    /// The name that the local copy has now.
    async fn set_aside(&self) -> Result<String, String> {
        let this = self.clone();
        blocking(move || {
            let Self { database, state_dir, place, .. } = this;
            let position = position_file::load(&state_dir).map_err(text)?;
            let (generation, txid) =
                position.map_or((Generation(0), Txid(0)), |p| (p.generation, p.txid));
            let fork = inspect::set_aside(&database, &state_dir, generation, txid).map_err(text)?;
            tracing::warn!(
                host = %place.host,
                fork = %fork.display(),
                "the local copy is not what the store has: set aside"
            );
            Ok(fork.display().to_string())
        })
        .await
    }

    /// A fence over the unfinished file; over nothing at all, the empty database first.
    pub(crate) async fn put_fence(self, txid: Txid, nonce: Nonce) -> Answer {
        let mut stage = self.stage.lock().await;
        let mut fence = self.fence.lock().await;
        if fence.as_ref().is_none_or(|fence| fence.nonce != nonce) {
            if matches!(*stage, Stage::Nothing) {
                match Restored::empty(&self.state_dir.join(UNFINISHED)).await {
                    Ok(empty) => *stage = Stage::Unfinished(empty),
                    Err(error) => return failed(of_restore(error)),
                }
            }
            let Stage::Unfinished(restored) = &*stage else {
                return failed(ReplicaProblem::Local("no unfinished file to fence".to_owned()));
            };
            if restored.txid.next() != txid {
                let why = format!("asked to fence {txid} over {}", restored.txid);
                return failed(ReplicaProblem::Local(why));
            }
            let (restored, state_dir) = (restored.clone(), self.state_dir.clone());
            let made = blocking(move || {
                Fence::after(&restored, &state_dir, &nonce, wall_ms()).map_err(text)
            });
            match made.await {
                Ok(made) => *fence = Some(made),
                Err(why) => return failed(ReplicaProblem::Local(why)),
            }
        }
        let Some(fence) = fence.as_ref() else {
            return failed(ReplicaProblem::Local("no fence was made".to_owned()));
        };
        let answer = self.send(fence).await;
        if let (Uploaded::Done(RemoteTip { etag: Some(etag), .. }), Stage::Unfinished(restored)) =
            (&answer, &mut *stage)
        {
            restored.fenced(fence, etag.clone());
        }
        Answer::Uploaded(answer)
    }

    pub(crate) async fn put_image(self, txid: Txid, nonce: Nonce) -> Answer {
        let mut fence = self.fence.lock().await;
        if fence.as_ref().is_none_or(|fence| fence.nonce != nonce) {
            let (database, state_dir) = (self.database.clone(), self.state_dir.clone());
            let (watched, limits) = (self.watched.clone(), self.rules.limits);
            let made = blocking(move || {
                tell_change(&database, &state_dir, &watched)?;
                Ok(Fence::image(&database, &state_dir, limits, txid, &nonce, wall_ms()))
            });
            match made.await {
                Ok(Ok(made)) => *fence = Some(made),
                Ok(Err(error)) if !error.blames_disk() => {
                    return failed(ReplicaProblem::Unfit(error.to_string()));
                }
                Ok(Err(error)) => return failed(ReplicaProblem::Local(error.to_string())),
                Err(why) => return failed(ReplicaProblem::Local(why)),
            }
        }
        match fence.as_ref() {
            Some(fence) => Answer::Uploaded(self.send(fence).await),
            None => failed(ReplicaProblem::Local("no image was made".to_owned())),
        }
    }

    async fn send(&self, fence: &Fence) -> Uploaded {
        match fence.send(&self.place).await {
            FenceOutcome::Done { etag } => Uploaded::Done(RemoteTip::tagged(fence.txid, etag)),
            FenceOutcome::Taken { nonce } => Uploaded::Taken { own: self.is_own(nonce, fence) },
            FenceOutcome::Again { why } => {
                tracing::warn!(host = %self.place.host, why, "an upload is repeated");
                Uploaded::Unknown
            }
            FenceOutcome::Refused { why } => {
                Uploaded::Failed(ReplicaProblem::Store(StoreProblem::Refused(why)))
            }
        }
    }

    /// The spool is this host's journal of uploads: what is in it was begun by us.
    fn is_own(&self, nonce: Option<Nonce>, fence: &Fence) -> bool {
        let Some(nonce) = nonce else { return false };
        let spooled = spool::left_over(&self.state_dir).unwrap_or_default();
        nonce != fence.nonce && spooled.iter().any(|(_, spooled)| *spooled == nonce)
    }

    pub(crate) async fn apply(self) -> Answer {
        let mut stage = self.stage.lock().await;
        let Stage::Unfinished(restored) = &mut *stage else {
            let why = "no unfinished file to apply to".to_owned();
            return Answer::Fetched(Err(ReplicaProblem::Local(why)));
        };
        let Place { store, prefix, host } = &self.place;
        let applied = restored.apply_one(store, prefix, host).await;
        let tip = RemoteTip { txid: restored.txid, etag: restored.etag.clone() };
        Answer::Fetched(applied.map(|()| tip).map_err(of_restore))
    }

    pub(crate) async fn adopt(self, generation: Generation, tip: RemoteTip) -> Answer {
        let mut stage = self.stage.lock().await;
        let Stage::Unfinished(restored) = std::mem::take(&mut *stage) else {
            let why = "no unfinished file to adopt".to_owned();
            return Answer::Adopted(Err(ReplicaProblem::Local(why)));
        };
        self.fence.lock().await.take();
        let adopted = blocking(move || {
            if let Some(user) = self.owner {
                owner::give(&restored.path, user).map_err(text)?;
            }
            let file = inspect::stat(&restored.path).map_err(text)?.unwrap_or(NO_FILE);
            let mut position = Position {
                version: POSITION_VERSION,
                generation,
                txid: tip.txid,
                etag: tip.etag,
                file,
                page_count: restored.page_count,
                page_size: restored.page_size.get(),
                clean: false,
            };
            position_file::save(&self.state_dir, &position).map_err(text)?;
            restored.adopt(&self.database, None).map_err(text)?;
            // The name changed its change time.
            position.file = inspect::stat(&self.database).map_err(text)?.unwrap_or(NO_FILE);
            position.clean = true;
            position_file::save(&self.state_dir, &position).map_err(text)
        });
        Answer::Adopted(adopted.await.map_err(ReplicaProblem::Local))
    }

    pub(crate) async fn open(self, watcher: Watcher, generation: Generation, base: Base) -> Answer {
        let mut stage = self.stage.lock().await;
        self.fence.lock().await.take();
        let own = self.clone();
        let known = base.clone();
        let noted = blocking(move || own.note_position(generation, &known)).await;
        if let Err(why) = noted {
            return Answer::Opened(Err(ReplicaProblem::Local(why)));
        }
        let settings = self.settings(generation);
        let base = match base {
            Base::At(tip) => running::Base::Current { txid: tip.txid, etag: tip.etag },
            Base::Nothing => running::Base::Image { after: Txid(0) },
        };
        match Replica::open(self.place.clone(), watcher, settings, base).await {
            Ok((opened, how)) => {
                tracing::debug!(host = %self.place.host, ?how, "replica opened");
                *stage = Stage::Opened(Box::new(opened));
                Answer::Opened(Ok(()))
            }
            Err(error) if error.blames_database() => {
                Answer::Opened(Err(ReplicaProblem::Unfit(error.to_string())))
            }
            Err(error) => Answer::Opened(Err(ReplicaProblem::Local(error.to_string()))),
        }
    }

    fn settings(&self, generation: Generation) -> Settings {
        Settings {
            database: self.database.clone(),
            state_dir: self.state_dir.clone(),
            generation,
            upload: self.upload,
            limits: self.rules.limits,
            levels: self.rules.levels,
            budget: self.rules.budget.clone(),
            clock: clock::system_now,
            keeper: self.keeper.clone(),
        }
    }

    /// Goes on where the replica of an earlier activator left off; its app runs.
    async fn resume(self, watcher: Watcher, generation: Generation, attach: Attach) -> Answer {
        let mut stage = self.stage.lock().await;
        let (place, settings) = (self.place.clone(), self.settings(generation));
        let resumed = Replica::resume(place, watcher, settings, attach.holders()).await;
        let (opened, how) = match resumed {
            Ok(resumed) => resumed,
            Err(error) => return Answer::Attached(Err(ReplicaProblem::Local(error.to_string()))),
        };
        tracing::info!(host = %self.place.host, ?how, "replication goes on");
        // What served already goes on, whether it can be followed or not: `status` tells.
        let running = self.begin(opened, &attach);
        *stage = Stage::Running(self.keep(running, attach));
        Answer::Attached(Ok(()))
    }

    fn begin(&self, opened: Replica<AnyStore>, attach: &Attach) -> Running {
        let deadline = *attach.deadline.borrow();
        let running = opened.held_by(attach.holders()).start(Some(deadline));
        self.watched.begin(running.watch());
        running
    }

    /// Where the app's config asks for it; true when it was in another mode.
    fn switch_to_wal(&self) -> Result<bool, String> {
        match follow::switch_to_wal(&self.database) {
            Ok(switched) => Ok(switched),
            Err(FollowError::Absent { .. }) => Ok(false),
            Err(error) => Err(error.to_string()),
        }
    }

    /// From now on the file on disk may run ahead of the store: a crash must find a position that
    /// says so, also beside a database that does not exist yet.
    fn note_position(&self, generation: Generation, base: &Base) -> Result<(), String> {
        let known = position_file::load(&self.state_dir).map_err(text)?;
        let (txid, etag) = match base {
            Base::At(tip) => (tip.txid, tip.etag.clone()),
            Base::Nothing => (Txid(0), None),
        };
        let file = inspect::stat(&self.database).map_err(text)?.unwrap_or(NO_FILE);
        let position = Position {
            version: POSITION_VERSION,
            generation,
            txid,
            etag,
            file,
            page_count: known.as_ref().map_or(0, |p| p.page_count),
            page_size: known.as_ref().map_or(0, |p| p.page_size),
            clean: false,
        };
        position_file::save(&self.state_dir, &position).map_err(text)
    }

    async fn attach(self, attach: Attach) -> Answer {
        let mut stage = self.stage.lock().await;
        let Stage::Opened(opened) = std::mem::take(&mut *stage) else {
            let why = "the replica was not opened".to_owned();
            return Answer::Attached(Err(ReplicaProblem::Local(why)));
        };
        let running = self.begin(*opened, &attach);
        // An app that has made no database yet has nothing to replicate; any other that cannot be
        // followed is refused, never silently unreplicated.
        if let Err(why) = running.attached(ATTACH_TIMEOUT).await
            && std::fs::symlink_metadata(&self.database).is_ok_and(|file| file.len() > 0)
        {
            running.abandon();
            return Answer::Attached(Err(ReplicaProblem::Unfit(why)));
        }
        *stage = Stage::Running(self.keep(running, attach));
        Answer::Attached(Ok(()))
    }

    /// Hands a running replica to a keeper of its own.
    fn keep(&self, running: Running, attach: Attach) -> mpsc::Sender<Finish> {
        let (finish, asked) = mpsc::channel(1);
        let (end, ended) = oneshot::channel();
        *self.end.lock().unwrap_or_else(PoisonError::into_inner) = Some(end);
        tokio::spawn(keep(self.clone(), running, asked, ended, attach));
        finish
    }

    pub(crate) async fn save(self, attach: Attach) -> Answer {
        let stage = std::mem::take(&mut *self.stage.lock().await);
        let unclean = |why: &str| Saved::Unclean { durable: Txid(0), why: why.to_owned() };
        let keeper = match stage {
            Stage::Running(keeper) => keeper,
            // Started, never attached: what the app wrote, if anything, is uploaded all the same,
            // so that an app that cannot start does not cost a full image at every try.
            Stage::Opened(opened) => {
                let running = self.begin(*opened, &attach);
                self.keep(running, attach)
            }
            Stage::Nothing | Stage::Unfinished(_) => {
                return Answer::Saved(unclean("there was no replica"));
            }
        };
        let (reply, saved) = oneshot::channel();
        // A keeper that is gone, or that abandons, leaves the reply unanswered.
        keeper.send(Finish { reply }).await.ok();
        let saved = saved.await.unwrap_or_else(|_| unclean("the replica had ended"));
        self.watched.end();
        Answer::Saved(saved)
    }

    async fn abandon(self) {
        // At once, also in the middle of a last sync: nothing of it may go on beside a new wake.
        self.end.lock().unwrap_or_else(PoisonError::into_inner).take();
        drop(std::mem::take(&mut *self.stage.lock().await));
        self.watched.end();
    }
}

/// How long a healthy app may keep its database from being followed.
const ATTACH_TIMEOUT: Duration = Duration::from_secs(5);

/// Stands for "there is no such file".
const NO_FILE: FileId = FileId { inode: 0, size: 0, ctime_ns: 0 };

/// An operator's edit, or an older file that was put in place: nobody can tell, so it is said.
fn tell_change(database: &Path, state_dir: &Path, watched: &Watched) -> Result<(), String> {
    let Some(position) = position_file::load(state_dir).map_err(text)? else { return Ok(()) };
    if position.clean && inspect::stat(database).map_err(text)? != Some(position.file) {
        watched.set_changed_after(position.txid);
        tracing::warn!(
            database = %database.display(),
            before = %position.txid,
            "the database was changed while its host slept: it is taken as it is, and uploaded; what \
             was there before is restored by its TXID"
        );
    }
    Ok(())
}

/// For the core, an error is its words.
fn text(error: impl std::fmt::Display) -> String {
    error.to_string()
}

fn failed(problem: ReplicaProblem) -> Answer {
    Answer::Uploaded(Uploaded::Failed(problem))
}

fn of_restore(error: RestoreError) -> ReplicaProblem {
    match error {
        RestoreError::Read(error) => ReplicaProblem::Store(records::problem(&error)),
        RestoreError::Io { .. } | RestoreError::NoRoom { .. } => {
            ReplicaProblem::Local(error.to_string())
        }
        RestoreError::Empty
        | RestoreError::Gap { .. }
        | RestoreError::Unreached { .. }
        | RestoreError::TooOld { .. }
        | RestoreError::Ltx(_)
        | RestoreError::Misfit { .. }
        | RestoreError::MissingPage { .. } => ReplicaProblem::Corrupt(error.to_string()),
    }
}

pub(crate) fn wall_ms() -> i64 {
    clock::system_now().wall.unix_ms()
}

pub(crate) async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, String> + Send + 'static,
) -> Result<T, String> {
    tokio::task::spawn_blocking(work)
        .await
        .unwrap_or_else(|error| Err(format!("a task ended early: {error}")))
}

impl Driver {
    /// A task on a host's copy, whose outcome is the answer.
    pub(crate) fn on_copy<W>(&self, ticket: Ticket, slot: Slot, work: impl FnOnce(HostReplica) -> W)
    where
        W: Future<Output = Answer> + Send + 'static,
    {
        // A host that was retired meanwhile has nobody left to answer.
        if let Some(hosted) = self.hosted(slot) {
            self.answer_later(ticket, work(hosted.replica.clone()));
        }
    }

    pub(crate) fn attach(&self, ticket: Ticket, slot: Slot) {
        let attach = self.keeper_of(slot);
        self.on_copy(ticket, slot, |copy| copy.attach(attach));
    }

    pub(crate) fn resume(&self, ticket: Ticket, slot: Slot, generation: Generation) {
        let (watcher, attach) = (self.parts.watcher.clone(), self.keeper_of(slot));
        self.on_copy(ticket, slot, |copy| copy.resume(watcher, generation, attach));
    }

    pub(crate) fn save(&self, ticket: Ticket, slot: Slot) {
        let attach = self.keeper_of(slot);
        self.on_copy(ticket, slot, |copy| copy.save(attach));
    }

    fn keeper_of(&self, slot: Slot) -> Attach {
        let inputs = self.parts.inputs.clone();
        let instance = self.hosted(slot).and_then(|hosted| hosted.instance.clone());
        Attach { slot, inputs, deadline: self.deadline.subscribe(), instance }
    }

    pub(crate) fn abandon(&self, slot: Slot) {
        if let Some(hosted) = self.hosted(slot) {
            tokio::spawn(hosted.replica.clone().abandon());
        }
    }
}
