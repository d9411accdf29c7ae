//! Managed hosts through the real proxy, with an activator that does what each test says.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::thread::{JoinHandle, ScopedJoinHandle, scope, spawn};

use dormouse_e2e::edge::{Answer, ENGINES, PATIENCE, Proxy};
use dormouse_e2e::edge_peer::{FakeActivator, Instance, limits};
use dormouse_e2e::wait::until;
use dormouse_link::message::{RouteLimits, ToActivator, ToProxy};
use dormouse_link::table::Deadline;
use dormouse_link::{NotStopped, Refusal, RunNumber, Slot, Word, protocol};

const HOST: &str = "a.test";

struct World {
    dir: tempfile::TempDir,
    activator: FakeActivator,
    proxy: Proxy,
}

impl World {
    /// One host at slot 3, a linked proxy that counts in its table.
    fn new(engine: &str, limits: RouteLimits, extra: &str) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let run = dir.path().join("run");
        let mut activator = FakeActivator::start(&run, 1).unwrap();
        activator.route(3, HOST, limits);
        let proxy = Proxy::start(dir.path(), engine, &config(dir.path(), extra)).unwrap();
        activator.accept_and_settle().unwrap();
        Self { dir, activator, proxy }
    }

    fn awake(engine: &str) -> (Self, Instance) {
        let world = Self::new(engine, limits(), "");
        let instance = world.activator.instance(HOST, 1).unwrap();
        world.activator.awake(3, 1).unwrap();
        (world, instance)
    }

    fn run_dir(&self) -> PathBuf {
        self.dir.path().join("run")
    }

    fn hear_wake(&self) {
        self.activator.hear(|message| *message == ToActivator::Wake { slot: Slot(3) }).unwrap();
    }

    /// A client that waits for its answer on a thread of its own.
    fn client(&self, path: &str) -> JoinHandle<Answer> {
        let mut stream = self.proxy.connect().unwrap();
        let request = format!("GET {path} HTTP/1.1\r\nHost: {HOST}\r\nConnection: close\r\n\r\n");
        stream.write_all(request.as_bytes()).unwrap();
        spawn(move || Answer::read(&mut stream).unwrap())
    }
}

fn config(dir: &Path, extra: &str) -> String {
    format!(
        "[box]\nrun = \"{}\"\n[store]\nkind = \"directory\"\npath = \"/nowhere\"\n\
         [edge]\nloops = 2\ndrain = \"20s\"\n{extra}\n",
        dir.join("run").display()
    )
}

fn on_both(test: impl Fn(&str)) {
    for engine in ENGINES {
        test(engine);
    }
}

fn text(answer: &Answer) -> String {
    String::from_utf8_lossy(&answer.body).into_owned()
}

#[test]
fn two_hundred_waiters_make_one_wake_and_all_are_served() {
    on_both(|engine| {
        let world = World::new(engine, limits(), "");
        let _instance = world.activator.instance(HOST, 1).unwrap();
        let clients: Vec<_> = (0..200).map(|_| world.client("/")).collect();
        world.hear_wake();
        // A request on a kept connection would show that the others were read: all are waiting.
        until_waiting(&world, 200);
        assert_eq!(world.activator.heard().unwrap(), [], "one wake is enough");
        world.activator.awake(3, 1).unwrap();
        for client in clients {
            let answer = client.join().unwrap();
            assert_eq!((answer.status, text(&answer)), (200, "run 1 got 0".to_owned()));
        }
        assert_eq!(world.activator.heard().unwrap(), []);
        // Those that only filled places have gone without reading their answers.
        while world.activator.inflight(3) > 0 {
            std::thread::yield_now();
        }
    });
}

