//! A box's guard: a process that outlives the activator, and kills at the session's deadline.

use dormouse_core::time::Deadline;

use crate::clock::{MS, Time};
use crate::instances::InstanceId;
use crate::sabotage::Sabotage;
use crate::world::{BoxIndex, Item, World};

/// What a guard knows.
#[derive(Clone, Debug, Default)]
pub struct Guard {
    deadline: Option<Deadline>,
    /// An earlier look that is still on its way is of no interest.
    stamp: u64,
}

impl Guard {
    /// The box has lost its power: there is nothing to be killed.
    pub const fn rest(&mut self) {
        self.deadline = None;
        self.stamp += 1;
    }
}

/// Between kills past the deadline: it goes on killing.
const AGAIN: Time = 200 * MS;

impl World {
    /// The table says so.
    pub fn guard_until(&mut self, b: BoxIndex, deadline: Deadline) {
        let guard = &mut self.boxes[b].guard;
        guard.deadline = Some(deadline);
        guard.stamp += 1;
        let stamp = guard.stamp;
        self.watch(b, stamp);
    }

    fn watch(&mut self, b: BoxIndex, stamp: u64) {
        let Some(deadline) = self.boxes[b].guard.deadline else { return };
        let left = deadline.left(self.boxes[b].clock.now(self.time)).0;
        // The slowest clock needs a little longer; REALTIME counts in milliseconds.
        self.after(left + left / 1000 + MS, Item::Guard(b, stamp));
    }

    /// Its timer: kills whatever runs, if the deadline has passed.
    pub fn guard(&mut self, b: BoxIndex, stamp: u64) {
        let Some(deadline) = self.boxes[b].guard.deadline else { return };
        if self.boxes[b].guard.stamp != stamp || !self.boxes[b].up {
            return;
        }
        if !deadline.passed(self.boxes[b].clock.now(self.time)) {
            return self.watch(b, stamp);
        }
        if self.breaks(Sabotage::GuardOmitted) {
            return;
        }
        let ids: Vec<InstanceId> =
            self.instances.iter().filter(|(_, i)| i.b == b).map(|(id, _)| *id).collect();
        if !ids.is_empty() {
            self.tell(|| format!("box{b}: the guard kills"));
            self.ledger.count("guarded");
            self.kill_instances(&ids);
        }
        self.after(AGAIN, Item::Guard(b, stamp));
    }
}
