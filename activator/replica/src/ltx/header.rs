//! The 100 bytes at the head of an LTX file, and their rules.

use std::fmt;

use dormouse_core::ids::Txid;

use super::error::LtxFault;

/// Length of the header.
pub const HEADER_LEN: usize = 100;
/// Length of a WAL file's header; no frame lies before it.
pub const WAL_HEADER_LEN: u64 = 32;
/// Length of a WAL frame's header.
pub const WAL_FRAME_HEADER_LEN: u64 = 24;

const MAGIC: [u8; 4] = *b"LTX1";
const FLAG_NO_CHECKSUM: u32 = 2;
/// `SQLite` keeps its locks in the page at this byte; that page is never stored.
const LOCK_BYTE: u32 = 0x4000_0000;

/// A page number; the first page is 1.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Pgno(pub u32);

impl Pgno {
    /// The page after this one.
    #[must_use]
    pub const fn next(self) -> Self {
        Self(self.0.saturating_add(1))
    }
}

impl fmt::Display for Pgno {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// A legal page size: a power of two, 512 to 65536.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageSize(u32);

impl PageSize {
    /// Checks a size in bytes.
    #[must_use]
    pub const fn new(bytes: u32) -> Option<Self> {
        if bytes.is_power_of_two() && bytes >= 512 && bytes <= 65536 {
            Some(Self(bytes))
        } else {
            None
        }
    }

    /// The size in bytes.
    #[must_use]
    pub const fn get(self) -> u32 {
        self.0
    }

    /// The size in bytes, for buffers.
    #[must_use]
    pub fn buffer_len(self) -> usize {
        usize::try_from(self.0).unwrap_or(usize::MAX)
    }

    /// The page that holds the lock bytes of `SQLite`.
    #[must_use]
    pub const fn lock_page(self) -> Pgno {
        Pgno(LOCK_BYTE / self.0 + 1)
    }

    /// Where a page begins in the database file.
    #[must_use]
    pub fn offset_of(self, page: Pgno) -> u64 {
        u64::from(page.0.saturating_sub(1)) * u64::from(self.0)
    }

    /// The first page that must be stored after `page` in a full image.
    #[must_use]
    pub fn next_stored(self, page: Pgno) -> Pgno {
        if page.next() == self.lock_page() { page.next().next() } else { page.next() }
    }

    /// The last page that must be stored in a full image of `commit` pages.
    #[must_use]
    pub fn last_stored(self, commit: u32) -> Pgno {
        if Pgno(commit) == self.lock_page() { Pgno(commit - 1) } else { Pgno(commit) }
    }
}

/// Not a page size that a database can have.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0} is no page size: a power of two from 512 to 65536 is")]
pub struct BadPageSize(pub u32);

impl TryFrom<u32> for PageSize {
    type Error = BadPageSize;

    fn try_from(bytes: u32) -> Result<Self, BadPageSize> {
        Self::new(bytes).ok_or(BadPageSize(bytes))
    }
}

/// The header. `no_checksum` is what Litestream always sets: no running database checksum.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// The file tracks no database checksum.
    pub no_checksum: bool,
    /// Page size of the database.
    pub page_size: PageSize,
    /// Size of the database in pages after this file is applied.
    pub commit: u32,
    /// First TXID.
    pub min: Txid,
    /// Last TXID.
    pub max: Txid,
    /// Milliseconds since 1970.
    pub timestamp_ms: i64,
    /// Database checksum before applying; 0 with `no_checksum`.
    pub pre_apply: u64,
    /// Where the frames began in the WAL; at least 32 in level 0.
    pub wal_offset: u64,
    /// WAL bytes that the file covers.
    pub wal_size: u64,
    /// The WAL's salts.
    pub salts: (u32, u32),
    /// Node id, 0.
    pub node: u64,
}

impl Header {
    /// A header as Litestream writes it, for frames of a WAL.
    #[must_use]
    pub const fn new(page_size: PageSize, commit: u32, min: Txid, max: Txid) -> Self {
        Self {
            no_checksum: true,
            page_size,
            commit,
            min,
            max,
            timestamp_ms: 0,
            pre_apply: 0,
            wal_offset: 0,
            wal_size: 0,
            salts: (0, 0),
            node: 0,
        }
    }

