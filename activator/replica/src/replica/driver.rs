//! The task of one host: waits, lets the core decide, carries out.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use dormouse_core::ids::{ETag, Nonce, Txid};
use dormouse_core::position::{FileId, POSITION_VERSION, Position};
use dormouse_core::time::{Deadline, Mono, Nanos, Now};
use dormouse_core::upload::{PutAnswer, Spooled, Standing, UploadInput, UploadOutput, Uploader};
use dormouse_store::{LtxKey, Store};
use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::JoinHandle;

use super::attach::ATTACH_MIN;
use super::gather::{Gatherer, Outcome};
use super::{Base, Command, Event, Finished, Replica, Settings, State, Status};
use crate::follow::{FollowError, Follower, SpooledFile, WalSize};
use crate::holders::Holders;
use crate::ltx::PageSize;
use crate::put::{Kind, Place};
use crate::watch::Subscription;
use crate::{inspect, position_file, spool};

/// After an event the watch stays unarmed so long: a busy writer costs 100 events a second.
const REARM: Nanos = Nanos::from_millis(10);
/// A writer that wrote nothing for so long after the watch was armed makes a pause.
const PAUSE: Nanos = Nanos::from_millis(20);
/// A last sync waits for room on the disk for so many tries, a second each. Then it ends as one whose
/// time is over: all is still in the database, and nobody waits for its next visit meanwhile.
const NO_ROOM_MAX: u32 = 3;

pub(super) enum Answer {
    Put(PutAnswer, String),
    Standing(Standing),
}

/// How the watch stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Watch {
    Armed,
    Rearm(Mono),
}

pub(super) enum Woken {
    Command(Option<Command>),
    Answer(Answer),
    Gathered(Outcome),
    Fired,
    Due,
}

pub(super) struct Finishing {
    pub(super) until: Mono,
    pub(super) reply: oneshot::Sender<Finished>,
}

pub(super) struct Driver<S> {
    place: Place<S>,
    pub(super) settings: Settings,
    pub(super) follower: Option<Follower>,
    pub(super) uploader: Uploader,
    subscription: Subscription,
    pub(super) watch: Watch,
    /// When a checkpoint is due, should the writer make a pause until then.
    pause: Option<Mono>,
    /// Since when a checkpoint waits for a pause.
    pub(super) long_since: Option<Mono>,
    pub(super) attach: Option<(Mono, Nanos)>,
    pub(super) holders: Holders,
    /// Inodes of what was followed last.
    pub(super) former: Vec<u64>,
    /// Of the chain so far.
    pub(super) page_size: Option<PageSize>,
    in_flight: Option<JoinHandle<Answer>>,
    asked_since: Option<Mono>,
    pub(super) gatherer: Gatherer<S>,
    pub(super) spooled: Option<SpooledFile>,
    pub(super) durable: (Txid, Option<ETag>),
    own_nonces: Vec<Nonce>,
    found: Option<Nonce>,
    pub(super) behind_since: Option<Mono>,
    events: mpsc::UnboundedSender<Event>,
    status: watch::Sender<Status>,
    pub(super) detached: Option<String>,
    /// There is no database yet, here or in the store.
    pub(super) is_empty: bool,
    pub(super) trouble: Option<String>,
    finishing: Option<Finishing>,
    /// Tries to spool, one after the other, for which the disk had no room.
    no_room: u32,
}