/// Fills the rest of the host's places: the first refusal tells that `count` are waiting.
fn until_waiting(world: &World, count: usize) {
    let places = usize::try_from(limits().waiters).unwrap();
    scope(|scope| {
        let probes: Vec<ScopedJoinHandle<'_, TcpStream>> = (0..=places - count)
            .map(|_| {
                scope.spawn(|| {
                    let mut stream = world.proxy.connect().unwrap();
                    write!(stream, "GET / HTTP/1.1\r\nHost: {HOST}\r\n\r\n").unwrap();
                    stream
                })
            })
            .collect();
        let streams: Vec<TcpStream> =
            probes.into_iter().map(|probe| probe.join().unwrap()).collect();
        // Exactly one of them finds no place; poll says which, whenever it is answered.
        let mut fds: Vec<_> = streams
            .iter()
            .map(|stream| {
                nix::poll::PollFd::new(
                    std::os::fd::AsFd::as_fd(stream),
                    nix::poll::PollFlags::POLLIN,
                )
            })
            .collect();
        let patience = nix::poll::PollTimeout::try_from(PATIENCE).unwrap();
        assert_eq!(nix::poll::poll(&mut fds, patience).unwrap(), 1);
    });
}

#[test]
fn a_waiter_is_answered_at_its_deadline() {
    on_both(|engine| {
        let short = RouteLimits { wake_wait_ms: 200, ..limits() };
        let world = World::new(engine, short, "");
        let client = world.client("/");
        world.hear_wake();
        let answer = client.join().unwrap();
        assert_eq!((answer.status, answer.reason()), (503, "wake-timed-out"));
        assert_eq!(answer.field("retry-after"), Some("5"));
        // The next one asks again: a wake that came to nothing silences nobody.
        let client = world.client("/");
        world.hear_wake();
        assert_eq!(client.join().unwrap().status, 503);
    });
}

#[test]
fn waiters_beyond_a_bound_are_refused_at_once() {
    on_both(|engine| {
        let world = World::new(engine, RouteLimits { waiters: 1, ..limits() }, "");
        let first = world.client("/");
        world.hear_wake();
        let second = world.proxy.get(HOST, "/").unwrap();
        assert_eq!((second.status, second.reason()), (503, "too-many-waiters"));
        let _instance = world.activator.instance(HOST, 1).unwrap();
        world.activator.awake(3, 1).unwrap();
        assert_eq!(first.join().unwrap().status, 200);
    });
    let world = World::new("epoll", limits(), "[edge.limits]\nwaiters = 1");
    let first = world.client("/");
    world.hear_wake();
    assert_eq!(world.proxy.get(HOST, "/").unwrap().reason(), "too-many-waiters");
    let _instance = world.activator.instance(HOST, 1).unwrap();
    world.activator.awake(3, 1).unwrap();
    assert_eq!(first.join().unwrap().status, 200);
}

#[test]
fn a_refused_wake_is_told_to_every_waiter() {
    on_both(|engine| {
        let world = World::new(engine, limits(), "");
        let clients: Vec<_> = (0..2).map(|_| world.client("/")).collect();
        world.hear_wake();
        let (slot, reason) = (Slot(3), Refusal::Broken);
        world.activator.resolve(3, Word::Refusing { reason }).unwrap();
        world.activator.send(&ToProxy::Refused { slot, reason, retry_after_s: 7 }).unwrap();
        for client in clients {
            let answer = client.join().unwrap();
            assert_eq!((answer.status, answer.reason()), (503, "broken"));
        }
        assert_eq!(world.proxy.get(HOST, "/").unwrap().reason(), "broken");
    });
}

#[test]
fn a_request_in_flight_takes_an_idle_stop_back() {
    on_both(|engine| {
        let (world, instance) = World::awake(engine);
        let client = world.client("/hold");
        instance.await_hold().unwrap();
        let stop = || {
            let areas = world.activator.counters(3);
            protocol::try_stop(world.activator.word(3).unwrap(), RunNumber(1), areas)
        };
        assert_eq!(stop(), Err(NotStopped::InFlight(1)));
        instance.release();
        assert_eq!(client.join().unwrap().status, 200);
        assert_eq!(stop(), Ok(()));
        // One that comes while the host is stopping wakes it again, as a new run.
        let client = world.client("/");
        world.hear_wake();
        let _second = world.activator.instance(HOST, 2).unwrap();
        world.activator.awake(3, 2).unwrap();
        assert_eq!(text(&client.join().unwrap()), "run 2 got 0");
    });
}

