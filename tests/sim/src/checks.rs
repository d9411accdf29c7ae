//! What is true, whatever the boxes believe; and a checker for each invariant of the design.
//!
//! Invariant 6 (sidecars) is pending: there are none yet. Under a wrong word of an operator 1 and 2
//! are off for the box that was overthrown while it lived; the data fence must keep 3 and 10.

use std::collections::{BTreeMap, BTreeSet};

use dormouse_core::effect::{Entry, RecordKey};
use dormouse_core::ids::{BoxName, Generation, Host, Nonce, Run, Slot, Txid};
use dormouse_core::record::{HostRecord, HostState, SessionRecord};
use dormouse_core::time::Wall;

use crate::clock::{MS, S, Time};
use crate::instances::InstanceId;
use crate::store::{Store, Write};
use crate::world::{BoxIndex, World};

/// What is true.
#[derive(Clone, Debug, Default)]
pub struct Ledger {
    /// Writes that were reported durable.
    pub durable: BTreeMap<Host, BTreeSet<Write>>,
    /// Writes that an app committed.
    pub committed: BTreeMap<Host, BTreeSet<Write>>,
    /// Writes that went with a disk, or with the power before an fsync.
    pub lost: BTreeSet<Write>,
    /// Boxes that were told to put everything to sleep and go.
    pub leaving: BTreeSet<BoxIndex>,
    /// Sabotage: boxes that are said to be fenced, and are not.
    pub unfenced: BTreeSet<BoxName>,
    /// Nonces of releases, as they were journalled.
    pub releases: BTreeSet<Nonce>,
    /// How often what happened.
    pub counts: BTreeMap<&'static str, u64>,
    /// The end: who exits stays away.
    pub over: bool,
    /// In calm: every app asks to be woken this much later.
    pub due_in: Option<Time>,
    /// Boxes whose activator has ended properly.
    pub exited: BTreeSet<BoxIndex>,
    /// Hosts that are said to be awake and have no instance, and since when.
    pub hollow: BTreeMap<(BoxIndex, Slot), (Run, Time)>,
    /// When it was promised to be woken.
    pub promised: BTreeMap<(BoxIndex, Host), Wall>,
}

impl Ledger {
    /// Something happened.
    pub fn count(&mut self, what: &'static str) {
        *self.counts.entry(what).or_default() += 1;
    }
}

/// The longest kill.
const KILLED_WITHIN: Time = 8500 * MS;
/// A waiter's answer travels a little.
const SLACK: Time = S;
/// How long a death may go unnoticed; a box that stands still for a while notices later.
const NOTICED_WITHIN: Time = 4 * S;

/// Sabotage: a lease with the generation that the record has.
#[must_use]
pub fn with_generation_kept(body: &[u8], store: &Store, key: &RecordKey) -> Vec<u8> {
    let RecordKey::Host(host) = key else { return body.to_vec() };
    match (HostRecord::decode(body), store.hosts.get(host)) {
        (Ok(record), Some(before)) => {
            HostRecord { generation: before.generation, ..record }.encode()
        }
        (Ok(_) | Err(_), _) => body.to_vec(),
    }
}

impl World {
    /// After every step.
    pub fn check_step(&mut self) {
        self.invariant_1_no_instance_without_a_lease();
        self.invariant_2_one_generation_runs();
        self.invariant_9_at_rest_nothing_runs();
        if self.step.is_multiple_of(8) {
            self.invariant_5_every_waiter_is_answered();
            self.invariant_7_what_is_awake_serves();
        }
    }

    /// Whether invariants 1 and 2 are off for a box: it was overthrown by a wrong word, or it stands
    /// still with all its processes, or has just gone on and is killing what it finds.
    fn is_excused(&self, b: BoxIndex) -> bool {
        let goes_on = self.boxes[b].stands_still_until;
        self.boxes[b].overthrown || goes_on > 0 && self.time < goes_on + KILLED_WITHIN
    }

    fn holds(&self, id: InstanceId) -> bool {
        let Some(instance) = self.instances.get(&id) else { return true };
        let owner = &self.boxes[instance.b];
        self.store.hosts.get(&instance.host).is_some_and(|record| {
            record.state == HostState::Owned
                && record.id == owner.id
                && record.generation == instance.generation
        })
    }

    /// A start under a lease that the store does not know.
    pub fn invariant_1_no_start_without_a_lease(&mut self, id: InstanceId) {
        let Some(instance) = self.instances.get(&id) else { return };
        if !self.boxes[instance.b].overthrown && !self.holds(id) {
            let what = format!(
                "box{} started {} under generation {}, which it does not hold: {:?}",
                instance.b,
                instance.host,
                instance.generation,
                self.store.hosts.get(&instance.host)
            );
            self.violate(1, &what);
        }
    }

