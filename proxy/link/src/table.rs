//! The wake table's memory: the activator's words, and one area of counters a proxy process.
//!
//! Two kinds of memfd, both sealed against shrinking and growing, both sparse:
//! - *words*: mode 0600; a proxy gets a descriptor that can only be read. A head page, then one
//!   `u64` a slot: 131,072 slots are 1 MiB.
//! - *area*: writable by one proxy process. A head page, then 64 bytes a slot: 131,072 slots are
//!   8 MiB of address space; memory is used by pages of 64 slots that were touched.

use std::ffi::CStr;
use std::fmt;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, OFlag, SealFlag, fcntl, open};
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::stat::{Mode, fchmod, fstat};
use nix::unistd::ftruncate;
use serde::{Deserialize, Serialize};

use crate::map::{Access, Mapping};
use crate::protocol::{Counters, OwnWord, ReadWord};
use crate::word::Slot;

/// Slots of a table unless the activator chooses otherwise: more hosts than one box's disk holds.
pub const SLOTS_DEFAULT: u32 = 131_072;
/// The most slots a table may have: 128 MiB of words, 1 GiB of address space an area.
pub const SLOTS_MAX: u32 = 16 * 1024 * 1024;
/// Layout of both kinds; raised whenever it changes.
pub const ABI: u32 = 1;

const WORDS_MAGIC: u64 = u64::from_le_bytes(*b"DMSEWORD");
const AREA_MAGIC: u64 = u64::from_le_bytes(*b"DMSEAREA");
const HEAD_BYTES: usize = 4096;
const HEAD_FIELDS: usize = 8;
// Fields of the head page, each a u64.
const MAGIC: usize = 0;
const SHAPE: usize = 1; // abi << 32 | slots
const TABLE_ID: usize = 2;
const DEADLINE_BOOT: usize = 3; // words only
const DEADLINE_REAL: usize = 4; // words only
const PID: usize = 3; // area only
const START_TIME: usize = 4; // area only

/// Names one table; random, so that no two are ever taken for each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct TableId(pub u64);

impl fmt::Display for TableId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

/// One process for all time: a pid alone is used again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct ProcessId {
    /// Process id.
    pub pid: u32,
    /// Field 22 of `/proc/PID/stat`: start time in clock ticks since boot.
    pub start_time: u64,
}

impl ProcessId {
    /// Reads the start time of a live process from `/proc`.
    pub fn of(pid: u32) -> std::io::Result<Self> {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat"))?;
        // The name in parentheses may hold anything; the fields after the last ')' are numbers.
        let start_time = stat
            .rsplit_once(')')
            .and_then(|(_, rest)| rest.split_ascii_whitespace().nth(19))
            .and_then(|field| field.parse().ok())
            .ok_or_else(|| std::io::Error::other(format!("/proc/{pid}/stat has no start time")))?;
        Ok(Self { pid, start_time })
    }
}

/// When the session ends, on both clocks; past either of them nothing is sent to any instance.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Deadline {
    /// `CLOCK_BOOTTIME`, nanoseconds.
    pub boottime_ns: u64,
    /// `CLOCK_REALTIME`, nanoseconds since 1970.
    pub realtime_ns: u64,
}

/// What can be wrong with a table.
#[derive(Debug, thiserror::Error)]
pub enum TableError {
    /// A system call failed.
    #[error("wake table: {call}: {errno}")]
    System {
        /// The call that failed.
        call: &'static str,
        /// Its error.
        errno: Errno,
    },
    /// The descriptor is no wake table of this kind.
    #[error("wake table: this is no {kind} file (magic {found:#018x})")]
    Magic {
        /// What was expected.
        kind: &'static str,
        /// What stands there.
        found: u64,
    },
    /// Made by another version.
    #[error("wake table: layout {found}, this program knows {ABI}")]
    Abi {
        /// The layout's number.
        found: u32,
    },
    /// The file's size and its head disagree, or the number of slots is out of range.
    #[error("wake table: {bytes} bytes for {slots} slots (1..={SLOTS_MAX})")]
    Size {
        /// Length of the file.
        bytes: u64,
        /// Slots that its head or the caller names.
        slots: u32,
    },
    /// The file could be shrunk under its readers.
    #[error("wake table: not sealed against shrinking")]
    NotSealed,
    /// Words and area belong to different tables.
    #[error("wake table: the words are of table {words}, the area of table {area}")]
    Mixed {
        /// Table of the words.
        words: TableId,
        /// Table of the area.
        area: TableId,
    },
}