#[test]
fn a_dead_instance_is_reported_and_the_same_request_waits_for_the_next_run() {
    on_both(|engine| {
        let (world, instance) = World::awake(engine);
        instance.vanish().unwrap();
        let client = world.client("/");
        let gone = ToActivator::InstanceGone { slot: Slot(3), run: RunNumber(1) };
        world.activator.hear(|message| *message == gone).unwrap();
        world.hear_wake();
        let _second = world.activator.instance(HOST, 2).unwrap();
        world.activator.awake(3, 2).unwrap();
        assert_eq!(text(&client.join().unwrap()), "run 2 got 0");
        assert_eq!(world.activator.inflight(3), 0);
    });
}

#[test]
fn a_sidecar_never_wakes_and_never_counts() {
    on_both(|engine| {
        let world = World::new(engine, limits(), "");
        let ask = |path: &str| {
            let head = format!("GET {path} HTTP/1.1\r\nHost: {HOST}\r\nConnection: close\r\n");
            world.proxy.ask(&format!("{head}X-Dormouse-Sidecar: 1\r\n\r\n")).unwrap()
        };
        let asleep = ask("/");
        assert_eq!((asleep.status, asleep.reason()), (503, "asleep"));
        assert_eq!(world.activator.heard().unwrap(), []);
        let instance = world.activator.instance(HOST, 1).unwrap();
        world.activator.resolve(3, Word::Waking).unwrap();
        scope(|scope| {
            let joining = scope.spawn(|| ask("/hold"));
            // A notice that finds it waiting makes no wake of it.
            for _ in 0..100 {
                world.activator.send(&ToProxy::Notify { slot: Slot(3) }).unwrap();
            }
            // Whether it waits already or comes later: it is let pass once the host is awake.
            world.activator.awake(3, 1).unwrap();
            instance.await_hold().unwrap();
            assert_eq!(world.activator.inflight(3), 0);
            instance.release();
            assert_eq!(joining.join().unwrap().status, 200);
        });
        assert_eq!(world.activator.heard().unwrap(), []);
    });
}

#[test]
fn past_the_sessions_deadline_nothing_is_sent_and_no_answer_counts() {
    on_both(|engine| {
        let (world, instance) = World::awake(engine);
        assert_eq!(world.proxy.get(HOST, "/").unwrap().status, 200);
        let mut begun = world.proxy.connect().unwrap();
        write!(begun, "POST / HTTP/1.1\r\nHost: {HOST}\r\nContent-Length: 9\r\n\r\nhalf").unwrap();
        while world.activator.inflight(3) == 0 {
            std::thread::yield_now();
        }
        let past = Deadline { boottime_ns: 1, realtime_ns: u64::MAX };
        world.activator.set_deadline(Some(past));
        write!(begun, "other").unwrap();
        let mut said = Vec::new();
        drop(begun.read_to_end(&mut said));
        assert!(said.starts_with(b"HTTP/1.1 503 "), "the rest of its body is not sent");
        let answer = world.proxy.get(HOST, "/").unwrap();
        assert_eq!((answer.status, answer.reason()), (503, "session-expired"));
        let ahead = Deadline { boottime_ns: u64::MAX, realtime_ns: u64::MAX };
        world.activator.set_deadline(Some(ahead));
        assert_eq!(world.proxy.get(HOST, "/").unwrap().status, 200);
        scope(|scope| {
            let asked = scope.spawn(|| world.proxy.get(HOST, "/hold").unwrap());
            instance.await_hold().unwrap();
            world.activator.set_deadline(Some(past));
            instance.release();
            let answer = asked.join().unwrap();
            assert_eq!((answer.status, answer.reason()), (503, "session-expired"));
        });
        // The run was fenced, and the session was taken anew before its answer came.
        world.activator.set_deadline(Some(ahead));
        scope(|scope| {
            let asked = scope.spawn(|| world.proxy.get(HOST, "/hold").unwrap());
            instance.await_hold().unwrap();
            world.activator.resolve(3, Word::Asleep).unwrap();
            instance.release();
            let answer = asked.join().unwrap();
            assert_eq!((answer.status, answer.reason()), (503, "session-expired"));
        });
    });
}

#[test]
fn waiters_outlive_the_link_and_are_posted_again() {
    on_both(|engine| {
        let mut world = World::new(engine, limits(), "");
        let client = world.client("/");
        world.hear_wake();
        world.activator.hang_up();
        world.activator.accept().unwrap();
        world.hear_wake();
        let _instance = world.activator.instance(HOST, 1).unwrap();
        world.activator.awake(3, 1).unwrap();
        assert_eq!(client.join().unwrap().status, 200);
    });
}

