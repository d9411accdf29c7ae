//! The world: simulated time, one queue of what happens next, and all that exists.

use std::collections::BTreeMap;

use dormouse_core::event::Event;
use dormouse_core::ids::{BoxId, BoxName, Host, Run, Slot};
use dormouse_core::upload::UploadInput;

use crate::activator::Activator;
use crate::checks::Ledger;
use crate::clock::{BoxClock, S, Time};
use crate::copies::Task;
use crate::disk::Disk;
use crate::guard::Guard;
use crate::instances::{Instance, InstanceId};
use crate::network::{Call, Told};
use crate::objects::Tags;
use crate::proxies::{Heard, Proxy, ProxyId, Request, RequestId, Said};
use crate::rng::Rng;
use crate::sabotage::Sabotage;
use crate::store::Store;
use crate::story::Story;
use crate::tables::Table;

/// Index of a box.
pub type BoxIndex = usize;
/// Number of one process of an activator; also of the wake table that it makes.
pub type Life = u64;

/// What happens at some moment.
#[derive(Clone, Debug)]
pub enum Item {
    /// A request reaches the store; the answer travels back after the span, if it does.
    Land(Call, Option<Time>),
    /// An answer reaches an activator.
    Told(Call, Told),
    /// An event of an activator's core.
    Core(BoxIndex, Life, Event),
    /// A sweep, unless a later step has asked for another.
    Sweep(BoxIndex, Life, u64),
    /// The rest of a step whose journal entry is durable now.
    Begin(BoxIndex, Life),
    /// A new activator stops waiting for its proxies.
    Boot(BoxIndex, Life),
    /// A crashed box or a killed activator comes back.
    Restart(BoxIndex),
    /// A local step of work on a copy ends.
    Copied(BoxIndex, Life, Slot, Task),
    /// An input of a running replica's uploader.
    Upload(BoxIndex, Life, Slot, u64, UploadInput),
    /// A final sync's budget ends.
    SaveEnds(BoxIndex, Life, Slot, u64),
    /// An instance is healthy.
    Healthy(InstanceId),
    /// An instance is not healthy in time.
    Unhealthy(InstanceId),
    /// An instance ends.
    Dies(InstanceId),
    /// An instance commits.
    Commits(InstanceId),
    /// A proxy connects to an activator.
    Connect(BoxIndex, Life, ProxyId),
    /// A proxy hears its activator.
    Hear(BoxIndex, Life, ProxyId, Heard),
    /// An activator hears a proxy.
    Say(BoxIndex, Life, ProxyId, Said),
    /// A client's request arrives.
    Arrives(RequestId),
    /// A waiter's deadline.
    GivesUp(RequestId),
    /// A request and its answer have ended.
    Finishes(RequestId),
    /// A box's guard looks at the session's deadline.
    Guard(BoxIndex, u64),
    /// Something goes wrong, or somebody does something.
    Chaos,
    /// Something that was planned.
    Planned(BoxIndex, Act),
}

/// What a crash does to the disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fate {
    /// What was fsynced stays.
    Kept,
    /// It is gone.
    Lost,
    /// An earlier state of it is put back, if one was kept.
    PutBack,
    /// Databases on it end too early.
    Damaged,
}

/// Something that is planned for a box.
#[derive(Clone, Copy, Debug)]
pub enum Act {
    /// Power goes; the disk with it, or not.
    Crash {
        /// What becomes of the disk.
        disk: Fate,
        /// How long it stays down.
        down: Time,
    },
    /// `kill -9` of its activator.
    Kill {
        /// How long until the next one.
        down: Time,
    },
    /// Its operator says that another box is gone.
    TakeOver(BoxIndex),
    /// Its operator adds what was removed.
    Add,
    /// Its operator takes a host back from an outside supervisor.
    TakeIn(Slot),
}

/// What of a box is paused, and until when.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pause {
    /// The end.
    pub until: Time,
    /// The instances and proxies too.
    pub whole: bool,
}

