//! Instances: slow, broken, deaf to SIGTERM, or not provably gone for a while.

use dormouse_core::event::{Answer, Event, Ticket};
use dormouse_core::ids::{Generation, Host, Run, Slot};
use dormouse_core::time::Wall;

use crate::clock::{MS, S, Time};
use crate::sabotage::Sabotage;
use crate::world::{BoxIndex, Item, Life, World};

/// Number of an instance, over all boxes.
pub type InstanceId = u64;

/// A process that runs, with all its descendants.
#[derive(Clone, Debug)]
pub struct Instance {
    /// On which box.
    pub b: BoxIndex,
    /// Of which host.
    pub host: Host,
    /// At which slot it was started.
    pub slot: Slot,
    /// Its run.
    pub run: Run,
    /// The generation that its box believed to hold.
    pub generation: Generation,
    /// It listens.
    pub healthy: bool,
    /// It stands still, and SIGTERM waits.
    frozen: bool,
    /// SIGTERM means nothing to it.
    deaf: bool,
    /// SIGKILL shows no effect before.
    stuck_until: Time,
    /// When it was sent SIGKILL.
    killed: Option<Time>,
    /// How long SIGKILL takes at most.
    kill_takes: Time,
    /// Who waits for health.
    starting: Option<(Life, Ticket)>,
    /// Who waits for its end.
    waits: Vec<(Life, Ticket)>,
    /// The activator that is told when it ends by itself.
    watcher: Life,
}

/// Longest wait for health.
const HEALTH_LIMIT: Time = 30 * S;

impl Instance {
    /// A new activator hears of its end from now on, and it is frozen no more.
    pub const fn find_again(&mut self, slot: Slot, life: Life) -> Run {
        self.slot = slot;
        self.watcher = life;
        self.frozen = false;
        self.run
    }
}

impl World {
    /// `Effect::Spawn`.
    pub fn spawn(&mut self, b: BoxIndex, ticket: Ticket, slot: Slot) {
        let Some(host) = self.host_at(b, slot) else { return };
        let Some(activator) = &self.boxes[b].activator else { return };
        let life = activator.life;
        let generation = activator.core.host(slot).and_then(|view| view.generation);
        let run = self.boxes[b].disk.next_run();
        if self.stormy && self.rng.chance(20) {
            let why = Answer::StartFailed("no such executable".into());
            return self.answer_at_once(b, ticket, why);
        }
        let id = self.number();
        let generation = generation.unwrap_or_default();
        let trouble = self.stormy && self.rng.chance(150);
        let stuck = trouble && !self.plan.automatic && self.rng.chance(300);
        let stuck = if stuck { self.rng.between(1, 60) * S } else { 0 };
        // With automatic takeover the margins of both sides (10 s) must cover the time to kill.
        let drags =
            self.plan.automatic && (self.rng.chance(300) || self.breaks(Sabotage::MarginOmitted));
        let kill_takes = if drags { self.rng.between(4000, 8000) * MS } else { 50 * MS };
        let instance = Instance {
            b,
            host: host.clone(),
            slot,
            run,
            generation,
            healthy: false,
            frozen: false,
            deaf: trouble && self.rng.chance(300),
            stuck_until: self.time + stuck,
            killed: None,
            kill_takes,
            starting: Some((life, ticket)),
            waits: Vec::new(),
            watcher: life,
        };
        self.tell(|| format!("box{b} spawns {host} run {run} under generation {generation}"));
        self.instances.insert(id, instance);
        if let Some(hosted) = self.hosted(b, slot) {
            hosted.run = Some(run);
        }
        self.invariant_1_no_start_without_a_lease(id);
        self.invariant_10_the_copy_is_not_older_than_durable(id);
        let most = if trouble && self.rng.chance(300) { 40_000 } else { 400 };
        let health = self.rng.between(5, most) * MS;
        if trouble && self.rng.chance(400) {
            // Before it is healthy, or just after.
            let span = if self.rng.chance(500) { health / 2 } else { health };
            let more = self.rng.between(0, 60) * MS;
            self.after(span + more, Item::Dies(id));
        }
        if health >= HEALTH_LIMIT {
            self.after(HEALTH_LIMIT, Item::Unhealthy(id));
        } else {
            self.after(health, Item::Healthy(id));
        }
        if self.stormy && self.rng.chance(60) {
            let span = self.rng.between(1, 90) * S;
            self.after(span, Item::Dies(id));
        }
        // An app writes by itself too: at its start, and sometimes between requests.
        self.after(health / 3, Item::Commits(id));
        if self.rng.chance(300) {
            let span = self.rng.between(1, 20) * S;
            self.after(span, Item::Commits(id));
        }
    }

    /// It listens.
    pub fn healthy(&mut self, id: InstanceId) {
        let Some(instance) = self.instances.get_mut(&id) else { return };
        instance.healthy = true;
        let (b, run) = (instance.b, instance.run);
        if let Some((life, ticket)) = instance.starting.take() {
            // The news of its death may overtake this.
            let span = self.rng.between(0, 10) * MS;
            let answer = Event::Answer(ticket, Answer::Healthy(run));
            self.after(span, Item::Core(b, life, answer));
        }
    }

    /// A start that came to nothing; the process may still be there.
    pub fn start_failed(&mut self, id: InstanceId, why: &str) {
        let Some(instance) = self.instances.get_mut(&id) else { return };
        let b = instance.b;
        if let Some((life, ticket)) = instance.starting.take() {
            let answer = Event::Answer(ticket, Answer::StartFailed(why.into()));
            self.after(0, Item::Core(b, life, answer));
        }
    }

