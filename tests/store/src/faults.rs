//! A TCP proxy that delays, cuts, refuses, and drops the answer to what was carried out.
//!
//! It counts requests by their first lines, without reading HTTP: a piece of a client's stream that
//! begins with a method begins a request. That holds for clients that do not pipeline.

use std::io::{Read as _, Write as _};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsFd as _;
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use nix::poll::{PollFd, PollFlags, poll};

use crate::server::now;

/// What the network does beside delaying.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// Nothing.
    None,
    /// Nobody listens, and open connections are cut.
    Refuse,
    /// The answers to so many more requests of this method are read from the store, and dropped
    /// with their connections: what was asked was carried out.
    DropAnswer {
        /// `PUT`, `POST`, …
        method: &'static str,
        /// How many more.
        times: u32,
    },
    /// So many more answers are cut after this many bytes, heads included.
    CutAnswer {
        /// Bytes that pass.
        after: usize,
        /// How many more.
        times: u32,
    },
}

/// What the proxy saw.
#[derive(Debug, Default)]
struct Seen {
    connections: u64,
    /// First line of each request.
    requests: Vec<String>,
    /// Of each that was answered, and when the answer passes on.
    answered: Vec<(Instant, String)>,
}

#[derive(Debug)]
struct State {
    fault: Fault,
    /// Each direction.
    delay: Duration,
    seen: Seen,
    /// Both ends of each connection.
    open: Vec<TcpStream>,
    /// What the acceptor does at the moment.
    listens: bool,
    ended: bool,
}

#[derive(Debug)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The proxy. Ends with its connections when it is dropped.
#[derive(Debug)]
pub struct FaultProxy {
    address: SocketAddr,
    shared: Arc<Shared>,
    acceptor: Option<JoinHandle<()>>,
}

/// How soon the acceptor sees a change.
const LOOK: u16 = 10; // ms

impl FaultProxy {
    /// Listens on a free port of the loopback, before `target`.
    pub fn start(target: SocketAddr) -> Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0").context("the fault proxy")?;
        let address = listener.local_addr()?;
        let state = State {
            fault: Fault::None,
            delay: Duration::ZERO,
            seen: Seen::default(),
            open: Vec::new(),
            listens: true,
            ended: false,
        };
        let shared = Arc::new(Shared { state: Mutex::new(state), changed: Condvar::new() });
        let own = Arc::clone(&shared);
        let acceptor = thread::spawn(move || accept(listener, address, target, &own));
        Ok(Self { address, shared, acceptor: Some(acceptor) })
    }

    /// Where it listens.
    #[must_use]
    pub const fn address(&self) -> SocketAddr {
        self.address
    }

    /// The same as an URL.
    #[must_use]
    pub fn endpoint(&self) -> String {
        format!("http://{}", self.address)
    }

    /// Delays each direction: a round trip on an open connection takes twice this long. The making
    /// of a connection is not delayed.
    pub fn delay(&self, each_way: Duration) {
        self.shared.lock().delay = each_way;
    }

    /// Sets what goes wrong from now on; returns when it does.
    pub fn set(&self, fault: Fault) {
        let mut state = self.shared.lock();
        state.fault = fault;
        let listens = fault != Fault::Refuse;
        while state.listens != listens {
            state = self.shared.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        if !listens {
            // Behind the last accept: one may have been under way.
            cut_all(&mut state);
        }
    }

    /// Connections until now.
    #[must_use]
    pub fn connections(&self) -> u64 {
        self.shared.lock().seen.connections
    }

    /// First lines of the requests until now, oldest first.
    #[must_use]
    pub fn requests(&self) -> Vec<String> {
        self.shared.lock().seen.requests.clone()
    }

    /// First lines of the requests whose answers have begun to reach the client, oldest first.
    #[must_use]
    pub fn answered(&self) -> Vec<String> {
        let now = now();
        let state = self.shared.lock();
        let passed = state.seen.answered.iter().filter(|(due, _)| *due <= now);
        passed.map(|(_, line)| line.clone()).collect()
    }
}

impl Drop for FaultProxy {
    fn drop(&mut self) {
        let mut state = self.shared.lock();
        state.ended = true;
        cut_all(&mut state);
        drop(state);
        if let Some(acceptor) = self.acceptor.take() {
            acceptor.join().ok();
        }
    }
}

fn cut_all(state: &mut State) {
    for stream in state.open.drain(..) {
        stream.shutdown(Shutdown::Both).ok();
    }
}

fn accept(listener: TcpListener, address: SocketAddr, target: SocketAddr, shared: &Arc<Shared>) {
    let mut listener = Some(listener);
    loop {
        let (ended, wanted) = {
            let state = shared.lock();
            (state.ended, state.fault != Fault::Refuse)
        };
        if ended {
            return;
        }
        match (&listener, wanted) {
            (Some(_), false) => listener = None,
            (None, true) => listener = TcpListener::bind(address).ok(),
            (None, false) => thread::park_timeout(Duration::from_millis(LOOK.into())),
            (Some(listener), true) => {
                let mut fds = [PollFd::new(listener.as_fd(), PollFlags::POLLIN)];
                if poll(&mut fds, LOOK).is_ok_and(|ready| ready > 0)
                    && let Ok((client, _)) = listener.accept()
                {
                    connect(client, target, shared);
                }
            }
        }
        let mut state = shared.lock();
        if state.listens != listener.is_some() {
            state.listens = listener.is_some();
            shared.changed.notify_all();
        }
    }
}

