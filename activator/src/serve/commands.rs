//! What people and tools ask of the running activator, and what they are told.

use dormouse_core::HostView;
use dormouse_core::effect::TakeoverEnd;
use dormouse_core::event::{Event, HostSeed, Policy};
use dormouse_core::ids::{BoxName, Host, Slot};
use dormouse_core::time::Nanos;
use dormouse_link::config::App;
use dormouse_link::message::RouteLimits;
use dormouse_registry::{Route, canonical_host};
use serde::{Deserialize, Serialize};
use tokio::sync::oneshot;

use super::apart::isolation;
use super::by_hand;
use super::drill::DrillStatus;
use super::driver::{Driver, Hosted};
use super::edge::EdgeRoute;
use super::effects::edge_slot;
use super::outside::{OUTSIDE, is_marked};
use super::owner;
use super::replica::HostReplica;
use super::store::{told, trouble};
use dormouse_replica::clock;
use dormouse_replica::put::Place;

use crate::guard;

/// What the core calls the last sync.
const SAVING: &str = "saving";

/// Names below the store's prefix that are not hosts'.
const RESERVED: [&str; 2] = ["sessions", "probe"];

/// A question with a way back.
#[derive(Debug)]
pub(crate) struct Command {
    pub(crate) ask: Ask,
    pub(crate) reply: oneshot::Sender<Reply>,
}

/// What is asked.
#[derive(Debug)]
pub(crate) enum Ask {
    Status,
    Metrics,
    Cost,
    Host(String),
    Add {
        host: String,
        app: String,
    },
    Remove(String),
    Wake(String),
    Sleep {
        host: String,
        /// Answered once it sleeps.
        wait: bool,
    },
    Wait {
        host: String,
        state: String,
    },
    Takeover(String),
    /// Read the config again.
    Reload,
    Hibernate {
        host: String,
        on: bool,
    },
    /// Of our own drills: which host is next.
    NextDrill(oneshot::Sender<Option<String>>),
}

/// What is told: an HTTP status and a body.
#[derive(Debug)]
pub(crate) struct Reply {
    pub(crate) status: u16,
    pub(crate) body: Body,
}

/// A reply's body.
#[derive(Debug)]
pub(crate) enum Body {
    Json(serde_json::Value),
    Text(String),
}

/// Someone who waits for a host to come to a state.
#[derive(Debug)]
pub(crate) struct Wait {
    pub(crate) slot: Slot,
    pub(crate) goal: Goal,
    pub(crate) reply: oneshot::Sender<Reply>,
}

/// What is waited for.
#[derive(Debug)]
pub(crate) enum Goal {
    /// This state, however long it takes.
    State(String),
    /// Awake; or it has become clear that this wake comes to nothing.
    Awake,
    /// Asleep after this run; or it was, and has been asked for again.
    Asleep { after: Option<u64> },
}

impl Goal {
    fn met(&self, status: &HostStatus) -> Option<Reply> {
        match self {
            Self::State(state) => (status.state == *state).then(|| Reply::json(status)),
            Self::Awake => by_hand::woken(status),
            Self::Asleep { after } => by_hand::rested(status, *after),
        }
    }
}

/// `dormouse status`.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Status {
    /// This box.
    #[serde(rename = "box")]
    pub(crate) name: String,
    /// Its session: a word, and a detail.
    pub(crate) session: String,
    pub(crate) session_detail: String,
    /// The store: where it is, and what is wrong with it.
    pub(crate) store: String,
    /// How instances are held together.
    pub(crate) containment: String,
    /// What keeps them apart.
    #[serde(default)]
    pub(crate) isolation: String,
    /// Who ends them at the deadline when the activator does not.
    #[serde(default)]
    pub(crate) guard: String,
    /// Who counts activity.
    pub(crate) accounting: String,
    /// Proxies that count in this table.
    pub(crate) proxies: Vec<u32>,
    pub(crate) hosts: Vec<HostStatus>,
}

