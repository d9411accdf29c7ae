//! The loop: inputs in, events to the core, effects out.

use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use dormouse_core::effect::{Entry, Expect, RecordKey, TakeoverEnd};
use dormouse_core::event::{Answer, Cause, Event, Sample, StoreProblem, Ticket, Wrote};
use dormouse_core::ids::{BoxName, Run, Slot};
use dormouse_core::time::{Boot, Deadline, Mono, Wall};
use dormouse_core::{Core, Settings};
use dormouse_instances::{Instance, Nursery};
use dormouse_link::config::{App, Config};
use dormouse_link::message::ToActivator;
use dormouse_registry::Registry;
use dormouse_replica::watch::Watcher;
use dormouse_store::AnyStore;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::sleep;

use super::commands::{Command, Reply, Wait};
use super::drill::Drills;
use super::edge::Edge;
use super::fdstore::FdStore;
use super::history::History;
use super::journal::Journal;
use super::link::LinkEvent;
use super::notify::{self, Told};
use super::paths::Paths;
use super::records::Records;
use super::refusals::Refusals;
use super::replica::HostReplica;
use super::rules::Rules;
use dormouse_replica::clock;

/// What reaches the loop.
#[derive(Debug)]
pub(crate) enum Input {
    /// Of the core, from a task.
    Event(Event),
    /// From a proxy.
    Link(LinkEvent),
    /// From the admin socket.
    Command(Command),
    /// A signal: put every host to sleep and end.
    Shutdown,
    /// Thousandths of the time in which something waits for memory.
    Pressure(u32),
    /// A signal: end, and leave what serves to the next activator.
    Leave,
    /// A signal: read the config again.
    Reload,
    /// A look at whether the loop lives.
    Watchdog,
}

/// What the driver is made of.
pub(crate) struct Parts {
    pub(crate) config: Arc<Config>,
    /// Where it was read.
    pub(crate) config_path: PathBuf,
    pub(crate) settings: Settings,
    pub(crate) paths: Paths,
    pub(crate) store: AnyStore,
    pub(crate) prefix: String,
    pub(crate) records: Records,
    pub(crate) registry: Registry,
    pub(crate) journal: Journal,
    pub(crate) history: History,
    pub(crate) nursery: Nursery,
    pub(crate) edge: Edge,
    pub(crate) watcher: Watcher,
    pub(crate) rules: Rules,
    /// Where locks outlive this process.
    pub(crate) fd_store: Option<Arc<FdStore>>,
    pub(crate) drills: Drills,
    pub(crate) inputs: mpsc::UnboundedSender<Input>,
}

/// A host as the driver has it: what its effects need.
#[derive(Debug)]
pub(crate) struct Hosted {
    pub(crate) host: String,
    pub(crate) app_name: String,
    pub(crate) app: App,
    /// Who its instances run as; absent: as we do.
    pub(crate) user: Option<u32>,
    pub(crate) instance: Option<Instance>,
    /// Run of the instance.
    pub(crate) run: Option<Run>,
    pub(crate) replica: HostReplica,
    /// Its record was last seen to say that an outside supervisor runs it.
    pub(crate) outside: bool,
}

/// Where the loop is headed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Course {
    /// It goes on; a shutdown may be under way.
    Goes,
    /// It was asked to put every host to sleep before there was anything to put to sleep.
    StopsAtOnce,
    /// Every host sleeps.
    Ended,
    /// What serves is left to the next activator, as a crash would leave it.
    Leaves,
}