impl<S: Store> Driver<S> {
    pub(super) fn new(
        replica: Replica<S>,
        subscription: Subscription,
        deadline: Option<Deadline>,
        events: mpsc::UnboundedSender<Event>,
        status: watch::Sender<Status>,
    ) -> Self {
        let Replica { place, settings, base, follower, own_nonces, inventory, .. } = replica;
        let Replica { unsent, holders, former, .. } = replica;
        let now = (settings.clock)();
        let gatherer = Gatherer::new(place.clone(), &settings, &base, inventory, now, deadline);
        let durable = match base {
            Base::Current { txid, etag } => (txid, etag),
            Base::Image { after } => (after, None),
        };
        let attach = follower.is_none().then_some((now.mono, ATTACH_MIN));
        let mut uploader = Uploader::new(settings.upload, now, deadline);
        if let Some(file) = &unsent {
            uploader.resume(now, Spooled { txid: file.txid, nonce: file.nonce.clone() });
        }
        Self {
            place,
            uploader,
            settings,
            page_size: follower.as_ref().map(Follower::page_size),
            follower,
            subscription,
            watch: Watch::Rearm(now.mono),
            pause: None,
            long_since: None,
            attach,
            holders,
            former,
            in_flight: None,
            asked_since: None,
            gatherer,
            spooled: unsent,
            durable,
            own_nonces,
            found: None,
            behind_since: None,
            events,
            status,
            detached: None,
            is_empty: false,
            trouble: None,
            finishing: None,
            no_room: 0,
        }
    }

    pub(super) async fn run(mut self, mut inbox: mpsc::Receiver<Command>) {
        loop {
            self.mend().await;
            self.publish();
            if let Some(finishing) = self.take_finished() {
                let finished = self.conclude().await;
                // Nobody waits any more: the position file says it all.
                drop(finishing.reply.send(finished));
                return;
            }
            match self.wait(&mut inbox).await {
                Woken::Command(None) => return,
                Woken::Command(Some(Command::SetDeadline(deadline))) => {
                    self.gatherer.set_deadline(deadline);
                    self.step(UploadInput::DeadlineSet(deadline)).await;
                }
                Woken::Command(Some(Command::Finish { budget, reply })) => {
                    self.begin_finish(budget, reply).await;
                }
                Woken::Answer(answer) => self.on_answer(answer).await,
                Woken::Gathered(outcome) => {
                    let now = self.now();
                    self.gatherer.on_ended(now, outcome);
                }
                Woken::Fired => self.on_fired().await,
                Woken::Due => self.on_due().await,
            }
        }
    }

    async fn wait(&mut self, inbox: &mut mpsc::Receiver<Command>) -> Woken {
        let delay = self.next_due().map(|due| Duration::from_nanos(due.since(self.now().mono).0));
        let in_flight = &mut self.in_flight;
        let gatherer = &mut self.gatherer;
        tokio::select! {
            biased;
            command = inbox.recv() => Woken::Command(command),
            answer = async { match in_flight {
                Some(task) => task.await,
                None => std::future::pending().await,
            } } => {
                *in_flight = None;
                let lost = |error| Answer::Put(PutAnswer::Unknown, format!("upload task: {error}"));
                Woken::Answer(answer.unwrap_or_else(lost))
            }
            () = self.subscription.fired() => Woken::Fired,
            outcome = gatherer.ended() => Woken::Gathered(outcome),
            () = async { match delay {
                Some(delay) => tokio::time::sleep(delay).await,
                None => std::future::pending().await,
            } } => Woken::Due,
        }
    }

    fn next_due(&self) -> Option<Mono> {
        let rearm = match self.watch {
            Watch::Rearm(at) if self.follower.is_some() => Some(at),
            Watch::Rearm(_) | Watch::Armed => None,
        };
        let attach = self.attach.map(|(at, _)| at);
        let finish = self.finishing.as_ref().map(|finishing| finishing.until);
        // A host that is going compacts what is left by itself.
        let levels = match self.finishing {
            Some(_) => None,
            None => self.gatherer.next_due(self.now()),
        };
        [self.uploader.next_due(), rearm, self.pause, attach, finish, levels]
            .into_iter()
            .flatten()
            .min()
    }

    async fn on_fired(&mut self) {
        self.watch = Watch::Rearm(self.now().mono + REARM);
        self.pause = None;
        if self.uploader.dirty_since().is_none() {
            self.step(UploadInput::Committed).await;
        }
        self.look_at_length().await;
        if let Some(follower) = &mut self.follower {
            follower.keep_checkpoints_out();
        }
    }