/// One host of `dormouse status`.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct HostStatus {
    pub(crate) host: String,
    pub(crate) app: String,
    pub(crate) state: String,
    pub(crate) slot: u32,
    pub(crate) run: Option<u64>,
    pub(crate) pid: Option<i32>,
    pub(crate) generation: Option<u64>,
    pub(crate) in_flight: u64,
    /// Seconds since the last client activity, while it is awake.
    pub(crate) idle_s: Option<u64>,
    /// Newest TXID that the store has acknowledged.
    pub(crate) durable_txid: Option<u64>,
    /// How far behind the store is, milliseconds.
    pub(crate) lag_ms: Option<u64>,
    /// What the replica is doing.
    pub(crate) replica: Option<String>,
    /// Bytes that were written and are not in the store yet, as far as they are known.
    pub(crate) behind_bytes: Option<u64>,
    /// What it may use, and what of that is not enforced.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) limits: Option<String>,
    /// How its last drill ended.
    pub(crate) drill: Option<DrillStatus>,
    /// Unix milliseconds of the next due time.
    pub(crate) due_ms: Option<u64>,
    /// It sleeps, or its last sync is under way, and its local copy may be ahead of the store.
    pub(crate) unsynced: bool,
    /// TXID of the state before the database was last changed while its host slept: by hand, or by
    /// an older file that was put in its place. Since the activator started.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) changed_after: Option<u64>,
    /// Why its last wake or sleep did not go well.
    pub(crate) problem: Option<String>,
    /// Local copies that were set aside, with generation and TXID in their names: `status HOST` only.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) forks: Vec<String>,
}

impl Reply {
    pub(crate) fn json<T: Serialize>(value: &T) -> Self {
        match serde_json::to_value(value) {
            Ok(value) => Self { status: 200, body: Body::Json(value) },
            Err(error) => Self::failed(error.to_string()),
        }
    }

    fn message(status: u16, message: &str) -> Self {
        Self { status, body: Body::Json(serde_json::json!({ "message": message })) }
    }

    pub(crate) fn done(message: impl AsRef<str>) -> Self {
        Self::message(200, message.as_ref())
    }

    pub(crate) fn failed(message: impl AsRef<str>) -> Self {
        Self::message(500, message.as_ref())
    }

    pub(crate) fn refused(message: impl AsRef<str>) -> Self {
        Self::message(409, message.as_ref())
    }

    pub(crate) fn unknown(host: &str) -> Self {
        let message =
            format!("host {host} is not served here: `dormouse list` shows those that are");
        Self::message(404, &message)
    }

    pub(crate) fn of_takeover(target: &BoxName, end: &TakeoverEnd) -> Self {
        match end {
            TakeoverEnd::Fenced => Self::done(format!(
                "{target} is fenced: its hosts are taken when they are asked for"
            )),
            TakeoverEnd::AlreadyOver => Self::done(format!(
                "{target}'s session was over already: its hosts are taken when they are asked for"
            )),
            TakeoverEnd::Alive => Self::refused(format!(
                "{target} renewed its session while it was watched: it lives, nothing was changed"
            )),
            TakeoverEnd::Unknown => {
                Self::message(404, &format!("no session of a box {target} is in the store"))
            }
            TakeoverEnd::Failed(why) => Self::failed(why),
            TakeoverEnd::Refused(why) => Self::refused(why),
        }
    }
}

