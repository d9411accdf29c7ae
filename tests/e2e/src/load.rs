//! Load on kept connections, with every request accounted for.
//!
//! A request has failed when it gets no answer, an answer of 5xx, or a broken connection. A client
//! sends again on a new connection only where the server had closed the old one before it wrote.

use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

use anyhow::{Context, Result, bail};

use crate::edge::PATIENCE;

/// What became of the requests.
#[derive(Clone, Debug, Default)]
pub struct Report {
    /// Requests that were answered 2xx.
    pub answered: u64,
    /// Connections that the clients opened.
    pub connections: u64,
    /// What became of each other request.
    pub failed: Vec<String>,
}

#[derive(Debug, Default)]
struct Shared {
    stop: AtomicBool,
    answered: AtomicU64,
    connections: AtomicU64,
    failed: Mutex<Vec<String>>,
}

/// Clients that ask one request after the other; stopped on drop.
#[derive(Debug)]
pub struct Load {
    shared: Arc<Shared>,
    clients: Vec<JoinHandle<()>>,
}

impl Load {
    /// Starts `clients` clients of a host.
    #[must_use]
    pub fn start(address: SocketAddr, host: &str, path: &str, clients: usize) -> Self {
        let shared: Arc<Shared> = Arc::default();
        let request = format!("GET {path} HTTP/1.1\r\nHost: {host}\r\n\r\n");
        let clients = (0..clients)
            .map(|_| {
                let (shared, request) = (shared.clone(), request.clone());
                std::thread::spawn(move || shared.ask_again_and_again(address, &request))
            })
            .collect();
        Self { shared, clients }
    }

    /// Requests that were answered so far, or that failed.
    #[must_use]
    pub fn done(&self) -> u64 {
        let failed = self.shared.failed.lock().unwrap_or_else(PoisonError::into_inner).len();
        let answered = self.shared.answered.load(Ordering::Relaxed);
        answered.saturating_add(u64::try_from(failed).unwrap_or(u64::MAX))
    }

    /// Lets every client end its request.
    #[must_use]
    pub fn stop(mut self) -> Report {
        self.end();
        let failed = self.shared.failed.lock().unwrap_or_else(PoisonError::into_inner).clone();
        Report {
            answered: self.shared.answered.load(Ordering::Relaxed),
            connections: self.shared.connections.load(Ordering::Relaxed),
            failed,
        }
    }

    fn end(&mut self) {
        self.shared.stop.store(true, Ordering::Relaxed);
        for client in self.clients.drain(..) {
            // A client that panicked has said so.
            drop(client.join());
        }
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        self.end();
    }
}

impl Shared {
    fn ask_again_and_again(&self, address: SocketAddr, request: &str) {
        let mut kept = None;
        while !self.stop.load(Ordering::Relaxed) {
            match self.ask(address, request, &mut kept) {
                Ok(()) => {
                    self.answered.fetch_add(1, Ordering::Relaxed);
                }
                Err(error) => {
                    kept = None;
                    let mut failed = self.failed.lock().unwrap_or_else(PoisonError::into_inner);
                    failed.push(format!("{error:#}"));
                }
            }
        }
    }

    fn ask(&self, address: SocketAddr, request: &str, kept: &mut Option<TcpStream>) -> Result<()> {
        let mut stream = if let Some(old) = kept.take().filter(is_open) {
            old
        } else {
            self.connections.fetch_add(1, Ordering::Relaxed);
            let new = TcpStream::connect(address).context("connect")?;
            new.set_nodelay(true)?;
            new.set_read_timeout(Some(PATIENCE))?;
            new
        };
        stream.write_all(request.as_bytes()).context("write")?;
        let close = read_answer(&mut stream)?;
        *kept = (!close).then_some(stream);
        Ok(())
    }
}

/// Whether the server has not closed it, as far as can be seen before a write.
fn is_open(stream: &TcpStream) -> bool {
    let quiet = stream.set_nonblocking(true).and_then(|()| stream.peek(&mut [0]));
    let open = matches!(quiet, Err(error) if error.kind() == ErrorKind::WouldBlock);
    open && stream.set_nonblocking(false).is_ok()
}

/// Reads one answer; whether the connection is to be closed behind it.
fn read_answer(stream: &mut TcpStream) -> Result<bool> {
    let mut bytes = Vec::new();
    let mut piece = [0; 4096];
    loop {
        let got =
            stream.read(&mut piece).with_context(|| format!("after {} bytes", bytes.len()))?;
        if got == 0 {
            bail!("closed after {} bytes of an answer", bytes.len());
        }
        bytes.extend_from_slice(piece.get(..got).unwrap_or_default());
        let Some(end) = bytes.windows(4).position(|four| four == b"\r\n\r\n") else { continue };
        let head = String::from_utf8_lossy(bytes.get(..end).unwrap_or_default());
        let head = head.to_ascii_lowercase();
        let status = head.split(' ').nth(1).unwrap_or_default();
        let length = head.lines().find_map(|line| line.strip_prefix("content-length:"));
        let length: usize = length.context("an answer without a length")?.trim().parse()?;
        if bytes.len() < end + 4 + length {
            continue;
        }
        if !status.starts_with('2') {
            let reason = head.lines().find(|line| line.starts_with("x-dormouse-reason"));
            bail!("answered {status} {}", reason.unwrap_or_default());
        }
        return Ok(head.lines().any(|line| line == "connection: close"));
    }
}
