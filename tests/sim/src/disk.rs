//! A box's disk: databases as sequences of writes, positions, spools, forks, journal, registry.

use std::collections::{BTreeMap, BTreeSet};

use dormouse_core::effect::Entry;
use dormouse_core::event::{Held, SessionMemo};
use dormouse_core::ids::{Generation, Host, Nonce, Run, Slot, Txid};
use dormouse_core::position::{FileId, LocalCopy, POSITION_VERSION, Position, RemoteTip};
use dormouse_core::time::{Deadline, Wall};

use crate::rng::{Rng, mix};
use crate::store::{File, Write};

/// A database file and its WAL.
#[derive(Clone, Debug)]
pub struct Database {
    /// Every committed write, in order.
    pub content: Vec<Write>,
    /// How many of them would survive a loss of power.
    pub synced: usize,
    /// How many of them are in the WAL only.
    pub wal: u64,
    /// What tells it from other files.
    pub file: FileId,
    /// It is less than its header says.
    pub damaged: bool,
}

/// One host's files.
#[derive(Clone, Debug, Default)]
pub struct Copy {
    /// The database.
    pub database: Option<Database>,
    /// The position beside it.
    pub position: Option<Position>,
    /// Nonces of uploads whose outcome may be unknown.
    pub spool: BTreeSet<(Txid, Nonce)>,
    /// The L0 that a running replica has spooled, and how much of the database it holds.
    pub unsent: Option<(File, usize)>,
    /// How much of the database the position's L0 holds, where a replica ran: its place in the WAL.
    pub mark: Option<usize>,
    /// Content of what was set aside.
    pub forks: Vec<Vec<Write>>,
}

/// A route of the registry.
#[derive(Clone, Debug)]
pub struct Route {
    /// The host.
    pub host: Host,
    /// When it must wake by itself.
    pub due: Option<Wall>,
}

/// All of it survives the activator; a crash of the box loses what was not fsynced.
#[derive(Clone, Debug, Default)]
pub struct Disk {
    /// The fsynced journal.
    pub journal: Vec<Entry>,
    /// Routes of the registry.
    pub routes: BTreeMap<Slot, Route>,
    /// Databases and what stands beside them.
    pub copies: BTreeMap<Host, Copy>,
    /// Runs that were given out.
    pub runs: u64,
    /// Leases of runs that serve. A loss of power takes them, and what is below.
    pub held: BTreeMap<Host, (Run, Held)>,
    /// The session's deadline, as last told.
    pub deadline: Option<Deadline>,
    /// Inodes and change times that were given out.
    changes: u64,
}

/// Hash of a whole history: what an L0 is built on.
#[must_use]
pub fn history(content: &[Write]) -> u64 {
    content.iter().fold(7, |hash, write| mix(hash, *write))
}

impl Disk {
    /// A host's files.
    pub fn copy(&mut self, host: &Host) -> &mut Copy {
        self.copies.entry(host.clone()).or_default()
    }

    fn change(&mut self) -> u64 {
        self.changes += 1;
        self.changes
    }

    /// Whether its position says that the copy may be ahead of the store.
    #[must_use]
    pub fn is_unclean(&self, host: &Host) -> bool {
        let position = self.copies.get(host).and_then(|copy| copy.position.as_ref());
        position.is_some_and(|position| !position.clean)
    }

    /// A look at the local copy.
    #[must_use]
    pub fn inspect(&self, host: &Host) -> LocalCopy {
        let Some(copy) = self.copies.get(host) else { return LocalCopy::default() };
        LocalCopy {
            file: copy.database.as_ref().map(|database| database.file),
            position: copy.position.clone(),
            wal_bytes: copy.database.as_ref().map_or(0, |database| database.wal),
            spool: copy.spool.iter().map(|(_, nonce)| nonce.clone()).collect(),
            damaged: copy.database.as_ref().is_some_and(|database| database.damaged),
        }
    }

    /// A new file with this content, under the database's name; everything in it is fsynced.
    pub fn place(&mut self, host: &Host, content: Vec<Write>) {
        let inode = self.change();
        let size = u64::try_from(content.len()).unwrap_or(0);
        let synced = content.len();
        let file = FileId { inode, size, ctime_ns: inode };
        self.copy(host).database = Some(Database { content, synced, wal: 0, file, damaged: false });
    }