    async fn on_due(&mut self) {
        let now = self.now();
        if self.attach.is_some_and(|(at, _)| at <= now.mono) {
            self.try_attach().await;
        }
        if let Watch::Rearm(at) = self.watch
            && at <= now.mono
            && self.follower.is_some()
        {
            self.rearm().await;
        }
        if self.pause.is_some_and(|at| at <= now.mono) {
            self.pause = None;
            self.on_pause().await;
        }
        self.step(UploadInput::Tick).await;
        // Last: an L0 is never kept waiting.
        if self.finishing.is_none() {
            self.gatherer.start(self.now());
        }
    }

    /// Arms the watch, then looks for what came before it was armed.
    async fn rearm(&mut self) {
        match self.subscription.arm() {
            Ok(()) => self.watch = Watch::Armed,
            Err(error) => {
                // The slow poll still tells; the next try comes with it.
                self.trouble(format!("inotify: {error}"));
                self.watch = Watch::Armed;
            }
        }
        if self.uploader.dirty_since().is_none() {
            self.look().await;
        }
        if self.follower.as_mut().is_some_and(|follower| {
            follower.keeps_checkpoints_out() || follower.wal_size() != WalSize::Short
        }) {
            self.pause = Some(self.now().mono + PAUSE);
        }
    }

    pub(super) async fn look(&mut self) {
        match self.blocking(Follower::poll).await {
            Some(Ok(true)) => self.step(UploadInput::Committed).await,
            Some(Ok(false)) | None => (),
            Some(Err(error)) => self.detach(&error),
        }
    }

    /// Feeds the core and carries out what it says.
    pub(super) async fn step(&mut self, input: UploadInput) {
        let mut inputs = vec![input];
        while let Some(input) = inputs.pop() {
            let now = self.now();
            let mut outputs = Vec::new();
            let unspooled = self.uploader.dirty_since();
            self.uploader.step(now, input, &mut outputs);
            if outputs.iter().any(|output| matches!(output, UploadOutput::Durable { .. })) {
                // What came since the file that is durable now.
                self.behind_since = unspooled;
            }
            if self.uploader.is_settled() && (self.detached.is_none() || self.is_empty) {
                self.behind_since = None;
            } else {
                self.behind_since.get_or_insert(now.mono);
            }
            for output in outputs {
                inputs.extend(self.carry_out(now, output).await);
            }
        }
    }

    async fn carry_out(&mut self, now: Now, output: UploadOutput) -> Option<UploadInput> {
        match output {
            UploadOutput::Spool => return Some(self.spool(now).await),
            UploadOutput::Put(file) => self.put(now, file),
            UploadOutput::Compare(file) => {
                self.asked_since = Some(now.mono);
                let place = self.place.clone();
                let key = LtxKey::l0(file.txid);
                self.in_flight =
                    Some(tokio::spawn(async move { Answer::Standing(place.standing(&key).await) }));
            }
            UploadOutput::Durable { txid, etag } => self.on_durable(txid, etag).await,
            UploadOutput::StandDown { txid } => {
                let was_ours =
                    self.found.as_ref().is_some_and(|nonce| self.own_nonces.contains(nonce));
                self.send(Event::StoodDown { txid, was_ours });
            }
            UploadOutput::Refused { txid } => {
                let reason = self.trouble.clone().unwrap_or_default();
                self.send(Event::Refused { reason: format!("upload {txid}: {reason}") });
            }
        }
        None
    }

