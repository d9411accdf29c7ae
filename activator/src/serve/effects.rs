//! Effects carried out: what is quick at once, the rest in tasks that come back as answers.

use dormouse_core::TakeoverMode;
use dormouse_core::effect::{Effect, Entry, Failure, Reason, Word};
use dormouse_core::event::{Answer, Event, Held, Ticket};
use dormouse_core::ids::{Run, Slot};
use dormouse_core::time::{Deadline, MILLI_NS, Wall};
use dormouse_instances::Instance;
use dormouse_link::{Refusal, RunNumber};

use crate::deadline;

use super::ask;
use super::commands::Reply;
use super::driver::{Course, Driver, Hosted, OVER};
use super::held;
use super::replica::HostReplica;
use dormouse_replica::clock;

impl Driver {
    pub(crate) fn carry_out(&mut self, effect: Effect) {
        match effect {
            Effect::Journal(entry) => {
                self.journal(&entry);
                note_release(&entry);
            }
            Effect::Put(ticket, key, body, expect) => self.put_record(ticket, key, body, expect),
            Effect::Get(ticket, key) => {
                let records = self.parts.records.clone();
                self.answer_later(ticket, async move { Answer::Got(records.get(&key).await) });
            }
            Effect::Inspect(ticket, slot) => self.on_copy(ticket, slot, HostReplica::inspect),
            Effect::List(ticket, slot) => self.on_copy(ticket, slot, HostReplica::list),
            Effect::Restore { ticket, slot, set_aside } => {
                self.on_copy(ticket, slot, |copy| copy.restore(set_aside));
            }
            Effect::SetAside(ticket, slot) => self.on_copy(ticket, slot, HostReplica::fork),
            Effect::PutFence(ticket, slot, txid, nonce) => {
                self.on_copy(ticket, slot, |copy| copy.put_fence(txid, nonce));
            }
            Effect::Apply(ticket, slot, _) => self.on_copy(ticket, slot, HostReplica::apply),
            Effect::PutImage(ticket, slot, txid, nonce) => {
                self.on_copy(ticket, slot, |copy| copy.put_image(txid, nonce));
            }
            Effect::Adopt(ticket, slot, generation, tip) => {
                self.on_copy(ticket, slot, |copy| copy.adopt(generation, tip));
            }
            Effect::OpenReplica { ticket, slot, generation, base } => {
                let watcher = self.parts.watcher.clone();
                self.on_copy(ticket, slot, |copy| copy.open(watcher, generation, base));
            }
            Effect::Attach(ticket, slot) => self.attach(ticket, slot),
            Effect::Resume(ticket, slot, generation) => self.resume(ticket, slot, generation),
            Effect::Hold(slot, run, held) => self.hold(slot, run, &held),
            Effect::Save(ticket, slot) => self.save(ticket, slot),
            Effect::Abandon(slot) => self.abandon(slot),
            Effect::Spawn(ticket, slot) => self.spawn(ticket, slot),
            Effect::Publish(slot, word) => self.publish(slot, word),
            Effect::TryStop(ticket, slot, run) => self.try_stop(ticket, slot, run),
            Effect::Refuse(slot, failure) => self.refuse(slot, &failure),
            Effect::AskDue(ticket, slot) => self.ask_due(ticket, slot),
            Effect::RecordDue(slot, due) => self.record_due(slot, due),
            Effect::Terminate(ticket, slot) => self.end_instance(ticket, slot, false),
            Effect::Kill(ticket, slot) => self.end_instance(ticket, slot, true),
            Effect::Freeze(ticket, slot) => self.freeze(ticket, slot, true),
            Effect::Thaw(ticket, slot) => self.freeze(ticket, slot, false),
            Effect::Deadline(deadline) => self.set_deadline(deadline.unwrap_or(OVER)),
            Effect::Retired(slot) => self.retired(slot),
            Effect::Handed(slot, how) => self.handed(slot, how),
            Effect::TakeoverEnded(target, end) => self.end_takeover(&target, &end),
            Effect::Exit => self.course = Course::Ended,
        }
    }

    /// Uploads count until then. With automatic takeover proxies send nothing past it either; with
    /// manual takeover no app is stopped by time, and the table says so.
    fn set_deadline(&self, deadline: Deadline) {
        if self.parts.settings.takeover == TakeoverMode::Automatic {
            self.parts.edge.set_deadline(dormouse_link::table::Deadline {
                boottime_ns: deadline.boot.0,
                realtime_ns: deadline.wall.0.saturating_mul(MILLI_NS),
            });
            let boot_id = &self.parts.settings.identity.boot_id;
            if let Err(error) = deadline::keep(self.parts.paths.run(), boot_id, deadline) {
                tracing::error!(%error, "the guard will stop what runs: the deadline was not kept");
            }
        }
        self.deadline.send_replace(deadline);
    }

