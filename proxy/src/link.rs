//! The link client: keeps a connection to the activator, hands what it says to the loops, and
//! what they say to it. Without an activator the loops go on with the table they have.

use std::collections::HashMap;
use std::io;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicU32;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use dormouse_link::Slot;
use dormouse_link::message::{
    ActivatorHello, HELLO_FDS, MESSAGE_BYTES_MAX, ProxyHello, RouteLimits, ToActivator, ToProxy,
    decode, decode_hello, encode, encode_hello,
};
use dormouse_link::socket::{Connection, Received};
use dormouse_link::table::{ProcessId, TableId, TableView};
use dormouse_proxy_core::Host;
use dormouse_ring::Watched;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender};
use tracing::{debug, info, warn};

use crate::delta::{FromLoop, Route, Table, ToLoop};
use crate::stats::Stats;

const RETRY_FIRST: Duration = Duration::from_millis(20);
const RETRY_MAX: Duration = Duration::from_secs(1);
/// For the hello, and for a message to be taken.
const PEER_PATIENCE: Duration = Duration::from_secs(10);
const STATS_EVERY: Duration = Duration::from_secs(10);

/// The client's side of the link.
pub(crate) struct Link {
    path: PathBuf,
    process: ProcessId,
    loops: Vec<UnboundedSender<ToLoop>>,
    from_loops: UnboundedReceiver<FromLoop>,
    stats: Vec<Arc<Stats>>,
    table: Option<Arc<Table>>,
    /// Waiters of a host on all loops; kept over reconnects.
    waiters: HashMap<Host, Arc<AtomicU32>>,
    /// Loops that have not yet moved to, or let go of, what is named here.
    moving: HashMap<TableId, usize>,
    leaving: HashMap<Slot, usize>,
    /// Slots that some loops do not know yet: how many.
    coming: HashMap<Slot, usize>,
}

/// One connection.
struct Peer {
    connection: Connection,
    watched: Watched,
    buffer: Vec<u8>,
}

impl Peer {
    fn connect(path: &Path) -> io::Result<Self> {
        let connection = Connection::connect(path)?;
        let watched = Watched::new(connection.as_fd().try_clone_to_owned()?)?;
        Ok(Self { connection, watched, buffer: vec![0; MESSAGE_BYTES_MAX] })
    }

    async fn send(&self, message: &[u8]) -> Result<()> {
        let sending = self.watched.write_with(|_| self.connection.send(message, &[]));
        tokio::time::timeout(PEER_PATIENCE, sending)
            .await
            .context("the activator does not read its link")??;
        Ok(())
    }

    async fn receive(&mut self) -> io::Result<Received> {
        let Self { connection, watched, buffer } = self;
        let received = watched.read_with(|_| connection.recv(buffer)).await?;
        if received.len == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        Ok(received)
    }
}

impl Link {
    pub(crate) fn new(
        path: PathBuf,
        loops: Vec<UnboundedSender<ToLoop>>,
        from_loops: UnboundedReceiver<FromLoop>,
        stats: Vec<Arc<Stats>>,
    ) -> io::Result<Self> {
        Ok(Self {
            path,
            process: ProcessId::of(std::process::id())?,
            loops,
            from_loops,
            stats,
            table: None,
            waiters: HashMap::new(),
            moving: HashMap::new(),
            leaving: HashMap::new(),
            coming: HashMap::new(),
        })
    }

    /// Connects again and again, for ever.
    pub(crate) async fn run(mut self) {
        let mut wait = RETRY_FIRST;
        let mut said = String::new();
        loop {
            match self.connected(&mut wait).await {
                Ok(never) => match never {},
                Err(error) => {
                    let text = dormouse_link::told(error.chain());
                    if text == said {
                        debug!(error = %text, "no link to the activator");
                    } else {
                        warn!(error = %text, "no link to the activator");
                        said = text;
                    }
                }
            }
            let pause = tokio::time::sleep(jittered(wait));
            tokio::pin!(pause);
            wait = (wait * 2).min(RETRY_MAX);
            loop {
                tokio::select! {
                    () = &mut pause => break,
                    // Wakes are posted again at the next connect; the rest is counted there too.
                    Some(lost) = self.from_loops.recv() => debug!(?lost, "not sent: no link"),
                }
            }
        }
    }

    async fn connected(&mut self, wait: &mut Duration) -> Result<std::convert::Infallible> {
        let mut peer =
            Peer::connect(&self.path).with_context(|| self.path.display().to_string())?;
        peer.send(&encode_hello(&ProxyHello { process: self.process })?).await?;
        let first = tokio::time::timeout(PEER_PATIENCE, peer.receive())
            .await
            .context("the activator does not say hello")??;
        self.greeted(&peer, first)?;
        *wait = RETRY_FIRST;
        let mut stats = tokio::time::interval(STATS_EVERY);
        loop {
            tokio::select! {
                received = peer.receive() => {
                    let received = received.context("the activator is gone")?;
                    let message = decode(peer.buffer.get(..received.len).unwrap_or_default())?;
                    self.hear(message)?;
                }
                said = self.from_loops.recv() => {
                    let Some(said) = said else { bail!("the loops have ended") };
                    self.pass_on(&peer, said).await?;
                }
                _ = stats.tick() => {
                    let sums = Stats::sum(self.stats.iter().map(AsRef::as_ref));
                    peer.send(&encode(&ToActivator::Stats(sums))?).await?;
                }
            }
        }
    }

