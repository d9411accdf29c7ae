//! A host as people and tools see it, and when it wants to be ticked.

use alloc::string::String;

use serde::Serialize;

use super::{CopyStep, HostEntry, Lease, LeaseStep, ParkStep, Purpose, State, StopStep};
use crate::ids::{Generation, Host, Run, Slot};
use crate::session::Session;
use crate::time::{Mono, Now, Wall};

/// A host as people and tools see it.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize)]
pub struct HostView {
    /// Its slot.
    pub slot: Slot,
    /// Its name.
    pub host: Host,
    /// Its state: one lower-case word.
    pub state: &'static str,
    /// The run that serves, or is being stopped.
    pub run: Option<Run>,
    /// The lease's generation, while this session owns the host.
    pub generation: Option<Generation>,
    /// When it must wake by itself.
    pub due: Option<Wall>,
    /// The local copy may be ahead of the store although the host sleeps.
    pub unsynced: bool,
    /// Why its last wake or sleep did not go well.
    pub problem: Option<String>,
}

impl HostView {
    /// Every word that `state` can be.
    pub const STATES: [&str; 15] = [
        "asleep",
        "leasing",
        "restoring",
        "starting",
        "attaching",
        "resuming",
        "awake",
        "frozen",
        "stopping",
        "saving",
        "parking",
        "fenced",
        "unproven",
        "backoff",
        "syncing",
    ];
}

impl State {
    /// The state's word.
    pub(crate) const fn word(&self) -> &'static str {
        match self {
            Self::Asleep => "asleep",
            Self::Leasing { .. } => "leasing",
            Self::Restoring { .. } => "restoring",
            Self::Opening { .. } | Self::Starting { .. } => "starting",
            Self::Attaching { .. } => "attaching",
            Self::Resuming { .. } => "resuming",
            Self::Awake { .. } => "awake",
            Self::Freezing { .. } | Self::Frozen { .. } | Self::Thawing { .. } => "frozen",
            Self::Stopping { .. } => "stopping",
            Self::Saving { .. } => "saving",
            Self::Parking { .. } => "parking",
            Self::Fenced { .. } => "fenced",
            Self::Unproven { .. } => "unproven",
            Self::Backoff { .. } => "backoff",
        }
    }
}

impl HostEntry {
    /// Its run, when one serves or is being stopped.
    pub(crate) const fn run(&self) -> Option<Run> {
        match &self.state {
            State::Awake { run, .. }
            | State::Attaching { run, .. }
            | State::Resuming { run, .. }
            | State::Freezing { run }
            | State::Frozen { run, .. }
            | State::Thawing { run } => Some(*run),
            State::Stopping { run, .. } => *run,
            State::Asleep
            | State::Leasing { .. }
            | State::Restoring { .. }
            | State::Opening { .. }
            | State::Starting { .. }
            | State::Saving { .. }
            | State::Parking { .. }
            | State::Fenced { .. }
            | State::Unproven { .. }
            | State::Backoff { .. } => None,
        }
    }

    /// For people and tools.
    pub(crate) fn view(&self) -> HostView {
        HostView {
            slot: self.slot,
            host: self.host.clone(),
            state: match (&self.state, self.purpose) {
                (
                    State::Leasing { .. } | State::Restoring { .. } | State::Opening { .. },
                    Purpose::Sync,
                ) => "syncing",
                (state, _) => state.word(),
            },
            run: self.run(),
            generation: match &self.lease {
                Lease::Owned { record, .. } => Some(record.generation),
                Lease::None | Lease::Remembered { .. } => None,
            },
            due: self.due,
            unsynced: self.unsynced.is_some(),
            problem: self.last_problem.clone(),
        }
    }

    /// When it wants to be ticked; `None` while it waits for an answer alone.
    pub(crate) fn next_due(&self, session: &Session, now: Now) -> Option<Mono> {
        match &self.state {
            State::Leasing { wake, step } => Some(match step {
                LeaseStep::Pausing { until, .. } | LeaseStep::AskingAgain { until, .. } => {
                    (*until).min(wake.deadline)
                }
                LeaseStep::AwaitSession => {
                    let tells = session.trouble_at();
                    tells.map_or(wake.deadline, |at| at.min(wake.deadline))
                }
                LeaseStep::Reading
                | LeaseStep::OwnerSession { .. }
                | LeaseStep::Overthrowing { .. }
                | LeaseStep::Putting { .. }
                | LeaseStep::Checking { .. } => wake.deadline,
            }),
            State::Restoring { wake, step } => Some(match step {
                CopyStep::Fencing { put } | CopyStep::Imaging { put } => match put.until {
                    // A pause that waits for the session need not be polled before it is live.
                    Some(until) if session.may_write(now) => until.min(wake.deadline),
                    Some(_) | None => wake.deadline,
                },
                CopyStep::Inspecting
                | CopyStep::Listing { .. }
                | CopyStep::Fetching { .. }
                | CopyStep::Applying
                | CopyStep::Relisting
                | CopyStep::Adopting { .. }
                | CopyStep::Forking { .. } => wake.deadline,
            }),
            State::Opening { wake }
            | State::Starting { wake, .. }
            | State::Attaching { wake, .. } => Some(wake.deadline),
            State::Frozen { since, .. } => Some(self.frozen_until(*since)),
            State::Stopping { step, .. } => match step {
                StopStep::Taking { .. } => None,
                StopStep::AskingAwake { until }
                | StopStep::Asking { until }
                | StopStep::Terminating { until }
                | StopStep::Killing { until } => Some(*until),
            },
            State::Parking { step } => match step {
                ParkStep::Pausing { until, .. } => Some(*until),
                ParkStep::Putting { .. } | ParkStep::Checking { .. } => None,
            },
            State::Resuming { until, .. }
            | State::Fenced { until, .. }
            | State::Unproven { until, .. }
            | State::Backoff { until, .. } => Some(*until),
            // Behind the store's back nothing stays: as soon as it may be written to.
            State::Asleep if session.may_write(now) => self.unsynced,
            State::Asleep
            | State::Awake { .. }
            | State::Freezing { .. }
            | State::Thawing { .. }
            | State::Saving { .. } => None,
        }
    }
}
