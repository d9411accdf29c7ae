//! A loop's door: who comes in, until when, and how the house is emptied.

use std::io;
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::sync::Arc;
use std::task::Waker;
use std::time::Duration;

use dormouse_link::Quiet;
use dormouse_ring::{Engine, Listener};
use tokio::sync::Semaphore;
use tokio::sync::mpsc::UnboundedReceiver;
use tokio::task::JoinHandle;
use tokio::time::Instant;
use tracing::{info, warn};

use crate::delta::ToLoop;
use crate::event_loop::Loop;
use crate::{client, clock};

/// How long new connections wait in the backlog for the last ones to end; longer than an idle
/// connection stays.
const PAUSE: Duration = Duration::from_millis(1500);
/// The end of the drain: nothing is accepted, relays are ended.
const LAST: Duration = Duration::from_secs(1);

/// The listening sockets, and the tasks that accept on them.
pub(crate) struct Door {
    listeners: Vec<Rc<Listener>>,
    connections: Arc<Semaphore>,
    accepting: Vec<JoinHandle<()>>,
}

impl Door {
    pub(crate) fn new(sockets: Vec<OwnedFd>, connections: Arc<Semaphore>) -> io::Result<Self> {
        let listeners = sockets.into_iter().map(|socket| Listener::new(socket).map(Rc::new));
        let listeners = listeners.collect::<io::Result<_>>()?;
        Ok(Self { listeners, connections, accepting: Vec::new() })
    }

    pub(crate) fn open<E: Engine>(&mut self, of: &Rc<Loop<E>>) {
        for listener in &self.listeners {
            let task = accept(of.clone(), listener.clone(), self.connections.clone());
            self.accepting.push(tokio::task::spawn_local(task));
        }
    }

    fn close(&mut self) {
        // No accept is ever in flight, so none is lost by this.
        self.accepting.drain(..).for_each(|task| task.abort());
    }
}

async fn accept<E: Engine>(this: Rc<Loop<E>>, listener: Rc<Listener>, connections: Arc<Semaphore>) {
    let failed = Quiet::default();
    loop {
        // Beyond the limit the kernel's backlog holds them.
        let Ok(permit) = connections.clone().acquire_owned().await else { return };
        match listener.accept(this.engine).await {
            Ok(accepted) => {
                this.stats.connections.add();
                // Before its task first runs: a drain must not end between.
                let id = this.register();
                let this = this.clone();
                tokio::task::spawn_local(async move {
                    client::serve(this, id, accepted).await;
                    drop(permit);
                });
            }
            Err(error) => {
                if let Some(times) = failed.due(clock::monotonic_ns()) {
                    warn!(%error, times, "accept failed");
                }
                // Out of descriptors: one will be free when some connection ends.
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        }
    }
}

impl<E: Engine> Loop<E> {
    /// Empties the loop. The next process begins only when this one has ended, so as long as some
    /// old connection keeps it, new ones are served here, one request each.
    pub(crate) async fn drain(
        self: &Rc<Self>,
        door: &mut Door,
        deltas: &mut UnboundedReceiver<ToLoop>,
        limit: Duration,
    ) {
        let deadline = clock::now() + limit;
        let last = deadline - LAST.min(limit / 2);
        self.draining.set(true);
        info!(connections = self.clients.borrow().len(), "draining");
        self.wake_clients();
        loop {
            self.older_than.set(self.next_client.get());
            self.older.set(self.clients.borrow().len());
            let is_over = !self.until(last, deltas, || self.older.get() == 0).await;
            door.close();
            if is_over {
                break;
            }
            let pause = last.min(clock::now() + PAUSE);
            if self.until(pause, deltas, || self.clients.borrow().is_empty()).await {
                return;
            }
            // One that came in between stays longer: nobody is to wait for it.
            door.open(self);
        }
        self.ending.set(true);
        self.wake_clients();
        if !self.until(deadline, deltas, || self.clients.borrow().is_empty()).await {
            let connections = self.clients.borrow().len();
            warn!(connections, "drain time is over: connections are cut");
        }
    }

    fn wake_clients(&self) {
        let wakers: Vec<Waker> = self.clients.borrow().values().cloned().collect();
        wakers.into_iter().for_each(Waker::wake);
    }

    /// Waits while clients end; false when the time is over first.
    async fn until(
        &self,
        end: Instant,
        deltas: &mut UnboundedReceiver<ToLoop>,
        holds: impl Fn() -> bool,
    ) -> bool {
        while !holds() {
            tokio::select! {
                () = self.ended.notified() => (),
                Some(delta) = deltas.recv() => self.apply(delta),
                () = tokio::time::sleep_until(end) => return false,
            }
        }
        true
    }
}
