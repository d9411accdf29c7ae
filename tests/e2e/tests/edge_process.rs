//! The proxy as a process: its sockets, its config, its time-outs, its log.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Shutdown, TcpListener};
use std::os::fd::OwnedFd;
use std::process::{Command, Stdio};

use dormouse_e2e::binary;
use dormouse_e2e::edge::{Answer, ENGINES, Proxy, strace};
use dormouse_e2e::edge_backend::Backend;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

fn plain(dir: &tempfile::TempDir, extra: &str) -> (Backend, String) {
    let backend = Backend::default();
    let socket = dir.path().join("a.sock");
    backend.serve(&socket).unwrap();
    let route = format!("[[route]]\nhost = \"a.test\"\nupstream = \"unix:{}\"", socket.display());
    (backend, format!("{extra}\n{route}\n"))
}

/// Starts a proxy whose descriptor 3 is a listener of this name, as systemd does.
fn inherit(dir: &tempfile::TempDir, config: &str, name: &str) -> (Command, TcpListener) {
    let path = dir.path().join("inherit.toml");
    std::fs::write(&path, config).unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut command = Command::new("sh");
    let script = "exec 3<&0 </dev/null; LISTEN_FDS=1 LISTEN_PID=$$ exec \"$@\"";
    command.args(["-c", script, "sh"]).arg(binary("dormouse-proxy").unwrap());
    command.arg("--config").arg(path).env("LISTEN_FDNAMES", name);
    command.stdin(Stdio::from(OwnedFd::from(listener.try_clone().unwrap())));
    (command, listener)
}

#[test]
fn a_socket_from_systemd_is_matched_by_its_name() {
    let dir = tempfile::tempdir().unwrap();
    let (_backend, config) = plain(&dir, "");
    let config = format!("{config}[[edge.listen]]\nname = \"web\"\n");
    let (command, listener) = inherit(&dir, &config, "web");
    let proxy = Proxy::spawn(command, Some(listener.local_addr().unwrap())).unwrap();
    assert_eq!(proxy.get("a.test", "/g").unwrap().status, 200);

    let (mut command, _listener) = inherit(&dir, &config, "other");
    let output = command.output().unwrap();
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success() && text.contains("no socket of that name"), "{text}");
}

#[test]
fn a_config_that_cannot_be_used_says_where_and_what_is_allowed() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("bad.toml");
    for (text, parts) in [
        ("[edge.limits]\nhead_fields = 5000", ["head_fields", "1 to 256"]),
        ("[edge]\nlisten_on = 1", ["bad.toml", "listen_on"]),
        ("[[route]]\nhost = \"a\"\nupstream = \"http://x\"", ["route.upstream", "unix:PATH"]),
        ("", ["edge.listen", "empty"]),
    ] {
        std::fs::write(&path, text).unwrap();
        let mut command = Command::new(binary("dormouse-proxy").unwrap());
        let output = command.arg("--config").arg(&path).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success(), "{said}");
        assert!(parts.iter().all(|part| said.contains(part)), "{text}: {said}");
    }
}

#[test]
fn a_refused_ring_is_one_line_and_epoll_serves() {
    let dir = tempfile::tempdir().unwrap();
    let (_backend, config) = plain(&dir, "");
    let config = format!("{config}[[edge.listen]]\nname = \"http\"\naddress = \"127.0.0.1:0\"\n");
    let path = dir.path().join("proxy.toml");
    std::fs::write(&path, config).unwrap();
    let refusing = |engine: &str| {
        let trace = dir.path().join("trace");
        let mut command = strace(&trace, &["-e", "inject=io_uring_setup:error=EPERM"]);
        command.arg(binary("dormouse-proxy").unwrap()).arg("--config").arg(&path);
        command.args(["--engine", engine]);
        command
    };
    let proxy = Proxy::spawn(refusing("auto"), None).unwrap();
    assert_eq!(proxy.get("a.test", "/g").unwrap().status, 200);
    let log = proxy.log();
    assert_eq!(log.matches("io_uring is refused").count(), 1, "{log}");
    assert!(log.contains("engine=\"epoll\""), "{log}");

    let output = refusing("uring").output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success() && said.contains("refuses io_uring"), "{said}");
}

