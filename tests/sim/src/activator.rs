//! An activator: the real core, and a driver that carries its effects out in simulated time.

use std::collections::{BTreeMap, VecDeque};

use dormouse_core::effect::{Effect, Entry, Expect, RecordKey, TakeoverEnd, Word};
use dormouse_core::event::{Answer, Event, HostSeed, Leftover, Policy, Sample, Ticket, Wrote};
use dormouse_core::ids::{BoxName, Host, Run, Slot};
use dormouse_core::record::{HostState, SessionRecord};
use dormouse_core::time::{Deadline, Mono, Nanos};
use dormouse_core::{Core, Identity, Settings, TakeoverMode};
use dormouse_link::RunNumber;

use crate::clock::{MS, S, Time};
use crate::copies::{Hosted, Task};
use crate::network::{Ask, To};
use crate::proxies::Heard;
use crate::sabotage::Sabotage;
use crate::tables::Table;
use crate::world::{Act, BoxIndex, Item, Life, World};

/// One process of the activator.
#[derive(Debug)]
pub struct Activator {
    /// The real one.
    pub core: Core,
    /// Its number, and its table's.
    pub life: Life,
    /// It has had its first event.
    pub booted: bool,
    /// What its effects need, by slot.
    pub hosts: BTreeMap<Slot, Hosted>,
    /// The session's deadline, as last told.
    pub deadline: Option<Deadline>,
    /// In the middle of an fsync: nothing else is looked at.
    pub busy_until: Option<Time>,
    /// Takeovers that ended.
    pub takeovers: Vec<(BoxName, TakeoverEnd)>,
    rest: VecDeque<Effect>,
    at_once: VecDeque<Event>,
    stamp: u64,
}

/// Slots of a table.
const SLOTS: u32 = 64;
/// How long a new activator waits for its proxies.
const PROXIES_PATIENCE: Time = 5 * S;

impl World {
    /// Settings of a box's core: the defaults, with short waits after failures.
    fn settings(&self, b: BoxIndex) -> Settings {
        let identity = Identity {
            name: self.boxes[b].name.clone(),
            id: self.boxes[b].id.clone(),
            boot_id: format!("boot{}", self.boxes[b].lives),
        };
        let defaults = Settings::new(identity);
        let margin = if self.breaks(Sabotage::MarginOmitted) { Nanos(0) } else { defaults.margin };
        Settings {
            margin,
            takeover: if self.plan.automatic {
                TakeoverMode::Automatic
            } else {
                TakeoverMode::Manual
            },
            wake_budget: Nanos::from_secs(60),
            backoff_max: Nanos::from_secs(8),
            wakes_max: self.plan.wakes_max,
            ..defaults
        }
    }

    /// How every host is treated.
    pub(crate) const fn policy(&self) -> Policy {
        let frozen = match self.plan.frozen {
            Some(span) => Some(Nanos(span)),
            None => None,
        };
        Policy { idle: Nanos(self.plan.idle), frozen, asks_due: true }
    }

    /// A new process; it waits for live proxies of an earlier one, then boots.
    pub fn start_activator(&mut self, b: BoxIndex) {
        self.boxes[b].lives += 1;
        let life = self.boxes[b].lives;
        self.tell(|| format!("box{b} starts activator {life}"));
        let core = Core::new(self.settings(b));
        let slots: Vec<Slot> = self.boxes[b].disk.routes.keys().copied().collect();
        self.boxes[b].tables.insert(life, Table::new(&slots));
        self.boxes[b].activator = Some(Activator {
            core,
            life,
            booted: false,
            hosts: BTreeMap::new(),
            deadline: None,
            busy_until: None,
            takeovers: Vec::new(),
            rest: VecDeque::new(),
            at_once: VecDeque::new(),
            stamp: 0,
        });
        let proxies: Vec<u64> = self.boxes[b].proxies.keys().copied().collect();
        for proxy in proxies {
            let wait = self.rng.between(1, 800) * MS;
            self.after(wait, Item::Connect(b, life, proxy));
        }
        self.after(PROXIES_PATIENCE, Item::Boot(b, life));
    }

    /// `kill -9`: instances, proxies and what is on its way to the store live on.
    pub fn kill_activator(&mut self, b: BoxIndex) {
        self.tell(|| format!("box{b}: kill -9 of the activator"));
        self.boxes[b].activator = None;
    }

