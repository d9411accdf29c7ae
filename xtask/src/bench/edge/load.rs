//! The clients: kept connections in one epoll, as fast as answers come or at a fixed rate.
//!
//! At a fixed rate requests are due in ticks, since a timer for each would cost as much as the
//! request. Its time begins when it was due, not when it could be sent: a proxy that falls behind
//! is seen in its latencies.

use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};
use nix::sys::time::TimeSpec;
use nix::sys::timerfd::{ClockId, Expiration, TimerFd, TimerFlags, TimerSetTimeFlags};

const EVENTS: usize = 128;
/// Longer than any answer takes; after that a proxy counts as stuck.
const STUCK_MS: u16 = 5000;
/// Time between requests that are due together, at a fixed rate.
const TICK: Duration = Duration::from_micros(100);
/// The timer's key; connections are numbered from 0.
const TIMER: u64 = u64::MAX;

/// What was seen in a span of time.
#[derive(Debug, Default)]
pub(super) struct Tally {
    pub(super) elapsed: Duration,
    /// One for each answer, in microseconds.
    pub(super) latencies_us: Vec<f64>,
}

impl Tally {
    /// Answers.
    pub(super) fn requests(&self) -> f64 {
        u32::try_from(self.latencies_us.len()).map_or(f64::INFINITY, f64::from)
    }
}

/// The answer that a connection awaits.
struct Awaited {
    since: Instant,
    head: Vec<u8>,
    /// Bytes to come, once the head has said how many.
    left: Option<usize>,
}

struct Connection {
    stream: TcpStream,
    awaited: Option<Awaited>,
}

/// When requests are due.
struct Pace {
    begun: Instant,
    /// Requests a tick.
    share: f64,
    ticks: u32,
    /// What is left to send of the last tick.
    left: f64,
}

impl Pace {
    fn new(begun: Instant, rate: f64) -> Self {
        Self { begun, share: rate * TICK.as_secs_f64(), ticks: 0, left: 0.0 }
    }

    /// When the next request was due, if it was.
    fn next(&mut self, now: Instant) -> Option<Instant> {
        while self.left < 1.0 {
            if self.begun + TICK * self.ticks > now {
                return None;
            }
            self.ticks += 1;
            self.left += self.share;
        }
        self.left -= 1.0;
        Some(self.begun + TICK * (self.ticks - 1))
    }
}

/// The clients of one proxy.
pub(super) struct Load {
    epoll: Epoll,
    timer: TimerFd,
    connections: Vec<Connection>,
    request: Vec<u8>,
    scratch: Vec<u8>,
}

#[expect(clippy::disallowed_methods, reason = "a benchmark measures real time")]
fn clock() -> Instant {
    Instant::now()
}

impl Load {
    /// Connects.
    pub(super) fn connect(address: SocketAddr, connections: u16, size: u32) -> Result<Self> {
        let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?;
        let timer = TimerFd::new(
            ClockId::CLOCK_MONOTONIC,
            TimerFlags::TFD_NONBLOCK | TimerFlags::TFD_CLOEXEC,
        )?;
        epoll.add(timer.as_fd(), EpollEvent::new(EpollFlags::EPOLLIN, TIMER))?;
        let connect = |key: u16| {
            let stream = TcpStream::connect(address)?;
            stream.set_nodelay(true)?;
            stream.set_nonblocking(true)?;
            epoll.add(&stream, EpollEvent::new(EpollFlags::EPOLLIN, u64::from(key)))?;
            Ok(Connection { stream, awaited: None })
        };
        let connections = (0..connections).map(connect).collect::<Result<_>>()?;
        let request = format!(
            "GET /{size} HTTP/1.1\r\nHost: {}\r\nUser-Agent: bench\r\nAccept: */*\r\n\r\n",
            super::HOST
        );
        let request = request.into_bytes();
        Ok(Self { epoll, timer, connections, request, scratch: vec![0; 128 * 1024] })
    }

    /// Asks for that long; `rate` requests a second, or as many as are answered.
    pub(super) fn run(&mut self, span: Duration, rate: Option<f64>) -> Result<Tally> {
        let begun = clock();
        let mut tally = Tally::default();
        let mut pace = rate.map(|rate| Pace::new(begun, rate));
        match pace {
            Some(_) => {
                let every = Expiration::Interval(TimeSpec::from(TICK));
                self.timer.set(every, TimerSetTimeFlags::empty())?;
            }
            None => self.timer.unset()?,
        }
        let mut events = [EpollEvent::empty(); EVENTS];
        let mut now = begun;
        self.send_due(now, &mut pace)?;
        while now.duration_since(begun) < span {
            let count = self.epoll.wait(&mut events, EpollTimeout::from(STUCK_MS))?;
            ensure!(count > 0, "no answer for {STUCK_MS} ms");
            for event in events.get(..count).unwrap_or_default() {
                if event.data() == TIMER {
                    // Only a wake: what is due is told by the clock.
                    self.timer.wait()?;
                } else if let Some(since) = self.receive(usize::try_from(event.data())?)? {
                    let taken = clock().duration_since(since);
                    tally.latencies_us.push(taken.as_secs_f64() * 1e6);
                }
            }
            now = clock();
            self.send_due(now, &mut pace)?;
        }
        tally.elapsed = now.duration_since(begun);
        Ok(tally)
    }

    /// Sends on idle connections what is due.
    fn send_due(&mut self, now: Instant, pace: &mut Option<Pace>) -> Result<()> {
        for connection in self.connections.iter_mut().filter(|each| each.awaited.is_none()) {
            let since = match pace {
                None => clock(),
                Some(pace) => match pace.next(now) {
                    Some(due) => due,
                    None => return Ok(()),
                },
            };
            let sent = connection.stream.write(&self.request)?;
            ensure!(sent == self.request.len(), "a request did not fit the socket");
            connection.awaited = Some(Awaited { since, head: Vec::new(), left: None });
        }
        Ok(())
    }

    /// Reads; gives when the request began whose answer is complete now.
    fn receive(&mut self, key: usize) -> Result<Option<Instant>> {
        let connection = self.connections.get_mut(key).context("an unknown connection")?;
        let count = match connection.stream.read(&mut self.scratch) {
            Ok(0) => bail!("the proxy closed a connection"),
            Ok(count) => count,
            Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(None),
            Err(error) => return Err(error.into()),
        };
        let awaited = connection.awaited.as_mut().context("bytes that nobody asked for")?;
        let left = if let Some(left) = awaited.left {
            left.checked_sub(count)
        } else {
            awaited.head.extend_from_slice(self.scratch.get(..count).unwrap_or_default());
            let Some(length) = answer_length(&awaited.head)? else { return Ok(None) };
            length.checked_sub(awaited.head.len())
        };
        awaited.left = Some(left.context("more bytes than announced")?);
        if awaited.left != Some(0) {
            return Ok(None);
        }
        Ok(connection.awaited.take().map(|awaited| awaited.since))
    }
}

/// Bytes of an answer with its head, once the head is complete.
fn answer_length(bytes: &[u8]) -> Result<Option<usize>> {
    let Some(end) = bytes.windows(4).position(|four| four == b"\r\n\r\n") else { return Ok(None) };
    let head = str::from_utf8(bytes.get(..end).unwrap_or_default())?;
    ensure!(head.starts_with("HTTP/1.1 200"), "answered {head}");
    let length = head.lines().find_map(|line| {
        let (name, value) = line.split_once(':')?;
        name.eq_ignore_ascii_case("content-length").then(|| value.trim().parse::<usize>().ok())?
    });
    Ok(Some(end + 4 + length.context("an answer without Content-Length")?))
}