    async fn spool(&mut self, now: Now) -> UploadInput {
        let txid = self.durable.0.next();
        let timestamp_ms = now.wall.unix_ms();
        let result = self
            .blocking(move |follower| {
                let nonce = spool::fresh_nonce()
                    .map_err(|error| FollowError::Io { path: "nonce".into(), source: error })?;
                follower.poll()?;
                follower.spool(txid, &nonce, timestamp_ms)
            })
            .await;
        match result {
            Some(Ok(Some(file))) => {
                let spooled = Spooled { txid, nonce: file.nonce.clone() };
                self.spooled = Some(file);
                self.no_room = 0;
                UploadInput::Spooled(Some(spooled))
            }
            Some(Ok(None)) | None => UploadInput::Spooled(None),
            Some(Err(error @ (FollowError::Io { .. } | FollowError::Ltx(_)))) => {
                // A full disk, or a lock of the app: everything is still pending.
                self.no_room = if error.blames_disk() { self.no_room.saturating_add(1) } else { 0 };
                self.trouble(error.to_string());
                UploadInput::SpoolFailed
            }
            Some(Err(error)) => {
                self.detach(&error);
                UploadInput::SpoolFailed
            }
        }
    }

    fn put(&mut self, now: Now, file: Spooled) {
        let Some(spooled) = self.spooled.clone() else { return };
        assert_eq!(spooled.nonce, file.nonce, "invariant 3: a repeat sends the same file");
        let place = self.place.clone();
        self.asked_since = Some(now.mono);
        self.in_flight = Some(tokio::spawn(async move {
            let kind = if spooled.is_image { Kind::Fence } else { Kind::Plain };
            let (answer, why) = place
                .put(&LtxKey::l0(file.txid), &spooled.path, &file.nonce, spooled.timestamp_ms, kind)
                .await;
            Answer::Put(answer, why)
        }));
    }

    async fn on_answer(&mut self, answer: Answer) {
        match answer {
            Answer::Put(answer, why) => {
                if !why.is_empty() {
                    self.trouble(why);
                }
                self.step(UploadInput::Put(answer)).await;
            }
            Answer::Standing(standing) => {
                if let Standing::File { nonce, .. } = &standing {
                    self.found.clone_from(nonce);
                }
                self.step(UploadInput::Compared(standing)).await;
            }
        }
        self.look_at_length().await;
        if self.is_settled() && self.watch != Watch::Armed {
            // Quiet again: the next commit need not wait for the pause to end.
            self.watch = Watch::Rearm(self.now().mono);
        }
    }

    async fn on_durable(&mut self, txid: Txid, etag: ETag) {
        assert_eq!(txid, self.durable.0.next(), "invariant 3: numbers are acknowledged in order");
        self.durable = (txid, Some(etag.clone()));
        self.trouble = None;
        // Before the event: who hears of it finds it in the status.
        self.publish();
        self.send(Event::Durable { txid, etag });
        if let Some(file) = self.spooled.take()
            && let Some(position) = self.position(false)
        {
            let state_dir = self.settings.state_dir.clone();
            let (path, keep) = (file.path.clone(), self.gatherer.room_for(&file));
            let mark = file.mark;
            let saved = blocking_io(move || {
                position_file::save(&state_dir, &position).map_err(io::Error::other)?;
                if let Some(mark) = mark {
                    // Without it a gap calls for a whole image: no reason to stop here.
                    mark.save(&state_dir).ok();
                }
                // Only now: until here its nonce was our journal.
                retire(&path, keep)
            })
            .await;
            let kept = match saved {
                Ok(kept) => kept,
                Err(error) => {
                    self.trouble(error.to_string());
                    None
                }
            };
            self.gatherer.acknowledged(self.now(), &file, kept);
        }
    }

    /// The position of the newest acknowledged L0.
    pub(super) fn position(&self, clean: bool) -> Option<Position> {
        let follower = self.follower.as_ref()?;
        let file = inspect::stat(&self.settings.database).ok().flatten()?;
        // Never the look of another file that has been put in its place meanwhile.
        let is_followed = file.inode == follower.inode();
        let gone = FileId { inode: follower.inode(), size: 0, ctime_ns: 0 };
        let file = if is_followed { file } else { gone };
        Some(Position {
            version: POSITION_VERSION,
            generation: self.settings.generation,
            txid: self.durable.0,
            etag: self.durable.1.clone(),
            file,
            page_count: follower.page_count(),
            page_size: follower.page_size().get(),
            clean,
        })
    }

