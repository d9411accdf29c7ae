//! Reading an LTX file as a stream, in constant memory, verifying everything on the way.

use std::io::{self, Read};
use std::sync::Arc;

use super::error::{LtxError, LtxFault};
use super::header::{HEADER_LEN, Header, Pgno};
use super::{
    BLOCK_SIZE_LEN, CHECKSUM_FLAG, CRC, PAGE_FLAG_BLOCK, PAGE_HEADER_LEN, Sum, TRAILER_LEN, lz4,
    put_uvarint, wide,
};

/// Reads one file. It is verified only when [`Decoder::next_page`] has given none.
pub struct Decoder<R> {
    from: R,
    file: Arc<str>,
    header: Header,
    sum: Sum,
    /// Sum over the index that the pages so far call for: compared instead of kept.
    index_sum: Sum,
    index_len: u64,
    offset: u64,
    last: Pgno,
    scratch: Vec<u8>,
    entry: Vec<u8>,
    is_verified: bool,
}

impl<R: Read> Decoder<R> {
    /// Reads and checks the header. `file` names the file in errors. `from` should be buffered.
    pub fn new(mut from: R, file: &str) -> Result<Self, LtxError> {
        let file: Arc<str> = file.into();
        let at = |fault| LtxError { file: Arc::clone(&file), offset: 0, fault };
        let mut bytes = [0; HEADER_LEN];
        from.read_exact(&mut bytes).map_err(|error| at(io_fault(error)))?;
        let header = Header::decode(&bytes).map_err(at)?;
        let mut sum = CRC.digest();
        sum.update(&bytes);
        Ok(Self {
            from,
            file,
            header,
            sum,
            index_sum: CRC.digest(),
            index_len: 0,
            offset: wide(HEADER_LEN),
            last: Pgno(0),
            scratch: Vec::new(),
            entry: Vec::new(),
            is_verified: false,
        })
    }

    /// The header.
    #[must_use]
    pub const fn header(&self) -> &Header {
        &self.header
    }

    /// Name of the file, as given.
    #[must_use]
    pub fn file(&self) -> &Arc<str> {
        &self.file
    }

    /// Reads the next page into `page`, which gets the page's size. None: the end was reached,
    /// and index, trailer and file checksum are right.
    pub fn next_page(&mut self, page: &mut Vec<u8>) -> Result<Option<Pgno>, LtxError> {
        if self.is_verified {
            return Ok(None);
        }
        let start = self.offset;
        let head = self.array::<6>()?;
        self.sum.update(&head);
        let [p0, p1, p2, p3, f0, f1] = head;
        let pgno = Pgno(u32::from_be_bytes([p0, p1, p2, p3]));
        let flags = u16::from_be_bytes([f0, f1]);
        if pgno.0 == 0 && flags == 0 {
            self.finish()?;
            return Ok(None);
        }
        self.check_order(pgno, start)?;
        page.resize(self.header.page_size.buffer_len(), 0);
        match flags {
            0 => {
                let taken = lz4::read_frame(&mut self.from, page, &mut self.scratch)
                    .map_err(|fault| self.page_fault(pgno, fault))?;
                self.offset += taken;
            }
            PAGE_FLAG_BLOCK => {
                let size = self.array::<4>()?;
                self.sum.update(&size);
                let len = u32::from_be_bytes(size);
                lz4::read_block(&mut self.from, len, page, &mut self.scratch)
                    .map_err(|fault| self.page_fault(pgno, fault))?;
                self.offset += u64::from(len);
            }
            other => return Err(self.fault(start, LtxFault::BadPageFlags(other))),
        }
        debug_assert!(self.offset >= start + PAGE_HEADER_LEN + BLOCK_SIZE_LEN);
        self.sum.update(page);
        self.last = pgno;
        self.entry.clear();
        put_uvarint(&mut self.entry, u64::from(pgno.0));
        put_uvarint(&mut self.entry, start);
        put_uvarint(&mut self.entry, self.offset - start);
        self.index_sum.update(&self.entry);
        self.index_len += wide(self.entry.len());
        Ok(Some(pgno))
    }

