//! Reading a write-ahead log that another process writes.
//!
//! Frames count up to the last commit frame whose salts and running checksum hold; a torn or
//! older tail ends the scan. Format: `SQLite`'s "WAL-mode file format".
//!
//! Reads at offsets only; keeps no lock and decides nothing about continuity.

use std::collections::BTreeMap;
use std::io;
use std::os::unix::fs::FileExt;

use crate::ltx::{PageSize, Pgno, WAL_FRAME_HEADER_LEN, WAL_HEADER_LEN};

const MAGIC_LITTLE: u32 = 0x377f_0682;
const MAGIC_BIG: u32 = 0x377f_0683;
const VERSION: u32 = 3_007_000;
const FRAME_HEADER: usize = 24;
/// Bytes that one read of a scan takes at least.
const READ_AHEAD: usize = 128 * 1024;

/// Byte order of the checksum words.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WordOrder {
    /// Written by a little-endian machine.
    Little,
    /// Written by a big-endian machine.
    Big,
}

/// A running checksum of the WAL.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WalSum(pub u32, pub u32);

impl WalSum {
    fn update(self, order: WordOrder, bytes: &[u8]) -> Self {
        let Self(mut a, mut b) = self;
        let word = |bytes: [u8; 4]| match order {
            WordOrder::Little => u32::from_le_bytes(bytes),
            WordOrder::Big => u32::from_be_bytes(bytes),
        };
        for chunk in bytes.as_chunks::<8>().0 {
            let [x0, x1, x2, x3, y0, y1, y2, y3] = *chunk;
            a = a.wrapping_add(word([x0, x1, x2, x3])).wrapping_add(b);
            b = b.wrapping_add(word([y0, y1, y2, y3])).wrapping_add(a);
        }
        Self(a, b)
    }
}

/// The salts of one generation of the WAL.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Salts(pub u32, pub u32);

impl Salts {
    /// Whether `SQLite` makes `other` from these when it restarts the WAL (first salt plus one).
    #[must_use]
    pub const fn precede(self, other: Self) -> bool {
        self.0.wrapping_add(1) == other.0
    }
}

/// The valid header of a WAL file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WalHeader {
    /// Order of checksum words.
    pub order: WordOrder,
    /// Page size of the database.
    pub page_size: PageSize,
    /// Salts of this generation.
    pub salts: Salts,
    /// How often this file was begun anew since it was made.
    pub restarts: u32,
    sum: WalSum,
}

/// The end of a commit frame: where the next scan goes on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WalEnd {
    /// Byte offset.
    pub offset: u64,
    /// Salts of the generation.
    pub salts: Salts,
    /// Running checksum.
    pub sum: WalSum,
}

/// Commits that a scan found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Scan {
    /// Newest frame of every page: offset of the page's bytes in the WAL.
    pub pages: BTreeMap<Pgno, u64>,
    /// Size of the database in pages after the last commit.
    pub commit: u32,
    /// End of the last commit frame.
    pub end: WalEnd,
}

impl WalHeader {
    /// Reads the header; none when there is no valid one (yet).
    pub fn read(wal: &impl FileExt) -> io::Result<Option<Self>> {
        let mut bytes = [0; 32];
        if read_up_to(wal, &mut bytes, 0)? < bytes.len() {
            return Ok(None);
        }
        Ok(Self::decode(&bytes))
    }

    fn decode(bytes: &[u8; 32]) -> Option<Self> {
        let word = |n: usize| be_word(bytes, n * 4);
        let order = match word(0) {
            MAGIC_LITTLE => WordOrder::Little,
            MAGIC_BIG => WordOrder::Big,
            _ => return None,
        };
        let sum = WalSum::default().update(order, &bytes[..24]);
        if word(1) != VERSION || sum != WalSum(word(6), word(7)) {
            return None;
        }
        let page_size = PageSize::new(word(2))?;
        Some(Self { order, page_size, salts: Salts(word(4), word(5)), restarts: word(3), sum })
    }

    /// Where the first frame begins.
    #[must_use]
    pub const fn start(&self) -> WalEnd {
        WalEnd { offset: WAL_HEADER_LEN, salts: self.salts, sum: self.sum }
    }

    /// Length of a frame with its header.
    #[must_use]
    pub fn frame_len(&self) -> u64 {
        WAL_FRAME_HEADER_LEN + u64::from(self.page_size.get())
    }

