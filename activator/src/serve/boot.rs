//! The first event: what registry, journal and a look at the machine say.

use std::collections::BTreeMap;

use dormouse_core::event::{self, Event, Held, HostSeed, SessionMemo};
use dormouse_core::ids::{Run, Slot};
use dormouse_instances::{Instance, Leftover};
use dormouse_link::RunNumber;

use crate::deadline;

use super::driver::Driver;
use super::held;
use super::journal::Memory;

impl Driver {
    /// Takes in every route that is not served yet. Before the link listens: a proxy that comes again with hosts awake is
    /// told of all of them at once, or it would forget those.
    pub(crate) fn load(&mut self) -> anyhow::Result<Vec<HostSeed>> {
        let mut seeds = Vec::new();
        for route in self.parts.registry.routes()? {
            if self.hosts.contains_key(&Slot(route.slot)) {
                continue;
            }
            let Some(app) = self.parts.config.apps.get(&route.app).cloned() else {
                tracing::error!(
                    host = route.host,
                    app = route.app,
                    "the config has no such app: the host is not served"
                );
                continue;
            };
            match self.make_room(&route.host) {
                Ok(user) => seeds.push(self.take_in(&route, app, user)),
                Err(error) => {
                    tracing::error!(%error, host = route.host, "no directory: the host is not served");
                }
            }
        }
        Ok(seeds)
    }

    /// The first event: what is known, and what an earlier activator left running.
    pub(crate) fn boot(&mut self, mut seeds: Vec<HostSeed>, memory: Memory, base: String) {
        let mut leftovers: BTreeMap<String, Vec<Leftover>> = BTreeMap::new();
        for leftover in self.parts.nursery.leftovers() {
            leftovers.entry(leftover.host.clone()).or_default().push(leftover);
        }
        for seed in &mut seeds {
            seed.releasing = memory.releasing.get(&seed.host).cloned();
            let mut found = leftovers.remove(&seed.host.0).unwrap_or_default();
            if let Some(leftover) = found.pop() {
                seed.leftover = Some(self.find_again(seed.slot, &seed.host.0, leftover));
            }
            stray(found);
        }
        stray(leftovers.into_values().flatten().collect());
        if let Some(store) = &self.parts.fd_store {
            let is_held =
                |seed: &&HostSeed| seed.leftover.as_ref().is_some_and(|l| l.held.is_some());
            store
                .keep_only(&seeds.iter().filter(is_held).map(|seed| seed.host.0.clone()).collect());
        }
        let boot_id = &self.parts.settings.identity.boot_id;
        let deadline = deadline::kept(self.parts.paths.run(), boot_id);
        let memo = memory.session.map(|memo| SessionMemo { deadline, ..memo });
        self.step(Event::Boot { base, memo, hosts: seeds });
    }

    /// What an earlier activator left running: with its lease, where it can be taken over.
    fn find_again(&mut self, slot: Slot, host: &str, left: Leftover) -> event::Leftover {
        let run = Run(left.run);
        let (instance, held) = match self.may_take_over(host, run, &left.instance) {
            Ok((instance, held)) => {
                tracing::info!(host, %run, pid = instance.pid(), "found running");
                self.watch(slot, run, instance.clone());
                (instance, Some(held))
            }
            Err(why) => {
                tracing::warn!(host, %run, why, "stopping a leftover instance");
                (left.instance, None)
            }
        };
        if let Some(hosted) = self.hosts.get_mut(&slot) {
            hosted.run = Some(run);
            hosted.instance = Some(instance);
        }
        event::Leftover { run, held }
    }

    fn may_take_over(
        &self,
        host: &str,
        run: Run,
        found: &Instance,
    ) -> Result<(Instance, Held), String> {
        let boot_id = &self.parts.settings.identity.boot_id;
        let kept = held::of(&self.parts.paths.state_dir(host), boot_id, run);
        let (held, leader) = kept.ok_or("it did not serve yet")?;
        let socket = self.parts.paths.socket(host, RunNumber(run.0));
        if !socket.exists() {
            return Err(format!("{} is gone", socket.display()));
        }
        let instance = found.taken_over(leader).map_err(|error| error.to_string())?;
        Ok((instance, held))
    }
}

/// Instances that no route accounts for are killed: nobody else would ever stop them.
fn stray(leftovers: Vec<Leftover>) {
    for leftover in leftovers {
        tracing::warn!(host = leftover.host, run = leftover.run, "killing a stray instance");
        if let Err(error) = leftover.instance.kill() {
            tracing::error!(%error, host = leftover.host, "a stray instance cannot be killed");
        }
    }
}
