//! The traps of a ring, each run on both engines.
#![expect(clippy::unwrap_used, clippy::expect_used, reason = "a test fails by panicking")]

use std::future::poll_fn;
use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::{Mutex, PoisonError};
use std::task::Poll;
use std::time::Duration;

use dormouse_ring::{Engine, Epoll, Listener, Stream, Uring, connect_unix};

/// Far more than any step takes; reached only by a failure.
const DEADLINE: Duration = Duration::from_secs(10);

/// Descriptors and threads are counted: no two tests at once.
static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

fn on_both(test: impl AsyncFn(Side)) {
    let _alone = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    Epoll.run(async { tokio::time::timeout(DEADLINE, test(Side::Epoll)).await }).unwrap().unwrap();
    Uring.probe().expect("this kernel refuses io_uring: run where it is allowed");
    Uring.run(async { tokio::time::timeout(DEADLINE, test(Side::Uring)).await }).unwrap().unwrap();
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Side {
    Epoll,
    Uring,
}

macro_rules! with_engine {
    ($side:expr, $engine:ident => $body:expr) => {
        match $side {
            Side::Epoll => {
                let $engine = Epoll;
                $body
            }
            Side::Uring => {
                let $engine = Uring;
                $body
            }
        }
    };
}

fn pair<E: Engine>(engine: E) -> (E::Stream, UnixStream) {
    let (ours, theirs) = UnixStream::pair().unwrap();
    ours.set_nonblocking(E::NONBLOCKING).unwrap();
    (engine.unix(ours).unwrap(), theirs)
}

async fn read<S: Stream>(stream: &mut S, size: usize) -> Vec<u8> {
    let mut into = Vec::new();
    poll_fn(|cx| stream.poll_read(cx, &mut into, size)).await.unwrap();
    into
}

async fn write<S: Stream>(stream: &mut S, bytes: &[u8]) {
    let mut from = bytes.to_vec();
    poll_fn(|cx| stream.poll_write(cx, &mut from)).await.unwrap();
}

/// One byte through the engine: whatever was queued before it has reached the kernel then.
async fn round_trip<E: Engine>(engine: E) {
    let (mut ours, mut theirs) = pair(engine);
    theirs.write_all(b"x").unwrap();
    assert_eq!(read(&mut ours, 1).await, b"x");
}

/// Gives the engine its turns until `done` says so.
async fn until<E: Engine>(engine: E, mut done: impl FnMut() -> bool) {
    while !done() {
        round_trip(engine).await;
    }
}

async fn time_out_then_read<E: Engine>(engine: E) {
    let (mut ours, mut theirs) = pair(engine);
    let nothing = tokio::time::timeout(Duration::from_millis(5), read(&mut ours, 16)).await;
    assert!(nothing.is_err());
    theirs.write_all(b"kept").unwrap();
    assert_eq!(read(&mut ours, 16).await, b"kept");
}

#[test]
fn a_read_that_timed_out_swallows_no_bytes() {
    on_both(async |side| with_engine!(side, engine => time_out_then_read(engine).await));
}

async fn drop_with_read_in_flight<E: Engine>(engine: E) {
    let open = || std::fs::read_dir("/proc/self/fd").unwrap().count();
    let before = open();
    let mut others = Vec::new();
    for _ in 0..50 {
        let (mut ours, theirs) = pair(engine);
        let mut into = Vec::new();
        let first = poll_fn(|cx| Poll::Ready(ours.poll_read(cx, &mut into, 16))).await;
        assert!(first.is_pending());
        // The read reaches the kernel before the stream goes.
        round_trip(engine).await;
        drop(ours);
        theirs.set_nonblocking(true).unwrap();
        others.push(theirs);
    }
    for mut theirs in others {
        until(engine, || matches!(theirs.read(&mut [0]), Ok(0))).await;
    }
    until(engine, || open() <= before).await;
}

#[test]
fn a_stream_dropped_with_a_read_in_flight_sends_fin_and_leaks_nothing() {
    on_both(async |side| with_engine!(side, engine => drop_with_read_in_flight(engine).await));
}

async fn full_backlog<E: Engine>(engine: E) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("full.sock");
    let listener = UnixListener::bind(&path).unwrap();
    nix::sys::socket::listen(&listener, nix::sys::socket::Backlog::new(0).unwrap()).unwrap();
    let threads = || std::fs::read_dir("/proc/self/task").unwrap().count();
    let before = threads();
    let waiting: Vec<_> = (0..30)
        .map(|_| {
            let path = path.clone();
            tokio::task::spawn_local(async move { connect_unix(engine, &path).await.map(drop) })
        })
        .collect();
    // Bytes pass while they wait: the loop's thread is free.
    round_trip(engine).await;
    assert!(threads() <= before + 2, "connects must not hold threads");
    listener.set_nonblocking(true).unwrap();
    for each in waiting {
        until(engine, || {
            drop(listener.accept());
            each.is_finished()
        })
        .await;
        each.await.unwrap().unwrap();
    }
}

