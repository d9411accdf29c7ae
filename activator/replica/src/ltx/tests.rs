use std::io::Read as _;

use dormouse_core::ids::Txid;
use proptest::prelude::*;

use super::*;

fn page(size: PageSize, seed: u32) -> Vec<u8> {
    (0..size.get())
        .map(|n| n.wrapping_mul(seed).to_le_bytes()[usize::from(seed.is_multiple_of(2))])
        .collect()
}

fn file(header: Header, pages: &[u32], encoding: Encoding) -> Vec<u8> {
    let mut encoder = Encoder::new(Vec::new(), "test.ltx", header, encoding).unwrap();
    for n in pages {
        encoder.page(Pgno(*n), &page(header.page_size, *n)).unwrap();
    }
    let (bytes, written) = encoder.finish().unwrap();
    assert_eq!(written.size, wide(bytes.len()));
    bytes
}

fn read(bytes: &[u8]) -> Result<Vec<(Pgno, Vec<u8>)>, LtxError> {
    let mut decoder = Decoder::new(bytes, "test.ltx")?;
    let mut pages = Vec::new();
    let mut buffer = Vec::new();
    while let Some(pgno) = decoder.next_page(&mut buffer)? {
        pages.push((pgno, buffer.clone()));
    }
    Ok(pages)
}

fn header(size: u32, commit: u32, min: u64) -> Header {
    let mut header = Header::new(PageSize::new(size).unwrap(), commit, Txid(min), Txid(min));
    header.wal_offset = 32;
    header
}

#[test]
fn both_encodings_make_the_round_trip_in_every_page_size() {
    for shift in 9..=16 {
        for encoding in [Encoding::Frame, Encoding::Block] {
            let head = header(1 << shift, 9, 5);
            let pages = read(&file(head, &[1, 4, 9], encoding)).unwrap();
            let want: Vec<_> = [1, 4, 9].map(|n| (Pgno(n), page(head.page_size, n))).into();
            assert_eq!(pages, want);
        }
    }
}

#[test]
fn incompressible_pages_make_the_round_trip() {
    let head = header(65536, 1, 2);
    let mut noise = vec![0; 65536];
    let mut state = 1_u64;
    for byte in &mut noise {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        *byte = state.to_be_bytes()[0];
    }
    for encoding in [Encoding::Frame, Encoding::Block] {
        let mut encoder = Encoder::new(Vec::new(), "n", head, encoding).unwrap();
        encoder.page(Pgno(1), &noise).unwrap();
        assert_eq!(read(&encoder.finish().unwrap().0).unwrap(), [(Pgno(1), noise.clone())]);
    }
}

#[test]
fn our_lz4_frames_are_read_by_a_general_decoder_with_checksums() {
    let mut frame = Vec::new();
    let bytes = page(PageSize::new(4096).unwrap(), 3);
    lz4::write_frame(&bytes, &mut frame).unwrap();
    let mut out = Vec::new();
    lz4_flex::frame::FrameDecoder::new(&frame[..]).read_to_end(&mut out).unwrap();
    assert_eq!(out, bytes);
    assert_eq!(frame[4], 0x64, "content checksum: Litestream 0.5.16+ counts on it");
}

#[test]
fn xxh32_gives_the_published_values() {
    assert_eq!(lz4::xxh32(b""), 0x02cc_5d05);
    assert_eq!(lz4::xxh32(b"Nobody inspects the spammish repetition"), 0xe229_3b2f);
}

#[test]
fn a_full_image_skips_exactly_the_lock_page() {
    let size = PageSize::new(65536).unwrap();
    assert_eq!(size.lock_page(), Pgno(16385));
    assert_eq!(PageSize::new(4096).unwrap().lock_page(), Pgno(262_145));
    assert_eq!(size.next_stored(Pgno(16384)), Pgno(16386));
    assert_eq!(size.last_stored(16385), Pgno(16384));
    let mut encoder =
        Encoder::new(std::io::sink(), "big", header(65536, 16386, 7), Encoding::Block).unwrap();
    let error = encoder.page(Pgno(16385), &vec![0; 65536]).unwrap_err();
    assert!(matches!(error.fault, LtxFault::LockPage(Pgno(16385))));
}