fn system(call: &'static str) -> impl FnOnce(Errno) -> TableError {
    move |errno| TableError::System { call, errno }
}

#[derive(Clone, Copy)]
enum Kind {
    Words,
    Area,
}

impl Kind {
    const fn magic(self) -> u64 {
        match self {
            Self::Words => WORDS_MAGIC,
            Self::Area => AREA_MAGIC,
        }
    }

    const fn text(self) -> &'static str {
        match self {
            Self::Words => "words",
            Self::Area => "area",
        }
    }

    const fn slot_bytes(self) -> usize {
        match self {
            Self::Words => size_of::<AtomicU64>(),
            Self::Area => size_of::<Counters>(),
        }
    }

    fn bytes(self, slots: u32) -> Result<usize, TableError> {
        if slots == 0 || slots > SLOTS_MAX {
            return Err(TableError::Size { bytes: 0, slots });
        }
        Ok(HEAD_BYTES + Slot(slots).index() * self.slot_bytes())
    }
}

/// A mapped file of one kind, its head checked.
#[derive(Debug)]
struct File {
    map: Mapping,
    slots: u32,
}

impl File {
    fn head(&self) -> &[AtomicU64] {
        self.map.array(0, HEAD_FIELDS)
    }

    fn field(&self, field: usize) -> u64 {
        self.head()[field].load(Ordering::Acquire)
    }

    fn table_id(&self) -> TableId {
        TableId(self.field(TABLE_ID))
    }

    fn words(&self) -> &[AtomicU64] {
        self.map.array(HEAD_BYTES, Slot(self.slots).index())
    }

    fn counters(&self) -> &[Counters] {
        self.map.array(HEAD_BYTES, Slot(self.slots).index())
    }

    fn create(
        kind: Kind,
        name: &CStr,
        slots: u32,
        table: TableId,
    ) -> Result<(Self, OwnedFd), TableError> {
        let bytes = kind.bytes(slots)?;
        let flags = MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING;
        let fd = memfd_create(name, flags).map_err(system("memfd_create"))?;
        // Anyone who can open /proc/PID/fd could else reopen a read-only descriptor for writing.
        fchmod(&fd, Mode::S_IRUSR | Mode::S_IWUSR).map_err(system("fchmod"))?;
        let length = i64::try_from(bytes).unwrap_or(i64::MAX);
        ftruncate(&fd, length).map_err(system("ftruncate"))?;
        fcntl(&fd, FcntlArg::F_ADD_SEALS(seals())).map_err(system("F_ADD_SEALS"))?;
        let map = Mapping::new(fd.as_fd(), bytes, Access::Write).map_err(system("mmap"))?;
        let file = Self { map, slots };
        file.set(TABLE_ID, table.0);
        file.set(SHAPE, (u64::from(ABI) << 32) | u64::from(slots));
        file.set(MAGIC, kind.magic());
        Ok((file, fd))
    }

    fn set(&self, field: usize, value: u64) {
        self.head()[field].store(value, Ordering::SeqCst);
    }

    fn open(kind: Kind, fd: BorrowedFd<'_>, access: Access) -> Result<Self, TableError> {
        let found = fcntl(fd, FcntlArg::F_GET_SEALS).map_err(system("F_GET_SEALS"))?;
        if !SealFlag::from_bits_truncate(found).contains(SealFlag::F_SEAL_SHRINK) {
            return Err(TableError::NotSealed);
        }
        let size = fstat(fd).map_err(system("fstat"))?.st_size;
        let bytes = u64::try_from(size).unwrap_or(0);
        let length = usize::try_from(size).unwrap_or(0);
        if length < HEAD_BYTES {
            return Err(TableError::Size { bytes, slots: 0 });
        }
        let map = Mapping::new(fd, length, access).map_err(system("mmap"))?;
        let mut file = Self { map, slots: 0 };
        let magic = file.field(MAGIC);
        if magic != kind.magic() {
            return Err(TableError::Magic { kind: kind.text(), found: magic });
        }
        let shape = file.field(SHAPE);
        let abi = u32::try_from(shape >> 32).unwrap_or(0);
        if abi != ABI {
            return Err(TableError::Abi { found: abi });
        }
        let slots = u32::try_from(shape & u64::from(u32::MAX)).unwrap_or(0);
        if kind.bytes(slots)? != length {
            return Err(TableError::Size { bytes, slots });
        }
        file.slots = slots;
        Ok(file)
    }
}

