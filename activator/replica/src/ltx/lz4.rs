//! LZ4 frames around one page, and raw LZ4 blocks.
//!
//! The frame is written by hand: Litestream 0.5.16+ counts on an eight-byte footer, so the
//! content checksum is not optional, and a page needs none of a general encoder's buffers.

use std::io::{self, Read};

use lz4_flex::block::{compress_into, decompress_into, get_maximum_output_size};

const FRAME_MAGIC: [u8; 4] = [0x04, 0x22, 0x4d, 0x18];
/// Version 1, independent blocks, content checksum; 64 KiB blocks; the header's own check byte.
const FRAME_DESCRIPTOR: [u8; 3] = [0x64, 0x40, 0xa7];
const STORED: u32 = 1 << 31;
const BLOCK_LEN_MAX: u32 = 4 << 20; // largest block of the format

const FLG_VERSION_MASK: u8 = 0xc0;
const FLG_VERSION: u8 = 0x40;
const FLG_BLOCK_CHECKSUM: u8 = 0x10;
const FLG_CONTENT_SIZE: u8 = 0x08;
const FLG_CONTENT_CHECKSUM: u8 = 0x04;
const FLG_DICTIONARY: u8 = 0x01;

/// Why a compressed page cannot be read.
#[derive(Debug)]
pub(super) enum PageFault {
    Io(io::Error),
    Bad(&'static str),
}

impl From<io::Error> for PageFault {
    fn from(error: io::Error) -> Self {
        Self::Io(error)
    }
}

/// Appends one page as an LZ4 frame.
pub(super) fn write_frame(page: &[u8], out: &mut Vec<u8>) -> io::Result<()> {
    out.extend_from_slice(&FRAME_MAGIC);
    out.extend_from_slice(&FRAME_DESCRIPTOR);
    let size_at = out.len();
    out.extend_from_slice(&[0; 4]);
    let len = compress(page, out)?;
    let size = if len < page.len() {
        u32_len(len)?
    } else {
        out.truncate(size_at + 4);
        out.extend_from_slice(page);
        u32_len(page.len())? | STORED
    };
    out[size_at..size_at + 4].copy_from_slice(&size.to_le_bytes());
    out.extend_from_slice(&[0; 4]);
    out.extend_from_slice(&xxh32(page).to_le_bytes());
    Ok(())
}

/// Appends one page as a raw block; returns its length.
pub(super) fn compress(page: &[u8], out: &mut Vec<u8>) -> io::Result<usize> {
    let start = out.len();
    out.resize(start + get_maximum_output_size(page.len()), 0);
    let len = compress_into(page, &mut out[start..])
        .map_err(|error| io::Error::other(error.to_string()))?;
    out.truncate(start + len);
    Ok(len)
}

/// Reads one raw block of `len` bytes that must give exactly one page.
pub(super) fn read_block(
    from: &mut impl Read,
    len: u32,
    page: &mut [u8],
    scratch: &mut Vec<u8>,
) -> Result<(), PageFault> {
    let bound = get_maximum_output_size(page.len());
    let len = usize::try_from(len).unwrap_or(usize::MAX);
    if len > bound {
        return Err(PageFault::Bad("the block is longer than any page"));
    }
    scratch.resize(len, 0);
    from.read_exact(scratch)?;
    match decompress_into(scratch, page) {
        Ok(n) if n == page.len() => Ok(()),
        Ok(_) => Err(PageFault::Bad("the block is shorter than a page")),
        Err(_) => Err(PageFault::Bad("the block cannot be decompressed")),
    }
}

/// Reads one LZ4 frame that must give exactly one page; returns the bytes it took.
pub(super) fn read_frame(
    from: &mut impl Read,
    page: &mut [u8],
    scratch: &mut Vec<u8>,
) -> Result<u64, PageFault> {
    let mut taken = 7_u64;
    let [m0, m1, m2, m3, flg, _bd] = array::<6>(from)?;
    if [m0, m1, m2, m3] != FRAME_MAGIC {
        return Err(PageFault::Bad("no LZ4 frame"));
    }
    if flg & FLG_VERSION_MASK != FLG_VERSION || flg & FLG_DICTIONARY != 0 {
        return Err(PageFault::Bad("unknown LZ4 frame version or dictionary"));
    }
    if flg & FLG_CONTENT_SIZE != 0 {
        array::<8>(from)?;
        taken += 8;
    }
    array::<1>(from)?; // the descriptor's check byte; the file checksum covers the content
    let mut filled = 0;
    loop {
        let size = u32::from_le_bytes(array(from)?);
        taken += 4;
        if size == 0 {
            break;
        }
        let len = size & !STORED;
        if len > BLOCK_LEN_MAX {
            return Err(PageFault::Bad("the LZ4 block is longer than the format allows"));
        }
        filled += frame_block(from, size, &mut page[filled..], scratch, filled > 0)?;
        taken += u64::from(len);
        if flg & FLG_BLOCK_CHECKSUM != 0 {
            array::<4>(from)?;
            taken += 4;
        }
    }
    if flg & FLG_CONTENT_CHECKSUM != 0 {
        let stored = u32::from_le_bytes(array(from)?);
        taken += 4;
        if stored != xxh32(&page[..filled]) {
            return Err(PageFault::Bad("the LZ4 content checksum differs"));
        }
    }
    if filled == page.len() { Ok(taken) } else { Err(PageFault::Bad("shorter than a page")) }
}

fn frame_block(
    from: &mut impl Read,
    size: u32,
    page: &mut [u8],
    scratch: &mut Vec<u8>,
    is_later: bool,
) -> Result<usize, PageFault> {
    let len = usize::try_from(size & !STORED).unwrap_or(usize::MAX);
    if size & STORED != 0 {
        let Some(into) = page.get_mut(..len) else {
            return Err(PageFault::Bad("longer than a page"));
        };
        from.read_exact(into)?;
        return Ok(len);
    }
    if len > get_maximum_output_size(page.len()) {
        return Err(PageFault::Bad("longer than a page"));
    }
    scratch.resize(len, 0);
    from.read_exact(scratch)?;
    match decompress_into(scratch, page) {
        Ok(0) => Err(PageFault::Bad("an empty LZ4 block")),
        Ok(n) => Ok(n),
        // A page fits one block; no writer of the format links a second one to it.
        Err(_) if is_later => Err(PageFault::Bad("linked LZ4 blocks, or a broken one")),
        Err(_) => Err(PageFault::Bad("the LZ4 block cannot be decompressed")),
    }
}

fn array<const N: usize>(from: &mut impl Read) -> Result<[u8; N], PageFault> {
    let mut bytes = [0; N];
    from.read_exact(&mut bytes)?;
    Ok(bytes)
}

fn u32_len(len: usize) -> io::Result<u32> {
    u32::try_from(len).map_err(io::Error::other)
}

const P1: u32 = 0x9e37_79b1;
const P2: u32 = 0x85eb_ca77;
const P3: u32 = 0xc2b2_ae3d;
const P4: u32 = 0x27d4_eb2f;
const P5: u32 = 0x1656_67b1;

/// xxHash32 with seed 0, the checksum of the LZ4 frame format.
pub(super) fn xxh32(bytes: &[u8]) -> u32 {
    let (stripes, mut rest) = bytes.as_chunks::<16>();
    let mut sum = if stripes.is_empty() {
        P5
    } else {
        let mut lanes = [P1.wrapping_add(P2), P2, 0, 0_u32.wrapping_sub(P1)];
        for stripe in stripes {
            let (words, _) = stripe.as_chunks::<4>();
            for (lane, word) in lanes.iter_mut().zip(words) {
                let mixed = u32::from_le_bytes(*word).wrapping_mul(P2);
                *lane = lane.wrapping_add(mixed).rotate_left(13).wrapping_mul(P1);
            }
        }
        let [a, b, c, d] = lanes;
        a.rotate_left(1)
            .wrapping_add(b.rotate_left(7))
            .wrapping_add(c.rotate_left(12))
            .wrapping_add(d.rotate_left(18))
    };
    let [b0, b1, b2, b3, ..] = super::wide(bytes.len()).to_le_bytes();
    sum = sum.wrapping_add(u32::from_le_bytes([b0, b1, b2, b3]));
    while let Some((word, tail)) = rest.split_first_chunk::<4>() {
        let mixed = u32::from_le_bytes(*word).wrapping_mul(P3);
        sum = sum.wrapping_add(mixed).rotate_left(17).wrapping_mul(P4);
        rest = tail;
    }
    for byte in rest {
        sum = sum.wrapping_add(u32::from(*byte).wrapping_mul(P5)).rotate_left(11).wrapping_mul(P1);
    }
    sum = (sum ^ (sum >> 15)).wrapping_mul(P2);
    sum = (sum ^ (sum >> 13)).wrapping_mul(P3);
    sum ^ (sum >> 16)
}
