//! The first event: what registry, journal and a look at the machine say.

use std::collections::BTreeMap;

use dormouse_core::event::{Event, HostSeed};
use dormouse_core::ids::Run;
use dormouse_instances::Leftover;

use super::driver::Driver;
use super::journal::Memory;

impl Driver {
    /// Takes in every route. Before the link listens: a proxy that comes again with hosts awake is
    /// told of all of them at once, or it would forget those.
    pub(crate) fn load(&mut self) -> anyhow::Result<Vec<HostSeed>> {
        let mut seeds = Vec::new();
        for route in self.parts.registry.routes()? {
            let Some(app) = self.parts.config.apps.get(&route.app).cloned() else {
                tracing::error!(
                    host = route.host,
                    app = route.app,
                    "the config has no such app: the host is not served"
                );
                continue;
            };
            if let Err(error) = self.parts.paths.make_host(&route.host) {
                tracing::error!(%error, host = route.host, "no directory: the host is not served");
                continue;
            }
            seeds.push(self.take_in(&route, app));
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
                tracing::warn!(host = %seed.host, run = leftover.run, "stopping a leftover instance");
                seed.leftover = Some(Run(leftover.run));
                if let Some(hosted) = self.hosts.get_mut(&seed.slot) {
                    hosted.run = Some(Run(leftover.run));
                    hosted.instance = Some(leftover.instance);
                }
            }
            stray(found);
        }
        stray(leftovers.into_values().flatten().collect());
        self.step(Event::Boot { base, memo: memory.session, hosts: seeds });
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
