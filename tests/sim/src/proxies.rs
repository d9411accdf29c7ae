//! Proxies and their clients: waiters, counts, posts, over the real steps of the wake table.

use std::collections::{BTreeMap, BTreeSet};

use dormouse_core::event::{Cause, Event};
use dormouse_core::ids::{Host, Run, Slot};
use dormouse_link::protocol::{self, Entry, Request as Asked};
use dormouse_link::{Counters, Word};

use crate::clock::{MS, S, Time};
use crate::sabotage::Sabotage;
use crate::world::{BoxIndex, Item, Life, World};

/// Number of a proxy process.
pub type ProxyId = u64;
/// Number of a client's request.
pub type RequestId = u64;

/// What an activator tells a proxy.
#[derive(Clone, Debug)]
pub enum Heard {
    /// Read the word again.
    Notify(Slot),
    /// Send the waiters away.
    Refused(Slot),
    /// A host is at this slot.
    Route(Slot, Host),
    /// The slot's host is gone.
    Unroute(Slot),
}

/// What a proxy tells the activator.
#[derive(Clone, Copy, Debug)]
pub enum Said {
    /// Somebody waits.
    Wake(Slot),
    /// A run does not take connections.
    Gone(Slot, Run),
    /// It counts in this table.
    TableAck,
    /// Nothing of the slot's former host is in flight.
    UnrouteAck(Slot),
}

/// One proxy process, with one loop.
#[derive(Debug, Default)]
pub struct Proxy {
    /// The table that it counts in.
    table: Option<Life>,
    routes: BTreeMap<Host, Slot>,
    waiters: Vec<RequestId>,
    inflight: BTreeMap<RequestId, (Slot, Run)>,
    retiring: BTreeSet<Slot>,
    last_run: BTreeMap<Host, Run>,
    heard_at: Time,
    said_at: Time,
}

impl Proxy {
    /// Whether a request was sent to an app and has not ended.
    #[must_use]
    pub fn is_serving(&self, id: RequestId) -> bool {
        self.inflight.contains_key(&id)
    }
}

/// How a request ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    /// The app answered.
    Served,
    /// A refusal.
    Refused,
    /// The instance died under it.
    Cut,
    /// Its proxy is gone, and its connection.
    Lost,
}

/// A client's request.
#[derive(Clone, Debug)]
pub struct Request {
    /// Which box it came to.
    pub b: BoxIndex,
    /// Which proxy.
    pub proxy: ProxyId,
    /// For which host.
    pub host: Host,
    /// A waiter is answered before.
    pub deadline: Time,
    /// Its app writes.
    pub writes: bool,
    /// How it ended.
    pub ended: Option<Ended>,
    avoid: Option<Run>,
}

/// How long a waiter waits.
pub const WAIT: Time = 30 * S;

impl World {
    /// A new proxy process.
    pub fn start_proxy(&mut self, b: BoxIndex) {
        let id = self.number();
        self.boxes[b].proxies.insert(id, Proxy::default());
        if let Some(life) = self.boxes[b].activator.as_ref().map(|a| a.life) {
            let wait = self.rng.between(1, 500) * MS;
            self.after(wait, Item::Connect(b, life, id));
        }
    }

    /// A proxy dies: its clients' connections with it. Its area is dropped, its stamps merged.
    pub fn kill_proxy(&mut self, b: BoxIndex, id: ProxyId) {
        if self.boxes[b].proxies.remove(&id).is_none() {
            return;
        }
        self.tell(|| format!("box{b}: proxy {id} is killed"));
        let of = |request: &Request| request.b == b && request.proxy == id;
        let all = self.requests.iter().filter(|(_, request)| of(request));
        for request in all.map(|(id, _)| *id).collect::<Vec<_>>() {
            self.ends(request, Ended::Lost);
        }
        for table in self.boxes[b].tables.values_mut() {
            let Some(area) = table.areas.remove(&id) else { continue };
            for (slot, counters) in &area {
                let last = counters.last_payload_ns().max(counters.last_out_ns());
                let merged = table.merged.entry(*slot).or_default();
                *merged = last.max(*merged);
            }
            table.let_go(id, None);
        }
    }

    /// A client asks.
    pub fn request(&mut self, b: BoxIndex, host: &Host, writes: bool) -> Option<RequestId> {
        let ids: Vec<ProxyId> = self.boxes[b].proxies.keys().copied().collect();
        let proxy = self.rng.pick(&ids)?;
        let id = self.number();
        let deadline = self.time + WAIT;
        let host = host.clone();
        let request = Request { b, proxy, host, deadline, writes, ended: None, avoid: None };
        self.requests.insert(id, request);
        self.after(WAIT, Item::GivesUp(id));
        self.after(0, Item::Arrives(id));
        Some(id)
    }