impl Driver {
    pub(crate) fn on_command(&mut self, command: Command) {
        let Command { ask, reply } = command;
        let answer = match ask {
            Ask::Status => Reply::json(&self.status()),
            Ask::Metrics => Reply { status: 200, body: Body::Text(self.metrics()) },
            Ask::Cost => Reply::json(&self.parts.store.ledger().read()),
            Ask::Reload => self.reload(),
            Ask::Host(host) => match self.find(&host) {
                Some(slot) => self.host_status(slot).map_or_else(
                    || Reply::unknown(&host),
                    |status| Reply::json(&HostStatus { forks: self.forks(slot), ..status }),
                ),
                None => Reply::unknown(&host),
            },
            Ask::Add { host, app } => match self.add(&host, &app) {
                Ok((slot, done)) => {
                    self.adding.push((slot, reply, done));
                    return self.answer_adds();
                }
                Err(refused) => refused,
            },
            Ask::NextDrill(next) => {
                let names = self.hosts.values().map(|hosted| &hosted.host);
                // The drills may have ended.
                next.send(self.parts.drills.next(names)).ok();
                return;
            }
            Ask::Wake(host) => match self.find(&host) {
                Some(slot) => return self.wake_by_hand(slot, reply),
                None => Reply::unknown(&host),
            },
            Ask::Sleep { host, wait } => match self.find(&host) {
                Some(slot) => return self.sleep_by_hand(slot, wait, reply),
                None => Reply::unknown(&host),
            },
            Ask::Remove(host) => match self.find(&host) {
                Some(slot) => {
                    self.retiring.insert(slot, reply);
                    return self.step(Event::Removed(slot));
                }
                None => Reply::unknown(&host),
            },
            Ask::Hibernate { host, on } => match self.find(&host) {
                Some(slot) if self.handing.contains_key(&slot) => {
                    Reply::refused(format!("{host} is being handed over already"))
                }
                Some(slot) => {
                    self.handing.insert(slot, (on, reply));
                    return self.step(if on { Event::TakeIn(slot) } else { Event::HandOut(slot) });
                }
                None => Reply::unknown(&host),
            },
            Ask::Wait { state, .. }
                if state != OUTSIDE && !HostView::STATES.contains(&state.as_str()) =>
            {
                let states = HostView::STATES.join(", ");
                Reply::message(400, &format!("{state:?} is no state; allowed: {OUTSIDE}, {states}"))
            }
            Ask::Wait { host, state } => match self.find(&host) {
                Some(slot) => {
                    self.waits.push(Wait { slot, goal: Goal::State(state), reply });
                    return self.answer_waits();
                }
                None => Reply::unknown(&host),
            },
            Ask::Takeover(target) => {
                let target = BoxName(target);
                self.takeovers.push((target.clone(), reply));
                return self.step(Event::Takeover(target));
            }
        };
        // Who asked may be gone.
        reply.send(answer).ok();
    }

    /// Before the first event there is nothing to say yet.
    pub(crate) fn on_early_command(&self, command: Command) {
        let answer = match command.ask {
            Ask::Status => Reply::json(&self.status()),
            Ask::Metrics => Reply { status: 200, body: Body::Text(self.metrics()) },
            Ask::Cost => Reply::json(&self.parts.store.ledger().read()),
            Ask::Host(_)
            | Ask::Add { .. }
            | Ask::Remove(_)
            | Ask::Wake(_)
            | Ask::Sleep { .. }
            | Ask::Hibernate { .. }
            | Ask::Wait { .. }
            | Ask::NextDrill(_)
            | Ask::Reload
            | Ask::Takeover(_) => Reply::message(503, "the activator is starting: ask again"),
        };
        command.reply.send(answer).ok();
    }

    fn find(&self, host: &str) -> Option<Slot> {
        let host = canonical_host(host).ok()?;
        self.hosts.iter().find(|(_, hosted)| hosted.host == host).map(|(slot, _)| *slot)
    }