/// One box.
#[derive(Debug)]
pub struct SimBox {
    /// Its name.
    pub name: BoxName,
    /// Its random identity.
    pub id: BoxId,
    /// Its clocks.
    pub clock: BoxClock,
    /// Whether it has power.
    pub up: bool,
    /// Paused, as by SIGSTOP.
    pub pause: Option<Pause>,
    /// End of its last pause with all its processes.
    pub stands_still_until: Time,
    /// The store cannot be reached until then.
    pub outage: Time,
    /// Its disk.
    pub disk: Disk,
    /// An earlier state of it, as an operator's backup or a snapshot of the machine has it.
    pub backup: Option<Disk>,
    /// Whether it ever was put back.
    pub put_back: bool,
    /// The running activator.
    pub activator: Option<Activator>,
    /// Activators so far.
    pub lives: Life,
    /// Wake tables by the activator that made them.
    pub tables: BTreeMap<Life, Table>,
    /// What its guard knows of the session; it outlives the activator.
    pub guard: Guard,
    /// Its proxies.
    pub proxies: BTreeMap<ProxyId, Proxy>,
    /// Fenced while it lived: the operator's word was wrong, invariants 1 and 2 are off for it.
    pub overthrown: bool,
}

/// What a world is made with.
#[derive(Clone, Copy, Debug)]
pub struct Plan {
    /// Boxes, 1 to 3.
    pub boxes: usize,
    /// Hosts.
    pub hosts: u64,
    /// Proxies a box.
    pub proxies: u64,
    /// How tags are made.
    pub tags: Tags,
    /// Whether sessions end by time.
    pub automatic: bool,
    /// Whether the store tells how old a record is.
    pub tells_age: bool,
    /// Idle window.
    pub idle: Time,
    /// With a frozen tier: how long before the stop.
    pub frozen: Option<Time>,
    /// Wakes of a box at a time; 0 means no limit.
    pub wakes_max: u32,
    /// Replicas in a thousand that gather for a while before they upload.
    pub batched: u64,
    /// Uploads in a thousand that are followed by a snapshot.
    pub compacts: u64,
    /// Length of the stormy part.
    pub storm: Time,
    /// Faults of the network in a thousand requests.
    pub faults: u64,
    /// Whether operators say wrong things.
    pub wrong_words: bool,
}

impl Plan {
    /// A plan by chance.
    pub fn by_chance(rng: &mut Rng) -> Self {
        Self {
            boxes: rng.index(3) + 1,
            hosts: rng.between(1, 3),
            proxies: rng.between(1, 2),
            tags: if rng.chance(500) { Tags::Random } else { Tags::Content },
            automatic: rng.chance(500),
            tells_age: rng.chance(500),
            idle: rng.between(5, 40) * S,
            frozen: if rng.chance(300) { Some(rng.between(2, 20) * S) } else { None },
            wakes_max: u32::from(rng.chance(500)),
            batched: 300,
            compacts: if rng.chance(500) { rng.between(20, 400) } else { 0 },
            storm: rng.between(120, 500) * S,
            faults: if rng.chance(200) { 0 } else { rng.between(5, 200) },
            wrong_words: rng.chance(300),
        }
    }

    /// Everything well, one of each.
    #[must_use]
    pub const fn quiet(boxes: usize) -> Self {
        Self {
            boxes,
            hosts: 1,
            proxies: 1,
            tags: Tags::Random,
            automatic: false,
            tells_age: true,
            idle: 10 * S,
            frozen: None,
            wakes_max: 0,
            batched: 0,
            compacts: 0,
            storm: 0,
            faults: 0,
            wrong_words: false,
        }
    }
}

/// A violated invariant.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Violation {
    /// Its number; 0 for a panic.
    pub invariant: u8,
    /// The message, which begins with the number.
    pub message: String,
    /// Step of the run.
    pub step: u64,
}

