//! Sentences about one connection.

use super::*;

const GET: &str = "GET / HTTP/1.1\r\nHost: a.test\r\n\r\n";
const OK: &str = "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok";
const KEPT: Step = Step::Finished { reuse: true };
const DROPPED: Step = Step::Finished { reuse: false };

fn fresh() -> Conn {
    let settings = Settings { head_bytes: 1024, head_fields: 20, body_bytes: 1000 };
    Conn::new(settings, Peer { address: "::1".into(), trusted: false, scheme: "http" })
}

fn client_says(conn: &mut Conn, text: &str) -> Step {
    conn.from_client().tail().extend_from_slice(text.as_bytes());
    conn.advance()
}

fn app_says(conn: &mut Conn, text: &str) -> Step {
    conn.from_upstream().tail().extend_from_slice(text.as_bytes());
    conn.advance()
}

fn taken(buffer: &mut Buffer) -> String {
    let text = String::from_utf8_lossy(buffer.data()).into_owned();
    buffer.clear();
    text
}

/// A connection whose request was sent to an upstream.
fn sent(request: &str, first_try: bool) -> Conn {
    let mut conn = fresh();
    assert_eq!(client_says(&mut conn, request), Step::Route);
    conn.forward(first_try);
    assert_eq!(conn.advance(), Step::Wait);
    assert!(!taken(conn.to_upstream()).is_empty());
    conn
}

#[test]
fn a_stale_connection_is_replaced_once_for_what_may_be_sent_twice() {
    let mut conn = sent(GET, true);
    conn.upstream_closed(true);
    assert_eq!(conn.advance(), Step::Retry);
    conn.forward(false);
    assert_eq!(conn.advance(), Step::Wait);
    assert!(taken(conn.to_upstream()).starts_with("GET / HTTP/1.1\r\n"));
    conn.upstream_closed(true);
    assert_eq!(conn.advance(), DROPPED);
    assert!(taken(conn.to_client()).starts_with("HTTP/1.1 502 "));
}

#[test]
fn nothing_else_is_sent_twice() {
    let post = "POST / HTTP/1.1\r\nHost: a.test\r\nContent-Length: 2\r\n\r\nok";
    let mut conn = sent(post, true);
    conn.upstream_closed(true);
    assert_eq!(conn.advance(), DROPPED);

    let put = "PUT / HTTP/1.1\r\nHost: a.test\r\nContent-Length: 4\r\n\r\nab";
    let mut conn = sent(put, true);
    assert_eq!(client_says(&mut conn, "cd"), Step::Wait);
    conn.upstream_closed(true);
    assert_eq!(conn.advance(), DROPPED, "its body was begun and is not kept");

    let mut conn = sent(GET, true);
    assert_eq!(app_says(&mut conn, "HTTP/1.1 2"), Step::Wait);
    conn.upstream_closed(true);
    assert_eq!(conn.advance(), DROPPED, "the app has seen it");
}

#[test]
fn an_answer_that_breaks_off_is_cut_not_completed() {
    for (head, clean) in [
        ("Content-Length: 9\r\n\r\nhalf", true),
        ("Transfer-Encoding: chunked\r\n\r\n4\r\nhalf\r\n", true),
        ("\r\nhalf", false),
    ] {
        let mut conn = sent(GET, false);
        assert_eq!(app_says(&mut conn, &format!("HTTP/1.1 200 OK\r\n{head}")), Step::Wait);
        assert!(!taken(conn.to_client()).ends_with("0\r\n\r\n"));
        conn.upstream_closed(clean);
        assert_eq!(conn.advance(), DROPPED);
        assert_eq!(taken(conn.to_client()), "", "{head:?}");
        assert_eq!(conn.advance(), Step::ShutdownClient);
    }
}

#[test]
fn an_early_answer_ends_the_connection_but_not_the_answer() {
    let mut conn = sent("POST / HTTP/1.1\r\nHost: a.test\r\nContent-Length: 9\r\n\r\nab", false);
    conn.upstream_write_failed();
    assert_eq!(app_says(&mut conn, OK), DROPPED);
    assert!(taken(conn.to_client()).contains("connection: close\r\n"));
    assert_eq!(conn.advance(), Step::ShutdownClient);
    assert_eq!(client_says(&mut conn, "GET /smuggled HTTP/1.1\r\n\r\n"), Step::Wait);
    conn.client_closed();
    assert_eq!(conn.advance(), Step::Closed);
}

#[test]
fn a_pipelined_request_waits_for_the_answer_before_it() {
    let mut conn = sent(&format!("{GET}{GET}"), false);
    assert_eq!(app_says(&mut conn, OK), KEPT);
    assert_eq!(conn.advance(), Step::Route);
    conn.forward(true);
    assert_eq!(conn.advance(), Step::Wait);
    assert!(!taken(conn.to_upstream()).is_empty());
    assert_eq!(app_says(&mut conn, OK), KEPT);
    assert_eq!(taken(conn.to_client()).matches("200 OK").count(), 2);
    assert_eq!(conn.advance(), Step::Wait);
    assert_eq!(conn.timer(), Timer::Idle);
}