#[test]
fn slow_and_silent_clients_are_let_go() {
    for engine in ENGINES {
        let dir = tempfile::tempdir().unwrap();
        let limits = "[edge.limits]\nhead_timeout = \"200ms\"\nidle_timeout = \"300ms\"";
        let (_backend, config) = plain(&dir, limits);
        let proxy = Proxy::start(dir.path(), engine, &config).unwrap();
        let mut slow = proxy.connect().unwrap();
        slow.write_all(b"GET / HTTP/1.1\r\nHost: a.te").unwrap();
        assert_eq!(Answer::read(&mut slow).unwrap().status, 408);
        let mut silent = proxy.connect().unwrap();
        silent.write_all(b"GET /g HTTP/1.1\r\nHost: a.test\r\n\r\n").unwrap();
        let answer = Answer::read(&mut silent).unwrap();
        assert_eq!((answer.status, answer.field("connection")), (200, None));
    }
}

#[test]
fn an_app_that_does_not_answer_is_504() {
    for engine in ENGINES {
        let dir = tempfile::tempdir().unwrap();
        let (_backend, config) = plain(&dir, "[edge.limits]\nupstream_timeout = \"100ms\"");
        let proxy = Proxy::start(dir.path(), engine, &config).unwrap();
        let answer = proxy.get("a.test", "/slow").unwrap();
        assert_eq!((answer.status, answer.reason()), (504, "upstream-timeout"));
    }
}

#[test]
fn an_upgraded_connection_half_closes_both_ways() {
    for engine in ENGINES {
        let dir = tempfile::tempdir().unwrap();
        let (_backend, config) = plain(&dir, "");
        let proxy = Proxy::start(dir.path(), engine, &config).unwrap();
        let mut stream = proxy.connect().unwrap();
        let head = "GET /upg HTTP/1.1\r\nHost: a.test\r\nConnection: Upgrade\r\nUpgrade: echo\r\n";
        stream.write_all(format!("{head}\r\n").as_bytes()).unwrap();
        let sent = "z".repeat(3 << 20);
        let mut writer = stream.try_clone().unwrap();
        let writing = std::thread::spawn({
            let sent = sent.clone();
            move || {
                writer.write_all(sent.as_bytes()).unwrap();
                writer.shutdown(Shutdown::Write).unwrap();
            }
        });
        let mut got = Vec::new();
        stream.read_to_end(&mut got).unwrap();
        writing.join().unwrap();
        let text = String::from_utf8(got).unwrap();
        let (head, body) = text.split_once("\r\n\r\n").unwrap();
        assert!(head.starts_with("HTTP/1.1 101 "), "{head}");
        assert!(body == format!("HELLO{sent}"), "{} bytes came back", body.len());
    }
}

#[test]
fn a_log_that_nobody_reads_ends_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let (_backend, config) = plain(&dir, "");
    let config = format!("{config}[[edge.listen]]\nname = \"http\"\naddress = \"127.0.0.1:0\"\n");
    let path = dir.path().join("proxy.toml");
    std::fs::write(&path, config).unwrap();
    let mut command = Command::new(binary("dormouse-proxy").unwrap());
    let mut child = command.arg("--config").arg(&path).stderr(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
    assert!(lines.by_ref().map_while(Result::ok).any(|line| line.contains("serving")));
    drop(lines);
    let pid = Pid::from_raw(i32::try_from(child.id()).unwrap());
    // It logs its drain into a pipe without a reader, and ends all the same.
    kill(pid, Signal::SIGTERM).unwrap();
    assert!(child.wait().unwrap().success());
}

#[test]
fn an_unreachable_upstream_is_502_and_an_unknown_host_404() {
    let dir = tempfile::tempdir().unwrap();
    let config = "[[route]]\nhost = \"gone.test\"\nupstream = \"unix:/nonexistent/x.sock\"\n";
    let proxy = Proxy::start(dir.path(), "epoll", config).unwrap();
    assert_eq!(proxy.get("gone.test", "/").unwrap().status, 502);
    let unknown = proxy.get("other.test", "/").unwrap();
    assert_eq!((unknown.status, unknown.reason()), (404, "unknown-host"));
}