/// The simulated world.
#[derive(Debug)]
pub struct World {
    /// Now.
    pub time: Time,
    /// Steps so far.
    pub step: u64,
    /// The only source of chance.
    pub rng: Rng,
    /// What it was made with.
    pub plan: Plan,
    /// Faults are on.
    pub stormy: bool,
    /// The broken rule.
    pub sabotage: Option<Sabotage>,
    /// The store.
    pub store: Store,
    /// Boxes.
    pub boxes: Vec<SimBox>,
    /// Instances that run, on all boxes.
    pub instances: BTreeMap<InstanceId, Instance>,
    /// Requests of clients.
    pub requests: BTreeMap<RequestId, Request>,
    /// What is true, whatever the boxes believe.
    pub ledger: Ledger,
    /// The first violation.
    pub violation: Option<Violation>,
    /// What happened, for people.
    pub story: Story,
    queue: BTreeMap<(Time, u64), Item>,
    numbers: u64,
}

impl World {
    /// Boxes that are started at the beginning.
    #[must_use]
    pub fn new(plan: Plan, rng: Rng, sabotage: Option<Sabotage>, story: Story) -> Self {
        let mut world = Self {
            time: 0,
            step: 0,
            rng,
            plan,
            stormy: false,
            sabotage,
            store: Store::new(plan.tags, plan.tells_age),
            boxes: Vec::new(),
            instances: BTreeMap::new(),
            requests: BTreeMap::new(),
            ledger: Ledger::default(),
            violation: None,
            story,
            queue: BTreeMap::new(),
            numbers: 0,
        };
        world.store.ignores = (
            sabotage == Some(Sabotage::HostMatchIgnored),
            sabotage == Some(Sabotage::SessionMatchIgnored),
            sabotage == Some(Sabotage::NoneMatchIgnored),
        );
        for index in 0..plan.boxes {
            world.add_box(index);
        }
        world
    }

    fn add_box(&mut self, index: BoxIndex) {
        let drift = self.rng.between(0, 2 * crate::clock::DRIFT_PPM_MAX);
        let id = self.number();
        self.boxes.push(SimBox {
            name: BoxName(format!("box{index}")),
            id: BoxId(format!("id{id}")),
            clock: BoxClock::new(drift),
            up: true,
            pause: None,
            stands_still_until: 0,
            outage: 0,
            disk: Disk::default(),
            backup: None,
            put_back: false,
            activator: None,
            lives: 0,
            tables: BTreeMap::new(),
            guard: Guard::default(),
            proxies: BTreeMap::new(),
            overthrown: false,
        });
        self.add_routes(index);
        for _ in 0..self.plan.proxies {
            self.start_proxy(index);
        }
        self.start_activator(index);
    }

    /// Routes of every host, as an operator would add them to an empty registry.
    pub fn add_routes(&mut self, b: BoxIndex) {
        for number in 0..self.plan.hosts {
            let slot = Slot(u32::try_from(number).unwrap_or(0));
            let route = crate::disk::Route { host: host(number), due: None };
            self.boxes[b].disk.routes.insert(slot, route);
        }
    }

    /// A number that was never given out.
    pub const fn number(&mut self) -> u64 {
        self.numbers += 1;
        self.numbers
    }

    /// Something will happen.
    pub fn after(&mut self, span: Time, item: Item) {
        self.at(self.time + span, item);
    }

    /// Something will happen at this moment.
    pub fn at(&mut self, time: Time, item: Item) {
        let number = self.number();
        self.queue.insert((time.max(self.time), number), item);
    }

    /// What a box has sent and the store has not carried out comes late, by chance.
    pub fn delay_writes(&mut self, b: BoxIndex, latest: Time) {
        for key in self.sent_writes(b) {
            if self.rng.chance(700) {
                let late = self.rng.between(S, latest);
                self.delay(key, late);
            }
        }
    }

    /// All that a box has sent and the store has not carried out comes this late; how many.
    pub fn hold_writes(&mut self, b: BoxIndex, late: Time) -> usize {
        let sent = self.sent_writes(b);
        for key in &sent {
            self.delay(*key, late);
        }
        sent.len()
    }

    /// Whether a file of this box, whose answer will come, is on its way.
    #[must_use]
    pub fn is_sending_file(&self, b: BoxIndex) -> bool {
        let of = |item: &Item| matches!(item, Item::Land(call, Some(_)) if call.b == b && call.ask.is_file());
        self.queue.values().any(of)
    }