    /// A new host, served once every proxy routes it.
    fn add(&mut self, host: &str, app_name: &str) -> Result<(Slot, Reply), Reply> {
        let host = match canonical_host(host) {
            Ok(host) => host,
            Err(error) => return Err(Reply::message(400, &error.to_string())),
        };
        if RESERVED.contains(&host.as_str()) {
            let message = format!("{host} cannot be a host: the store keeps its own things there");
            return Err(Reply::message(400, &message));
        }
        let Some(app) = self.parts.config.apps.get(app_name).cloned() else {
            let known: Vec<&str> = self.parts.config.apps.keys().map(String::as_str).collect();
            let known =
                if known.is_empty() { "none has a section".into() } else { known.join(", ") };
            let message = format!("no app {app_name:?} in the config; allowed: {known}");
            return Err(Reply::message(400, &message));
        };
        if self.parts.config.routes.iter().any(|route| route.host == host) {
            return Err(Reply::refused(format!("{host} is a plain [[route]] of the config")));
        }
        if let Err(problem) = self.parts.paths.fits(&host) {
            return Err(Reply::message(400, &problem));
        }
        let user = match self.make_room(&host) {
            Ok(user) => user,
            Err(error) => return Err(Reply::failed(error.to_string())),
        };
        let slots = self.parts.edge.slots();
        let edge = &self.parts.edge;
        let held = |slot| edge.holds(dormouse_link::Slot(slot));
        let route = match self.parts.registry.add(&host, app_name, slots, held) {
            Ok(route) => route,
            Err(error) => return Err(Reply::refused(error.to_string())),
        };
        let seed = self.take_in(&route, app, user);
        let slot = seed.slot;
        self.step(Event::Added(seed));
        Ok((slot, Reply::done(format!("{host} is served by app {app_name}"))))
    }

    /// Answers those whose new host every proxy routes.
    pub(crate) fn answer_adds(&mut self) {
        for (slot, reply, done) in std::mem::take(&mut self.adding) {
            if self.parts.edge.is_routed(edge_slot(slot)) {
                // Who asked may be gone.
                reply.send(done).ok();
            } else {
                self.adding.push((slot, reply, done));
            }
        }
    }

    /// A host's directories, and the user that they are of.
    pub(crate) fn make_room(&mut self, host: &str) -> anyhow::Result<Option<u32>> {
        let user = owner::of(host, &self.parts.config.instances, &mut self.parts.registry)?;
        self.parts.paths.make_host(host, user)?;
        Ok(user)
    }

    /// Gives a route its place in driver and edge.
    pub(crate) fn take_in(&mut self, route: &Route, app: App, user: Option<u32>) -> HostSeed {
        let slot = Slot(route.slot);
        self.parts.edge.add_route(edge_slot(slot), self.edge_route(&route.host));
        let policy = self.policy(&app);
        let mut replica = HostReplica::new(
            Place {
                store: self.parts.store.clone(),
                prefix: self.parts.prefix.clone(),
                host: Host(route.host.clone()),
            },
            self.parts.paths.database(&route.host, &app),
            self.parts.paths.state_dir(&route.host),
            &app,
            self.parts.rules.clone(),
            Nanos(self.parts.config.sleep.sync.as_nanos()),
            user,
        );
        replica.keeper = self.parts.fd_store.as_ref().map(|store| store.of(&route.host));
        let hosted = Hosted {
            host: route.host.clone(),
            app_name: route.app.clone(),
            app,
            user,
            instance: None,
            run: None,
            replica,
            outside: is_marked(&self.parts.paths, &route.host),
        };
        self.hosts.insert(slot, hosted);
        HostSeed {
            slot,
            host: route.host.as_str().into(),
            policy,
            due: route.due_ms.map(dormouse_core::time::Wall),
            leftover: None,
            releasing: None,
            unsynced: self.hosts.get(&slot).is_some_and(|hosted| hosted.replica.is_unclean()),
        }
    }

    pub(crate) fn edge_route(&self, host: &str) -> EdgeRoute {
        let limits = &self.parts.config.edge.limits;
        let millis = u32::try_from(limits.wake_wait.as_millis()).unwrap_or(u32::MAX);
        EdgeRoute {
            host: host.to_owned(),
            limits: RouteLimits {
                body_bytes: if limits.body_bytes == 0 { u64::MAX } else { limits.body_bytes },
                waiters: limits.waiters_per_host,
                wake_wait_ms: millis,
            },
        }
    }