#[test]
fn a_full_image_that_lacks_a_page_is_refused_by_both_sides() {
    let head = header(512, 3, 1);
    let mut encoder = Encoder::new(Vec::new(), "x", head, Encoding::Frame).unwrap();
    encoder.page(Pgno(1), &[0; 512]).unwrap();
    let gap = encoder.page(Pgno(3), &[0; 512]).unwrap_err();
    assert!(matches!(gap.fault, LtxFault::PageOrder { after: Pgno(1), page: Pgno(3) }));
    let short = encoder.finish().unwrap_err();
    assert!(matches!(short.fault, LtxFault::ImageIncomplete(Pgno(1))));
}

#[test]
fn every_header_rule_is_checked() {
    let good = header(4096, 3, 5);
    let broken: [fn(&mut Header); 6] = [
        |h| h.min = Txid(0),
        |h| h.max = Txid(4),
        |h| (h.salts, h.wal_offset) = ((1, 2), 0),
        |h| (h.wal_size, h.wal_offset) = (4120, 0),
        |h| h.pre_apply = 1 << 63,
        |h| h.no_checksum = false,
    ];
    assert!(Header::decode(&good.encode()).is_ok());
    for (n, change) in broken.iter().enumerate() {
        let mut bad = good;
        change(&mut bad);
        assert!(matches!(Header::decode(&bad.encode()), Err(LtxFault::BadHeader(_))), "rule {n}");
    }
    for (at, byte) in [(0, b'X'), (7, 6), (10, 0x17)] {
        let mut bytes = good.encode();
        bytes[at] = byte;
        assert!(Header::decode(&bytes).is_err(), "byte {at}");
    }
    let mut reserved = good.encode();
    reserved[99] = 1;
    assert!(Header::decode(&reserved).is_ok(), "reserved bytes are not judged");
}

#[test]
fn a_file_that_is_cut_anywhere_is_torn() {
    for encoding in [Encoding::Frame, Encoding::Block] {
        let bytes = file(header(512, 4, 5), &[1, 2, 4], encoding);
        for len in 0..bytes.len() {
            let error = read(&bytes[..len]).unwrap_err();
            assert!(matches!(error.fault, LtxFault::Torn), "cut at {len}: {error}");
        }
        let mut longer = bytes;
        longer.push(0);
        assert!(matches!(read(&longer).unwrap_err().fault, LtxFault::TrailingBytes));
    }
}

#[test]
fn no_flipped_bit_gives_other_pages() {
    for encoding in [Encoding::Frame, Encoding::Block] {
        let bytes = file(header(512, 4, 5), &[1, 2, 4], encoding);
        let good = read(&bytes).unwrap();
        for at in 0..bytes.len() {
            for bit in 0..8 {
                let mut bad = bytes.clone();
                bad[at] ^= 1 << bit;
                // Bits that no checksum covers (an LZ4 descriptor's) may pass; the pages may not.
                if let Ok(pages) = read(&bad) {
                    assert_eq!(pages, good, "byte {at} bit {bit}");
                }
            }
        }
    }
}

#[test]
fn an_error_names_the_file_and_the_place() {
    let mut bytes = file(header(512, 4, 5), &[1, 2, 4], Encoding::Frame);
    let end = bytes.len() - 1;
    bytes[end] ^= 1;
    let text = read(&bytes).unwrap_err().to_string();
    assert!(text.starts_with("test.ltx at byte "), "{text}");
    assert!(text.contains("checksum mismatch"), "{text}");
}

proptest! {
    #[test]
    fn no_bytes_panic(bytes in proptest::collection::vec(any::<u8>(), 0..700)) {
        drop(read(&bytes));
        let mut headed = header(512, 3, 5).encode().to_vec();
        headed.extend_from_slice(&bytes);
        drop(read(&headed));
        headed.truncate(HEADER_LEN);
        headed.extend_from_slice(&[0, 0, 0, 1, 0, 0, 4, 0x22, 0x4d, 0x18, 0x64, 0x40, 0xa7]);
        headed.extend_from_slice(&bytes);
        drop(read(&headed));
    }
}