#[test]
fn a_new_table_gets_the_counts_and_the_waiters_of_the_old_one() {
    on_both(|engine| {
        let (mut world, instance) = World::awake(engine);
        let held: Vec<_> = (0..3).map(|_| world.client("/hold")).collect();
        for _ in &held {
            instance.await_hold().unwrap();
        }
        assert_eq!(world.activator.inflight(3), 3);
        world.activator.resolve(3, Word::Stopping { run: RunNumber(1) }).unwrap();
        let waiting = world.client("/");
        world.hear_wake();

        let mut second = FakeActivator::start(&world.run_dir(), 2).unwrap();
        // Slots are the activator's choice: another one this time.
        second.route(9, HOST, limits());
        world.activator.hang_up();
        second.accept().unwrap();
        let (mut wake, mut ack) = (false, false);
        while !(wake && ack) {
            let message = second.hear(|_| true).unwrap();
            wake |= message == ToActivator::Wake { slot: Slot(9) };
            ack |= matches!(message, ToActivator::TableAck { .. });
        }
        assert_eq!(second.inflight(9), 3, "what is in flight is counted in the new table");
        let _new = second.instance(HOST, 2).unwrap();
        second.awake(9, 2).unwrap();
        assert_eq!(text(&waiting.join().unwrap()), "run 2 got 0");
        instance.release();
        for client in held {
            assert_eq!(text(&client.join().unwrap()), "run 1 got 0");
        }
        assert_eq!(second.inflight(9), 0);
    });
}

#[test]
fn a_new_route_is_acknowledged_once_every_loop_serves_it() {
    on_both(|engine| {
        let world = World::new(engine, limits(), "");
        let (slot, host) = (Slot(5), "new.test".to_owned());
        world.activator.send(&ToProxy::Route { slot, host, limits: limits() }).unwrap();
        world.activator.hear(|message| *message == ToActivator::RouteAck { slot }).unwrap();
        let _instance = world.activator.instance("new.test", 1).unwrap();
        world.activator.awake(5, 1).unwrap();
        for _ in 0..20 {
            assert_eq!(world.proxy.get("new.test", "/").unwrap().status, 200);
        }
    });
}

#[test]
fn a_slot_is_let_go_only_when_nothing_is_in_flight() {
    on_both(|engine| {
        let (world, instance) = World::awake(engine);
        let client = world.client("/hold");
        instance.await_hold().unwrap();
        world.activator.send(&ToProxy::Unroute { slot: Slot(3), host: HOST.to_owned() }).unwrap();
        // The delta has reached the loops once the host is unknown on both of them.
        while world.proxy.get(HOST, "/").unwrap().status != 404 {}
        assert_eq!(world.activator.heard().unwrap(), []);
        instance.release();
        assert_eq!(client.join().unwrap().status, 200);
        let ack = ToActivator::UnrouteAck { slot: Slot(3) };
        world.activator.hear(|message| *message == ack).unwrap();
    });
}

#[test]
fn a_drain_finishes_what_is_in_flight() {
    on_both(|engine| {
        let (mut world, instance) = World::awake(engine);
        let client = world.client("/hold");
        instance.await_hold().unwrap();
        let mut idle = world.proxy.connect().unwrap();
        write!(idle, "GET / HTTP/1.1\r\nHost: {HOST}\r\n\r\n").unwrap();
        let mut byte = [0];
        idle.read_exact(&mut byte).unwrap();
        world.proxy.terminate().unwrap();
        // The idle connection ends first, and only then may the other be answered.
        let mut rest = Vec::new();
        idle.read_to_end(&mut rest).unwrap();
        assert!(String::from_utf8_lossy(&rest).ends_with("run 1 got 0"), "{rest:?}");
        drop(idle);
        // The next process begins when this one has ended: until then new requests are answered.
        let mut new = world.proxy.connect().unwrap();
        write!(new, "GET / HTTP/1.1\r\nHost: {HOST}\r\n\r\n").unwrap();
        let answer = Answer::read(&mut new).unwrap();
        assert_eq!((answer.status, answer.field("connection")), (200, Some("close")));
        instance.release();
        assert_eq!(client.join().unwrap().status, 200);
        assert!(world.proxy.wait().unwrap().success(), "{}", world.proxy.log());
    });
}