/// The activator's loop.
pub(crate) struct Driver {
    pub(crate) core: Core,
    pub(crate) parts: Parts,
    pub(crate) hosts: BTreeMap<Slot, Hosted>,
    pub(crate) runs: Range<u64>,
    /// Until when uploads count.
    pub(crate) deadline: watch::Sender<Deadline>,
    pub(crate) waits: Vec<Wait>,
    pub(crate) adding: Vec<(Slot, oneshot::Sender<Reply>, Reply)>,
    pub(crate) retiring: BTreeMap<Slot, oneshot::Sender<Reply>>,
    /// Handovers that are under way: whether it comes back, and who asked.
    pub(crate) handing: BTreeMap<Slot, (bool, oneshot::Sender<Reply>)>,
    pub(crate) takeovers: Vec<(BoxName, oneshot::Sender<Reply>)>,
    pub(crate) refusals: Refusals,
    pub(crate) course: Course,
    pub(crate) told: Told,
    received: mpsc::UnboundedReceiver<Input>,
    /// Events that effects led to at once.
    at_once: VecDeque<Event>,
    /// Set while the rest of a step must not write to the store: the journal failed.
    journal_down: Option<String>,
}

/// No session: nothing may be uploaded.
pub(crate) const OVER: Deadline = Deadline { mono: Mono(0), boot: Boot(0), wall: Wall(0) };

/// Run numbers that are reserved at a time.
const RUNS_AT_A_TIME: u32 = 256;
/// How long a shutdown may take; what is not done by then is found at the next start.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(90);

impl Driver {
    pub(crate) fn new(
        mut parts: Parts,
        received: mpsc::UnboundedReceiver<Input>,
    ) -> anyhow::Result<Self> {
        let runs = parts.registry.reserve_runs(RUNS_AT_A_TIME)?;
        Ok(Self {
            core: Core::new(parts.settings.clone()),
            parts,
            hosts: BTreeMap::new(),
            runs,
            deadline: watch::Sender::new(OVER),
            waits: Vec::new(),
            adding: Vec::new(),
            retiring: BTreeMap::new(),
            handing: BTreeMap::new(),
            takeovers: Vec::new(),
            refusals: Refusals::default(),
            course: Course::Goes,
            told: Told::new(),
            received,
            at_once: VecDeque::new(),
            journal_down: None,
        })
    }

    /// Lets proxies of an earlier activator come to the new table before anything is stopped.
    pub(crate) async fn await_proxies(&mut self, limit: Duration) -> Vec<LinkEvent> {
        let mut early = Vec::new();
        let end = clock::system_now().mono.0.saturating_add(nanos(limit));
        loop {
            self.parts.edge.bury();
            let left = end.saturating_sub(clock::system_now().mono.0);
            if self.parts.edge.is_settled() || left == 0 {
                break;
            }
            let pause = Duration::from_nanos(left.min(nanos(Duration::from_millis(100))));
            tokio::select! {
                input = self.received.recv() => match input {
                    // What is asked for before the first event is asked for behind it.
                    Some(Input::Link(LinkEvent::Said { connection, message }))
                        if is_wish(&message) =>
                    {
                        early.push(LinkEvent::Said { connection, message });
                    }
                    Some(Input::Link(event)) => self.on_link(event),
                    Some(Input::Command(command)) => self.on_early_command(command),
                    Some(Input::Shutdown) => self.course = Course::StopsAtOnce,
                    Some(Input::Leave) => {
                        self.course = Course::Leaves;
                        break;
                    }
                    Some(
                        Input::Event(_) | Input::Watchdog | Input::Pressure(_) | Input::Reload,
                    ) | None => {}
                },
                () = sleep(pause) => {}
            }
        }
        if !self.parts.edge.is_settled() {
            tracing::warn!("a live proxy did not move to the new table in time");
        }
        early
    }

