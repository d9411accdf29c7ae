//! Writing an LTX file, page by page, in constant memory but for the page index.

use std::io::{self, Write};
use std::sync::Arc;

use super::error::{LtxError, LtxFault};
use super::header::{Header, Pgno};
use super::{CHECKSUM_FLAG, CRC, PAGE_FLAG_BLOCK, PAGE_HEADER_LEN, Sum, lz4, put_uvarint, wide};

/// How pages are compressed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Encoding {
    /// LZ4 frames: every Litestream 0.5 reads them.
    Frame,
    /// Raw LZ4 blocks: Litestream 0.5.16 and later only.
    Block,
}

/// What was written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Written {
    /// Length of the file.
    pub size: u64,
    /// Pages in it.
    pub pages: u64,
    /// The file checksum of its trailer.
    pub checksum: u64,
}

/// Writes one file. Nothing is valid before [`Encoder::finish`].
pub struct Encoder<W> {
    to: W,
    file: Arc<str>,
    header: Header,
    encoding: Encoding,
    sum: Sum,
    offset: u64,
    last: Pgno,
    pages: u64,
    index: Vec<u8>,
    buffer: Vec<u8>,
}

impl<W: Write> Encoder<W> {
    /// Writes the header. `file` names the file in errors.
    pub fn new(to: W, file: &str, header: Header, encoding: Encoding) -> Result<Self, LtxError> {
        let mut encoder = Self {
            to,
            file: file.into(),
            header,
            encoding,
            sum: CRC.digest(),
            offset: 0,
            last: Pgno(0),
            pages: 0,
            index: Vec::new(),
            buffer: Vec::new(),
        };
        header.check().map_err(|fault| encoder.fault(fault))?;
        let bytes = header.encode();
        encoder.sum.update(&bytes);
        encoder.write(&bytes)?;
        Ok(encoder)
    }

    /// Writes the next page; pages ascend, and the lock page is left out by the caller.
    pub fn page(&mut self, page: Pgno, bytes: &[u8]) -> Result<(), LtxError> {
        let size = self.header.page_size;
        let in_order = if self.header.is_snapshot() {
            page == size.next_stored(self.last)
        } else {
            page > self.last
        };
        if !in_order {
            return Err(self.fault(LtxFault::PageOrder { after: self.last, page }));
        }
        if page.0 > self.header.commit {
            return Err(self.fault(LtxFault::PageBeyondEnd { page, commit: self.header.commit }));
        }
        if page == size.lock_page() {
            return Err(self.fault(LtxFault::LockPage(page)));
        }
        if bytes.len() != size.buffer_len() {
            return Err(self.fault(LtxFault::BadPage { page, why: "not one page long" }));
        }
        let mut buffer = std::mem::take(&mut self.buffer);
        let hashed = frame(self.encoding, page, bytes, &mut buffer)
            .map_err(|error| self.fault(LtxFault::Io(error)))?;
        self.sum.update(&buffer[..hashed]);
        self.sum.update(bytes);
        let start = self.offset;
        self.write(&buffer)?;
        put_uvarint(&mut self.index, u64::from(page.0));
        put_uvarint(&mut self.index, start);
        put_uvarint(&mut self.index, wide(buffer.len()));
        self.buffer = buffer;
        self.last = page;
        self.pages += 1;
        Ok(())
    }

    /// Writes index and trailer; gives the writer back, not flushed.
    pub fn finish(mut self) -> Result<(W, Written), LtxError> {
        if self.header.is_snapshot()
            && self.last != self.header.page_size.last_stored(self.header.commit)
        {
            return Err(self.fault(LtxFault::ImageIncomplete(self.last)));
        }
        let mut tail = vec![0; usize::try_from(PAGE_HEADER_LEN).unwrap_or(6)];
        self.index.push(0);
        tail.extend_from_slice(&self.index);
        tail.extend_from_slice(&wide(self.index.len()).to_be_bytes());
        tail.extend_from_slice(&0_u64.to_be_bytes());
        self.sum.update(&tail);
        let checksum = self.sum.clone().finalize() | CHECKSUM_FLAG;
        tail.extend_from_slice(&checksum.to_be_bytes());
        self.write(&tail)?;
        Ok((self.to, Written { size: self.offset, pages: self.pages, checksum }))
    }

    fn write(&mut self, bytes: &[u8]) -> Result<(), LtxError> {
        self.to.write_all(bytes).map_err(|error| self.fault(LtxFault::Io(error)))?;
        self.offset += wide(bytes.len());
        Ok(())
    }

    fn fault(&self, fault: LtxFault) -> LtxError {
        LtxError { file: Arc::clone(&self.file), offset: self.offset, fault }
    }
}

/// Fills `out` with one page as stored; returns how many bytes of it the checksum covers.
fn frame(encoding: Encoding, page: Pgno, bytes: &[u8], out: &mut Vec<u8>) -> io::Result<usize> {
    out.clear();
    out.extend_from_slice(&page.0.to_be_bytes());
    match encoding {
        Encoding::Frame => {
            out.extend_from_slice(&0_u16.to_be_bytes());
            let hashed = out.len();
            lz4::write_frame(bytes, out)?;
            Ok(hashed)
        }
        Encoding::Block => {
            out.extend_from_slice(&PAGE_FLAG_BLOCK.to_be_bytes());
            let size_at = out.len();
            out.extend_from_slice(&[0; 4]);
            let hashed = out.len();
            let len = u32::try_from(lz4::compress(bytes, out)?).map_err(io::Error::other)?;
            out[size_at..hashed].copy_from_slice(&len.to_be_bytes());
            Ok(hashed)
        }
    }
}