    /// The first event, unless it was sent already.
    pub fn boot(&mut self, b: BoxIndex) {
        let policy = self.policy();
        let world = &mut self.boxes[b];
        let Some(activator) = world.activator.as_mut().filter(|a| !a.booted) else { return };
        activator.booted = true;
        let (memo, releasing) = world.disk.memory();
        let base = format!("n{}x{}", world.id, activator.life);
        let ignored = self.sabotage == Some(Sabotage::LeftoverIgnored);
        let mut seeds = Vec::new();
        for (slot, route) in &world.disk.routes {
            let mut left = self.instances.values_mut().filter(|_| !ignored);
            let found = left.find(|instance| instance.b == b && instance.host == route.host);
            let leftover = found.map(|instance| {
                let run = instance.find_again(*slot, activator.life);
                let held = world.disk.held.get(&route.host);
                let held = held.filter(|(held, _)| *held == run).map(|(_, held)| held.clone());
                Leftover { run, held }
            });
            let mut hosted = Hosted::new(route.host.clone());
            hosted.run = leftover.as_ref().map(|leftover| leftover.run);
            activator.hosts.insert(*slot, hosted);
            seeds.push(HostSeed {
                slot: *slot,
                host: route.host.clone(),
                policy,
                due: route.due,
                leftover,
                releasing: releasing.get(&route.host).cloned(),
                unsynced: world.disk.is_unclean(&route.host),
            });
        }
        self.core_event(b, Event::Boot { base, memo, hosts: seeds });
    }

    /// One input of a core, and all that follows from it at once.
    pub fn core_event(&mut self, b: BoxIndex, event: Event) {
        let Some(activator) = self.boxes[b].activator.as_mut() else { return };
        if !activator.booted {
            return;
        }
        activator.at_once.push_back(event);
        self.work(b);
    }

    fn work(&mut self, b: BoxIndex) {
        loop {
            let now = self.boxes[b].clock.now(self.time);
            let Some(activator) = self.boxes[b].activator.as_mut() else { return };
            if let Some(effect) = activator.rest.pop_front() {
                if let Effect::Journal(entry) = effect {
                    if self.journal(b, entry) {
                        return; // The rest begins when it is durable.
                    }
                } else {
                    self.carry_out(b, effect);
                }
                continue;
            }
            let Some(event) = activator.at_once.pop_front() else { break };
            let mut effects = Vec::new();
            activator.core.step(now, event.clone(), &mut effects);
            activator.rest.extend(effects.iter().cloned());
            if self.story.is_told() {
                self.tell_step(b, &event, &effects);
            }
        }
        self.schedule_sweep(b);
    }

    fn tell_step(&mut self, b: BoxIndex, event: &Event, effects: &[Effect]) {
        let quiet = matches!(event, Event::Sweep(_)) && effects.is_empty();
        if quiet {
            return;
        }
        let Some(activator) = &self.boxes[b].activator else { return };
        let states: Vec<&str> = activator.core.hosts().map(|host| host.state).collect();
        let brief: Vec<String> = effects.iter().map(brief).collect();
        let line = format!("box{b} {event:?} => {states:?} {}", brief.join("; "));
        self.tell(|| line);
    }

    /// Makes an entry durable; whether the rest of the step has to wait for that.
    fn journal(&mut self, b: BoxIndex, entry: Entry) -> bool {
        if let Entry::Releasing { nonce, .. } = &entry {
            self.ledger.releases.insert(nonce.clone());
        }
        self.boxes[b].disk.journal.push(entry);
        let fsync = self.rng.between(0, 20) * MS;
        let Some(activator) = self.boxes[b].activator.as_mut() else { return true };
        if fsync == 0 {
            return false;
        }
        let life = activator.life;
        activator.busy_until = Some(self.time + fsync);
        self.after(fsync, Item::Begin(b, life));
        true
    }

    /// The journal entry is durable: the effects behind it begin.
    pub fn begin_rest(&mut self, b: BoxIndex) {
        if let Some(activator) = self.boxes[b].activator.as_mut() {
            activator.busy_until = None;
            self.work(b);
        }
    }

    fn schedule_sweep(&mut self, b: BoxIndex) {
        let now = self.boxes[b].clock.now(self.time);
        let world = &mut self.boxes[b];
        let Some(activator) = world.activator.as_mut() else { return };
        activator.stamp += 1;
        let (life, stamp) = (activator.life, activator.stamp);
        if let Some(due) = activator.core.next_due(now) {
            let wait = world.clock.until(self.time, due).max(MS);
            self.after(wait, Item::Sweep(b, life, stamp));
        }
    }

