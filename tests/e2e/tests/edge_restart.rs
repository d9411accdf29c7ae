//! The proxy's restart under load, on sockets that outlive it.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::path::Path;
use std::process::{Command, Stdio};

use dormouse_e2e::edge::{Answer, ENGINES, PATIENCE, Proxy};
use dormouse_e2e::edge_backend::Backend;
use dormouse_e2e::edge_peer::{FakeActivator, limits};
use dormouse_e2e::load::Load;
use dormouse_e2e::wait::until;
use dormouse_e2e::world::{Plan, World};
use dormouse_e2e::{binary, programs};

const HOST: &str = "a.test";
const CLIENTS: usize = 8;
/// Requests before, between and after the restarts.
const STRETCH: u64 = 3500;

/// Starts a proxy whose descriptor 3 is this listener, as systemd does.
fn on(listener: &TcpListener, config: &Path, engine: &str) -> Proxy {
    let mut command = Command::new("sh");
    let script = "exec 3<&0 </dev/null; LISTEN_FDS=1 LISTEN_PID=$$ exec \"$@\"";
    command.args(["-c", script, "sh"]).arg(binary("dormouse-proxy").unwrap());
    command.arg("--config").arg(config).args(["--engine", engine]).env("LISTEN_FDNAMES", "http");
    command.stdin(Stdio::from(OwnedFd::from(listener.try_clone().unwrap())));
    Proxy::spawn(command, Some(listener.local_addr().unwrap())).unwrap()
}

fn until_done(load: &Load, count: u64) {
    until(PATIENCE, "requests are answered", || Ok(load.done() >= count)).unwrap();
}

fn restarts_under_load(engine: &str) {
    let dir = tempfile::tempdir().unwrap();
    let run = dir.path().join("run");
    let mut activator = FakeActivator::start(&run, 1).unwrap();
    activator.route(3, HOST, limits());
    let config = dir.path().join("proxy.toml");
    let text = format!(
        "[box]\nrun = \"{}\"\n[store]\nkind = \"directory\"\npath = \"/nowhere\"\n\
         [edge]\nloops = 2\ndrain = \"20s\"\n[[edge.listen]]\nname = \"http\"\n",
        run.display()
    );
    std::fs::write(&config, text).unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let mut proxy = on(&listener, &config, engine);
    activator.accept_and_settle().unwrap();
    let _instance = activator.instance(HOST, 1).unwrap();
    activator.awake(3, 1).unwrap();
    let load = Load::start(address, HOST, "/", CLIENTS);
    for _ in 0..5 {
        until_done(&load, load.done() + STRETCH);
        proxy.terminate().unwrap();
        assert!(proxy.wait().unwrap().success(), "{}", proxy.log());
        proxy = on(&listener, &config, engine);
        activator.accept_and_settle().unwrap();
    }
    until_done(&load, load.done() + STRETCH);
    let report = load.stop();
    assert_eq!(report.failed, Vec::<String>::new(), "of {} requests", report.answered);
    assert!(report.answered >= 20_000, "{} requests", report.answered);
}

#[test]
fn five_restarts_under_load_fail_no_request_on_epoll() {
    restarts_under_load("epoll");
}

#[test]
fn five_restarts_under_load_fail_no_request_on_a_ring() {
    restarts_under_load("uring");
}

/// A connection that was switched, and that nobody closes.
fn upgraded(address: SocketAddr) -> TcpStream {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    let head = "GET /upg HTTP/1.1\r\nHost: a.test\r\nConnection: Upgrade\r\nUpgrade: echo\r\n\r\n";
    stream.write_all(head.as_bytes()).unwrap();
    let mut got = Vec::new();
    while !got.ends_with(b"HELLO") {
        let mut byte = [0];
        stream.read_exact(&mut byte).unwrap();
        got.extend(byte);
    }
    stream
}