    /// For an activator that comes after this one; without it, that one stops the instance first.
    fn hold(&self, slot: Slot, run: Run, held: &Held) {
        let Some(hosted) = self.hosted(slot) else { return };
        let Some(leader) = hosted.instance.as_ref().and_then(Instance::leader) else { return };
        let boot_id = &self.parts.settings.identity.boot_id;
        let state_dir = self.parts.paths.state_dir(&hosted.host);
        if let Err(error) = held::keep(&state_dir, boot_id, run, leader, held) {
            let host = &hosted.host;
            tracing::warn!(%error, host, "a restart will stop this host: its lease was not kept");
        }
    }

    fn try_stop(&mut self, ticket: Ticket, slot: Slot, run: Run) {
        let taken = self.parts.edge.try_stop(edge_slot(slot), RunNumber(run.0));
        self.answer_at_once(ticket, if taken { Answer::StopTaken } else { Answer::StopBusy });
    }

    fn record_due(&mut self, slot: Slot, due: Option<Wall>) {
        let Some(hosted) = self.hosts.get(&slot) else { return };
        if let Err(error) = self.parts.registry.set_due(&hosted.host, due.map(|due| due.0)) {
            tracing::error!(%error, host = hosted.host, "a due time was not kept");
        }
    }

    pub(crate) fn hosted(&self, slot: Slot) -> Option<&Hosted> {
        self.hosts.get(&slot)
    }

    fn publish(&mut self, slot: Slot, word: Word) {
        if matches!(word, Word::Awake(_)) {
            self.end_refusals(slot);
            self.note_outside(slot, false);
        }
        let host = self.hosted(slot).map_or("", |hosted| hosted.host.as_str());
        let word = match word {
            Word::Asleep => {
                tracing::info!(host, "asleep");
                dormouse_link::Word::Asleep
            }
            Word::Waking => {
                tracing::info!(host, "waking");
                dormouse_link::Word::Waking
            }
            Word::Awake(run) => {
                tracing::info!(host, %run, "awake");
                dormouse_link::Word::Awake { run: RunNumber(run.0) }
            }
            Word::Stopping(run) => {
                tracing::info!(host, %run, "stopping");
                dormouse_link::Word::Stopping { run: RunNumber(run.0) }
            }
        };
        self.parts.edge.publish(edge_slot(slot), word);
    }

    fn refuse(&mut self, slot: Slot, failure: &Failure) {
        self.see_outside(slot, failure);
        let reason = refusal(failure.reason);
        if let Some(times) = self.refusals.note(slot, reason, clock::system_now().mono) {
            let host = self.hosted(slot).map_or("", |hosted| hosted.host.as_str());
            let (reason, detail) = (reason.text(), failure.detail.as_str());
            tracing::warn!(host, reason, detail, times, "refused");
        }
        let retry_after_s = u32::try_from(failure.retry_after.secs_up()).unwrap_or(u32::MAX);
        self.parts.edge.refuse(edge_slot(slot), reason, retry_after_s.max(1));
    }

    fn end_refusals(&mut self, slot: Slot) {
        if let Some((reason, times)) = self.refusals.end(slot) {
            let host = self.hosted(slot).map_or("", |hosted| hosted.host.as_str());
            tracing::info!(host, reason = reason.text(), times, "refused until now");
        }
    }

    /// SIGTERM or SIGKILL; answered when nothing of the instance is left.
    fn end_instance(&self, ticket: Ticket, slot: Slot, kill: bool) {
        let hosted = self.hosted(slot);
        let Some(instance) = hosted.and_then(|hosted| hosted.instance.clone()) else {
            return self.answer_later(ticket, async { Answer::Empty });
        };
        let host = hosted.map(|hosted| hosted.host.clone()).unwrap_or_default();
        if kill {
            if let Err(error) = instance.kill() {
                tracing::error!(%error, "an instance cannot be killed");
            }
        } else {
            instance.terminate();
        }
        let inputs = self.parts.inputs.clone();
        tokio::spawn(async move {
            match instance.gone().await {
                Ok(()) => {
                    tracing::info!(host, "nothing of the instance is left");
                    let event = Event::Answer(ticket, Answer::Empty);
                    inputs.send(super::driver::Input::Event(event)).ok();
                }
                // No answer is no proof: the core's own time runs out.
                Err(error) => tracing::error!(%error, "a cgroup cannot be proven empty"),
            }
        });
    }