    /// It is gone, with all its descendants.
    pub fn instance_dies(&mut self, id: InstanceId) {
        self.start_failed(id, "it exited");
        let Some(instance) = self.instances.remove(&id) else { return };
        let Instance { b, host, slot, run, waits, watcher, .. } = instance;
        self.tell(|| format!("box{b}: {host} run {run} is gone"));
        self.requests_cut(b, &host, run);
        let died = self.rng.between(0, 50) * MS;
        self.after(died, Item::Core(b, watcher, Event::Died(slot, run)));
        for (life, ticket) in waits {
            let span = self.rng.between(0, 50) * MS;
            self.after(span, Item::Core(b, life, Event::Answer(ticket, Answer::Empty)));
        }
    }

    /// SIGKILL. A second one makes it no quicker.
    fn sigkill(&mut self, id: InstanceId) {
        let now = self.time;
        let alive = self.instances.get_mut(&id).filter(|instance| instance.killed.is_none());
        let Some(instance) = alive else { return };
        instance.killed = Some(now);
        let stuck = instance.stuck_until.saturating_sub(self.time);
        let most = instance.kill_takes;
        let killed = self.rng.between(MS, most);
        self.after(killed.max(stuck), Item::Dies(id));
    }

    /// SIGKILL to each of them.
    pub fn kill_instances(&mut self, ids: &[InstanceId]) {
        for id in ids {
            self.sigkill(*id);
        }
    }

    /// SIGTERM or SIGKILL, answered when it is gone.
    pub fn end_instance(&mut self, b: BoxIndex, ticket: Ticket, slot: Slot, kill: bool) {
        let Some(host) = self.host_at(b, slot) else { return };
        let run = self.run_at(b, slot);
        let Some(life) = self.boxes[b].activator.as_ref().map(|a| a.life) else { return };
        let id = run.and_then(|run| self.instance(b, &host, run));
        let Some(id) = id else {
            return self.answer_after(MS, b, ticket, Answer::Empty);
        };
        let drain = self.rng.between(20, 15_000) * MS;
        let leaving = self.ledger.leaving.contains(&b);
        let Some(instance) = self.instances.get_mut(&id) else { return };
        let stuck = instance.stuck_until.saturating_sub(self.time);
        let deaf = instance.deaf || instance.frozen;
        let assumed = self.sabotage == Some(Sabotage::ProofAssumed) && !leaving
            || self.sabotage == Some(Sabotage::ReleaseUnproven) && leaving;
        if assumed {
            self.answer_after(MS, b, ticket, Answer::Empty);
        } else if let Some(instance) = self.instances.get_mut(&id) {
            instance.waits.push((life, ticket));
        }
        if kill {
            self.sigkill(id);
        } else if !deaf {
            self.after(drain.max(stuck), Item::Dies(id));
        }
    }

    /// `cgroup.freeze`, either way.
    pub fn freeze(&mut self, b: BoxIndex, ticket: Ticket, slot: Slot, frozen: bool) {
        let host = self.host_at(b, slot);
        let run = self.run_at(b, slot);
        let id = host.zip(run).and_then(|(host, run)| self.instance(b, &host, run));
        let done = match id.and_then(|id| self.instances.get_mut(&id)) {
            None => Err("no instance".into()),
            Some(instance) => {
                instance.frozen = frozen;
                self.ledger.count(if frozen { "freezes" } else { "thaws" });
                Ok(())
            }
        };
        self.answer_at_once(b, ticket, Answer::Frozen(done));
    }

    /// The question at sleep.
    pub fn ask_due(&mut self, b: BoxIndex, ticket: Ticket, slot: Slot) {
        let span = self.rng.between(5, 1000) * MS;
        let wall = self.boxes[b].clock.now(self.time).wall;
        let answer = match (self.ledger.due_in, self.rng.below(10)) {
            (Some(due_in), _) => Ok(Some(Wall(wall.0 + due_in / MS))),
            (None, 0) if self.stormy => Err("no answer".into()),
            (None, 1..=3) if self.stormy => {
                Ok(Some(Wall(wall.0 + self.rng.between(10_000, 90_000))))
            }
            (None, _) => Ok(None),
        };
        let due = answer.as_ref().ok().copied().flatten();
        if let (Some(_), Some(host), Some(due)) = (self.ledger.due_in, self.host_at(b, slot), due) {
            self.ledger.promised.insert((b, host), due);
        }
        let answer = match answer {
            Ok(_) if self.breaks(Sabotage::DueForgotten) => Ok(None),
            other => other,
        };
        self.answer_after(span, b, ticket, Answer::Due(answer));
    }

    /// It commits one write.
    pub fn commit(&mut self, id: InstanceId) {
        let write = self.number();
        let Some(instance) = self.instances.get(&id).filter(|i| !i.frozen) else { return };
        let (b, host, slot, run) = (instance.b, instance.host.clone(), instance.slot, instance.run);
        self.boxes[b].disk.commit(&host, write);
        self.tell(|| format!("box{b}: {host} run {run} commits {write}"));
        self.ledger.committed.entry(host).or_default().insert(write);
        if self.run_at(b, slot) == Some(run) {
            self.committed(b, slot);
        }
    }
}