#[test]
fn a_web_socket_holds_no_new_connection_up_and_ends_with_the_drain() {
    for engine in ENGINES {
        let dir = tempfile::tempdir().unwrap();
        let backend = Backend::default();
        let socket = dir.path().join("a.sock");
        backend.serve(&socket).unwrap();
        let config = format!(
            "[edge]\nloops = 2\ndrain = \"3s\"\n\
             [[route]]\nhost = \"a.test\"\nupstream = \"unix:{}\"",
            socket.display()
        );
        let mut proxy = Proxy::start(dir.path(), engine, &config).unwrap();
        let mut switched = upgraded(proxy.address);
        proxy.terminate().unwrap();
        until(PATIENCE, "it drains", || Ok(proxy.log().contains("draining"))).unwrap();
        for _ in 0..100 {
            assert_eq!(proxy.get(HOST, "/g").unwrap().status, 200);
        }
        // No reset: the relay is ended properly a second before the hard stop.
        assert_eq!(switched.read_to_end(&mut Vec::new()).unwrap(), 0);
        drop(switched);
        assert!(proxy.wait().unwrap().success());
        assert!(!proxy.log().contains("are cut"), "{}", proxy.log());
    }
}

#[test]
fn a_real_web_socket_is_told_to_come_again_and_does() {
    use tungstenite::protocol::frame::coding::CloseCode;
    use tungstenite::{Message, client};
    for engine in ENGINES {
        let bin = programs().unwrap();
        let config = World::guestbook(&bin, "path");
        let plan = Plan { config, engine: engine.to_owned(), ..Plan::default() };
        let mut world = World::started(&bin, &plan).unwrap();
        world.add(HOST, "guestbook").unwrap();
        let address = world.address();
        let connect = || {
            let stream = TcpStream::connect(address).unwrap();
            stream.set_read_timeout(Some(PATIENCE)).unwrap();
            let (mut socket, _) = client(format!("ws://{HOST}/ws"), stream).unwrap();
            socket.send(Message::text("one")).unwrap();
            assert_eq!(socket.read().unwrap(), Message::text("one"));
            socket
        };
        let mut socket = connect();
        world.end_proxy(nix::sys::signal::Signal::SIGTERM).unwrap();
        let Message::Close(Some(close)) = socket.read().unwrap() else { panic!("no Close") };
        assert_eq!(close.code, CloseCode::Restart);
        assert!(socket.read().is_err(), "and the connection ends behind it");
        world.start_proxy().unwrap();
        connect();
        world.stop().unwrap();
    }
}

#[test]
fn a_stream_that_began_during_the_drain_holds_nobody_up() {
    let dir = tempfile::tempdir().unwrap();
    let mut activator = FakeActivator::start(&dir.path().join("run"), 1).unwrap();
    activator.route(3, HOST, limits());
    let config = format!(
        "[box]\nrun = \"{}\"\n[store]\nkind = \"directory\"\npath = \"/nowhere\"\n\
         [edge]\nloops = 1\ndrain = \"20s\"",
        dir.path().join("run").display()
    );
    let mut proxy = Proxy::start(dir.path(), "epoll", &config).unwrap();
    activator.accept_and_settle().unwrap();
    let instance = activator.instance(HOST, 1).unwrap();
    activator.awake(3, 1).unwrap();
    let mut idle = proxy.connect().unwrap();
    write!(idle, "GET / HTTP/1.1\r\nHost: {HOST}\r\n\r\n").unwrap();
    idle.read_exact(&mut [0]).unwrap();
    proxy.terminate().unwrap();
    until(PATIENCE, "it drains", || Ok(proxy.log().contains("draining"))).unwrap();
    let mut long = proxy.connect().unwrap();
    write!(long, "GET /hold HTTP/1.1\r\nHost: {HOST}\r\n\r\n").unwrap();
    instance.await_hold().unwrap();
    // What was there before has ended; the one that came in between has not.
    idle.read_to_end(&mut Vec::new()).unwrap();
    drop(idle);
    assert_eq!(proxy.get(HOST, "/").unwrap().status, 200);
    instance.release();
    assert_eq!(Answer::read(&mut long).unwrap().status, 200);
    assert!(proxy.wait().unwrap().success());
}