    /// Whatever of a box is late lands now.
    pub fn land_late_writes(&mut self, b: BoxIndex) {
        let late = |item: &Item| matches!(item, Item::Land(call, None) if call.b == b);
        let keys: Vec<(Time, u64)> =
            self.queue.iter().filter(|(_, item)| late(item)).map(|(key, _)| *key).collect();
        for key in keys {
            if let Some(item) = self.queue.remove(&key) {
                self.after(0, item);
            }
        }
    }

    fn sent_writes(&self, b: BoxIndex) -> Vec<(Time, u64)> {
        let of =
            |item: &Item| matches!(item, Item::Land(call, _) if call.b == b && call.ask.writes());
        self.queue.iter().filter(|(_, item)| of(item)).map(|(key, _)| *key).collect()
    }

    /// The request lands late, and its answer never comes: its sender sees a time-out.
    fn delay(&mut self, key: (Time, u64), late: Time) {
        if let Some(Item::Land(call, _)) = self.queue.remove(&key) {
            let b = call.b;
            self.tell(|| format!("a write of box{b} will land {} s late", late / S));
            let told = call.ask.unanswered();
            self.after(late, Item::Land(call.clone(), None));
            self.after(crate::network::TIMEOUT, Item::Told(call, told));
        }
    }

    /// The worst moment for a late write: just before another one to the same key.
    pub fn hurry_rivals(&mut self, call: &Call) {
        let of =
            |item: &Item| matches!(item, Item::Land(other, None) if other.ask.is_rival(&call.ask));
        let rivals: Vec<(Time, u64)> =
            self.queue.iter().filter(|(_, item)| of(item)).map(|(key, _)| *key).collect();
        for key in rivals {
            if self.rng.chance(700)
                && let Some(item) = self.queue.remove(&key)
            {
                self.tell(|| "a late write lands now".into());
                self.after(1, item);
            }
        }
    }

    /// Runs until this moment, or until an invariant is violated.
    pub fn run_until(&mut self, end: Time) {
        while self.violation.is_none() {
            let Some(((time, number), item)) = self.queue.pop_first() else { break };
            if time > end {
                self.queue.insert((time, number), item);
                break;
            }
            self.time = time;
            self.step += 1;
            self.happen(item);
            self.check_step();
        }
        self.time = self.time.max(end);
    }

    /// Runs until `done`, at most for a span; whether it came to that.
    pub fn run_while(&mut self, span: Time, done: impl Fn(&Self) -> bool) -> bool {
        let end = self.time + span;
        while self.violation.is_none() && !done(self) {
            let next = self.queue.first_key_value().map(|((time, _), _)| *time);
            match next {
                Some(time) if time <= end => self.run_until(time),
                Some(_) | None => {
                    self.time = end;
                    return done(self);
                }
            }
        }
        done(self)
    }

    /// An invariant does not hold.
    pub fn violate(&mut self, invariant: u8, what: &str) {
        if self.violation.is_none() {
            let message = format!("invariant {invariant}: {what}");
            self.tell(|| message.clone());
            self.violation = Some(Violation { invariant, message, step: self.step });
        }
    }

    /// One line of the story.
    pub fn tell(&mut self, line: impl FnOnce() -> String) {
        if self.story.is_told() {
            self.story.add(self.step, self.time, &line());
        }
    }

    /// Whether this is the broken rule.
    #[must_use]
    pub fn breaks(&self, rule: Sabotage) -> bool {
        self.sabotage == Some(rule)
    }