    fn invariant_1_no_instance_without_a_lease(&mut self) {
        let bare = self
            .instances
            .iter()
            .find(|(id, instance)| !self.is_excused(instance.b) && !self.holds(**id));
        if let Some((_, instance)) = bare {
            let what = format!(
                "{} runs on box{} under generation {}, which the box does not hold: {:?}",
                instance.host,
                instance.b,
                instance.generation,
                self.store.hosts.get(&instance.host)
            );
            self.violate(1, &what);
        }
    }

    fn invariant_2_one_generation_runs(&mut self) {
        let mut seen: BTreeMap<&Host, (BoxIndex, Run)> = BTreeMap::new();
        let mut twice = None;
        for instance in self.instances.values() {
            if self.is_excused(instance.b) {
                continue;
            }
            let other = seen.insert(&instance.host, (instance.b, instance.run));
            if let Some((b, run)) = other {
                twice = Some(format!(
                    "{} runs twice: run {run} on box{b} and run {} on box{}",
                    instance.host, instance.run, instance.b
                ));
            }
        }
        if let Some(what) = twice {
            self.violate(2, &what);
        }
    }

    /// A host record was written: generations only rise, and every acquisition raises them.
    pub fn host_record_landed(&mut self, b: BoxIndex, host: &Host, before: Option<&HostRecord>) {
        let Some(record) = self.store.hosts.get(host).cloned() else { return };
        self.invariant_2_generations_rise(host, &record, before);
        if record.state == HostState::Released {
            self.invariant_4_released_only_when_gone_and_synced(b, host, &record);
        }
    }

    fn invariant_2_generations_rise(
        &mut self,
        host: &Host,
        record: &HostRecord,
        before: Option<&HostRecord>,
    ) {
        let old = before.map_or(Generation(0), |before| before.generation);
        // A release keeps the number, and so does what is written over a predecessor's release so
        // that it cannot land; whoever acquires raises it.
        let releases =
            record.state == HostState::Released || self.ledger.releases.contains(&record.nonce);
        let kept = releases && record.generation == old;
        if !kept && record.generation <= old {
            let what =
                format!("{host} was taken with generation {}, after {old}", record.generation);
            self.violate(2, &what);
        }
    }

    /// A session record was written: epochs only rise, and what was over does not go on.
    pub fn session_landed(&mut self, b: BoxIndex, name: &str, before: Option<&SessionRecord>) {
        let Some(record) = self.store.sessions.get(name).cloned() else { return };
        let owner = self.boxes.iter().position(|other| other.name.0 == name);
        if let Some(before) = before {
            let over = before.ended || before.fenced_by.is_some();
            let goes_on = !record.ended && record.fenced_by.is_none();
            let renewed = record.epoch == before.epoch && goes_on;
            if record.epoch < before.epoch || renewed && (over || record.id != before.id) {
                let what = format!("box{b} wrote epoch {} of {name} over {before:?}", record.epoch);
                self.violate(2, &what);
            }
        }
        let Some(owner) = owner else { return };
        if record.fenced_by.is_some() {
            self.ledger.count("takeovers");
        }
        if record.fenced_by.is_some() && record.id == self.boxes[owner].id {
            let runs = self.instances.values().any(|instance| instance.b == owner);
            // With automatic takeover its deadline has passed: nothing of it may run.
            if !self.plan.automatic
                && self.boxes[owner].up
                && (runs || self.boxes[owner].activator.is_some())
            {
                self.tell(|| format!("box{owner} was fenced while it lives"));
                self.boxes[owner].overthrown = true;
                self.ledger.count("overthrown");
            }
        } else if before.is_none_or(|before| record.epoch > before.epoch) {
            self.invariant_2_no_epoch_over_running_instances(owner, &record);
        }
    }

    fn invariant_2_no_epoch_over_running_instances(
        &mut self,
        owner: BoxIndex,
        record: &SessionRecord,
    ) {
        let left = self.instances.values().find(|instance| instance.b == owner);
        if let Some(left) = left {
            let what = format!(
                "box{owner} began epoch {} while run {} of {} goes on",
                record.epoch, left.run, left.host
            );
            return self.violate(2, &what);
        }
        self.boxes[owner].overthrown = false;
    }

    /// Called whenever a file lands, or something is reported durable.
    pub fn invariant_3_durable_data_is_in_every_restore(&mut self, host: &Host) {
        let restored = match self.store.restore(host) {
            Ok(restored) => restored,
            Err(why) => return self.violate(3, &format!("nothing can be restored: {why}")),
        };
        if let Some(merged) = restored.as_ref().and_then(|restored| restored.merged) {
            let what = format!("{host}: file {merged} is built on another history");
            return self.violate(3, &what);
        }
        let content: BTreeSet<Write> =
            restored.map(|restored| restored.content.into_iter().collect()).unwrap_or_default();
        let durable = self.ledger.durable.get(host);
        let missing = durable.and_then(|durable| durable.difference(&content).next().copied());
        if let Some(missing) = missing {
            let what = format!("{host}: write {missing} was reported durable and is not restored");
            self.violate(3, &what);
        }
    }

