//! `dormouse wake` and `dormouse sleep`: answered by what came of it.

use dormouse_core::event::{Cause, Event};
use dormouse_core::ids::{BoxId, Host, Slot};
use dormouse_core::record::{HostRecord, HostState};
use tokio::sync::oneshot;

use super::commands::{Goal, HostStatus, Reply, Wait};
use super::driver::Driver;
use super::outside::OUTSIDE;
use dormouse_core::effect::RecordKey;
use dormouse_core::event::Got;

/// Whether a host in this state is not on its way to be awake.
fn has_given_up(state: &str) -> bool {
    ["asleep", "backoff", "unproven", OUTSIDE].contains(&state)
}

/// What somebody hears who asked for a wake; nothing while it is under way.
pub(crate) fn woken(status: &HostStatus) -> Option<Reply> {
    if status.state == "awake" {
        return Some(Reply::json(status));
    }
    let HostStatus { host, state, problem, .. } = status;
    has_given_up(state).then(|| {
        let why = problem.as_deref().unwrap_or("the wake was called off; try again");
        Reply::refused(format!("{host} was not woken, it is {state}: {why}"))
    })
}

/// What somebody hears who asked for a sleep after a run; nothing while it is under way.
pub(crate) fn rested(status: &HostStatus, after: Option<u64>) -> Option<Reply> {
    let HostStatus { host, state, problem, .. } = status;
    match state.as_str() {
        "stopping" | "saving" | "fenced" => None,
        "awake" | "frozen" if status.run == after => None,
        "unproven" => {
            let why = problem.as_deref().unwrap_or("it is killed again and again");
            Some(Reply::refused(format!("{host} is not asleep, it is unproven: {why}")))
        }
        // Asleep; or on its way to be awake again, for somebody asked for it meanwhile.
        _ => Some(Reply::json(status)),
    }
}

/// Why a host that sleeps here is not asleep for good: where it is.
fn runs_where(got: Got, own: &BoxId, host: &str) -> Option<String> {
    // A record that cannot be read says nothing; the host sleeps here.
    let Got::Found { body, .. } = got else { return None };
    let record = HostRecord::decode(&body).ok()?;
    let name = record.owner.name;
    match record.state {
        HostState::Released => None,
        HostState::Owned if record.id == *own => None,
        HostState::Owned => {
            Some(format!("{host} is not here: box {name} owns it; put it to sleep there"))
        }
        HostState::Outside => {
            Some(format!("{host} is outside: a supervisor on box {name} runs it, and stops it"))
        }
    }
}

impl Driver {
    pub(crate) fn wake_by_hand(&mut self, slot: Slot, reply: oneshot::Sender<Reply>) {
        // Listed before: what comes of it may be known at once.
        self.waits.push(Wait { slot, goal: Goal::Awake, reply });
        self.step(Event::Requested(slot, Cause::Operator));
    }

    pub(crate) fn sleep_by_hand(&mut self, slot: Slot, wait: bool, reply: oneshot::Sender<Reply>) {
        self.step(Event::Rest(slot));
        let Some(status) = self.host_status(slot) else { return };
        let done = Reply::json(&status);
        if !has_given_up(&status.state) && wait {
            self.waits.push(Wait { slot, goal: Goal::Asleep { after: status.run }, reply });
            return self.answer_waits();
        }
        if status.generation.is_some() || !has_given_up(&status.state) {
            // Who asked may be gone.
            reply.send(done).ok();
            return;
        }
        // Nothing of it runs here. Does another box run it? Its record alone says.
        let (records, own) = (self.parts.records.clone(), self.parts.settings.identity.id.clone());
        tokio::spawn(async move {
            let got = records.get(&RecordKey::Host(Host(status.host.clone()))).await;
            let elsewhere = runs_where(got, &own, &status.host);
            reply.send(elsewhere.map_or(done, Reply::refused)).ok();
        });
    }
}
