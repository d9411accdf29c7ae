//! The keeper of a running replica: a task a host that passes the deadline on, reports what
//! happens, and finishes the replica when the host sleeps.

use dormouse_core::event::{Event, Saved};
use dormouse_core::ids::{Slot, Txid};
use dormouse_core::position::RemoteTip;
use dormouse_core::time::Deadline;
use dormouse_instances::Instance;
use dormouse_replica::compact::{self, CompactError};
use dormouse_replica::holders::Holders;
use dormouse_replica::levels::Inventory;
use dormouse_replica::replica::{self as running, Running};
use dormouse_replica::{clock, position_file};
use tokio::sync::{mpsc, oneshot, watch};

use super::driver::Input;
use super::replica::{HostReplica, blocking};

/// The last sync is asked for, once.
#[derive(Debug)]
pub(crate) struct Finish {
    pub(crate) reply: oneshot::Sender<Saved>,
}

/// What the keeper of a running replica needs of the driver.
pub(crate) struct Attach {
    pub(crate) slot: Slot,
    pub(crate) inputs: mpsc::UnboundedSender<Input>,
    pub(crate) deadline: watch::Receiver<Deadline>,
    /// Whose processes have the database open.
    pub(crate) instance: Option<Instance>,
}

impl Attach {
    /// What the instance has open, for a follower whose file became another one.
    pub(crate) fn holders(&self) -> Holders {
        match self.instance.clone() {
            Some(instance) => {
                Holders::new(move |database, former| instance.holds_former(database, former))
            }
            None => Holders::default(),
        }
    }
}

/// Owns a running replica: passes the deadline on, reports, finishes it when asked. The session is
/// renewed during the last sync too: an upload that lasts longer than one renewal counts.
pub(crate) async fn keep(
    host: HostReplica,
    mut running: Running,
    mut asked: mpsc::Receiver<Finish>,
    mut ended: oneshot::Receiver<()>,
    mut attach: Attach,
) {
    let before = running.status().durable;
    let mut stood_down = false;
    let mut finishing = None;
    loop {
        tokio::select! {
            finish = asked.recv(), if finishing.is_none() => {
                let Some(Finish { reply }) = finish else { return running.abandon() };
                let finished = running.finish(host.sync_budget);
                let sync = last_sync(host.clone(), finished, before, attach.deadline.clone());
                finishing = Some((Box::pin(sync), reply));
            }
            saved = async { match &mut finishing {
                Some((sync, _)) => sync.await,
                None => std::future::pending().await,
            } } => {
                // What it told last, and nobody has heard yet.
                while let Some(event) = running.event_at_once() {
                    stood_down |= heard(&host, &attach, event);
                }
                let saved = if stood_down { Saved::StoodDown } else { saved };
                if let Some((_, reply)) = finishing {
                    // A driver that is gone needs no answer.
                    reply.send(saved).ok();
                }
                return;
            }
            _ = &mut ended => return running.abandon(),
            changed = attach.deadline.changed() => {
                if changed.is_err() {
                    return running.abandon();
                }
                let deadline = *attach.deadline.borrow_and_update();
                running.set_deadline(Some(deadline)).await;
            }
            Some(event) = running.event() => stood_down |= heard(&host, &attach, event),
        }
    }
}

/// Passes on what a replica tells; whether it stood down.
fn heard(host: &HostReplica, attach: &Attach, event: running::Event) -> bool {
    match event {
        running::Event::Durable { txid, .. } => {
            tracing::debug!(host = %host.place.host, %txid, "durable");
        }
        running::Event::StoodDown { txid, was_ours } => {
            tracing::error!(host = %host.place.host, %txid, was_ours, "another writer");
            attach.inputs.send(Input::Event(Event::StoodDown(attach.slot))).ok();
            return true;
        }
        running::Event::Refused { reason } | running::Event::Stalled { reason } => {
            tracing::warn!(host = %host.place.host, reason, "replication does not get on");
        }
    }
    false
}

/// The last sync, and what keeps the next restore cheap.
async fn last_sync(
    host: HostReplica,
    finished: impl Future<Output = running::Finished>,
    before: Txid,
    deadline: watch::Receiver<Deadline>,
) -> Saved {
    let finished = finished.await;
    if finished.clean && finished.txid != before {
        let deadline = *deadline.borrow();
        compact_closed(&host, finished.txid, deadline).await;
    }
    saved(finished)
}

/// How a finished replica ended, as the core knows it.
fn saved(finished: running::Finished) -> Saved {
    if !finished.clean {
        let why = finished.reason.unwrap_or_else(|| "the last sync did not finish".to_owned());
        tracing::warn!(durable = %finished.txid, why, "asleep, and not all is in the store");
        return Saved::Unclean { durable: finished.txid, why };
    }
    let etag = finished.etag;
    Saved::Clean((finished.txid > Txid(0)).then_some(RemoteTip { txid: finished.txid, etag }))
}

/// Keeps the next restore cheap; only after a visit that uploaded something.
async fn compact_closed(host: &HostReplica, txid: Txid, deadline: Deadline) {
    let state_dir = host.state_dir.clone();
    let loaded = blocking(move || {
        let position = position_file::load(&state_dir).map_err(|error| error.to_string())?;
        let left =
            position.as_ref().and_then(|p| Inventory::take(&state_dir, p.generation, p.txid));
        Ok((position, left))
    });
    let Ok((Some(position), left)) = loaded.await else { return };
    let page_size = dormouse_replica::ltx::PageSize::new(position.page_size);
    let (Some(page_size), true) = (page_size, position.clean) else { return };
    let closed = compact::Closed {
        database: host.database.clone(),
        state_dir: host.state_dir.clone(),
        generation: position.generation,
        txid,
        page_size,
        page_count: position.page_count,
    };
    // No renewal reaches this one: what does not fit into the session waits for the next visit.
    let (_ends_with_us, deadline) = watch::channel(Some(deadline));
    let terms = compact::Terms {
        settings: host.rules.levels,
        budget: host.rules.budget.clone(),
        deadline,
        clock: clock::system_now,
    };
    let inventory = left.unwrap_or_else(Inventory::unknown);
    match compact::compact(&host.place, &closed, inventory, &terms).await {
        Ok(done) => {
            tracing::debug!(host = %host.place.host, ?done, "compacted");
            host.watched.set_fault(None);
        }
        Err(error) => {
            tracing::warn!(host = %host.place.host, %error, "not compacted");
            let is_fault = matches!(error, CompactError::Fault(_) | CompactError::Moved { .. });
            host.watched.set_fault(is_fault.then(|| error.to_string()));
        }
    }
}