    fn invariant_4_released_only_when_gone_and_synced(
        &mut self,
        b: BoxIndex,
        host: &Host,
        record: &HostRecord,
    ) {
        let running = self.instances.values().find(|i| i.b == b && i.host == *host);
        if let Some(instance) = running.filter(|_| !self.boxes[b].overthrown) {
            let what = format!("box{b} released {host} while run {} goes on", instance.run);
            return self.violate(4, &what);
        }
        if record.id != self.boxes[b].id {
            return;
        }
        let tip = self.store.list(host).map_or(Txid(0), |tip| tip.txid);
        if tip != record.txid {
            let what = format!("{host} was released at {}, the store has {tip}", record.txid);
            return self.violate(4, &what);
        }
        let is_sent = |entry: &Entry| matches!(entry, Entry::Releasing { nonce, .. } if *nonce == record.nonce);
        if !self.boxes[b].disk.journal.iter().any(is_sent) {
            return; // Sent by a process whose disk is gone: what is there now is of another time.
        }
        let restored = self.store.restore(host).ok().flatten();
        let content: BTreeSet<Write> =
            restored.map(|restored| restored.content.into_iter().collect()).unwrap_or_default();
        let database = self.boxes[b].disk.copies.get(host).and_then(|c| c.database.as_ref());
        let unsaved = database.and_then(|d| d.content.iter().find(|w| !content.contains(w)));
        if let Some(write) = unsaved {
            let what = format!("{host} was released before write {write} was uploaded");
            self.violate(4, &what);
        }
    }

    /// Waiters that are past their deadline, and not because their box stood still.
    pub fn invariant_5_every_waiter_is_answered(&mut self) {
        let now = self.time;
        let late = self.requests.iter().find(|(id, request)| {
            let world = &self.boxes[request.b];
            let serving = world.proxies.get(&request.proxy).is_some_and(|p| p.is_serving(**id));
            let stood_still = world.pause.is_some_and(|pause| pause.until + SLACK > now);
            request.ended.is_none() && now > request.deadline + SLACK && !(serving || stood_still)
        });
        let late = late
            .map(|(id, r)| format!("request {id} for {} on box{} was never answered", r.host, r.b));
        if let Some(what) = late {
            self.violate(5, &what);
        }
        self.requests
            .retain(|_, request| request.ended.is_none() || request.deadline + 90 * S > now);
    }

    fn invariant_7_what_is_awake_serves(&mut self) {
        let mut hollow = BTreeMap::new();
        for (b, world) in self.boxes.iter().enumerate() {
            let Some(activator) = world.activator.as_ref().filter(|_| world.pause.is_none()) else {
                continue;
            };
            for slot in activator.core.awake() {
                let Some(view) = activator.core.host(slot) else { continue };
                let Some(run) = view.run else { continue };
                if self.instance(b, &view.host, run).is_none() {
                    let known = self.ledger.hollow.get(&(b, slot)).filter(|known| known.0 == run);
                    hollow.insert((b, slot), known.copied().unwrap_or((run, self.time)));
                }
            }
        }
        let long = hollow.iter().find(|(_, (_, since))| since + NOTICED_WITHIN < self.time);
        let what = long.map(|((b, slot), (run, _))| {
            format!("slot {slot} of box{b} is awake, and its run {run} died long ago")
        });
        self.ledger.hollow = hollow;
        if let Some(what) = what {
            self.violate(7, &what);
        }
    }

    /// At the moment in which a request is sent to an app.
    pub fn invariant_8_only_the_current_run_is_served(
        &mut self,
        b: BoxIndex,
        host: &Host,
        run: Run,
    ) {
        let current = self.boxes[b].activator.as_ref().and_then(|activator| {
            let hosted = activator.hosts.values().find(|hosted| hosted.host == *host)?;
            hosted.run
        });
        if let Some(current) = current.filter(|current| *current != run) {
            let what = format!("box{b} sent a request for {host} to run {run}, not to {current}");
            self.violate(8, &what);
        }
    }

