//! The storm: clients, operators, crashes, pauses, outages and clocks that jump, all by chance.

use dormouse_core::event::{Cause, Event, Policy};
use dormouse_core::ids::{BoxId, Slot};
use dormouse_core::time::Nanos;

use crate::clock::{MS, S, Time};
use crate::disk::Disk;
use crate::instances::InstanceId;
use crate::network::LATEST;
use crate::proxies::ProxyId;
use crate::world::{Act, BoxIndex, Fate, Item, Pause, World, host};

impl World {
    /// The storm begins.
    pub fn begin_storm(&mut self) {
        self.stormy = true;
        self.after(S, Item::Chaos);
    }

    /// One thing happens, and the next one is on its way.
    pub fn chaos(&mut self) {
        if !self.stormy {
            return;
        }
        let b = self.rng.index(self.boxes.len());
        if self.rng.chance(30) {
            self.boxes[b].backup = Some(self.boxes[b].disk.clone());
        }
        let wait = self.rng.between(50, 4000) * MS;
        self.after(wait, Item::Chaos);
        match self.rng.below(100) {
            0..60 => self.clients(b),
            60..64 => self.plan_crash(b),
            64..69 => {
                if self.rng.chance(300) {
                    self.delay_writes(b, 15 * S);
                }
                self.kill_activator(b);
                let down = self.rng.between(100, 20_000) * MS;
                self.after(down, Item::Restart(b));
            }
            69..74 => self.pause_by_chance(b),
            74..77 => self.proxy_trouble(b),
            77..80 => {
                let outage = self.rng.between(2, 90) * S;
                self.tell(|| format!("box{b} loses the store for {} s", outage / S));
                self.boxes[b].outage = self.time + outage;
            }
            80..82 => {
                let shift = self.rng.between(0, 7_200_000);
                self.tell(|| format!("box{b}: the clock is set"));
                self.boxes[b].clock.set_wall(shift);
            }
            82..90 => self.instance_trouble(),
            _ => self.operator(b),
        }
    }

    fn clients(&mut self, b: BoxIndex) {
        let number = self.rng.below(self.plan.hosts);
        for _ in 0..self.rng.between(1, 4) {
            let writes = self.rng.chance(600);
            self.request(b, &host(number), writes);
        }
    }

    /// Writes on their way, then the power goes; and often somebody says that the box is gone.
    fn plan_crash(&mut self, b: BoxIndex) {
        let ids: Vec<InstanceId> =
            self.instances.iter().filter(|(_, i)| i.b == b).map(|(id, _)| *id).collect();
        for id in ids {
            let span = self.rng.between(0, 200) * MS;
            self.after(span, Item::Commits(id));
        }
        let at = self.rng.between(1, 300) * MS;
        self.plan_end(b, at);
    }

    fn plan_end(&mut self, b: BoxIndex, at: Time) {
        let disk = match self.rng.below(100) {
            0..20 => Fate::Lost,
            20..35 => Fate::PutBack,
            35..45 => Fate::Damaged,
            _ => Fate::Kept,
        };
        let mut down = self.rng.between(1, 60) * S;
        let others: Vec<BoxIndex> = (0..self.boxes.len()).filter(|other| *other != b).collect();
        if let Some(by) = self.rng.pick(&others).filter(|_| self.rng.clone().chance(700)) {
            down = self.rng.between(45, 150) * S;
            let said = self.rng.between(500, 8000) * MS;
            self.after(at + said, Item::Planned(by, Act::TakeOver(b)));
        }
        self.after(at, Item::Planned(b, Act::Crash { disk, down }));
    }

    /// The box crashes at once, or its activator alone is killed.
    pub fn plan_death(&mut self, b: BoxIndex) {
        if self.rng.chance(500) {
            return self.plan_end(b, 0);
        }
        let down = self.rng.between(100, 20_000) * MS;
        self.after(0, Item::Planned(b, Act::Kill { down }));
    }

    /// Something that was planned happens.
    pub fn planned(&mut self, b: BoxIndex, act: Act) {
        if !self.stormy {
            return;
        }
        match act {
            Act::Crash { disk, down } => self.crash(b, disk, down),
            Act::Kill { down } => {
                self.kill_activator(b);
                self.after(down, Item::Restart(b));
            }
            Act::Add => self.add_missing(b),
            Act::TakeIn(slot) => self.core_event(b, Event::TakeIn(slot)),
            Act::TakeOver(target) => {
                let name = self.boxes[target].name.clone();
                self.core_event(b, Event::Takeover(name));
            }
        }
    }

    /// Power goes: processes, and of each database what was not fsynced.
    pub fn crash(&mut self, b: BoxIndex, disk: Fate, down: Time) {
        if !self.boxes[b].up {
            return;
        }
        self.tell(|| format!("box{b} crashes"));
        self.ledger.count("crashes");
        self.boxes[b].up = false;
        self.boxes[b].activator = None;
        self.boxes[b].pause = None;
        self.boxes[b].overthrown = false;
        self.boxes[b].guard.rest();
        let proxies: Vec<ProxyId> = self.boxes[b].proxies.keys().copied().collect();
        for proxy in proxies {
            self.kill_proxy(b, proxy);
        }
        self.instances.retain(|_, instance| instance.b != b);
        let lost = self.boxes[b].disk.lose_power(&mut self.rng);
        self.ledger.lost.extend(lost);
        if self.stormy {
            self.delay_writes(b, LATEST);
        }
        match disk {
            Fate::Kept => {}
            Fate::Lost => self.lose_disk(b),
            Fate::PutBack => self.put_back_disk(b),
            Fate::Damaged => self.damage_disk(b),
        }
        self.after(down, Item::Restart(b));
    }

