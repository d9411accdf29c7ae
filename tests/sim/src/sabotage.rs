//! Deliberate breaks of one rule each, all outside the core: what the checkers must notice.

/// A rule that the simulated store, driver or proxy breaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Sabotage {
    /// A lease PUT without an answer is taken as done, and never sent.
    LeaseAssumed,
    /// The store ignores `If-Match` on host records.
    HostMatchIgnored,
    /// The store ignores `If-Match` on session records.
    SessionMatchIgnored,
    /// A failed condition on a record is taken as a success, whoever wrote it.
    NonceUnchecked,
    /// A lease is taken with the generation that it had.
    GenerationKept,
    /// The store ignores `If-None-Match` on L0 files.
    NoneMatchIgnored,
    /// An upload without an answer is reported as durable.
    DurableAssumed,
    /// WAL frames are spooled before they are fsynced.
    SpoolUnsynced,
    /// A stop is answered as proven at once, when the box leaves.
    ReleaseUnproven,
    /// A final sync with an unknown upload says clean, when the box leaves.
    SaveUnknown,
    /// What an earlier activator left running is not looked for.
    LeftoverIgnored,
    /// A proxy drops a waiter when it is refused.
    WaiterForgotten,
    /// Posts of proxies never arrive.
    PostsDropped,
    /// Due times are not kept.
    DueForgotten,
    /// Requests go to an earlier run.
    OldRunServed,
    /// A kill is answered as proven at once.
    ProofAssumed,
    /// A fence is answered as written, and never sent.
    FenceOmitted,
    /// The local copy is always said to be current.
    WarmCacheTrusted,
    /// The newest file is always said to be one that this disk knows of.
    NewestAssumedOwn,
    /// A restore overwrites the local file instead of setting it aside.
    ForkDiscarded,
    /// Snapshots cover fences, which are deleted; and uploads count after the session's loss.
    FencesDeleted,
    /// A snapshot holds more than was acknowledged.
    SnapshotUnacknowledged,
    /// The next file is sent before the last one is definite.
    TwoInFlight,
    /// With automatic takeover: nobody kills at the deadline but the activator.
    GuardOmitted,
    /// With automatic takeover: a box acts, and waits, without the margin.
    MarginOmitted,
    /// A dead session is not fenced before its hosts are taken.
    SessionUnfenced,
    /// A restored file gets name and clean position before its fence is definite.
    PositionBeforeFence,
    /// A restore that ends with a snapshot gives the snapshot's tag as that of the L0.
    SnapshotTagTaken,
    /// A database that was cut off counts as whole.
    DamageUnseen,
    /// A replica that goes on does not send what was spooled before.
    SpoolForgotten,
}

/// A sabotage, its name, and the invariants whose checker must trip.
pub const SABOTAGES: [(Sabotage, &str, &[u8]); 30] = [
    (Sabotage::LeaseAssumed, "lease-assumed", &[1]),
    (Sabotage::HostMatchIgnored, "host-match-ignored", &[1, 2]),
    (Sabotage::SessionMatchIgnored, "session-match-ignored", &[1, 2]),
    (Sabotage::NonceUnchecked, "nonce-unchecked", &[1, 2]),
    (Sabotage::GenerationKept, "generation-kept", &[2]),
    (Sabotage::NoneMatchIgnored, "none-match-ignored", &[3]),
    (Sabotage::DurableAssumed, "durable-assumed", &[3]),
    (Sabotage::SpoolUnsynced, "spool-unsynced", &[3, 10]),
    (Sabotage::ReleaseUnproven, "release-unproven", &[4]),
    (Sabotage::SaveUnknown, "save-unknown", &[4]),
    (Sabotage::LeftoverIgnored, "leftover-ignored", &[2, 9]),
    (Sabotage::WaiterForgotten, "waiter-forgotten", &[5]),
    (Sabotage::PostsDropped, "posts-dropped", &[7]),
    (Sabotage::DueForgotten, "due-forgotten", &[7]),
    (Sabotage::OldRunServed, "old-run-served", &[8]),
    (Sabotage::ProofAssumed, "proof-assumed", &[9]),
    (Sabotage::FenceOmitted, "fence-omitted", &[10]),
    (Sabotage::WarmCacheTrusted, "warm-cache-trusted", &[3, 10]),
    (Sabotage::NewestAssumedOwn, "newest-assumed-own", &[3, 10]),
    (Sabotage::ForkDiscarded, "fork-discarded", &[10]),
    (Sabotage::FencesDeleted, "fences-deleted", &[3]),
    (Sabotage::SnapshotUnacknowledged, "snapshot-unacknowledged", &[3]),
    (Sabotage::TwoInFlight, "two-in-flight", &[3]),
    (Sabotage::GuardOmitted, "guard-omitted", &[1, 2]),
    (Sabotage::MarginOmitted, "margin-omitted", &[1, 2]),
    (Sabotage::SessionUnfenced, "session-unfenced", &[1, 2]),
    (Sabotage::PositionBeforeFence, "position-before-fence", &[3, 10]),
    (Sabotage::SnapshotTagTaken, "snapshot-tag-taken", &[10]),
    (Sabotage::DamageUnseen, "damage-unseen", &[3, 10]),
    (Sabotage::SpoolForgotten, "spool-forgotten", &[3, 10]),
];

impl Sabotage {
    /// By its name.
    #[must_use]
    pub fn named(name: &str) -> Option<Self> {
        SABOTAGES.iter().find(|(_, known, _)| *known == name).map(|(sabotage, _, _)| *sabotage)
    }
}