    fn invariant_9_at_rest_nothing_runs(&mut self) {
        let mut found = None;
        for instance in self.instances.values() {
            let Some(activator) = &self.boxes[instance.b].activator else { continue };
            if !activator.booted {
                continue;
            }
            let Some(view) = activator.core.host(instance.slot) else { continue };
            let rests = matches!(view.state, "asleep" | "backoff" | "leasing" | "restoring");
            if rests && view.host == instance.host {
                found = Some(format!(
                    "{} is {} on box{}, and run {} goes on",
                    instance.host, view.state, instance.b, instance.run
                ));
            }
        }
        if let Some(what) = found {
            self.violate(9, &what);
        }
    }

    /// When an activator says that it is done.
    pub fn invariant_9_nothing_runs_after_an_exit(&mut self, b: BoxIndex) {
        let left = self.instances.values().find(|instance| instance.b == b);
        let what = left.map(|i| format!("box{b} exits, and run {} of {} goes on", i.run, i.host));
        if let Some(what) = what {
            self.violate(9, &what);
        }
    }

    /// At a start under the newest generation.
    pub fn invariant_10_the_copy_is_not_older_than_durable(&mut self, id: InstanceId) {
        if !self.holds(id) {
            return;
        }
        let Some(instance) = self.instances.get(&id) else { return };
        let copy = self.boxes[instance.b].disk.copies.get(&instance.host);
        let content: BTreeSet<Write> = copy
            .and_then(|copy| copy.database.as_ref())
            .map(|database| database.content.iter().copied().collect())
            .unwrap_or_default();
        let durable = self.ledger.durable.get(&instance.host);
        let missing = durable.and_then(|durable| durable.difference(&content).next());
        if let Some(missing) = missing {
            let what = format!(
                "box{} starts {} without write {missing}, which was reported durable",
                instance.b, instance.host
            );
            self.violate(10, &what);
        }
    }

    /// When a restored file gets the database's name.
    pub fn invariant_10_no_local_work_is_discarded(
        &mut self,
        b: BoxIndex,
        host: &Host,
        content: &[Write],
    ) {
        let database = self.boxes[b].disk.copies.get(host).and_then(|c| c.database.as_ref());
        let dropped = database.and_then(|d| d.content.iter().find(|w| !content.contains(w)));
        if let Some(write) = dropped {
            let what = format!("box{b} overwrites write {write} of {host}");
            self.violate(10, &what);
        }
    }

    /// Whoever holds the newest generation has fenced all others. A disk that was put back has
    /// forgotten what it sent: such a file may land late, and the host stands down before it.
    pub fn invariant_10_the_owner_meets_no_other_writer(
        &mut self,
        b: BoxIndex,
        slot: Slot,
        host: &Host,
        txid: Txid,
    ) {
        let view = self.boxes[b].activator.as_ref().and_then(|a| a.core.host(slot));
        let generation = view.and_then(|view| view.generation);
        let owns = self.store.hosts.get(host).is_some_and(|record| {
            Some(record.generation) == generation
                && record.id == self.boxes[b].id
                && record.state == HostState::Owned
        });
        if owns && !self.boxes[b].put_back {
            let what = format!("box{b} owns {host}, and its file {txid} met another writer's");
            self.violate(10, &what);
        }
    }

    /// A copy of the owner's own, which holds all that the replica has and more, is the newest
    /// there is. (A disk that was put back cannot know that.)
    pub fn invariant_10_nothing_is_set_aside_without_need(&mut self, b: BoxIndex, host: &Host) {
        let site = &self.boxes[b];
        let Some(copy) = site.disk.copies.get(host) else { return };
        let (Some(database), Some(position)) = (&copy.database, &copy.position) else { return };
        let since = self.store.hosts.get(host).filter(|r| r.id == site.id).map(|r| r.since);
        let Ok(Some(replica)) = self.store.restore(host) else { return };
        let own = since.is_some_and(|since| since <= position.generation) && !site.put_back;
        let ahead = database.content.len() > replica.content.len();
        if own && ahead && !database.damaged && database.content.starts_with(&replica.content) {
            let what = format!("box{b} sets the newest copy of {host} aside");
            self.violate(10, &what);
        }
    }

    /// At the end: every write is in the store, in a copy, or in a fork on a disk that is there.
    pub fn invariant_10_every_write_is_somewhere(&mut self) {
        for (host, writes) in &self.ledger.committed {
            let restored = self.store.restore(host).ok().flatten();
            let mut kept: BTreeSet<Write> =
                restored.map(|restored| restored.content.into_iter().collect()).unwrap_or_default();
            for copy in self.boxes.iter().filter_map(|b| b.disk.copies.get(host)) {
                kept.extend(copy.database.iter().flat_map(|d| d.content.iter()));
                kept.extend(copy.forks.iter().flatten());
            }
            let gone = writes.iter().find(|w| !kept.contains(w) && !self.ledger.lost.contains(w));
            if let Some(write) = gone {
                let what = format!("write {write} of {host} is nowhere");
                return self.violate(10, &what);
            }
        }
    }
}