    fn check_order(&self, page: Pgno, start: u64) -> Result<(), LtxError> {
        let size = self.header.page_size;
        let in_order = if self.header.is_snapshot() {
            page == size.next_stored(self.last)
        } else {
            page > self.last
        };
        if page == size.lock_page() {
            return Err(self.fault(start, LtxFault::LockPage(page)));
        }
        if !in_order {
            return Err(self.fault(start, LtxFault::PageOrder { after: self.last, page }));
        }
        if page.0 > self.header.commit {
            let commit = self.header.commit;
            return Err(self.fault(start, LtxFault::PageBeyondEnd { page, commit }));
        }
        Ok(())
    }

    fn finish(&mut self) -> Result<(), LtxError> {
        let last = self.header.page_size.last_stored(self.header.commit);
        if self.header.is_snapshot() && self.last != last {
            return Err(self.fault(self.offset, LtxFault::ImageIncomplete(self.last)));
        }
        let index_at = self.offset;
        self.index_sum.update(&[0]);
        self.index_len += 1;
        let found = self.sum_index()?;
        let index_len = u64::from_be_bytes(self.array::<8>()?);
        if found != self.index_sum.clone().finalize() || index_len != self.index_len {
            return Err(self.fault(index_at, LtxFault::BadIndex));
        }
        self.sum.update(&index_len.to_be_bytes());
        let trailer_at = self.offset;
        let post_apply = u64::from_be_bytes(self.array::<8>()?);
        let fits =
            if self.header.no_checksum { post_apply == 0 } else { post_apply >= CHECKSUM_FLAG };
        if !fits {
            return Err(self.fault(trailer_at, LtxFault::BadPostApply));
        }
        self.sum.update(&post_apply.to_be_bytes());
        let stored = u64::from_be_bytes(self.array::<8>()?);
        let computed = self.sum.clone().finalize() | CHECKSUM_FLAG;
        if stored != computed {
            let fault = LtxFault::ChecksumMismatch { stored, computed };
            return Err(self.fault(trailer_at, fault));
        }
        debug_assert_eq!(self.offset, trailer_at + TRAILER_LEN);
        match self.from.read(&mut [0]) {
            Ok(0) => self.is_verified = true,
            Ok(_) => return Err(self.fault(self.offset, LtxFault::TrailingBytes)),
            Err(error) => return Err(self.fault(self.offset, LtxFault::Io(error))),
        }
        Ok(())
    }

    /// Reads as many index bytes as the pages call for; returns their sum.
    fn sum_index(&mut self) -> Result<u64, LtxError> {
        let mut sum = CRC.digest();
        let mut left = self.index_len;
        let mut chunk = [0_u8; 4096];
        while left > 0 {
            let n = usize::try_from(left).unwrap_or(usize::MAX).min(chunk.len());
            let (part, _) = chunk.split_at_mut(n);
            let result = self.from.read_exact(part);
            result.map_err(|error| self.fault(self.offset, io_fault(error)))?;
            sum.update(part);
            self.sum.update(part);
            self.offset += wide(n);
            left -= wide(n);
        }
        Ok(sum.finalize())
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], LtxError> {
        let mut bytes = [0; N];
        let result = self.from.read_exact(&mut bytes);
        result.map_err(|error| self.fault(self.offset, io_fault(error)))?;
        self.offset += wide(N);
        Ok(bytes)
    }

    fn page_fault(&self, page: Pgno, fault: lz4::PageFault) -> LtxError {
        let fault = match fault {
            lz4::PageFault::Io(error) => io_fault(error),
            lz4::PageFault::Bad(why) => LtxFault::BadPage { page, why },
        };
        self.fault(self.offset, fault)
    }

    fn fault(&self, offset: u64, fault: LtxFault) -> LtxError {
        LtxError { file: Arc::clone(&self.file), offset, fault }
    }
}

fn io_fault(error: io::Error) -> LtxFault {
    if error.kind() == io::ErrorKind::UnexpectedEof { LtxFault::Torn } else { LtxFault::Io(error) }
}