#[test]
fn a_request_on_an_idle_connection_is_answered_during_a_drain() {
    on_both(|engine| {
        let (mut world, _instance) = World::awake(engine);
        let mut idle = world.proxy.connect().unwrap();
        write!(idle, "GET / HTTP/1.1\r\nHost: {HOST}\r\n\r\n").unwrap();
        let mut byte = [0];
        idle.read_exact(&mut byte).unwrap();
        world.proxy.terminate().unwrap();
        until(PATIENCE, "it drains", || Ok(world.proxy.log().contains("draining"))).unwrap();
        write!(idle, "GET / HTTP/1.1\r\nHost: {HOST}\r\n\r\n").unwrap();
        let mut text = String::new();
        idle.read_to_string(&mut text).unwrap();
        assert_eq!(text.matches("run 1 got 0").count(), 2, "{text}");
        assert!(world.proxy.wait().unwrap().success(), "{}", world.proxy.log());
    });
}

#[test]
fn a_request_before_the_first_routes_waits_for_them() {
    on_both(|engine| {
        let dir = tempfile::tempdir().unwrap();
        let mut activator = FakeActivator::start(&dir.path().join("run"), 1).unwrap();
        activator.route(3, HOST, limits());
        let proxy = Proxy::start(dir.path(), engine, &config(dir.path(), "")).unwrap();
        let _instance = activator.instance(HOST, 1).unwrap();
        scope(|scope| {
            let asked = scope.spawn(|| proxy.get(HOST, "/").unwrap());
            let unknown = scope.spawn(|| proxy.get("other.test", "/").unwrap());
            activator.accept().unwrap();
            // One loop may post before the other has moved.
            let wake = ToActivator::Wake { slot: Slot(3) };
            while activator.hear(|_| true).unwrap() != wake {}
            activator.awake(3, 1).unwrap();
            assert_eq!(text(&asked.join().unwrap()), "run 1 got 0");
            assert_eq!(unknown.join().unwrap().status, 404);
        });
    });
}

#[test]
fn a_drain_has_a_hard_stop() {
    let (mut world, instance) = World::awake("epoll");
    let short = std::fs::read_to_string(world.dir.path().join("proxy-epoll.toml")).unwrap();
    let run = short.replace("20s", "300ms");
    drop(world.proxy);
    world.activator.hang_up();
    let run = run.split("[[edge.listen]]").next().unwrap();
    world.proxy = Proxy::start(world.dir.path(), "epoll", run).unwrap();
    world.activator.accept_and_settle().unwrap();
    let mut stream = world.proxy.connect().unwrap();
    write!(stream, "GET /hold HTTP/1.1\r\nHost: {HOST}\r\n\r\n").unwrap();
    instance.await_hold().unwrap();
    world.proxy.terminate().unwrap();
    assert!(world.proxy.wait().unwrap().success());
    assert!(world.proxy.log().contains("connections are cut"), "{}", world.proxy.log());
    instance.release();
}

#[test]
fn large_bodies_pass_both_ways() {
    on_both(|engine| {
        let (world, _instance) = World::awake(engine);
        let large = world.proxy.get(HOST, "/large").unwrap();
        assert_eq!((large.status, large.body.len()), (200, 8 << 20));
        let body = "y".repeat(8 << 20);
        let head = format!("POST / HTTP/1.1\r\nHost: {HOST}\r\nConnection: close\r\n");
        let length = format!("Content-Length: {}\r\n\r\n", body.len());
        let answer = world.proxy.ask(&format!("{head}{length}{body}")).unwrap();
        assert_eq!(text(&answer), format!("run 1 got {}", body.len()));
    });
}

#[test]
fn a_body_beyond_the_routes_limit_is_refused_before_the_app_sees_it() {
    let world = World::new("epoll", RouteLimits { body_bytes: 10, ..limits() }, "");
    let head = format!("POST / HTTP/1.1\r\nHost: {HOST}\r\nContent-Length: 11\r\n\r\n");
    assert_eq!(world.proxy.ask(&head).unwrap().status, 413);
    assert_eq!(world.activator.heard().unwrap(), []);
}