    pub(crate) fn policy(&self, app: &App) -> Policy {
        Policy {
            idle: Nanos(self.parts.config.idle_of(app).as_nanos()),
            frozen: app.freeze.map(|span| Nanos(span.as_nanos())),
            asks_due: app.next_due.is_some(),
        }
    }

    /// Answers those whose host has come to the state that they wait for.
    pub(crate) fn answer_waits(&mut self) {
        let waits = std::mem::take(&mut self.waits);
        for wait in waits {
            let met = match self.host_status(wait.slot) {
                None => Some(Reply::message(404, "the host was removed")),
                Some(status) => wait.goal.met(&status),
            };
            match met {
                Some(reply) => {
                    wait.reply.send(reply).ok();
                }
                None if wait.reply.is_closed() => {}
                None => self.waits.push(wait),
            }
        }
    }

    fn status(&self) -> Status {
        let (session, session_detail) = self.core.session(clock::system_now());
        let config = &self.parts.config;
        Status {
            name: config.this_box.name.clone(),
            session: session.to_owned(),
            session_detail,
            store: told(&self.parts.store, &self.parts.records),
            guard: guard::told(self.parts.paths.run(), config.session.takeover).to_owned(),
            containment: self.containment(),
            isolation: isolation(&config.instances),
            accounting: "proxy".to_owned(),
            proxies: self.parts.edge.proxies().filter(|p| p.1).map(|(pid, ..)| pid).collect(),
            hosts: self.hosts.keys().filter_map(|slot| self.host_status(*slot)).collect(),
        }
    }

    /// What was set aside and is still there, by the files themselves.
    fn forks(&self, slot: Slot) -> Vec<String> {
        let Some(hosted) = self.hosted(slot) else { return Vec::new() };
        let database = self.parts.paths.database(&hosted.host, &hosted.app);
        let mut forks = dormouse_replica::inspect::forks(&database);
        forks.sort();
        forks.iter().map(|fork| fork.display().to_string()).collect()
    }

    pub(crate) fn host_status(&self, slot: Slot) -> Option<HostStatus> {
        let view = self.core.host(slot)?;
        let state = self.state_of(&view);
        let HostView { run, generation, due, unsynced, problem, .. } = view;
        let hosted = self.hosted(slot)?;
        let activity = self.parts.edge.activity(edge_slot(slot));
        let idle_ns = clock::system_now().mono.0.saturating_sub(activity.last_ns);
        let store = trouble(&self.parts.store, &self.parts.records);
        let replica = hosted.replica.watched.status(store.as_deref());
        let saving = replica.as_ref().filter(|_| state == SAVING);
        let stalled = saving.filter(|replica| replica.stalled).map(|replica| &replica.state);
        let problem = stalled.map(|why| format!("the last sync: {why}")).or(problem);
        let unsynced = unsynced || saving.is_some_and(|replica| replica.is_behind);
        Some(HostStatus {
            host: hosted.host.clone(),
            app: hosted.app_name.clone(),
            state: state.to_owned(),
            slot: slot.0,
            run: run.map(|run| run.0),
            pid: run.and_then(|_| hosted.instance.as_ref()?.pid()),
            generation: generation.map(|generation| generation.0),
            in_flight: activity.in_flight,
            idle_s: (state == "awake").then_some(idle_ns / dormouse_core::time::SECOND_NS),
            durable_txid: replica.as_ref().map(|replica| replica.durable_txid),
            lag_ms: replica.as_ref().map(|replica| replica.lag_ms),
            behind_bytes: replica.as_ref().map(|replica| replica.behind_bytes),
            replica: replica
                .map(|replica| replica.state)
                .or_else(|| hosted.replica.watched.fault()),
            limits: self.limits(hosted),
            drill: self.parts.drills.of(&hosted.host),
            due_ms: due.map(|due| due.0),
            unsynced,
            changed_after: hosted.replica.watched.changed_after().map(|txid| txid.0),
            problem,
            forks: Vec::new(),
        })
    }
}
