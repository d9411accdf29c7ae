//! LTX files, version 3, as Litestream 0.5 writes and reads them.
//!
//! Reads both page encodings (LZ4 frames of 0.5.0 to 0.5.15, raw blocks since 0.5.16) and writes
//! the one that every 0.5 version reads: LZ4 frames with a content checksum. Numbers are
//! big-endian; every byte but the compressed payload is under a CRC-64/GO-ISO.
//!
//! Knows streams of bytes only: no store, no `SQLite`, no clock.

mod decode;
mod encode;
mod error;
mod header;
mod lz4;

pub use decode::Decoder;
pub use encode::{Encoder, Encoding, Written};
pub use error::{LtxError, LtxFault};
pub use header::{
    BadPageSize, HEADER_LEN, Header, PageSize, Pgno, WAL_FRAME_HEADER_LEN, WAL_HEADER_LEN,
};

use crc::{CRC_64_GO_ISO, Crc, Table};

type Sum = crc::Digest<'static, u64, Table<16>>;

static CRC: Crc<u64, Table<16>> = Crc::<u64, Table<16>>::new(&CRC_64_GO_ISO);

/// Every stored checksum has this bit, so that zero can mean "none".
const CHECKSUM_FLAG: u64 = 1 << 63;
const PAGE_HEADER_LEN: u64 = 6; // pgno, flags
const BLOCK_SIZE_LEN: u64 = 4;
const PAGE_FLAG_BLOCK: u16 = 1;
/// Post-apply checksum and file checksum.
const TRAILER_LEN: u64 = 16;

fn wide(n: usize) -> u64 {
    u64::try_from(n).unwrap_or(u64::MAX)
}

/// Appends an unsigned LEB128, as Go's `encoding/binary` writes it.
fn put_uvarint(out: &mut Vec<u8>, mut n: u64) {
    loop {
        let [low, ..] = n.to_le_bytes();
        n >>= 7;
        if n == 0 {
            out.push(low & 0x7f);
            return;
        }
        out.push(low | 0x80);
    }
}

#[cfg(test)]
mod tests;