    /// Time has passed.
    pub fn sweep(&mut self, b: BoxIndex, stamp: u64) {
        let Some(activator) = &self.boxes[b].activator else { return };
        if activator.stamp != stamp || !activator.booted {
            return;
        }
        let samples = self.samples(b);
        self.core_event(b, Event::Sweep(samples));
    }

    fn samples(&self, b: BoxIndex) -> Vec<Sample> {
        let Some(activator) = &self.boxes[b].activator else { return Vec::new() };
        let table = self.boxes[b].tables.get(&activator.life);
        let samples = activator.core.awake().map(|slot| {
            let (in_flight, last) = table.map_or((0, 0), |table| table.activity(slot));
            let stalled = activator.hosts.get(&slot).is_some_and(Hosted::is_stalled);
            Sample { slot, in_flight, last_active: Mono(last), stalled }
        });
        samples.collect()
    }

    /// Something waits for memory, more or less.
    pub fn press(&mut self, b: BoxIndex) {
        if self.boxes[b].activator.as_ref().is_some_and(|activator| activator.booted) {
            let permille = if self.rng.chance(500) { 0 } else { 500 };
            let samples = self.samples(b);
            self.core_event(b, Event::Pressure(permille, samples));
        }
    }

    /// An answer, heard before anything else is looked at.
    pub fn answer_at_once(&mut self, b: BoxIndex, ticket: Ticket, answer: Answer) {
        if let Some(activator) = self.boxes[b].activator.as_mut() {
            activator.at_once.push_back(Event::Answer(ticket, answer));
        }
    }

    /// An answer of a task.
    pub fn answer(&mut self, b: BoxIndex, ticket: Ticket, answer: Answer) {
        self.core_event(b, Event::Answer(ticket, answer));
    }

    /// An answer after a span.
    pub fn answer_after(&mut self, span: Time, b: BoxIndex, ticket: Ticket, answer: Answer) {
        if let Some(life) = self.boxes[b].activator.as_ref().map(|a| a.life) {
            self.after(span, Item::Core(b, life, Event::Answer(ticket, answer)));
        }
    }

    fn carry_out(&mut self, b: BoxIndex, effect: Effect) {
        match effect {
            Effect::Journal(_) => {}
            Effect::Get(ticket, key) => self.ask(b, Ask::Get(key), To::Core(ticket)),
            Effect::Put(ticket, key, body, expect) => {
                self.put_record(b, ticket, (key, body, expect));
            }
            Effect::List(ticket, slot) => {
                if let Some(host) = self.host_at(b, slot) {
                    self.ask(b, Ask::List(host), To::Core(ticket));
                }
            }
            Effect::Inspect(ticket, slot) => self.inspect(b, ticket, slot),
            Effect::Restore { ticket, slot, set_aside } => {
                self.task(b, slot, Task::Restore(ticket, set_aside));
            }
            Effect::SetAside(ticket, slot) => self.task(b, slot, Task::Fork(ticket)),
            Effect::PutFence(ticket, slot, txid, nonce) => {
                self.task(b, slot, Task::Fence(ticket, nonce, txid));
            }
            Effect::Apply(ticket, slot, txid) => self.task(b, slot, Task::Apply(ticket, txid)),
            Effect::PutImage(ticket, slot, txid, nonce) => {
                self.task(b, slot, Task::Image(ticket, nonce, txid));
            }
            Effect::Adopt(ticket, slot, generation, tip) => {
                self.task(b, slot, Task::Adopt(ticket, generation, tip));
            }
            Effect::OpenReplica { ticket, slot, generation, base } => {
                self.task(b, slot, Task::Open(ticket, generation, base));
            }
            Effect::Attach(ticket, slot) => self.task(b, slot, Task::Attach(ticket)),
            Effect::Resume(ticket, slot, generation) => {
                self.task(b, slot, Task::Resume(ticket, generation));
            }
            Effect::Hold(slot, run, held) => {
                if let Some(host) = self.host_at(b, slot) {
                    self.boxes[b].disk.held.insert(host, (run, held));
                }
            }
            Effect::Abandon(slot) => self.task(b, slot, Task::Abandon),
            Effect::Save(ticket, slot) => self.save(b, ticket, slot),
            Effect::Spawn(ticket, slot) => self.spawn(b, ticket, slot),
            Effect::Publish(slot, word) => self.publish(b, slot, link_word(word)),
            Effect::TryStop(ticket, slot, run) => {
                let taken = self.try_stop(b, slot, RunNumber(run.0));
                let answer = if taken { Answer::StopTaken } else { Answer::StopBusy };
                self.answer_at_once(b, ticket, answer);
            }
            Effect::Refuse(slot, _) => self.refuse(b, slot),
            Effect::AskDue(ticket, slot) => self.ask_due(b, ticket, slot),
            Effect::RecordDue(slot, due) => self.boxes[b].disk.record_due(slot, due),
            Effect::Terminate(ticket, slot) => self.end_instance(b, ticket, slot, false),
            Effect::Kill(ticket, slot) => self.end_instance(b, ticket, slot, true),
            Effect::Freeze(ticket, slot) => self.freeze(b, ticket, slot, true),
            Effect::Thaw(ticket, slot) => self.freeze(b, ticket, slot, false),
            Effect::Deadline(deadline) => self.set_deadline(b, deadline),
            Effect::Retired(slot) => self.retired(b, slot),
            Effect::Handed(slot, how) => self.handed(b, slot, &how),
            Effect::TakeoverEnded(target, end) => self.takeover_ended(b, target, end),
            Effect::Exit => self.exit(b),
        }
    }