    /// How a request ended; only the first end counts.
    pub fn ends(&mut self, id: RequestId, how: Ended) {
        let Some(request) = self.requests.get_mut(&id).filter(|r| r.ended.is_none()) else {
            return;
        };
        request.ended = Some(how);
        let (b, host) = (request.b, request.host.clone());
        self.tell(|| format!("box{b}: request {id} for {host}: {how:?}"));
    }

    /// A request that has not been sent to an app: counts it in, or lists it as a waiter.
    pub fn pass(&mut self, id: RequestId) {
        let Some(request) = self.requests.get(&id).filter(|r| r.ended.is_none()) else { return };
        let (b, p, host, avoid) = (request.b, request.proxy, request.host.clone(), request.avoid);
        let mono = self.boxes[b].clock.now(self.time).mono.0;
        let Some(proxy) = self.boxes[b].proxies.get(&p) else {
            return self.ends(id, Ended::Lost);
        };
        let (Some(life), Some(slot)) = (proxy.table, proxy.routes.get(&host).copied()) else {
            return self.ends(id, Ended::Refused);
        };
        let parts = self.boxes[b].tables.get(&life).and_then(|table| table.parts(p, slot));
        let Some((word, counters)) = parts else { return self.ends(id, Ended::Refused) };
        match protocol::enter(word, counters) {
            Entry::Counted { run } if avoid == Some(Run(run.0)) => {
                protocol::leave(counters, mono);
                self.wait(id, slot);
            }
            Entry::Counted { run } => {
                counters.stamp_payload(mono);
                self.forward(id, slot, Run(run.0));
            }
            Entry::NotAwake(Word::Refusing { .. }) => self.ends(id, Ended::Refused),
            Entry::NotAwake(
                Word::Asleep | Word::Waking | Word::Awake { .. } | Word::Stopping { .. },
            ) => {
                self.wait(id, slot);
            }
        }
    }

    /// Counted in: it goes to the run that the word names.
    fn forward(&mut self, id: RequestId, slot: Slot, named: Run) {
        let Some(request) = self.requests.get(&id) else { return };
        let (b, p, host, writes) = (request.b, request.proxy, request.host.clone(), request.writes);
        let pooled = self.boxes[b].proxies.get(&p).and_then(|x| x.last_run.get(&host).copied());
        let run = match pooled {
            Some(earlier) if self.breaks(Sabotage::OldRunServed) => earlier,
            Some(_) | None => named,
        };
        let instance = self.instance(b, &host, run);
        let instance = instance.filter(|i| self.instances.get(i).is_some_and(|i| i.healthy));
        let sent = instance.is_some() || self.breaks(Sabotage::OldRunServed);
        if sent {
            self.invariant_8_only_the_current_run_is_served(b, &host, run);
        }
        let Some(proxy) = self.boxes[b].proxies.get_mut(&p) else { return };
        proxy.inflight.insert(id, (slot, run));
        proxy.last_run.insert(host.clone(), run);
        let Some(instance) = instance else {
            self.count_out(id);
            if let Some(request) = self.requests.get_mut(&id) {
                request.avoid = Some(run);
            }
            self.say(b, p, Said::Gone(slot, run));
            return self.wait(id, slot);
        };
        self.tell(|| format!("box{b}: request {id} goes to {host} run {run}"));
        let long = self.stormy && self.rng.chance(50);
        let span = self.rng.between(5, if long { 60_000 } else { 800 }) * MS;
        if writes {
            let within = self.rng.below(span);
            self.after(within, Item::Commits(instance));
        }
        self.after(span, Item::Finishes(id));
    }

    /// Lists a waiter, then asks for a wake.
    fn wait(&mut self, id: RequestId, slot: Slot) {
        let Some(request) = self.requests.get(&id) else { return };
        let (b, p, avoid) = (request.b, request.proxy, request.avoid);
        let Some(proxy) = self.boxes[b].proxies.get_mut(&p) else { return };
        proxy.waiters.push(id);
        let Some(life) = proxy.table else { return };
        let parts = self.boxes[b].tables.get(&life).and_then(|table| table.parts(p, slot));
        let Some((word, counters)) = parts else { return };
        match protocol::request(word, counters) {
            Asked::Post => self.say(b, p, Said::Wake(slot)),
            Asked::AlreadyPosted => {}
            Asked::Awake { run, post } => {
                if post {
                    self.say(b, p, Said::Wake(slot));
                }
                if avoid != Some(Run(run.0)) {
                    self.unlist(b, p, id);
                    self.after(0, Item::Arrives(id));
                }
            }
        }
    }