    /// Whether the frame before `end` is a commit of this generation with that very checksum.
    pub fn ends_at(&self, wal: &impl FileExt, end: WalEnd) -> io::Result<bool> {
        let Some(at) = end.offset.checked_sub(self.frame_len()) else { return Ok(false) };
        let mut head = [0; FRAME_HEADER];
        if at < WAL_HEADER_LEN || read_up_to(wal, &mut head, at)? < head.len() {
            return Ok(false);
        }
        let is_commit = be_word(&head, 4) != 0;
        let salts = Salts(be_word(&head, 8), be_word(&head, 12));
        let sum = WalSum(be_word(&head, 16), be_word(&head, 20));
        Ok(is_commit && salts == end.salts && salts == self.salts && sum == end.sum)
    }

    /// Reads on from `from`, an end within this generation; none when no commit follows.
    pub fn scan(&self, wal: &impl FileExt, from: WalEnd) -> io::Result<Option<Scan>> {
        self.scan_until(wal, from, u64::MAX)
    }

    /// Where that many frames end.
    #[must_use]
    pub fn offset_of(&self, frames: u64) -> u64 {
        WAL_HEADER_LEN.saturating_add(frames.saturating_mul(self.frame_len()))
    }

    /// As [`WalHeader::scan`], no further than that offset.
    pub fn scan_until(
        &self,
        wal: &impl FileExt,
        from: WalEnd,
        until: u64,
    ) -> io::Result<Option<Scan>> {
        let frame_len = FRAME_HEADER + self.page_size.buffer_len();
        let mut buffer = vec![0; frame_len * (READ_AHEAD / frame_len).max(1)];
        let mut walk = Walk { header: self, end: from, pending: Vec::new(), found: None };
        loop {
            let offset = walk.end.offset;
            let got = read_up_to(wal, &mut buffer, offset)?;
            let frames = buffer[..got].chunks_exact(frame_len);
            let whole = got == buffer.len();
            for frame in frames {
                if walk.end.offset >= until || !walk.frame(frame) {
                    return Ok(walk.found);
                }
            }
            if !whole {
                return Ok(walk.found);
            }
        }
    }
}

struct Walk<'a> {
    header: &'a WalHeader,
    /// End of the last valid frame, commit or not.
    end: WalEnd,
    /// Frames since the last commit.
    pending: Vec<(Pgno, u64)>,
    found: Option<Scan>,
}

impl Walk<'_> {
    /// Takes one frame; false ends the scan.
    fn frame(&mut self, frame: &[u8]) -> bool {
        let (head, page) = frame.split_at(FRAME_HEADER);
        let pgno = Pgno(be_word(head, 0));
        let commit = be_word(head, 4);
        let salts = Salts(be_word(head, 8), be_word(head, 12));
        let sum = self.end.sum.update(self.header.order, &head[..8]);
        let sum = sum.update(self.header.order, page);
        let is_valid = pgno.0 != 0
            && salts == self.header.salts
            && sum == WalSum(be_word(head, 16), be_word(head, 20));
        if !is_valid {
            return false;
        }
        self.pending.push((pgno, self.end.offset + WAL_FRAME_HEADER_LEN));
        self.end.offset += self.header.frame_len();
        self.end.sum = sum;
        if commit != 0 {
            let end = self.end;
            let scan =
                self.found.get_or_insert_with(|| Scan { pages: BTreeMap::new(), commit, end });
            scan.pages.extend(self.pending.drain(..));
            scan.commit = commit;
            scan.end = end;
        }
        true
    }
}

fn be_word(bytes: &[u8], at: usize) -> u32 {
    match bytes.get(at..at + 4).and_then(|part| part.first_chunk::<4>()) {
        Some(word) => u32::from_be_bytes(*word),
        None => 0,
    }
}

/// Reads until the buffer is full or the file ends.
pub(crate) fn read_up_to(file: &impl FileExt, buffer: &mut [u8], offset: u64) -> io::Result<usize> {
    let mut filled = 0;
    while filled < buffer.len() {
        let at = offset + u64::try_from(filled).map_err(io::Error::other)?;
        match file.read_at(&mut buffer[filled..], at) {
            Ok(0) => break,
            Ok(n) => filled += n,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => (),
            Err(error) => return Err(error),
        }
    }
    Ok(filled)
}

#[cfg(test)]
#[path = "wal_tests.rs"]
mod tests;