    /// Runs until everything is asleep after a shutdown.
    pub(crate) async fn run(&mut self) {
        let mut shutdown_ends: Option<Mono> = None;
        // Asked for while it started: with nothing awake, the core ends it in this very step.
        if self.course == Course::StopsAtOnce {
            self.course = Course::Goes;
            shutdown_ends = Some(self.begin_shutdown());
        }
        while self.course == Course::Goes {
            let now = clock::system_now();
            if shutdown_ends.is_some_and(|end| end <= now.mono) {
                tracing::warn!("shutdown took too long; the next start finds what is left");
                return;
            }
            let due = self.core.next_due(now).map_or(u64::MAX, |due| due.0);
            let wake = due.min(shutdown_ends.map_or(u64::MAX, |end| end.0));
            if self.received.is_empty() {
                self.flush();
            }
            let pause = Duration::from_nanos(wake.saturating_sub(now.mono.0));
            tokio::select! {
                input = self.received.recv() => match input {
                    // A second one changes nothing: the time runs.
                    Some(Input::Shutdown) if shutdown_ends.is_some() => {}
                    Some(Input::Shutdown) => shutdown_ends = Some(self.begin_shutdown()),
                    Some(Input::Leave) => return self.leave(),
                    Some(input) => self.on_input(input),
                    None => return,
                },
                () = sleep(pause) => self.sweep(),
            }
        }
    }

    fn begin_shutdown(&mut self) -> Mono {
        tracing::info!("putting every host to sleep");
        notify::stopping();
        self.step(Event::Shutdown);
        Mono(clock::system_now().mono.0.saturating_add(nanos(SHUTDOWN_TIMEOUT)))
    }

    /// Nothing is put to sleep, and nothing waited for: a host in the middle of a wake or a sleep
    /// is brought to an end by the next activator, which knows it from a crash.
    fn leave(&mut self) {
        let awake = self.core.awake().count();
        tracing::info!(awake, "leaving what runs to the next activator");
        self.course = Course::Leaves;
        self.flush();
    }

    pub(crate) fn is_leaving(&self) -> bool {
        self.course == Course::Leaves
    }

    fn flush(&mut self) {
        if let Err(error) = self.parts.history.flush() {
            tracing::warn!(%error, "the event log cannot be written");
        }
    }

    fn on_input(&mut self, input: Input) {
        match input {
            Input::Event(event) => self.step(event),
            Input::Link(event) => self.on_link(event),
            Input::Command(command) => self.on_command(command),
            // The loop itself hears these.
            Input::Shutdown | Input::Leave => {}
            Input::Reload => drop(self.reload()),
            Input::Watchdog => self.feed_watchdog(),
            Input::Pressure(permille) => self.press(permille),
        }
    }

    fn sweep(&mut self) {
        self.parts.edge.bury();
        let samples = self.samples();
        self.step(Event::Sweep(samples));
    }

    pub(crate) fn samples(&self) -> Vec<Sample> {
        self.core.awake().map(|slot| self.sample(slot)).collect()
    }

    fn sample(&self, slot: Slot) -> Sample {
        let activity = self.parts.edge.activity(dormouse_link::Slot(slot.0));
        Sample {
            slot,
            in_flight: activity.in_flight,
            last_active: Mono(activity.last_ns),
            stalled: self.hosted(slot).is_some_and(|hosted| {
                let watched = &hosted.replica.watched;
                // Frozen, it may hold a lock of its database: everything is in the store before.
                watched.is_stalled() || hosted.app.freeze.is_some() && watched.is_behind()
            }),
        }
    }

    pub(crate) fn on_link(&mut self, event: LinkEvent) {
        match event {
            LinkEvent::Connected { connection, hello, sender } => {
                if let Err(error) = self.parts.edge.connect(connection, hello.process, sender) {
                    tracing::error!(%error, "a proxy got no area");
                }
            }
            LinkEvent::Gone { connection } => {
                self.parts.edge.disconnect(connection);
                self.answer_adds();
            }
            LinkEvent::Said { connection, message } => match message {
                ToActivator::TableAck { table } => {
                    self.parts.edge.acknowledge(connection, table);
                }
                ToActivator::UnrouteAck { slot } => self.parts.edge.unrouted(connection, slot),
                ToActivator::RouteAck { slot } => {
                    self.parts.edge.routed(connection, slot);
                    self.answer_adds();
                }
                ToActivator::Stats(stats) => self.parts.edge.stats(connection, stats),
                ToActivator::Wake { slot } => {
                    self.step(Event::Requested(Slot(slot.0), Cause::Client));
                }
                ToActivator::InstanceGone { slot, run } => {
                    self.step(Event::Died(Slot(slot.0), Run(run.0)));
                }
            },
        }
    }