    /// The disk is gone: the box comes back under its name with another identity.
    pub fn lose_disk(&mut self, b: BoxIndex) {
        self.tell(|| format!("box{b} loses its disk"));
        let disk = std::mem::take(&mut self.boxes[b].disk);
        self.write_off(disk);
        self.boxes[b].backup = None;
        let id = self.number();
        self.boxes[b].id = BoxId(format!("id{id}"));
        self.boxes[b].disk = Disk::default();
        self.add_routes(b);
    }

    /// The disk is as it was once: with the identity, and without what it learned since.
    pub fn put_back_disk(&mut self, b: BoxIndex) {
        let Some(backup) = self.boxes[b].backup.clone() else { return };
        self.tell(|| format!("box{b}: an earlier state of its disk is put back"));
        self.ledger.count("disks put back");
        let disk = std::mem::replace(&mut self.boxes[b].disk, backup);
        self.boxes[b].put_back = true;
        self.write_off(disk);
    }

    /// Databases that were replicated once are cut off.
    fn damage_disk(&mut self, b: BoxIndex) {
        self.tell(|| format!("box{b}: its databases are cut off"));
        self.ledger.count("disks damaged");
        let lost = self.boxes[b].disk.cut_off(&mut self.rng);
        self.ledger.lost.extend(lost);
    }

    /// What was only on this disk is not looked for any more.
    fn write_off(&mut self, disk: Disk) {
        for copy in disk.copies.into_values() {
            self.ledger.lost.extend(copy.database.into_iter().flat_map(|d| d.content));
            self.ledger.lost.extend(copy.forks.into_iter().flatten());
        }
    }

    /// A crashed box or a killed activator comes back.
    pub fn restart(&mut self, b: BoxIndex) {
        if !self.boxes[b].up {
            self.tell(|| format!("box{b} boots"));
            self.boxes[b].up = true;
            for _ in 0..self.plan.proxies {
                self.start_proxy(b);
            }
        }
        if self.boxes[b].activator.is_none() {
            self.start_activator(b);
        }
    }

    fn pause_by_chance(&mut self, b: BoxIndex) {
        let span = self.rng.between(1, if self.rng.clone().chance(300) { 150 } else { 20 }) * S;
        let whole = self.rng.chance(700);
        if whole && self.rng.chance(300) {
            self.boxes[b].clock.suspend(span);
        }
        self.pause(b, span, whole);
    }

    /// SIGSTOP for a span; its clients' deadlines stand still with it.
    pub fn pause(&mut self, b: BoxIndex, span: Time, whole: bool) {
        if !self.boxes[b].up || self.boxes[b].pause.is_some_and(|p| p.until > self.time) {
            return;
        }
        self.tell(|| format!("box{b} is paused for {} s (whole: {whole})", span / S));
        let until = self.time + span;
        self.boxes[b].pause = Some(Pause { until, whole });
        if whole {
            self.boxes[b].stands_still_until = until;
        }
    }

    fn proxy_trouble(&mut self, b: BoxIndex) {
        let ids: Vec<ProxyId> = self.boxes[b].proxies.keys().copied().collect();
        if let Some(id) = self.rng.pick(&ids) {
            self.kill_proxy(b, id);
            self.start_proxy(b);
        }
    }

    fn instance_trouble(&mut self) {
        let ids: Vec<InstanceId> = self.instances.keys().copied().collect();
        if let Some(id) = self.rng.pick(&ids) {
            if self.rng.chance(400) {
                self.after(0, Item::Dies(id));
            } else {
                self.after(0, Item::Commits(id));
            }
        }
    }

    fn operator(&mut self, b: BoxIndex) {
        let slots: Vec<Slot> = self.boxes[b].disk.routes.keys().copied().collect();
        let Some(slot) = self.rng.pick(&slots) else { return self.add_missing(b) };
        match self.rng.below(17) {
            15 | 16 => self.press(b),
            12 | 13 => self.core_event(b, Event::HandOut(slot)),
            0..3 => self.core_event(b, Event::Requested(slot, Cause::Operator)),
            3..6 => self.core_event(b, Event::Rest(slot)),
            6 | 7 => {
                self.core_event(b, Event::Removed(slot));
                let span = self.rng.between(1, 30) * S;
                self.after(span, Item::Planned(b, Act::Add));
            }
            8 => self.shut_down(b),
            14 => {
                // Never longer: what must be asleep is judged by the plan.
                let policy = self.policy();
                let idle = Nanos(policy.idle.0 / self.rng.between(1, 3));
                self.core_event(b, Event::Treated(slot, Policy { idle, ..policy }));
            }
            _ => self.take_over(b),
        }
    }

    /// Adds what an operator removed earlier.
    pub fn add_missing(&mut self, b: BoxIndex) {
        for number in 0..self.plan.hosts {
            self.add_host(b, &host(number));
        }
    }

    /// `systemctl stop`: everything to sleep, then the end.
    pub fn shut_down(&mut self, b: BoxIndex) {
        if self.boxes[b].activator.as_ref().is_some_and(|a| a.booted) {
            self.tell(|| format!("box{b} shuts down"));
            self.ledger.leaving.insert(b);
            self.core_event(b, Event::Shutdown);
        }
    }

    fn take_over(&mut self, b: BoxIndex) {
        let others: Vec<BoxIndex> = (0..self.boxes.len())
            .filter(|other| *other != b)
            .filter(|other| !self.boxes[*other].up || self.plan.wrong_words)
            .collect();
        if let Some(target) = self.rng.pick(&others) {
            let name = self.boxes[target].name.clone();
            self.core_event(b, Event::Takeover(name));
        }
    }
}
