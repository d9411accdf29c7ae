//! An awake request makes no system call towards the activator, and takes no lock: seen by strace.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::net::TcpStream;

use dormouse_e2e::binary;
use dormouse_e2e::edge::{ENGINES, Proxy, strace};
use dormouse_e2e::edge_peer::{FakeActivator, limits};

const REQUESTS: usize = 1000;

/// Sends one request on a kept connection and reads its answer.
fn ask(stream: &mut TcpStream) {
    write!(stream, "GET / HTTP/1.1\r\nHost: a.test\r\n\r\n").unwrap();
    let mut got = Vec::new();
    let mut buffer = [0; 1024];
    while !got.ends_with(b"run 1 got 0") {
        let count = stream.read(&mut buffer).unwrap();
        assert_ne!(count, 0, "the proxy closed");
        got.extend_from_slice(&buffer[..count]);
    }
}

/// The C library's allocator growing or trimming its heap: now and then, and on no request's
/// account.
const ALLOCATOR: [&str; 5] = ["brk", "madvise", "mmap", "mprotect", "munmap"];
/// Which way it may trim, it reads once, when it first wants to.
const ALLOCATOR_READS: &str = "/proc/sys/vm/overcommit_memory";

/// System calls by name, of the thread that made most of them, in the second half of its trace.
fn calls_of_the_loop(trace: &str) -> BTreeMap<String, usize> {
    let mut threads: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for line in trace.lines() {
        let Some((thread, call)) = line.split_once(' ') else { continue };
        threads.entry(thread).or_default().push(call.trim_start());
    }
    let busiest = threads.into_values().max_by_key(Vec::len).unwrap();
    let mut calls = BTreeMap::new();
    let mut reads = false;
    for call in &busiest[busiest.len() / 2..] {
        if reads || call.contains(ALLOCATOR_READS) {
            reads = !call.starts_with("close(");
            continue;
        }
        if let Some((name, _)) = call.split_once('(')
            && !ALLOCATOR.contains(&name)
        {
            *calls.entry(name.to_owned()).or_default() += 1;
        }
    }
    calls
}

#[test]
fn an_awake_request_makes_no_call_towards_the_activator_and_takes_no_lock() {
    for engine in ENGINES {
        let dir = tempfile::tempdir().unwrap();
        let run = dir.path().join("run");
        let mut activator = FakeActivator::start(&run, 1).unwrap();
        activator.route(3, "a.test", limits());
        let config = format!(
            "[box]\nrun = \"{}\"\n[store]\nkind = \"directory\"\npath = \"/nowhere\"\n[edge]\n\
             loops = 1\n[[edge.listen]]\nname = \"http\"\naddress = \"127.0.0.1:0\"\n",
            run.display()
        );
        let path = dir.path().join("proxy.toml");
        std::fs::write(&path, config).unwrap();
        let trace = dir.path().join("trace");
        let mut command = strace(&trace, &[]);
        command.arg(binary("dormouse-proxy").unwrap()).arg("--config").arg(&path);
        command.args(["--engine", engine]);
        let proxy = Proxy::spawn(command, None).unwrap();
        activator.accept_and_settle().unwrap();
        let _instance = activator.instance("a.test", 1).unwrap();
        activator.awake(3, 1).unwrap();
        let mut stream = proxy.connect().unwrap();
        for _ in 0..REQUESTS {
            ask(&mut stream);
        }
        assert_eq!(activator.heard().unwrap(), []);
        drop(proxy);
        let calls = calls_of_the_loop(&std::fs::read_to_string(&trace).unwrap());
        let expected = match engine {
            "epoll" => ["epoll_wait", "recvfrom", "sendto"].as_slice(),
            _ => ["epoll_wait", "io_uring_enter"].as_slice(),
        };
        let names: Vec<&str> = calls.keys().map(String::as_str).collect();
        assert_eq!(names, expected, "{engine}: {calls:?}");
    }
}