fn seals() -> SealFlag {
    SealFlag::F_SEAL_SHRINK | SealFlag::F_SEAL_GROW | SealFlag::F_SEAL_SEAL
}

/// The words, as their owner has them.
#[derive(Debug)]
pub struct WordsOwner {
    file: File,
    fd: OwnedFd,
}

impl WordsOwner {
    /// A new table; every slot is asleep, and there is no session deadline.
    pub fn create(slots: u32, table: TableId) -> Result<Self, TableError> {
        let (file, fd) = File::create(Kind::Words, c"dormouse-words", slots, table)?;
        Ok(Self { file, fd })
    }

    /// A new descriptor of the words that can only be read: for a proxy.
    pub fn reader_fd(&self) -> Result<OwnedFd, TableError> {
        let path = format!("/proc/self/fd/{}", self.fd.as_raw_fd());
        open(path.as_str(), OFlag::O_RDONLY | OFlag::O_CLOEXEC, Mode::empty())
            .map_err(system("open read-only"))
    }

    /// The table's name.
    #[must_use]
    pub fn table_id(&self) -> TableId {
        self.file.table_id()
    }

    /// How many slots there are.
    #[must_use]
    pub fn slots(&self) -> u32 {
        self.file.slots
    }

    /// A slot's word; none beyond the table.
    #[must_use]
    pub fn word(&self, slot: Slot) -> Option<OwnWord<'_>> {
        self.file.words().get(slot.index()).map(OwnWord::over)
    }

    /// Publishes the session's deadline; `None` = no deadline (manual takeover).
    pub fn set_deadline(&self, deadline: Option<Deadline>) {
        let none = Deadline { boottime_ns: 0, realtime_ns: 0 };
        let Deadline { boottime_ns, realtime_ns } = deadline.unwrap_or(none);
        self.file.set(DEADLINE_BOOT, boottime_ns);
        self.file.set(DEADLINE_REAL, realtime_ns);
    }
}

/// One proxy process's area, as the activator has it.
#[derive(Debug)]
pub struct AreaOwner {
    file: File,
    fd: OwnedFd,
}

impl AreaOwner {
    /// A new area of a table for one proxy process.
    pub fn create(slots: u32, table: TableId, process: ProcessId) -> Result<Self, TableError> {
        let (file, fd) = File::create(Kind::Area, c"dormouse-area", slots, table)?;
        file.set(PID, u64::from(process.pid));
        file.set(START_TIME, process.start_time);
        Ok(Self { file, fd })
    }

    /// The descriptor to hand to that proxy.
    #[must_use]
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// The process that this area is for.
    #[must_use]
    pub fn process(&self) -> ProcessId {
        let pid = u32::try_from(self.file.field(PID)).unwrap_or(0);
        ProcessId { pid, start_time: self.file.field(START_TIME) }
    }

    /// A slot's counters; none beyond the table.
    #[must_use]
    pub fn counters(&self, slot: Slot) -> Option<&Counters> {
        self.file.counters().get(slot.index())
    }
}

/// What a proxy sees: the words to read, its own area to write.
#[derive(Debug)]
pub struct TableView {
    words: File,
    area: File,
}

impl TableView {
    /// Maps and checks what came over the link.
    pub fn map(words: BorrowedFd<'_>, area: BorrowedFd<'_>) -> Result<Self, TableError> {
        let words = File::open(Kind::Words, words, Access::Read)?;
        let area = File::open(Kind::Area, area, Access::Write)?;
        if words.table_id() != area.table_id() || words.slots != area.slots {
            return Err(TableError::Mixed { words: words.table_id(), area: area.table_id() });
        }
        Ok(Self { words, area })
    }

    /// The table's name.
    #[must_use]
    pub fn table_id(&self) -> TableId {
        self.words.table_id()
    }

    /// How many slots there are.
    #[must_use]
    pub fn slots(&self) -> u32 {
        self.words.slots
    }

