//! An activator that does what a test says, and instances that answer with their run's number.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use dormouse_link::message::{
    ActivatorHello, MESSAGE_BYTES_MAX, ProxyHello, RouteLimits, ToActivator, ToProxy, decode,
    decode_hello, encode, encode_hello, instance_socket,
};
use dormouse_link::socket::{Connection, Listener};
use dormouse_link::table::{AreaOwner, ProcessId, TableId, WordsOwner};
use dormouse_link::{Counters, OwnWord, RunNumber, Slot, Word, protocol};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use crate::edge::PATIENCE;

const SLOTS: u32 = 64;

/// The activator's side.
#[derive(Debug)]
pub struct FakeActivator {
    run_dir: PathBuf,
    listener: Listener,
    words: WordsOwner,
    areas: HashMap<ProcessId, AreaOwner>,
    connection: Option<Connection>,
    routes: Vec<(Slot, String, RouteLimits)>,
}

/// Limits that no test reaches unless it means to.
#[must_use]
pub fn limits() -> RouteLimits {
    RouteLimits { body_bytes: 1 << 30, waiters: 256, wake_wait_ms: 20_000 }
}

impl FakeActivator {
    /// Listens in `run_dir`, with an empty table.
    pub fn start(run_dir: &Path, table: u64) -> Result<Self> {
        std::fs::create_dir_all(run_dir)?;
        Ok(Self {
            run_dir: run_dir.to_owned(),
            listener: Listener::bind(&run_dir.join("link.sock"), vec![])?,
            words: WordsOwner::create(SLOTS, TableId(table))?,
            areas: HashMap::new(),
            connection: None,
            routes: Vec::new(),
        })
    }

    /// Adds a route, before [`FakeActivator::accept`].
    pub fn route(&mut self, slot: u32, host: &str, limits: RouteLimits) {
        self.routes.push((Slot(slot), host.to_owned(), limits));
    }

    /// Takes the next proxy, greets it and sends the routes.
    pub fn accept(&mut self) -> Result<()> {
        wait(self.listener.as_fd(), "a proxy connects")?;
        let (connection, _) = self.listener.accept()?;
        wait(connection.as_fd(), "the proxy says hello")?;
        let mut buffer = vec![0; MESSAGE_BYTES_MAX];
        let received = connection.recv(&mut buffer)?;
        let hello: ProxyHello = decode_hello(buffer.get(..received.len).unwrap_or_default())?;
        let table = self.words.table_id();
        let area = match self.areas.entry(hello.process) {
            Entry::Occupied(known) => known.into_mut(),
            Entry::Vacant(new) => new.insert(AreaOwner::create(SLOTS, table, hello.process)?),
        };
        let answer = ActivatorHello {
            table,
            slots: SLOTS,
            run_dir: self.run_dir.display().to_string(),
            box_name: "test".to_owned(),
        };
        let words = self.words.reader_fd()?;
        connection.send(&encode_hello(&answer)?, &[words.as_fd(), area.fd()])?;
        self.connection = Some(connection);
        for (slot, host, limits) in self.routes.clone() {
            self.send(&ToProxy::Route { slot, host, limits })?;
        }
        self.send(&ToProxy::RoutesDone)
    }

    /// Takes the next proxy and waits until it counts in this table.
    pub fn accept_and_settle(&mut self) -> Result<()> {
        self.accept()?;
        let table = self.words.table_id();
        self.hear(
            |message| matches!(message, ToActivator::TableAck { table: named } if *named == table),
        )
        .map(drop)
    }

    /// Cuts the link.
    pub fn hang_up(&mut self) {
        self.connection = None;
    }

    /// Sends a message.
    pub fn send(&self, message: &ToProxy) -> Result<()> {
        let connection = self.connection.as_ref().context("a link")?;
        Ok(connection.send(&encode(message)?, &[])?)
    }

    /// Waits for a message that `is` the one; statistics are skipped, others are an error.
    pub fn hear(&self, is: impl Fn(&ToActivator) -> bool) -> Result<ToActivator> {
        loop {
            let message = self.next()?;
            if is(&message) {
                return Ok(message);
            }
            if !matches!(message, ToActivator::Stats(_)) {
                bail!("unexpected message: {message:?}");
            }
        }
    }

    fn next(&self) -> Result<ToActivator> {
        let connection = self.connection.as_ref().context("a link")?;
        wait(connection.as_fd(), "the proxy says something")?;
        let mut buffer = vec![0; MESSAGE_BYTES_MAX];
        let received = connection.recv(&mut buffer)?;
        if received.len == 0 {
            bail!("the proxy hung up");
        }
        Ok(decode(buffer.get(..received.len).unwrap_or_default())?)
    }