    fn unlist(&mut self, b: BoxIndex, p: ProxyId, id: RequestId) {
        if let Some(proxy) = self.boxes[b].proxies.get_mut(&p) {
            proxy.waiters.retain(|waiter| *waiter != id);
        }
    }

    /// A waiter's deadline: it is refused by its proxy alone.
    pub fn gives_up(&mut self, id: RequestId) {
        let Some(request) = self.requests.get(&id).filter(|r| r.ended.is_none()) else { return };
        let (b, p, host) = (request.b, request.proxy, request.host.clone());
        let Some(proxy) = self.boxes[b].proxies.get(&p) else { return };
        if proxy.is_serving(id) || self.breaks(Sabotage::WaiterForgotten) {
            return;
        }
        self.unlist(b, p, id);
        self.ends(id, Ended::Refused);
        let Some(proxy) = self.boxes[b].proxies.get(&p) else { return };
        let (Some(life), Some(slot)) = (proxy.table, proxy.routes.get(&host)) else { return };
        let waits = |w: &RequestId| self.requests.get(w).is_some_and(|r| r.host == host);
        if !proxy.waiters.iter().any(waits)
            && let Some(table) = self.boxes[b].tables.get(&life)
            && let Some((_, counters)) = table.parts(p, *slot)
        {
            counters.forget_request();
        }
    }

    /// Request and answer have ended.
    pub fn finishes(&mut self, id: RequestId) {
        self.ends(id, Ended::Served);
        self.count_out(id);
    }

    fn count_out(&mut self, id: RequestId) {
        let Some(request) = self.requests.get(&id) else { return };
        let (b, p) = (request.b, request.proxy);
        let mono = self.boxes[b].clock.now(self.time).mono.0;
        let Some(proxy) = self.boxes[b].proxies.get_mut(&p) else { return };
        let Some((slot, _)) = proxy.inflight.remove(&id) else { return };
        let last = !proxy.inflight.values().any(|(other, _)| *other == slot);
        let retired = last && proxy.retiring.remove(&slot);
        if let Some(life) = proxy.table
            && let Some(table) = self.boxes[b].tables.get(&life)
            && let Some((_, counters)) = table.parts(p, slot)
            && counters.inflight() > 0
        {
            protocol::leave(counters, mono);
        }
        if retired {
            self.say(b, p, Said::UnrouteAck(slot));
        }
    }

    /// An instance died under its requests.
    pub fn requests_cut(&mut self, b: BoxIndex, host: &Host, run: Run) {
        let mut cut = Vec::new();
        for proxy in self.boxes[b].proxies.values() {
            for (id, (_, of)) in &proxy.inflight {
                if *of == run && self.requests.get(id).is_some_and(|r| r.host == *host) {
                    cut.push(*id);
                }
            }
        }
        for id in cut {
            self.ends(id, Ended::Cut);
            self.count_out(id);
        }
    }

    /// A proxy connects, and moves to the activator's table.
    pub fn connect(&mut self, b: BoxIndex, life: Life, p: ProxyId) {
        let world = &mut self.boxes[b];
        let Some(table) = world.tables.get_mut(&life) else { return };
        let Some(proxy) = world.proxies.get_mut(&p) else { return };
        let area = table.words.keys().map(|slot| (*slot, Counters::new())).collect();
        table.areas.entry(p).or_insert(area);
        proxy.routes =
            world.disk.routes.iter().map(|(slot, route)| (route.host.clone(), *slot)).collect();
        let moved = proxy.table != Some(life);
        proxy.table = Some(life);
        proxy.retiring.clear();
        for (id, (slot, _)) in &mut proxy.inflight {
            let host = self.requests.get(id).map(|request| &request.host);
            if let Some(new) = host.and_then(|host| proxy.routes.get(host)).filter(|_| moved) {
                *slot = *new;
                if let Some((_, counters)) = table.parts(p, *new) {
                    counters.carry_over(1);
                }
            }
        }
        self.say(b, p, Said::TableAck);
        // Nobody knows what became of earlier posts.
        let waiters = self.boxes[b].proxies.get(&p).map(|proxy| proxy.waiters.clone());
        for id in waiters.unwrap_or_default() {
            self.unlist(b, p, id);
            if let Some(host) = self.requests.get(&id).map(|request| request.host.clone())
                && let Some(slot) =
                    self.boxes[b].proxies.get(&p).and_then(|x| x.routes.get(&host).copied())
            {
                self.say(b, p, Said::Wake(slot));
            }
            self.pass(id);
        }
    }

