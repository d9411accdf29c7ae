//! Merging LTX files into one, by page number, in constant memory: one page of each input.

use std::io::{Read, Write};

use dormouse_core::ids::Txid;

use crate::ltx::{Decoder, Encoder, Encoding, Header, LtxError, LtxFault, Pgno, Written};

/// Merges files whose TXIDs follow each other; for a page in several, the later file wins, and
/// pages beyond the last file's size are dropped. Every input is read to its end and verified.
pub fn merge<R: Read, W: Write>(
    inputs: Vec<Decoder<R>>,
    to: W,
    name: &str,
) -> Result<(W, Header, Written), LtxError> {
    merge_from(inputs, to, name, None)
}

/// As [`merge`], under another first TXID: 1 where the first input is a whole image.
pub fn merge_from<R: Read, W: Write>(
    inputs: Vec<Decoder<R>>,
    to: W,
    name: &str,
    min: Option<Txid>,
) -> Result<(W, Header, Written), LtxError> {
    let fault = |file: &str, why| LtxError {
        file: file.into(),
        offset: 0,
        fault: LtxFault::BadHeader(why),
    };
    let (Some(first), Some(last)) = (inputs.first(), inputs.last()) else {
        return Err(fault(name, "nothing to merge"));
    };
    let (first, last) = (*first.header(), *last.header());
    for pair in inputs.windows(2) {
        let [before, after] = pair else { continue };
        let (a, b) = (before.header(), after.header());
        if b.min > a.max.next() || b.max <= a.max {
            return Err(fault(after.file(), "does not follow the file before it"));
        }
        if a.page_size != b.page_size {
            return Err(fault(after.file(), "another page size than the file before it"));
        }
    }
    let mut header = Header::new(last.page_size, last.commit, min.unwrap_or(first.min), last.max);
    header.timestamp_ms = last.timestamp_ms;
    header.pre_apply = first.pre_apply;
    let mut encoder = Encoder::new(to, name, header, Encoding::Frame)?;
    let mut heads = Vec::new();
    for decoder in inputs {
        let mut head = Head { decoder, page: Vec::new(), at: None };
        head.advance()?;
        heads.push(head);
    }
    while let Some(page) = heads.iter().filter_map(|head| head.at).min() {
        let newest = heads.iter().rfind(|head| head.at == Some(page));
        if let Some(head) = newest
            && page.0 <= header.commit
        {
            encoder.page(page, &head.page)?;
        }
        for head in heads.iter_mut().filter(|head| head.at == Some(page)) {
            head.advance()?;
        }
    }
    let (to, written) = encoder.finish()?;
    Ok((to, header, written))
}

struct Head<R> {
    decoder: Decoder<R>,
    page: Vec<u8>,
    at: Option<Pgno>,
}

impl<R: Read> Head<R> {
    fn advance(&mut self) -> Result<(), LtxError> {
        self.at = self.decoder.next_page(&mut self.page)?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ltx::PageSize;

    fn file(min: u64, max: u64, commit: u32, pages: &[(u32, u8)]) -> Vec<u8> {
        let size = PageSize::new(512).unwrap();
        let header = Header::new(size, commit, Txid(min), Txid(max));
        let mut encoder = Encoder::new(Vec::new(), "in", header, Encoding::Block).unwrap();
        for (page, fill) in pages {
            encoder.page(Pgno(*page), &[*fill; 512]).unwrap();
        }
        encoder.finish().unwrap().0
    }

    fn merged(files: &[Vec<u8>]) -> Result<(Header, Vec<(u32, u8)>), LtxError> {
        let mut inputs = Vec::new();
        for bytes in files {
            inputs.push(Decoder::new(&bytes[..], "in")?);
        }
        let (bytes, header, _) = merge(inputs, Vec::new(), "out")?;
        let mut decoder = Decoder::new(&bytes[..], "out")?;
        let mut page = Vec::new();
        let mut pages = Vec::new();
        while let Some(pgno) = decoder.next_page(&mut page)? {
            pages.push((pgno.0, page[0]));
        }
        Ok((header, pages))
    }

    #[test]
    fn later_pages_win_and_pages_beyond_the_end_are_dropped() {
        let files = [
            file(1, 3, 4, &[(1, 1), (2, 1), (3, 1), (4, 1)]),
            file(4, 4, 5, &[(2, 2), (5, 2)]),
            file(4, 5, 3, &[(3, 3)]),
        ];
        let (header, pages) = merged(&files).unwrap();
        assert_eq!(pages, [(1, 1), (2, 2), (3, 3)]);
        assert_eq!((header.min, header.max, header.commit), (Txid(1), Txid(5), 3));
    }

    #[test]
    fn a_gap_or_a_corrupt_input_is_an_error() {
        let one = file(2, 2, 2, &[(1, 1), (2, 1)]);
        assert!(merged(&[one.clone(), file(4, 4, 2, &[(1, 2)])]).is_err());
        assert!(merged(&[one.clone(), file(2, 2, 2, &[(1, 2)])]).is_err());
        let mut bad = file(3, 3, 2, &[(2, 2)]);
        let end = bad.len() - 1;
        bad[end] ^= 1;
        assert!(merged(&[one, bad]).is_err());
        assert!(merged(&[]).is_err());
    }
}