    fn greeted(&mut self, peer: &Peer, first: Received) -> Result<()> {
        let bytes = peer.buffer.get(..first.len).unwrap_or_default();
        let hello: ActivatorHello = decode_hello(bytes)?;
        let fds: [_; HELLO_FDS] = first
            .fds
            .try_into()
            .map_err(|_| anyhow::anyhow!("the activator's hello lacks the table's descriptors"))?;
        let [words, area] = fds;
        let known = self.table.clone().filter(|table| {
            table.view.table_id() == hello.table && table.run_dir() == Path::new(&hello.run_dir)
        });
        let table = match known {
            Some(table) => table,
            None => Arc::new(Table::new(
                TableView::map(words.as_fd(), area.as_fd())?,
                PathBuf::from(hello.run_dir),
            )),
        };
        info!(table = %hello.table, slots = hello.slots, box_name = %hello.box_name, "linked");
        self.table = Some(table.clone());
        self.moving = HashMap::from([(hello.table, self.loops.len())]);
        self.leaving.clear();
        self.coming.clear();
        self.tell_loops(&ToLoop::Connected(table));
        Ok(())
    }

    fn tell_loops(&self, delta: &ToLoop) {
        for each in &self.loops {
            // A loop that has ended needs no news.
            drop(each.send(delta.clone()));
        }
    }

    fn hear(&mut self, message: ToProxy) -> Result<()> {
        match message {
            ToProxy::Route { slot, host, limits } => self.route(slot, &host, limits)?,
            ToProxy::Unroute { slot, host: _ } => {
                self.leaving.insert(slot, self.loops.len());
                self.tell_loops(&ToLoop::Unroute(slot));
            }
            ToProxy::RoutesDone => self.tell_loops(&ToLoop::RoutesDone),
            ToProxy::Notify { slot } => self.tell_loops(&ToLoop::Notify(slot)),
            ToProxy::Refused { slot, reason, retry_after_s } => {
                self.tell_loops(&ToLoop::Refused { slot, reason, retry_after_s });
            }
            // The mapping goes when the last host that was there lets go of it.
            ToProxy::RetireTable { table } => debug!(%table, "table is retired"),
        }
        Ok(())
    }

    fn route(&mut self, slot: Slot, host: &str, limits: RouteLimits) -> Result<()> {
        let host = Host::parse(host.as_bytes())
            .with_context(|| format!("the activator routes {host:?}"))?;
        let slots = self.table.as_ref().map_or(0, |table| table.view.slots());
        if slot.0 >= slots {
            bail!("the activator gives {host} the slot {slot} of {slots}");
        }
        let waiters = self.waiters.entry(host.clone()).or_default().clone();
        self.coming.insert(slot, self.loops.len());
        self.tell_loops(&ToLoop::Route(Route { slot, host, limits, waiters }));
        Ok(())
    }

    async fn pass_on(&mut self, peer: &Peer, said: FromLoop) -> Result<()> {
        let message = match said {
            FromLoop::Post(slot) => ToActivator::Wake { slot },
            FromLoop::Gone { slot, run } => ToActivator::InstanceGone { slot, run },
            FromLoop::Moved(table) => {
                if !is_last(&mut self.moving, &table) {
                    return Ok(());
                }
                ToActivator::TableAck { table }
            }
            FromLoop::Routed(slot) => {
                if !is_last(&mut self.coming, &slot) {
                    return Ok(());
                }
                ToActivator::RouteAck { slot }
            }
            FromLoop::Unrouted(slot) => {
                if !is_last(&mut self.leaving, &slot) {
                    return Ok(());
                }
                self.waiters.retain(|_, waiters| Arc::strong_count(waiters) > 1);
                ToActivator::UnrouteAck { slot }
            }
        };
        peer.send(&encode(&message)?).await
    }
}

/// Counts one loop; whether it was the last that was waited for.
fn is_last<K: std::hash::Hash + Eq>(waited: &mut HashMap<K, usize>, key: &K) -> bool {
    match waited.get_mut(key) {
        Some(1) => {
            waited.remove(key);
            true
        }
        Some(left) => {
            *left -= 1;
            false
        }
        None => false,
    }
}

/// Half to all of it, so that several proxies do not knock at once.
fn jittered(wait: Duration) -> Duration {
    let random = getrandom::u32().unwrap_or(u32::MAX);
    let half = wait / 2;
    half + half.mul_f64(f64::from(random) / f64::from(u32::MAX))
}