    /// What has come and is not yet heard, statistics left out.
    pub fn heard(&self) -> Result<Vec<ToActivator>> {
        let connection = self.connection.as_ref().context("a link")?;
        let mut heard = Vec::new();
        let mut buffer = vec![0; MESSAGE_BYTES_MAX];
        loop {
            match connection.recv(&mut buffer) {
                Ok(received) if received.len == 0 => bail!("the proxy hung up"),
                Ok(received) => {
                    let message: ToActivator =
                        decode(buffer.get(..received.len).unwrap_or_default())?;
                    if !matches!(message, ToActivator::Stats(_)) {
                        heard.push(message);
                    }
                }
                Err(none) if none.kind() == std::io::ErrorKind::WouldBlock => return Ok(heard),
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// A slot's word.
    pub fn word(&self, slot: u32) -> Result<OwnWord<'_>> {
        self.words.word(Slot(slot)).context("a slot of the table")
    }

    /// The counters of a slot in all areas.
    #[must_use]
    pub fn counters(&self, slot: u32) -> Vec<&Counters> {
        self.areas.values().filter_map(|area| area.counters(Slot(slot))).collect()
    }

    /// Requests in flight for a slot.
    #[must_use]
    pub fn inflight(&self, slot: u32) -> u32 {
        self.counters(slot).iter().map(|counters| counters.inflight()).sum()
    }

    /// Publishes a word as the answer to requests, and notifies.
    pub fn resolve(&self, slot: u32, to: Word) -> Result<()> {
        let word = self.word(slot)?;
        protocol::resolve(word, self.counters(slot), word.load(), to)
            .map_err(|found| anyhow::anyhow!("the word says {found:?}"))?;
        self.send(&ToProxy::Notify { slot: Slot(slot) })
    }

    /// Publishes awake with an instance of that run, and notifies.
    pub fn awake(&self, slot: u32, run: u64) -> Result<()> {
        self.resolve(slot, Word::Awake { run: RunNumber(run) })
    }

    /// Publishes the session's deadline.
    pub fn set_deadline(&self, deadline: Option<dormouse_link::table::Deadline>) {
        self.words.set_deadline(deadline);
    }

    /// Starts an instance of a host's run.
    pub fn instance(&self, host: &str, run: u64) -> Result<Instance> {
        Instance::start(&instance_socket(&self.run_dir, host, RunNumber(run)), run)
    }
}

fn wait(fd: std::os::fd::BorrowedFd<'_>, what: &str) -> Result<()> {
    let patience = PollTimeout::try_from(PATIENCE)?;
    match poll(&mut [PollFd::new(fd, PollFlags::POLLIN)], patience)? {
        0 => bail!("not within {PATIENCE:?}: {what}"),
        _ => Ok(()),
    }
}

/// An app's process, played by threads. `/hold` is answered when the test says so.
#[derive(Debug)]
pub struct Instance {
    path: PathBuf,
    /// One for each `/hold` that has arrived.
    pub holding: Receiver<()>,
    release: Arc<Mutex<Vec<Sender<()>>>>,
}

impl Instance {
    fn start(path: &Path, run: u64) -> Result<Self> {
        std::fs::create_dir_all(path.parent().context("a directory")?)?;
        drop(std::fs::remove_file(path));
        let listener = UnixListener::bind(path)?;
        let (tell, holding) = channel();
        let release: Arc<Mutex<Vec<Sender<()>>>> = Arc::default();
        let held = release.clone();
        std::thread::spawn(move || {
            for stream in listener.incoming().map_while(Result::ok) {
                let (tell, held) = (tell.clone(), held.clone());
                std::thread::spawn(move || drop(serve(stream, run, &tell, &held)));
            }
        });
        Ok(Self { path: path.to_owned(), holding, release })
    }

    /// Waits until a `/hold` has arrived.
    pub fn await_hold(&self) -> Result<()> {
        self.holding.recv_timeout(PATIENCE).context("a request is held by the app")
    }

    /// Answers every `/hold` that has arrived.
    pub fn release(&self) {
        let mut held = self.release.lock().unwrap_or_else(PoisonError::into_inner);
        for each in held.drain(..) {
            // A connection that is gone needs no answer.
            each.send(()).unwrap_or_default();
        }
    }

    /// Removes its socket: later connects find nothing.
    pub fn vanish(&self) -> Result<()> {
        Ok(std::fs::remove_file(&self.path)?)
    }
}

fn serve(
    stream: UnixStream,
    run: u64,
    tell: &Sender<()>,
    held: &Mutex<Vec<Sender<()>>>,
) -> Result<()> {
    let mut out = stream.try_clone()?;
    let mut lines = BufReader::new(stream);
    loop {
        let mut text = String::new();
        while !text.ends_with("\r\n\r\n") {
            if lines.read_line(&mut text)? == 0 {
                return Ok(());
            }
        }
        let lower = text.to_ascii_lowercase();
        let length = lower.lines().find_map(|line| line.strip_prefix("content-length: "));
        let length: u64 = length.map_or(Ok(0), str::parse)?;
        let got = std::io::copy(&mut Read::take(&mut lines, length), &mut std::io::sink())?;
        if text.starts_with("GET /hold") {
            let (release, released) = channel();
            held.lock().unwrap_or_else(PoisonError::into_inner).push(release);
            tell.send(())?;
            released.recv_timeout(Duration::from_mins(1))?;
        }
        let body = if text.starts_with("GET /large") {
            "x".repeat(8 << 20)
        } else {
            format!("run {run} got {got}")
        };
        write!(out, "HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n{body}", body.len())?;
    }
}