    /// The app commits.
    pub fn commit(&mut self, host: &Host, write: Write) {
        if self.copy(host).database.is_none() {
            self.place(host, Vec::new());
        }
        if let Some(database) = &mut self.copy(host).database {
            database.content.push(write);
            database.wal += 1;
        }
    }

    /// The WAL moves into the file, fsynced.
    pub fn checkpoint(&mut self, host: &Host) {
        let ctime_ns = self.change();
        if let Some(database) = &mut self.copy(host).database {
            database.wal = 0;
            database.synced = database.content.len();
            database.file.size = u64::try_from(database.content.len()).unwrap_or(0);
            database.file.ctime_ns = ctime_ns;
        }
    }

    /// Renames the database away and forgets its position.
    pub fn set_aside(&mut self, host: &Host) {
        let copy = self.copy(host);
        if let Some(database) = copy.database.take() {
            copy.forks.push(database.content);
        }
        copy.position = None;
    }

    /// Writes the position of the file as it is now.
    pub fn note(
        &mut self,
        host: &Host,
        generation: Generation,
        tip: Option<&RemoteTip>,
        clean: bool,
    ) {
        let copy = self.copy(host);
        let none = FileId { inode: 0, size: 0, ctime_ns: 0 };
        copy.position = Some(Position {
            version: POSITION_VERSION,
            generation,
            txid: tip.map_or(Txid(0), |tip| tip.txid),
            etag: tip.and_then(|tip| tip.etag.clone()),
            file: copy.database.as_ref().map_or(none, |database| database.file),
            page_count: 1,
            page_size: 512,
            clean,
        });
    }

    /// Keeps a due time in the registry.
    pub fn record_due(&mut self, slot: Slot, due: Option<Wall>) {
        if let Some(route) = self.routes.get_mut(&slot) {
            route.due = due;
        }
    }

    /// A run number that was never given out here.
    pub const fn next_run(&mut self) -> Run {
        self.runs += 1;
        Run(self.runs)
    }

    /// What the journal remembers.
    #[must_use]
    pub fn memory(&self) -> (Option<SessionMemo>, BTreeMap<Host, Nonce>) {
        let mut session: Option<SessionMemo> = None;
        let mut releasing = BTreeMap::new();
        for entry in &self.journal {
            match entry {
                Entry::Session { epoch, base } => match &mut session {
                    Some(memo) if memo.epoch == *epoch => memo.bases.push(base.clone()),
                    other => {
                        let bases = vec![base.clone()];
                        *other = Some(SessionMemo { epoch: *epoch, bases, deadline: None });
                    }
                },
                Entry::Releasing { host, nonce } => {
                    releasing.insert(host.clone(), nonce.clone());
                }
                Entry::Settled { host } => {
                    releasing.remove(host);
                }
            }
        }
        if let Some(memo) = &mut session {
            memo.deadline = self.deadline;
        }
        (session, releasing)
    }

    /// Each database that has a position in its replica ends too early; what it loses is returned.
    pub fn cut_off(&mut self, rng: &mut Rng) -> Vec<Write> {
        let mut lost = Vec::new();
        let ctime_ns = self.change();
        for copy in self.copies.values_mut() {
            let is_replicated = copy.position.as_ref().is_some_and(|p| p.txid > Txid(0));
            let Some(database) = copy.database.as_mut().filter(|_| is_replicated) else { continue };
            let kept = rng.index(database.content.len() + 1);
            lost.extend(database.content.drain(kept..));
            database.synced = kept;
            database.wal = 0;
            database.file.ctime_ns = ctime_ns;
            database.damaged = true;
        }
        lost
    }

    /// Power goes: of each database some suffix that was not fsynced is lost, and is returned.
    pub fn lose_power(&mut self, rng: &mut Rng) -> Vec<Write> {
        let mut lost = Vec::new();
        self.held.clear();
        self.deadline = None;
        for copy in self.copies.values_mut() {
            copy.unsent = None;
            copy.mark = None;
            let Some(database) = &mut copy.database else { continue };
            let unsynced = database.content.len().saturating_sub(database.synced);
            let kept = database.synced + rng.index(unsynced + 1);
            lost.extend(database.content.drain(kept..));
            database.synced = kept;
        }
        lost
    }
}