#[test]
fn bytes_behind_an_answer_spoil_its_connection() {
    let mut conn = sent(GET, false);
    assert_eq!(app_says(&mut conn, &format!("{OK}POISON")), DROPPED);
    assert!(!taken(conn.to_client()).contains("POISON"));
}

#[test]
fn a_body_that_is_malformed_from_its_start_reaches_nobody() {
    let mut conn = fresh();
    let head = "POST / HTTP/1.1\r\nHost: a.test\r\nTransfer-Encoding: chunked\r\n\r\n";
    assert_eq!(client_says(&mut conn, &format!("{head}-1\r\n")), Step::Wait);
    assert!(taken(conn.to_client()).starts_with("HTTP/1.1 400 "));
    assert_eq!(conn.to_upstream().len(), 0);
    assert_eq!(conn.advance(), Step::ShutdownClient);
}

#[test]
fn bodies_are_held_back_by_either_side() {
    let mut conn = fresh();
    conn.settings.body_bytes = u64::MAX;
    let head = "POST / HTTP/1.1\r\nHost: a.test\r\nContent-Length: 1000000\r\n\r\n";
    assert_eq!(client_says(&mut conn, head), Step::Route);
    conn.forward(false);
    while conn.wants_client() {
        let large = "x".repeat(10_000);
        assert_eq!(client_says(&mut conn, &large), Step::Wait);
    }
    assert!(conn.to_upstream().len() <= HIGH_WATER + head.len() + 200);
    assert!(conn.from_client().len() < HIGH_WATER + 10_000);
    app_says(&mut conn, "HTTP/1.1 200 OK\r\n\r\n");
    while conn.wants_upstream() {
        assert_eq!(app_says(&mut conn, &"y".repeat(10_000)), Step::Wait);
    }
    assert!(conn.to_client().len() <= HIGH_WATER + 10_100);
}

#[test]
fn a_drain_ends_idle_connections_in_a_moment_and_others_after_their_answer() {
    let mut idle = fresh();
    assert_eq!(idle.advance(), Step::Wait);
    idle.drain();
    assert_eq!(
        (idle.advance(), idle.timer(), idle.wants_client()),
        (Step::Wait, Timer::Drain, true)
    );
    assert_eq!(idle.timed_out(Timer::Drain), Step::Wait);
    assert_eq!(idle.advance(), Step::ShutdownClient);

    let mut late = fresh();
    late.drain();
    assert_eq!(client_says(&mut late, GET), Step::Route);
    late.forward(false);
    assert_eq!(late.advance(), Step::Wait);
    assert!(!taken(late.to_upstream()).is_empty());
    assert_eq!(app_says(&mut late, OK), KEPT);
    assert!(taken(late.to_client()).contains("connection: close\r\n"));

    let mut busy = sent(GET, false);
    busy.drain();
    assert_eq!(app_says(&mut busy, OK), KEPT);
    assert!(taken(busy.to_client()).contains("connection: close\r\n"));
    assert_eq!(busy.advance(), Step::ShutdownClient);
}

#[test]
fn the_end_of_a_drain_closes_a_tunnel_behind_what_was_sent() {
    let upgrade = "GET / HTTP/1.1\r\nHost: a.test\r\nConnection: upgrade\r\nUpgrade: echo\r\n\r\n";
    let mut conn = sent(upgrade, false);
    conn.drain();
    let switch = "HTTP/1.1 101 Switching\r\nUpgrade: echo\r\nConnection: upgrade\r\n\r\nHELLO";
    assert_eq!(app_says(&mut conn, switch), Step::Wait);
    assert_eq!((conn.timer(), conn.end()), (Timer::Progress, DROPPED));
    assert_eq!(conn.advance(), Step::Wait);
    assert!(taken(conn.to_client()).ends_with("HELLO"));
    assert_eq!(conn.advance(), Step::ShutdownClient);
    conn.client_closed();
    assert_eq!(conn.advance(), Step::Closed);
}

const SOCKET: &str =
    "GET / HTTP/1.1\r\nHost: a.test\r\nConnection: Upgrade\r\nUpgrade: WebSocket\r\n\r\n";
const SWITCHED: &str =
    "HTTP/1.1 101 Switching\r\nUpgrade: websocket\r\nConnection: upgrade\r\n\r\n";

fn says_1012(said: &[u8]) -> bool {
    said.ends_with(b"\x88\x11\x03\xf4service restart")
}

#[test]
fn a_drain_ends_a_web_socket_with_1012_where_a_frame_ends() {
    let mut conn = sent(SOCKET, false);
    assert_eq!(app_says(&mut conn, SWITCHED), Step::Wait);
    assert_eq!(app_says(&mut conn, "\u{1}\u{5}hel"), Step::Wait);
    taken(conn.to_client());
    conn.drain();
    assert_eq!(conn.advance(), Step::Wait, "in the middle of a frame");
    assert_eq!(app_says(&mut conn, "lo\u{1}\u{3}one"), DROPPED);
    let said = conn.to_client().data().to_vec();
    assert!(said.starts_with(b"lo\x88") && says_1012(&said), "{said:?}");
    let length = said.len();
    conn.to_client().consume(length);
    assert_eq!(conn.advance(), Step::ShutdownClient);
    conn.client_closed();
    assert_eq!(conn.advance(), Step::Closed);
}