    fn put_record(&mut self, b: BoxIndex, ticket: Ticket, put: (RecordKey, Vec<u8>, Expect)) {
        let (key, mut body, expect) = put;
        let is_host = matches!(key, RecordKey::Host(_));
        if is_host && self.breaks(Sabotage::LeaseAssumed) {
            let wrote = Wrote::Done(dormouse_core::ids::ETag("\"assumed\"".into()));
            return self.answer_at_once(b, ticket, Answer::Wrote(wrote));
        }
        let own = key == RecordKey::Session(self.boxes[b].name.clone());
        if self.stormy && !own && self.breaks(Sabotage::SessionUnfenced) && is_fence(&body) {
            if let RecordKey::Session(name) = key {
                self.ledger.unfenced.insert(name);
            }
            let wrote = Wrote::Done(dormouse_core::ids::ETag("\"unfenced\"".into()));
            return self.answer_at_once(b, ticket, Answer::Wrote(wrote));
        }
        if is_host && self.breaks(Sabotage::GenerationKept) {
            body = crate::checks::with_generation_kept(&body, &self.store, &key);
        }
        self.ask(b, Ask::Put(key, body, expect), To::Core(ticket));
    }

    /// Uploads count until then.
    fn set_deadline(&mut self, b: BoxIndex, deadline: Option<Deadline>) {
        let Some(activator) = self.boxes[b].activator.as_mut() else { return };
        activator.deadline = deadline;
        self.boxes[b].disk.deadline = deadline;
        let Some(activator) = self.boxes[b].activator.as_mut() else { return };
        let guarded = deadline.filter(|_| self.plan.automatic);
        let slots: Vec<(Slot, u64)> =
            activator.hosts.iter().filter_map(|(s, h)| Some((*s, h.replica()?))).collect();
        for (slot, replica) in slots {
            let counted = deadline.filter(|_| !self.breaks(Sabotage::FencesDeleted));
            let input = dormouse_core::upload::UploadInput::DeadlineSet(counted);
            self.upload(b, slot, replica, input);
        }
        if let Some(deadline) = guarded {
            self.guard_until(b, deadline);
        }
    }

    /// The host at a slot, as this activator has it.
    #[must_use]
    pub fn host_at(&self, b: BoxIndex, slot: Slot) -> Option<Host> {
        let activator = self.boxes[b].activator.as_ref()?;
        activator.hosts.get(&slot).map(|hosted| hosted.host.clone())
    }

    /// What the driver has of a host.
    pub fn hosted(&mut self, b: BoxIndex, slot: Slot) -> Option<&mut Hosted> {
        self.boxes[b].activator.as_mut()?.hosts.get_mut(&slot)
    }