    /// One input of the core, and all that follows from it at once.
    pub(crate) fn step(&mut self, event: Event) {
        self.at_once.push_back(event);
        while let Some(event) = self.at_once.pop_front() {
            let now = clock::system_now();
            if let Err(error) = self.parts.history.note(now, &event) {
                tracing::warn!(%error, "the event log cannot be written");
            }
            let mut effects = Vec::new();
            self.core.step(now, event, &mut effects);
            for effect in effects {
                self.carry_out(effect);
            }
            self.journal_down = None;
        }
        self.answer_waits();
        self.status_may_have_changed();
    }

    /// The core hears of it before anything else is looked at.
    pub(crate) fn answer_at_once(&mut self, ticket: Ticket, answer: Answer) {
        self.at_once.push_back(Event::Answer(ticket, answer));
    }

    /// Runs a task whose outcome is the answer.
    pub(crate) fn answer_later(
        &self,
        ticket: Ticket,
        work: impl Future<Output = Answer> + Send + 'static,
    ) {
        let inputs = self.parts.inputs.clone();
        tokio::spawn(async move {
            let answer = work.await;
            // A driver that is gone needs no answer.
            inputs.send(Input::Event(Event::Answer(ticket, answer))).ok();
        });
    }

    /// The next run number; a block is reserved when the last one is used up.
    pub(crate) fn next_run(&mut self) -> Result<Run, String> {
        if let Some(run) = self.runs.next() {
            return Ok(Run(run));
        }
        self.runs =
            self.parts.registry.reserve_runs(RUNS_AT_A_TIME).map_err(|error| error.to_string())?;
        self.runs.next().map(Run).ok_or_else(|| "no run numbers are left".to_owned())
    }

    /// Durable when it returns; what of this step comes behind it fails if it is not.
    pub(crate) fn journal(&mut self, entry: &Entry) {
        if let Err(error) = self.parts.journal.append(entry) {
            tracing::error!(%error, "the journal cannot be written");
            self.journal_down = Some(error.to_string());
        }
    }

    pub(crate) fn put_record(
        &mut self,
        ticket: Ticket,
        key: RecordKey,
        body: Vec<u8>,
        expect: Expect,
    ) {
        if let Some(why) = self.journal_down.clone() {
            let wrote = Wrote::Failed(StoreProblem::Broken(why));
            return self.answer_at_once(ticket, Answer::Wrote(wrote));
        }
        let records = self.parts.records.clone();
        let put = async move { Answer::Wrote(records.put(&key, body, expect).await) };
        self.answer_later(ticket, put);
    }

    pub(crate) fn end_takeover(&mut self, target: &BoxName, end: &TakeoverEnd) {
        tracing::info!(%target, ?end, "takeover ended");
        let (done, going): (Vec<_>, Vec<_>) =
            self.takeovers.drain(..).partition(|(name, _)| name == target);
        self.takeovers = going;
        for (_, waiting) in done {
            // Who asked may be gone.
            waiting.send(Reply::of_takeover(target, end)).ok();
        }
    }
}

/// Whether it is the core's to hear.
const fn is_wish(message: &ToActivator) -> bool {
    match message {
        ToActivator::Wake { .. } | ToActivator::InstanceGone { .. } => true,
        ToActivator::TableAck { .. }
        | ToActivator::RouteAck { .. }
        | ToActivator::UnrouteAck { .. }
        | ToActivator::Stats(_) => false,
    }
}

fn nanos(span: Duration) -> u64 {
    u64::try_from(span.as_nanos()).unwrap_or(u64::MAX)
}