#[test]
fn a_web_socket_that_is_silent_ends_at_once_and_one_that_begins_later_at_the_end() {
    let mut silent = sent(SOCKET, false);
    app_says(&mut silent, SWITCHED);
    taken(silent.to_client());
    silent.drain();
    assert_eq!(silent.advance(), DROPPED);
    assert!(says_1012(silent.to_client().data()));
    let mut late = sent(SOCKET, false);
    late.drain();
    assert_eq!(app_says(&mut late, SWITCHED), Step::Wait);
    taken(late.to_client());
    assert_eq!(late.end(), DROPPED);
    assert!(says_1012(late.to_client().data()));
    let mut halfway = sent(SOCKET, false);
    app_says(&mut halfway, SWITCHED);
    app_says(&mut halfway, "\u{1}\u{5}hel");
    taken(halfway.to_client());
    halfway.drain();
    assert_eq!(halfway.end(), DROPPED);
    assert!(halfway.to_client().is_empty(), "FIN alone, in the middle of a frame");
}

#[test]
fn a_tunnel_passes_what_was_sent_early_and_ends_side_by_side() {
    let upgrade = "GET / HTTP/1.1\r\nHost: a.test\r\nConnection: upgrade\r\nUpgrade: echo\r\n\r\n";
    let mut conn = sent(&format!("{upgrade}EARLY"), false);
    let switch = "HTTP/1.1 101 Switching\r\nUpgrade: echo\r\nConnection: upgrade\r\n\r\nHELLO";
    assert_eq!(app_says(&mut conn, switch), Step::Wait);
    assert!(taken(conn.to_client()).ends_with("HELLO"));
    assert_eq!(taken(conn.to_upstream()), "EARLY");
    conn.client_closed();
    assert_eq!(conn.advance(), Step::ShutdownUpstream);
    assert_eq!(app_says(&mut conn, "BYE"), Step::Wait);
    assert_eq!(taken(conn.to_client()), "BYE");
    conn.upstream_closed(true);
    assert_eq!(conn.advance(), Step::ShutdownClient);
    assert_eq!(conn.advance(), DROPPED);
    assert_eq!(conn.advance(), Step::Closed);
}

#[test]
fn a_timer_that_runs_out_is_answered_where_something_can_be_said() {
    let mut conn = fresh();
    assert_eq!(client_says(&mut conn, "GET"), Step::Wait);
    assert_eq!(conn.timer(), Timer::Head);
    assert_eq!(conn.timed_out(Timer::Head), Step::Wait);
    assert!(taken(conn.to_client()).starts_with("HTTP/1.1 408 "));

    let mut conn = sent(GET, false);
    assert_eq!(conn.timer(), Timer::Upstream);
    assert_eq!(conn.timed_out(Timer::Upstream), DROPPED);
    assert!(taken(conn.to_client()).starts_with("HTTP/1.1 504 "));

    let mut conn = sent(GET, false);
    app_says(&mut conn, "HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n");
    assert_eq!(conn.timer(), Timer::Progress, "the client has not taken the head yet");
    taken(conn.to_client());
    assert_eq!(conn.timer(), Timer::Off, "a stream may be silent");
}

#[test]
fn a_refused_request_leaves_a_connection_that_goes_on() {
    let mut conn = fresh();
    assert_eq!(client_says(&mut conn, GET), Step::Route);
    conn.refuse(&Answer::unavailable("asleep", "the host is asleep", 5));
    let said = taken(conn.to_client());
    assert!(said.contains("Retry-After: 5\r\n") && said.contains("x-dormouse-reason: asleep\r\n"));
    assert_eq!(client_says(&mut conn, GET), Step::Route);
}

#[test]
fn limits_are_told_by_their_status() {
    let mut conn = fresh();
    client_says(&mut conn, &"x".repeat(1025));
    assert!(taken(conn.to_client()).starts_with("HTTP/1.1 431 "));
    let mut conn = fresh();
    client_says(&mut conn, "PUT / HTTP/1.1\r\nHost: a\r\nContent-Length: 1001\r\n\r\n");
    assert!(taken(conn.to_client()).starts_with("HTTP/1.1 413 "));
}

#[test]
fn an_upstream_that_counts_no_more_is_not_passed_on() {
    let answer = Answer::unavailable("session-expired", "not now", 5);
    let mut conn = sent(GET, false);
    conn.from_upstream().tail().extend_from_slice(b"HTTP/1.1 303 See Other\r\n\r\n");
    assert_eq!(conn.disown(&answer), DROPPED);
    assert!(taken(conn.to_client()).starts_with("HTTP/1.1 503 "));
    let mut conn = sent(GET, false);
    app_says(&mut conn, "HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhalf");
    assert_eq!(conn.disown(&answer), Step::Closed, "what has begun is cut");
}