    fn retired(&mut self, b: BoxIndex, slot: Slot) {
        let Some(activator) = self.boxes[b].activator.as_mut() else { return };
        activator.hosts.remove(&slot);
        let life = activator.life;
        self.boxes[b].disk.routes.remove(&slot);
        let proxies: Vec<u64> = self.boxes[b].proxies.keys().copied().collect();
        if let Some(table) = self.boxes[b].tables.get_mut(&life) {
            table.leave(slot, &proxies);
        }
        self.tell_proxies(b, &Heard::Unroute(slot));
    }

    /// A host is added at a free slot; false when its name is taken or every slot is held.
    pub fn add_host(&mut self, b: BoxIndex, host: &Host) -> bool {
        let policy = self.policy();
        let world = &mut self.boxes[b];
        let Some(activator) = world.activator.as_mut().filter(|a| a.booted) else { return false };
        if world.disk.routes.values().any(|route| route.host == *host) {
            return false;
        }
        let Some(table) = world.tables.get_mut(&activator.life) else { return false };
        let free = (0..SLOTS)
            .map(Slot)
            .find(|slot| !world.disk.routes.contains_key(slot) && !table.holds(*slot));
        let Some(slot) = free else { return false };
        table.make(slot);
        let route = crate::disk::Route { host: host.clone(), due: None };
        world.disk.routes.insert(slot, route);
        activator.hosts.insert(slot, Hosted::new(host.clone()));
        let host = host.clone();
        let seed = HostSeed {
            slot,
            host: host.clone(),
            policy,
            due: None,
            leftover: None,
            releasing: None,
            unsynced: false,
        };
        self.tell_proxies(b, &Heard::Route(slot, host));
        self.core_event(b, Event::Added(seed));
        true
    }

    /// Its host is outside: the supervisor writes to the file for a while, then it comes back.
    fn handed(&mut self, b: BoxIndex, slot: Slot, how: &Result<(), String>) {
        let Some(host) = self.host_at(b, slot) else { return };
        let record = self.store.hosts.get(&host);
        let is_outside =
            record.is_some_and(|r| r.state == HostState::Outside && r.id == self.boxes[b].id);
        if how.is_err() || !is_outside {
            return;
        }
        self.ledger.count("handed out");
        if self.boxes[b].disk.copies.get(&host).is_some_and(|copy| copy.database.is_some()) {
            let write = self.number();
            self.boxes[b].disk.commit(&host, write);
            self.boxes[b].disk.checkpoint(&host);
            self.ledger.committed.entry(host).or_default().insert(write);
        }
        let span = self.rng.between(2, 60) * S;
        self.after(span, Item::Planned(b, Act::TakeIn(slot)));
    }

    fn takeover_ended(&mut self, b: BoxIndex, target: BoxName, end: TakeoverEnd) {
        if let Some(activator) = self.boxes[b].activator.as_mut() {
            activator.takeovers.push((target, end));
        }
    }

    fn exit(&mut self, b: BoxIndex) {
        self.tell(|| format!("box{b} exits"));
        self.invariant_9_nothing_runs_after_an_exit(b);
        self.boxes[b].activator = None;
        self.ledger.exited.insert(b);
        self.ledger.leaving.remove(&b);
        if !self.ledger.over {
            let span = self.rng.between(1, 20) * S;
            self.after(span, Item::Restart(b));
        }
    }

    /// The run that a host's instance has, as the driver knows it.
    #[must_use]
    pub fn run_at(&self, b: BoxIndex, slot: Slot) -> Option<Run> {
        self.boxes[b].activator.as_ref()?.hosts.get(&slot)?.run
    }
}

/// The same word, as the link has it.
const fn link_word(word: Word) -> dormouse_link::Word {
    match word {
        Word::Asleep => dormouse_link::Word::Asleep,
        Word::Waking => dormouse_link::Word::Waking,
        Word::Awake(run) => dormouse_link::Word::Awake { run: RunNumber(run.0) },
        Word::Stopping(run) => dormouse_link::Word::Stopping { run: RunNumber(run.0) },
    }
}

/// Whether a session record says that its session was fenced.
fn is_fence(body: &[u8]) -> bool {
    SessionRecord::decode(body).is_ok_and(|record| record.fenced_by.is_some())
}

/// An effect without the bytes of records.
fn brief(effect: &Effect) -> String {
    let text = if let Effect::Put(ticket, key, _, expect) = effect {
        format!("Put({ticket:?}, {key:?}, {expect:?})")
    } else {
        format!("{effect:?}")
    };
    text.replace("Ticket { subject: ", "").replace("attempt: Attempt", "")
}