    fn say(&mut self, b: BoxIndex, p: ProxyId, said: Said) {
        let span = self.rng.between(0, 20) * MS;
        let Some(proxy) = self.boxes[b].proxies.get_mut(&p) else { return };
        let Some(life) = proxy.table else { return };
        proxy.said_at = proxy.said_at.max(self.time + span);
        let at = proxy.said_at;
        self.at(at, Item::Say(b, life, p, said));
    }

    /// Tells every proxy of a box that is connected.
    pub fn tell_proxies(&mut self, b: BoxIndex, heard: &Heard) {
        let Some(life) = self.boxes[b].activator.as_ref().map(|a| a.life) else { return };
        let ids: Vec<ProxyId> = self.boxes[b].proxies.keys().copied().collect();
        for id in ids {
            let span = self.rng.between(0, 20) * MS;
            let Some(proxy) = self.boxes[b].proxies.get_mut(&id) else { continue };
            if proxy.table == Some(life) {
                proxy.heard_at = proxy.heard_at.max(self.time + span);
                let at = proxy.heard_at;
                self.at(at, Item::Hear(b, life, id, heard.clone()));
            }
        }
    }

    /// A proxy hears its activator.
    pub fn heard(&mut self, b: BoxIndex, life: Life, p: ProxyId, heard: Heard) {
        let Some(proxy) = self.boxes[b].proxies.get_mut(&p) else { return };
        if proxy.table != Some(life) {
            return;
        }
        match heard {
            Heard::Route(slot, host) => {
                proxy.routes.insert(host, slot);
            }
            Heard::Unroute(slot) => {
                let waiters = self.waiters_of(b, p, slot);
                let Some(proxy) = self.boxes[b].proxies.get_mut(&p) else { return };
                proxy.routes.retain(|_, at| *at != slot);
                let busy = proxy.inflight.values().any(|(at, _)| *at == slot);
                if busy {
                    proxy.retiring.insert(slot);
                }
                for id in waiters {
                    self.unlist(b, p, id);
                    self.ends(id, Ended::Refused);
                }
                if !busy {
                    self.say(b, p, Said::UnrouteAck(slot));
                }
            }
            Heard::Refused(slot) => {
                for id in self.waiters_of(b, p, slot) {
                    self.unlist(b, p, id);
                    if !self.breaks(Sabotage::WaiterForgotten) {
                        self.ends(id, Ended::Refused);
                    }
                }
            }
            Heard::Notify(slot) => self.look_again(b, life, p, slot),
        }
    }

    fn waiters_of(&self, b: BoxIndex, p: ProxyId, slot: Slot) -> Vec<RequestId> {
        let Some(proxy) = self.boxes[b].proxies.get(&p) else { return Vec::new() };
        let host = proxy.routes.iter().find(|(_, at)| **at == slot).map(|(host, _)| host);
        let of = |id: &&RequestId| self.requests.get(id).map(|r| &r.host) == host;
        proxy.waiters.iter().filter(of).copied().collect()
    }

    fn look_again(&mut self, b: BoxIndex, life: Life, p: ProxyId, slot: Slot) {
        let waiters = self.waiters_of(b, p, slot);
        let parts = self.boxes[b].tables.get(&life).and_then(|table| table.parts(p, slot));
        let Some((word, counters)) = parts else { return };
        match protocol::peek(word) {
            Word::Awake { .. } => {
                for id in waiters {
                    self.unlist(b, p, id);
                    if let Some(request) = self.requests.get_mut(&id) {
                        request.avoid = None;
                    }
                    self.pass(id);
                }
            }
            Word::Asleep | Word::Waking | Word::Stopping { .. } | Word::Refusing { .. } => {
                if !waiters.is_empty() && protocol::request(word, counters) == Asked::Post {
                    self.say(b, p, Said::Wake(slot));
                }
            }
        }
    }

    /// The activator hears a proxy.
    pub fn said(&mut self, b: BoxIndex, p: ProxyId, said: Said) {
        let Some(life) = self.boxes[b].activator.as_ref().map(|a| a.life) else { return };
        match said {
            Said::Wake(slot) if !self.breaks(Sabotage::PostsDropped) => {
                self.core_event(b, Event::Requested(slot, Cause::Client));
            }
            Said::Wake(_) => {}
            Said::Gone(slot, run) => self.core_event(b, Event::Died(slot, run)),
            Said::UnrouteAck(slot) => {
                if let Some(table) = self.boxes[b].tables.get_mut(&life) {
                    table.let_go(p, Some(slot));
                }
            }
            Said::TableAck => {
                if let Some(table) = self.boxes[b].tables.get_mut(&life) {
                    table.acknowledged.insert(p);
                }
                if self.is_settled(b, life) {
                    self.boot(b);
                }
            }
        }
    }
}