    /// A slot's word; none beyond the table.
    #[must_use]
    #[inline]
    pub fn word(&self, slot: Slot) -> Option<ReadWord<'_>> {
        // Loads of 8 bytes from read-only memory are allowed by std on every target we build for.
        self.words.words().get(slot.index()).map(ReadWord::over)
    }

    /// This process's counters of a slot; none beyond the table.
    #[must_use]
    #[inline]
    pub fn counters(&self, slot: Slot) -> Option<&Counters> {
        self.area.counters().get(slot.index())
    }

    /// The session's deadline, if it has one.
    #[must_use]
    #[inline]
    pub fn deadline(&self) -> Option<Deadline> {
        let boottime_ns = self.words.field(DEADLINE_BOOT);
        let realtime_ns = self.words.field(DEADLINE_REAL);
        (boottime_ns != 0 || realtime_ns != 0).then_some(Deadline { boottime_ns, realtime_ns })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::protocol::{Entry, enter, publish};
    use crate::word::{RunNumber, Word};

    const TABLE: TableId = TableId(0xfeed);
    const ME: ProcessId = ProcessId { pid: 1, start_time: 2 };

    fn pair(slots: u32) -> (WordsOwner, AreaOwner, TableView) {
        let words = WordsOwner::create(slots, TABLE).unwrap();
        let area = AreaOwner::create(slots, TABLE, ME).unwrap();
        let view = TableView::map(words.reader_fd().unwrap().as_fd(), area.fd()).unwrap();
        (words, area, view)
    }

    #[test]
    fn both_sides_see_the_same_slot() {
        let (words, area, view) = pair(SLOTS_DEFAULT);
        let slot = Slot(SLOTS_DEFAULT - 1);
        let awake = Word::Awake { run: RunNumber(3) };
        publish(words.word(slot).unwrap(), Word::Asleep, awake).unwrap();
        let entry = enter(view.word(slot).unwrap(), view.counters(slot).unwrap());
        assert_eq!(entry, Entry::Counted { run: RunNumber(3) });
        assert_eq!(area.counters(slot).unwrap().inflight(), 1);
        assert!(view.word(Slot(SLOTS_DEFAULT)).is_none());
        assert_eq!((view.table_id(), area.process()), (TABLE, ME));
        assert_eq!(view.deadline(), None);
        let deadline = Deadline { boottime_ns: 5, realtime_ns: 6 };
        words.set_deadline(Some(deadline));
        assert_eq!(view.deadline(), Some(deadline));
    }

    #[test]
    fn a_table_can_be_neither_shrunk_nor_grown() {
        let (words, area, _) = pair(8);
        assert_eq!(ftruncate(&words.fd, 4096), Err(Errno::EPERM));
        assert_eq!(ftruncate(&area.fd, 1 << 20), Err(Errno::EPERM));
    }

    #[test]
    fn a_reader_cannot_map_the_words_for_writing() {
        let (words, _, _) = pair(8);
        let reader = words.reader_fd().unwrap();
        let denied = Mapping::new(reader.as_fd(), HEAD_BYTES, Access::Write);
        assert_eq!(denied.err(), Some(Errno::EACCES));
        assert_eq!(fstat(&reader).unwrap().st_mode & 0o777, 0o600);
    }

    #[test]
    fn a_wrong_file_is_named() {
        let (words, area, _) = pair(8);
        let swapped = TableView::map(area.fd(), words.reader_fd().unwrap().as_fd());
        assert!(matches!(swapped, Err(TableError::Magic { kind: "words", .. })));
        words.file.set(SHAPE, (9 << 32) | 8);
        let reader = words.reader_fd().unwrap();
        let newer = TableView::map(reader.as_fd(), area.fd());
        assert!(matches!(newer, Err(TableError::Abi { found: 9 })));
        words.file.set(SHAPE, (u64::from(ABI) << 32) | 9);
        let longer = TableView::map(reader.as_fd(), area.fd());
        assert!(matches!(longer, Err(TableError::Size { slots: 9, .. })));
        words.file.set(SHAPE, (u64::from(ABI) << 32) | 8);
        words.file.set(TABLE_ID, 1);
        let mixed = TableView::map(reader.as_fd(), area.fd());
        assert!(matches!(mixed, Err(TableError::Mixed { .. })));
        let plain = tempfile::tempfile().unwrap();
        assert!(TableView::map(plain.as_fd(), area.fd()).is_err());
        assert!(matches!(WordsOwner::create(0, TABLE), Err(TableError::Size { .. })));
    }

    #[test]
    fn an_untouched_area_costs_no_memory() {
        let (_, area, _) = pair(SLOTS_DEFAULT);
        assert!(fstat(&area.fd).unwrap().st_blocks <= 16);
    }

    #[test]
    fn a_process_is_known_by_its_start_time() {
        let me = ProcessId::of(std::process::id()).unwrap();
        assert_eq!(me, ProcessId::of(me.pid).unwrap());
        assert_ne!(me.start_time, 0);
    }
}