    /// A file from TXID 1 holds every page.
    #[must_use]
    pub const fn is_snapshot(&self) -> bool {
        self.min.0 == 1
    }

    /// The rules that both sides check.
    pub fn check(&self) -> Result<(), LtxFault> {
        let rules = [
            (self.min.0 > 0, "the first TXID is 0"),
            (self.min <= self.max, "the first TXID is above the last"),
            (
                i64::try_from(self.wal_offset).is_ok() && i64::try_from(self.wal_size).is_ok(),
                "negative WAL offset or size",
            ),
            (self.salts == (0, 0) || self.wal_offset != 0, "WAL salts without a WAL offset"),
            (self.wal_size == 0 || self.wal_offset != 0, "a WAL size without a WAL offset"),
            (
                !(self.is_snapshot() || self.no_checksum) || self.pre_apply == 0,
                "a pre-apply checksum where none is allowed",
            ),
            (
                self.is_snapshot() || self.no_checksum || self.pre_apply >= super::CHECKSUM_FLAG,
                "no pre-apply checksum",
            ),
        ];
        match rules.iter().find(|(holds, _)| !holds) {
            Some((_, why)) => Err(LtxFault::BadHeader(why)),
            None => Ok(()),
        }
    }

    /// The bytes of the header.
    #[must_use]
    pub fn encode(&self) -> [u8; HEADER_LEN] {
        let flags = if self.no_checksum { FLAG_NO_CHECKSUM } else { 0 };
        let mut out = Out([0; HEADER_LEN], 0);
        out.put(&MAGIC);
        out.put(&flags.to_be_bytes());
        out.put(&self.page_size.get().to_be_bytes());
        out.put(&self.commit.to_be_bytes());
        out.put(&self.min.0.to_be_bytes());
        out.put(&self.max.0.to_be_bytes());
        out.put(&self.timestamp_ms.to_be_bytes());
        out.put(&self.pre_apply.to_be_bytes());
        out.put(&self.wal_offset.to_be_bytes());
        out.put(&self.wal_size.to_be_bytes());
        out.put(&self.salts.0.to_be_bytes());
        out.put(&self.salts.1.to_be_bytes());
        out.put(&self.node.to_be_bytes());
        out.0
    }

    /// Reads and checks a header.
    pub fn decode(bytes: &[u8; HEADER_LEN]) -> Result<Self, LtxFault> {
        let mut rest = In(bytes);
        if rest.take::<4>() != MAGIC {
            return Err(LtxFault::BadMagic);
        }
        let flags = rest.u32();
        if flags & !FLAG_NO_CHECKSUM != 0 {
            return Err(LtxFault::BadHeader("unknown flags"));
        }
        let page_size =
            PageSize::new(rest.u32()).ok_or(LtxFault::BadHeader("impossible page size"))?;
        let header = Self {
            no_checksum: flags & FLAG_NO_CHECKSUM != 0,
            page_size,
            commit: rest.u32(),
            min: Txid(rest.u64()),
            max: Txid(rest.u64()),
            timestamp_ms: i64::from_be_bytes(rest.take()),
            pre_apply: rest.u64(),
            wal_offset: rest.u64(),
            wal_size: rest.u64(),
            salts: (rest.u32(), rest.u32()),
            node: rest.u64(),
        };
        header.check()?;
        Ok(header)
    }
}

struct Out([u8; HEADER_LEN], usize);

impl Out {
    fn put(&mut self, bytes: &[u8]) {
        let end = self.1 + bytes.len();
        self.0[self.1..end].copy_from_slice(bytes);
        self.1 = end;
    }
}

/// Reads fields off a slice; past its end it reads zeros (headers have a fixed length).
struct In<'a>(&'a [u8]);

impl In<'_> {
    fn take<const N: usize>(&mut self) -> [u8; N] {
        match self.0.split_first_chunk::<N>() {
            Some((head, rest)) => {
                self.0 = rest;
                *head
            }
            None => [0; N],
        }
    }

    fn u32(&mut self) -> u32 {
        u32::from_be_bytes(self.take())
    }

    fn u64(&mut self) -> u64 {
        u64::from_be_bytes(self.take())
    }
}