fn connect(client: TcpStream, target: SocketAddr, shared: &Arc<Shared>) {
    shared.lock().seen.connections += 1;
    // A store that is gone: the client sees its connection end.
    let Ok(store) = TcpStream::connect(target) else { return };
    let joined = Joined::new(client, store, shared);
    if let Ok(joined) = joined {
        joined.run();
    }
}

/// What one connection is at.
#[derive(Debug, Default)]
struct Exchange {
    /// Method of the request on its way.
    method: String,
    /// Its first line, until its answer begins.
    line: Option<String>,
    /// Bytes of its answer until now.
    answered: usize,
}

/// A client and the store.
struct Joined {
    client: TcpStream,
    store: TcpStream,
    shared: Arc<Shared>,
    exchange: Arc<Mutex<Exchange>>,
}

type Piece = (Instant, Vec<u8>);

impl Joined {
    fn new(client: TcpStream, store: TcpStream, shared: &Arc<Shared>) -> Result<Self> {
        client.set_nodelay(true)?;
        store.set_nodelay(true)?;
        let mut state = shared.lock();
        state.open.push(client.try_clone()?);
        state.open.push(store.try_clone()?);
        drop(state);
        Ok(Self { client, store, shared: Arc::clone(shared), exchange: Arc::default() })
    }

    fn again(&self) -> Result<Self> {
        Ok(Self {
            client: self.client.try_clone()?,
            store: self.store.try_clone()?,
            shared: Arc::clone(&self.shared),
            exchange: Arc::clone(&self.exchange),
        })
    }

    /// Two threads a direction: one reads and stamps, one writes when it is time.
    fn run(self) {
        let (Ok(back), Ok(up), Ok(down)) =
            (self.again(), self.store.try_clone(), self.client.try_clone())
        else {
            return;
        };
        let (to_store, for_store) = mpsc::channel();
        let (to_client, for_client) = mpsc::channel();
        thread::spawn(move || self.requests(&to_store));
        thread::spawn(move || back.answers(&to_client));
        thread::spawn(move || deliver(up, &for_store));
        thread::spawn(move || deliver(down, &for_client));
    }

    fn requests(mut self, to_store: &Sender<Piece>) {
        let mut room = vec![0; 64 * 1024];
        while let Ok(len @ 1..) = self.client.read(&mut room) {
            let bytes = room.get(..len).unwrap_or_default();
            let mut state = self.shared.lock();
            if let Some(line) = first_line(bytes) {
                let method = line.split(' ').next().unwrap_or_default().to_owned();
                *self.exchange.lock().unwrap_or_else(PoisonError::into_inner) =
                    Exchange { method, line: Some(line.clone()), answered: 0 };
                state.seen.requests.push(line);
            }
            let due = now() + state.delay;
            drop(state);
            if to_store.send((due, bytes.to_vec())).is_err() {
                break;
            }
        }
        // The other direction ends by itself when the store has nothing more to say.
    }

    fn answers(mut self, to_client: &Sender<Piece>) {
        let mut room = vec![0; 64 * 1024];
        while let Ok(len @ 1..) = self.store.read(&mut room) {
            let mut bytes = room.get(..len).unwrap_or_default();
            let is_interim = bytes.starts_with(b"HTTP/1.1 100");
            let mut state = self.shared.lock();
            let mut exchange = self.exchange.lock().unwrap_or_else(PoisonError::into_inner);
            let is_cut = !is_interim && {
                let passes = judge(&mut state.fault, &exchange, len);
                bytes = bytes.get(..passes.min(len)).unwrap_or_default();
                passes < len
            };
            exchange.answered += bytes.len();
            let due = now() + state.delay;
            if !is_interim
                && !bytes.is_empty()
                && let Some(line) = exchange.line.take()
            {
                state.seen.answered.push((due, line));
            }
            drop(exchange);
            drop(state);
            if to_client.send((due, bytes.to_vec())).is_err() || is_cut {
                break;
            }
        }
        self.store.shutdown(Shutdown::Both).ok();
        self.client.shutdown(Shutdown::Read).ok();
    }
}

/// How many of the next `len` bytes of an answer pass.
fn judge(fault: &mut Fault, exchange: &Exchange, len: usize) -> usize {
    match fault {
        Fault::DropAnswer { method, times } if *times > 0 && exchange.method == *method => {
            *times -= 1;
            0
        }
        Fault::CutAnswer { after, times } if *times > 0 && exchange.answered + len > *after => {
            *times -= 1;
            after.saturating_sub(exchange.answered)
        }
        Fault::None | Fault::Refuse | Fault::DropAnswer { .. } | Fault::CutAnswer { .. } => len,
    }
}

fn deliver(mut to: TcpStream, pieces: &Receiver<Piece>) {
    for (due, bytes) in pieces {
        let left = due.saturating_duration_since(now());
        if !left.is_zero() {
            #[expect(clippy::disallowed_methods, reason = "a delay is what is wanted here")]
            thread::sleep(left);
        }
        if to.write_all(&bytes).is_err() {
            break;
        }
    }
    to.shutdown(Shutdown::Both).ok();
}

/// The first line of a piece that begins a request.
fn first_line(bytes: &[u8]) -> Option<String> {
    let methods = ["GET ", "PUT ", "HEAD ", "POST ", "DELETE "];
    if !methods.iter().any(|method| bytes.starts_with(method.as_bytes())) {
        return None;
    }
    let line = bytes.split(|byte| *byte == b'\r').next().unwrap_or_default();
    Some(String::from_utf8_lossy(line).into_owned())
}