    /// When a box can go on with this item; none when it can now.
    fn waits(&self, item: &Item) -> Option<Time> {
        let (b, of_activator) = match item {
            Item::Land(..) | Item::Restart(_) | Item::Chaos | Item::Planned(..) => return None,
            Item::Told(call, _) => (call.b, true),
            Item::Core(b, ..)
            | Item::Sweep(b, ..)
            | Item::Begin(b, ..)
            | Item::Boot(b, ..)
            | Item::Copied(b, ..)
            | Item::Upload(b, ..)
            | Item::SaveEnds(b, ..)
            | Item::Say(b, ..) => (*b, true),
            Item::Connect(b, ..) | Item::Hear(b, ..) | Item::Guard(b, _) => (*b, false),
            Item::Healthy(id) | Item::Unhealthy(id) | Item::Dies(id) | Item::Commits(id) => {
                (self.instances.get(id)?.b, false)
            }
            Item::Arrives(id) | Item::GivesUp(id) | Item::Finishes(id) => {
                (self.requests.get(id)?.b, false)
            }
        };
        let pause = self.boxes[b].pause.filter(|pause| pause.whole || of_activator);
        let busy = if of_activator && !matches!(item, Item::Begin(..)) {
            self.boxes[b].activator.as_ref().and_then(|a| a.busy_until)
        } else {
            None
        };
        let until = pause.map(|pause| pause.until).max(busy);
        until.filter(|until| *until > self.time)
    }

    fn happen(&mut self, item: Item) {
        for world in &mut self.boxes {
            // What waited for its end happens first.
            world.pause = world.pause.filter(|pause| pause.until + S > self.time);
        }
        if let Some(until) = self.waits(&item) {
            return self.at(until, item);
        }
        match item {
            Item::Land(call, back) => self.land(call, back),
            Item::Told(call, told) => self.told(call, told),
            Item::Core(b, life, event) if self.lives(b, life) => self.core_event(b, event),
            Item::Sweep(b, life, stamp) if self.lives(b, life) => self.sweep(b, stamp),
            Item::Begin(b, life) if self.lives(b, life) => self.begin_rest(b),
            Item::Boot(b, life) if self.lives(b, life) => self.boot(b),
            Item::Copied(b, life, slot, task) if self.lives(b, life) => {
                self.copied(b, slot, task);
            }
            Item::Upload(b, life, slot, replica, input) if self.lives(b, life) => {
                self.upload(b, slot, replica, input);
            }
            Item::SaveEnds(b, life, slot, replica) if self.lives(b, life) => {
                self.save_ends(b, slot, replica);
            }
            Item::Say(b, life, proxy, said) if self.lives(b, life) => self.said(b, proxy, said),
            Item::Connect(b, life, proxy) if self.lives(b, life) => self.connect(b, life, proxy),
            Item::Hear(b, life, proxy, heard) => self.heard(b, life, proxy, heard),
            Item::Restart(b) => self.restart(b),
            Item::Healthy(id) => self.healthy(id),
            Item::Unhealthy(id) => self.start_failed(id, "not healthy in time"),
            Item::Dies(id) => self.instance_dies(id),
            Item::Commits(id) => self.commit(id),
            Item::Arrives(id) => self.pass(id),
            Item::GivesUp(id) => self.gives_up(id),
            Item::Finishes(id) => self.finishes(id),
            Item::Guard(b, stamp) => self.guard(b, stamp),
            Item::Chaos => self.chaos(),
            Item::Planned(b, act) => self.planned(b, act),
            // Of an activator that is gone.
            Item::Core(..)
            | Item::Sweep(..)
            | Item::Begin(..)
            | Item::Boot(..)
            | Item::Copied(..)
            | Item::Upload(..)
            | Item::SaveEnds(..)
            | Item::Say(..)
            | Item::Connect(..) => {}
        }
    }

    /// Whether this very activator runs.
    #[must_use]
    pub fn lives(&self, b: BoxIndex, life: Life) -> bool {
        self.boxes[b].activator.as_ref().is_some_and(|activator| activator.life == life)
    }

    /// The instance of a run.
    #[must_use]
    pub fn instance(&self, b: BoxIndex, host: &Host, run: Run) -> Option<InstanceId> {
        let is = |i: &Instance| i.b == b && i.host == *host && i.run == run;
        self.instances.iter().find(|(_, instance)| is(instance)).map(|(id, _)| *id)
    }
}

/// The name of a host by its number.
#[must_use]
pub fn host(number: u64) -> Host {
    Host(format!("h{number}.test"))
}
