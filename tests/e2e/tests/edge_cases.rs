//! The h1 cases through the real proxy, on both engines.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use dormouse_e2e::edge::Proxy;
use dormouse_e2e::edge_backend::Backend;
use dormouse_e2e::edge_cases::{Case, Outcome, load};

const AT_ONCE: usize = 24;

fn play_all(proxy: &Proxy, cases: &[Case], tag: &str) -> Vec<(usize, Outcome)> {
    let (next, done) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
    std::thread::scope(|scope| {
        for _ in 0..AT_ONCE {
            scope.spawn(|| {
                loop {
                    let number = next.fetch_add(1, Ordering::Relaxed);
                    let Some(case) = cases.get(number) else { return };
                    let outcome = case.play(proxy.connect().unwrap(), tag).unwrap();
                    done.lock().unwrap().push((number, outcome));
                }
            });
        }
    });
    done.into_inner().unwrap()
}

fn the_cases_hold(engine: &str) {
    let dir = tempfile::tempdir().unwrap();
    let backend = Backend::default();
    let mut config = String::new();
    for host in ["a.test", "b.test"] {
        let socket = dir.path().join(format!("{host}.sock"));
        backend.serve(&socket).unwrap();
        let route =
            format!("[[route]]\nhost = \"{host}\"\nupstream = \"unix:{}\"\n", socket.display());
        config.push_str(&route);
    }
    let mut proxy = Proxy::start(dir.path(), engine, &config).unwrap();
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../cases/h1-cases.json");
    let cases = load(&file).unwrap();
    assert_eq!(cases.len(), 102);
    let outcomes = play_all(&proxy, &cases, engine);
    // Its end closes every connection to the app: the log is complete then.
    proxy.terminate().unwrap();
    assert!(proxy.wait().unwrap().success(), "{}", proxy.log());
    let log = backend.log();
    let mut wrong = Vec::new();
    for (number, outcome) in &outcomes {
        let problems = cases[*number].judge(outcome, &log);
        if !problems.is_empty() {
            wrong.push(format!("{}: {}", cases[*number].id, problems.join("; ")));
        }
    }
    wrong.sort();
    let as_expected = cases.len() - wrong.len();
    assert!(
        wrong.is_empty(),
        "{as_expected} of {} on {engine}; the rest:\n{}",
        cases.len(),
        wrong.join("\n")
    );
}

#[test]
fn the_h1_cases_hold_on_epoll() {
    the_cases_hold("epoll");
}

#[test]
fn the_h1_cases_hold_on_uring() {
    the_cases_hold("uring");
}
