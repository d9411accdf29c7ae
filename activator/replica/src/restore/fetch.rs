//! Reading files from the store ahead of their use: in order, bounded, several at once.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, Read, Write as _};
use std::path::Path;

use dormouse_core::ids::{ETag, Host};
use dormouse_store::{ReadError, Store};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;

use super::error::RestoreError;
use super::plan::RemoteFile;
use super::progress::Progress;

/// Bytes of one request of a large file.
const CHUNK_BYTES: u64 = 1 << 20;
/// A file up to this size is read by one request.
const WHOLE_MAX: u64 = 2 << 20;
/// Bytes that are asked for ahead of their use.
const AHEAD_BYTES: u64 = 4 << 20;
/// Requests in flight at once, however small they are.
const AHEAD_MAX: usize = 16;
/// Chunks that wait for the decoder.
const QUEUE_MAX: usize = 1;

/// A piece of a file, in order.
#[derive(Debug)]
pub(super) struct Chunk {
    pub(super) bytes: Vec<u8>,
    pub(super) etag: ETag,
}

pub(super) type Chunks = mpsc::Receiver<Result<Chunk, ReadError>>;

/// Starts to read `files` one after the other. Dropping the receiver ends it.
pub(super) fn start<S: Store>(
    store: &S,
    prefix: &str,
    host: &Host,
    files: &[RemoteFile],
) -> Chunks {
    let (send, receive) = mpsc::channel(QUEUE_MAX);
    let layout = store.layout();
    let mut work = Vec::new();
    for file in files {
        let key = layout.ltx_key(prefix, host, &file.key);
        if file.size <= WHOLE_MAX {
            work.push(Piece { key, range: None, size: file.size });
            continue;
        }
        let mut offset = 0;
        while offset < file.size {
            let range = Some((offset, CHUNK_BYTES.min(file.size - offset)));
            work.push(Piece { key: key.clone(), range, size: file.size });
            offset += CHUNK_BYTES;
        }
    }
    let store = store.clone();
    tokio::spawn(async move {
        let mut work = work.into_iter().peekable();
        let mut ahead: VecDeque<(u64, JoinHandle<Result<Chunk, ReadError>>)> = VecDeque::new();
        loop {
            let mut bytes: u64 = ahead.iter().map(|(bytes, _)| *bytes).sum();
            while ahead.len() < AHEAD_MAX
                && let Some(piece) = work.next_if(|piece| {
                    ahead.is_empty() || bytes.saturating_add(piece.bytes()) <= AHEAD_BYTES
                })
            {
                bytes = bytes.saturating_add(piece.bytes());
                let store = store.clone();
                let bytes = piece.bytes();
                ahead.push_back((bytes, tokio::spawn(async move { one(&store, &piece).await })));
            }
            let Some((_, next)) = ahead.pop_front() else { return };
            let result = match next.await {
                Ok(result) => result,
                Err(error) => Err(ReadError::Broken { key: String::new(), why: error.to_string() }),
            };
            let is_over = result.is_err();
            if send.send(result).await.is_err() || is_over {
                for (_, task) in ahead {
                    task.abort();
                }
                return;
            }
        }
    });
    receive
}

/// Reads one whole file into `path`.
pub(crate) async fn to_file<S: Store>(
    store: &S,
    prefix: &str,
    host: &Host,
    file: &RemoteFile,
    path: &Path,
) -> Result<(), RestoreError> {
    let mut chunks = start(store, prefix, host, std::slice::from_ref(file));
    let mut out = Some(File::create(path).map_err(|error| RestoreError::io(path, error))?);
    while let Some(chunk) = chunks.recv().await {
        let (bytes, mut to) = (chunk?.bytes, out.take());
        let written = tokio::task::spawn_blocking(move || {
            if let Some(to) = &mut to {
                to.write_all(&bytes)?;
            }
            Ok(to)
        });
        let written = written.await.unwrap_or_else(|error| Err(io::Error::other(error)));
        out = written.map_err(|error| RestoreError::io(path, error))?;
    }
    Ok(())
}

/// What one request reads.
struct Piece {
    key: String,
    /// Offset and length; none: the whole file.
    range: Option<(u64, u64)>,
    /// Of the whole file, as it was listed.
    size: u64,
}

impl Piece {
    fn bytes(&self) -> u64 {
        self.range.map_or(self.size, |(_, len)| len)
    }
}

/// Requests that reading a file takes.
pub(super) fn requests(file: &RemoteFile) -> u64 {
    if file.size <= WHOLE_MAX { 1 } else { file.size.div_ceil(CHUNK_BYTES) }
}

async fn one<S: Store>(store: &S, piece: &Piece) -> Result<Chunk, ReadError> {
    let Piece { key, range, size } = piece;
    let object = match *range {
        None => store.get(key).await?,
        Some((offset, len)) => store.get_range(key, offset, len).await?,
    };
    if object.meta.size != *size {
        let why = format!("listed with {size} bytes, has {}", object.meta.size);
        return Err(ReadError::Broken { key: key.clone(), why });
    }
    Ok(Chunk { bytes: object.body, etag: object.meta.etag })
}

/// One file out of the chunks, for a blocking decoder.
pub(super) struct FileReader<'a> {
    chunks: &'a mut Chunks,
    progress: &'a Progress,
    left: u64,
    current: Vec<u8>,
    at: usize,
    pub(super) etag: Option<ETag>,
    pub(super) failed: Option<ReadError>,
}

impl<'a> FileReader<'a> {
    pub(super) fn new(chunks: &'a mut Chunks, progress: &'a Progress, size: u64) -> Self {
        Self { chunks, progress, left: size, current: Vec::new(), at: 0, etag: None, failed: None }
    }
}

impl Read for FileReader<'_> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        while self.at == self.current.len() {
            if self.left == 0 {
                return Ok(0);
            }
            match self.chunks.blocking_recv() {
                Some(Ok(chunk)) if !chunk.bytes.is_empty() => {
                    let len = u64::try_from(chunk.bytes.len()).map_err(io::Error::other)?;
                    self.left = self.left.saturating_sub(len);
                    self.progress.read(len);
                    self.current = chunk.bytes;
                    self.at = 0;
                    self.etag = Some(chunk.etag);
                }
                Some(Ok(_)) | None => return Ok(0),
                Some(Err(error)) => {
                    let why = error.to_string();
                    self.failed = Some(error);
                    return Err(io::Error::other(why));
                }
            }
        }
        let n = into.len().min(self.current.len() - self.at);
        into[..n].copy_from_slice(&self.current[self.at..self.at + n]);
        self.at += n;
        Ok(n)
    }
}