    fn freeze(&mut self, ticket: Ticket, slot: Slot, frozen: bool) {
        let instance = self.hosted(slot).and_then(|hosted| hosted.instance.clone());
        let done = match instance {
            Some(instance) => instance.freeze(frozen).map_err(|error| error.to_string()),
            None => Err("no instance".to_owned()),
        };
        self.answer_at_once(ticket, Answer::Frozen(done));
    }

    fn ask_due(&self, ticket: Ticket, slot: Slot) {
        let Some(hosted) = self.hosted(slot) else { return };
        let (Some(path), Some(Run(run))) = (hosted.app.next_due.clone(), hosted.run) else {
            let nothing = Answer::Due(Err("nothing to ask".to_owned()));
            return self.answer_later(ticket, async { nothing });
        };
        let socket = self.parts.paths.socket(&hosted.host, RunNumber(run));
        let env_file = self.parts.paths.env_file(&hosted.host);
        let question = ask::Question {
            socket,
            host: hosted.host.clone(),
            path,
            token_name: hosted.app.next_due_token.clone(),
            env_file,
        };
        let limit = self.parts.config.sleep.next_due.duration();
        self.answer_later(ticket, async move { Answer::Due(ask::next_due(question, limit).await) });
    }

    fn handed(&mut self, slot: Slot, how: Result<(), String>) {
        let host = self.hosted(slot).map(|hosted| hosted.host.clone()).unwrap_or_default();
        tracing::info!(host, ?how, "handover ended");
        let Some((on, waiting)) = self.handing.remove(&slot) else { return };
        if how.is_ok() {
            self.note_outside(slot, !on);
        }
        let reply = match how {
            Ok(()) if on => Reply::done(format!("{host} is Dormouse's again")),
            Ok(()) => Reply::done(format!(
                "{host} is the outside supervisor's: no box wakes it before \
                 `dormouse hibernate {host} --on` here"
            )),
            Err(why) => Reply::failed(why),
        };
        // Who asked may be gone.
        waiting.send(reply).ok();
    }

    fn retired(&mut self, slot: Slot) {
        self.end_refusals(slot);
        let Some(hosted) = self.hosts.remove(&slot) else { return };
        self.parts.edge.remove_route(edge_slot(slot));
        let (host, folder) = (&hosted.host, self.parts.paths.host_dir(&hosted.host));
        let reply = match self.parts.registry.remove(host) {
            Ok(()) if hosted.outside => Reply::done(format!(
                "{host} is removed here. It stays outside: its record in the store still says so, no \
                 box wakes it, and its supervisor's file stays in {}. To take it back: on the box \
                 that handed it out, `dormouse add {host} --app {}` and `dormouse hibernate {host} \
                 --on`",
                folder.display(),
                hosted.app_name
            )),
            Ok(()) if hosted.replica.is_unclean() => Reply::done(format!(
                "{host} is removed; what it wrote last is NOT in the store: it is kept in {}",
                folder.display()
            )),
            Ok(()) => Reply::done(format!("{host} is removed; its data stays")),
            Err(error) => Reply::failed(error.to_string()),
        };
        tracing::info!(host = hosted.host, "removed");
        if let Some(waiting) = self.retiring.remove(&slot) {
            // Who asked may be gone.
            waiting.send(reply).ok();
        }
    }
}

/// The same number, as the link has it.
pub(crate) const fn edge_slot(slot: Slot) -> dormouse_link::Slot {
    dormouse_link::Slot(slot.0)
}

fn note_release(entry: &Entry) {
    match entry {
        Entry::Releasing { host, .. } => tracing::info!(host = host.0, "releasing the lease"),
        Entry::Settled { host } => tracing::info!(host = host.0, "the release is definite"),
        Entry::Session { .. } => {}
    }
}

fn refusal(reason: Reason) -> Refusal {
    match reason {
        Reason::Elsewhere => Refusal::Elsewhere,
        Reason::Outside => Refusal::Held,
        Reason::StoreDown => Refusal::StoreDown,
        Reason::NoSession | Reason::Lost => Refusal::SessionExpired,
        Reason::Replica => Refusal::ReplicaDamaged,
        Reason::Database => Refusal::DatabaseUnfit,
        Reason::Disk => Refusal::WakeFailed,
        Reason::Broken => Refusal::Broken,
        Reason::Unproven => Refusal::Unproven,
        Reason::TimedOut => Refusal::WakeTimedOut,
        Reason::Leaving | Reason::Removed => Refusal::ShuttingDown,
    }
}