    async fn begin_finish(&mut self, budget: Nanos, reply: oneshot::Sender<Finished>) {
        // A disk that was full while the app ran may have room without it.
        self.no_room = 0;
        self.finishing = Some(Finishing { until: self.now().mono + budget, reply });
        if self.follower.is_none() {
            self.try_attach().await;
        }
        self.look().await;
        self.step(UploadInput::Flush).await;
    }

    /// The finish is over: everything is durable, or it cannot be (in time).
    fn take_finished(&mut self) -> Option<Finishing> {
        let until = self.finishing.as_ref()?.until;
        let is_over = (self.uploader.is_settled() && self.in_flight.is_none())
            || self.uploader.has_stood_down()
            || self.no_room >= NO_ROOM_MAX
            || self.now().mono >= until;
        if is_over { self.finishing.take() } else { None }
    }

    pub(super) fn is_settled(&self) -> bool {
        self.uploader.is_settled() && self.in_flight.is_none()
    }

    /// Runs what blocks on the runtime's pool, with the follower.
    pub(super) async fn blocking<T: Send + 'static>(
        &mut self,
        work: impl FnOnce(&mut Follower) -> T + Send + 'static,
    ) -> Option<T> {
        let mut follower = self.follower.take()?;
        let task = tokio::task::spawn_blocking(move || {
            let result = work(&mut follower);
            (follower, result)
        });
        match task.await {
            Ok((follower, result)) => {
                self.follower = Some(follower);
                Some(result)
            }
            Err(error) => {
                self.trouble(error.to_string());
                self.attach = Some((self.now().mono + ATTACH_MIN, ATTACH_MIN));
                None
            }
        }
    }

    pub(super) fn trouble(&mut self, why: String) {
        if self.trouble.as_ref() != Some(&why) {
            self.send(Event::Stalled { reason: why.clone() });
        }
        self.trouble = Some(why);
    }

    pub(super) fn send(&self, event: Event) {
        // Nobody listens: the status still tells.
        drop(self.events.send(event));
    }

    fn publish(&self) {
        let spooled = self.spooled.as_ref().map_or(0, |file| file.size);
        let pending = self.follower.as_ref().map_or(0, Follower::pending_bytes);
        let state = if self.uploader.has_stood_down() {
            State::StoodDown
        } else if let Some(reason) = &self.detached {
            State::Detached { reason: reason.clone() }
        } else {
            State::Following
        };
        let status = Status {
            durable: self.durable.0,
            etag: self.durable.1.clone(),
            behind_since: self.behind_since,
            behind_bytes: spooled.saturating_add(pending),
            asked_since: self.in_flight.as_ref().and(self.asked_since),
            deadline: self.gatherer.deadline(),
            state,
            is_attached: self.follower.is_some(),
            image_needed: self.follower.as_ref().and_then(Follower::image_needed),
            trouble: self.trouble.clone(),
            compaction: self.gatherer.trouble.clone(),
        };
        self.status.send_if_modified(|old| {
            let is_new = *old != status;
            *old = status;
            is_new
        });
    }

    pub(super) fn now(&self) -> Now {
        (self.settings.clock)()
    }
}

/// Takes an acknowledged file out of the spool: to where merges read it, or away.
fn retire(path: &Path, keep: Option<PathBuf>) -> io::Result<Option<PathBuf>> {
    if let Some(kept) = keep
        && kept.parent().is_some_and(|dir| std::fs::create_dir_all(dir).is_ok())
        && std::fs::rename(path, &kept).is_ok()
    {
        return Ok(Some(kept));
    }
    std::fs::remove_file(path).map(|()| None)
}

pub(super) async fn blocking_io<T: Send + 'static>(
    work: impl FnOnce() -> io::Result<T> + Send + 'static,
) -> io::Result<T> {
    match tokio::task::spawn_blocking(work).await {
        Ok(result) => result,
        Err(error) => Err(io::Error::other(error)),
    }
}