#[test]
fn a_full_backlog_is_waited_for_without_a_thread() {
    on_both(async |side| with_engine!(side, engine => full_backlog(engine).await));
}

async fn missing_and_refusing<E: Engine>(engine: E) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("gone.sock");
    let missing = connect_unix(engine, &path).await.map(drop).unwrap_err();
    assert_eq!(missing.kind(), std::io::ErrorKind::NotFound);
    drop(UnixListener::bind(&path).unwrap());
    let refused = connect_unix(engine, &path).await.map(drop).unwrap_err();
    assert_eq!(refused.kind(), std::io::ErrorKind::ConnectionRefused);
}

#[test]
fn a_missing_or_refusing_socket_is_told_apart_at_once() {
    on_both(async |side| with_engine!(side, engine => missing_and_refusing(engine).await));
}

async fn accept_dropped<E: Engine>(engine: E) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("l.sock");
    let listener = Listener::new(OwnedFd::from(UnixListener::bind(&path).unwrap())).unwrap();
    let nobody = tokio::time::timeout(Duration::from_millis(5), listener.accept(engine)).await;
    assert!(nobody.is_err());
    let mut client = UnixStream::connect(&path).unwrap();
    client.write_all(b"hi").unwrap();
    let mut accepted = listener.accept(engine).await.unwrap();
    assert_eq!(read(&mut accepted.stream, 16).await, b"hi");
    assert_eq!(accepted.peer, None);
}

#[test]
fn an_accept_that_was_given_up_takes_no_connection() {
    on_both(async |side| with_engine!(side, engine => accept_dropped(engine).await));
}

async fn half_close_and_large_write<E: Engine>(engine: E) {
    let (mut ours, mut theirs) = pair(engine);
    let sent: Vec<u8> = (0..=255).cycle().take(1 << 20).collect();
    let reader = std::thread::spawn(move || {
        let mut got = Vec::new();
        theirs.read_to_end(&mut got).unwrap();
        theirs.write_all(b"answer").unwrap();
        got
    });
    write(&mut ours, &sent).await;
    assert_eq!(ours.writing(), 0);
    ours.shutdown_write().unwrap();
    assert_eq!(read(&mut ours, 16).await, b"answer");
    assert_eq!(read(&mut ours, 16).await, b"");
    assert!(reader.join().unwrap() == sent);
}

#[test]
fn a_large_write_arrives_whole_and_half_close_leaves_the_other_half() {
    on_both(async |side| with_engine!(side, engine => half_close_and_large_write(engine).await));
}

async fn write_to_a_closed_peer<E: Engine>(engine: E) {
    let (mut ours, theirs) = pair(engine);
    drop(theirs);
    let mut from = b"x".to_vec();
    let error = poll_fn(|cx| ours.poll_write(cx, &mut from)).await.unwrap_err();
    assert_eq!(error.kind(), std::io::ErrorKind::BrokenPipe);
    assert_eq!(ours.writing(), 0);
}

#[test]
fn a_write_to_a_closed_peer_is_an_error() {
    on_both(async |side| with_engine!(side, engine => write_to_a_closed_peer(engine).await));
}
