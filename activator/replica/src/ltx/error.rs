//! What is wrong with an LTX file, and where.

use std::io;
use std::sync::Arc;

use super::header::Pgno;

/// A fault of one file at one place.
#[derive(Debug, thiserror::Error)]
#[error("{file} at byte {offset}: {fault}")]
pub struct LtxError {
    /// Name of the file, as the caller gave it.
    pub file: Arc<str>,
    /// Offset of the field that is wrong (or of the write that failed).
    pub offset: u64,
    /// What is wrong.
    pub fault: LtxFault,
}

/// What can be wrong with an LTX file.
#[derive(Debug, thiserror::Error)]
pub enum LtxFault {
    /// Reading or writing failed.
    #[error("{0}")]
    Io(io::Error),
    /// The file ends too early.
    #[error("the file is torn: it ends here")]
    Torn,
    /// Not an LTX file.
    #[error("not an LTX file (the first four bytes are not LTX1)")]
    BadMagic,
    /// A header field breaks its rule.
    #[error("bad header: {0}")]
    BadHeader(&'static str),
    /// Page flags other than 0 and 1.
    #[error("unknown page flags {0:#06x}")]
    BadPageFlags(u16),
    /// Pages must ascend, and be complete where the file begins at TXID 1.
    #[error("page {page} cannot follow page {after}")]
    PageOrder {
        /// The page before, 0 at the start.
        after: Pgno,
        /// The page that came.
        page: Pgno,
    },
    /// A page beyond the database's size.
    #[error("page {page} is beyond the database's {commit} pages")]
    PageBeyondEnd {
        /// The page that came.
        page: Pgno,
        /// Size of the database in pages.
        commit: u32,
    },
    /// The lock page is never stored.
    #[error("the lock page {0} must not be stored")]
    LockPage(Pgno),
    /// A file from TXID 1 holds every page.
    #[error("the full image lacks pages after page {0}")]
    ImageIncomplete(Pgno),
    /// The compressed page is broken.
    #[error("bad compressed page {page}: {why}")]
    BadPage {
        /// The page.
        page: Pgno,
        /// What is wrong with it.
        why: &'static str,
    },
    /// The page index does not describe the pages before it.
    #[error("the page index does not describe the pages")]
    BadIndex,
    /// The trailer's post-apply checksum breaks its rule.
    #[error("the post-apply checksum does not fit the header's flags")]
    BadPostApply,
    /// The file checksum differs.
    #[error("file checksum mismatch: stored {stored:016x}, computed {computed:016x}")]
    ChecksumMismatch {
        /// What the trailer says.
        stored: u64,
        /// What the bytes give.
        computed: u64,
    },
    /// Bytes after the trailer.
    #[error("bytes follow the trailer")]
    TrailingBytes,
}
