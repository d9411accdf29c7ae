//! The units of `deploy/` under a real systemd: PID 1 of namespaces of its own.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::fs;
use std::path::Path;

use dormouse_e2e::client;
use dormouse_e2e::edge::PATIENCE;
use dormouse_e2e::load::Load;
use dormouse_e2e::programs;
use dormouse_e2e::systemd::{
    HOST, INSIDE, STORE, address, are_stored, boot, boot_to_the_end, booted, deploy, good, install,
    is_durable, is_in_state, is_served, log, own_log, property, record, root, run, run_of, session,
    sign, start, status, systemctl, told,
};
use dormouse_e2e::wait::until;

const SLOW: &str = "slow.test";

#[test]
fn restarts_of_the_activator_leave_hosts_awake_and_fail_no_request() {
    booted("restarts_of_the_activator_leave_hosts_awake_and_fail_no_request", || {
        start();
        sign(HOST, "one");
        is_durable(HOST);
        let before = run_of(HOST);
        let load = Load::start(address(), HOST, "/healthz", 4);
        let reach = |count: u64| {
            until(PATIENCE, "requests are answered", || Ok(load.done() >= count)).unwrap();
        };
        for name in ["two", "three", "four"] {
            reach(load.done() + 1000);
            sign(HOST, name);
            let main = property("dormouse", "MainPID");
            systemctl(&["restart", "dormouse.service"]);
            assert_ne!(property("dormouse", "MainPID"), main);
            is_in_state(HOST, "awake");
        }
        reach(load.done() + 1000);
        let report = load.stop();
        assert_eq!(report.failed, Vec::<String>::new(), "of {}", report.answered);
        assert_eq!(run_of(HOST), before, "the same process, run and lease");
        assert_eq!(property("dormouse", "Result"), "success");
        is_durable(HOST);
        let said = own_log();
        assert_eq!(said.matches("leaving what runs").count(), 3, "{said}");
        assert_eq!(said.matches("replication goes on").count(), 3, "{said}");
        assert!(!said.contains("NeedsFullImage") && !said.contains("leftover"), "{said}");
        are_stored(&["one", "two", "three", "four"]);
    });
}

/// Adds a host of an app that takes long to start; who asks for it waits.
fn add_a_slow_one() {
    let mut config = fs::read_to_string("/etc/dormouse/dormouse.toml").unwrap();
    config.push_str(
        "[app.slow]\ncommand = [\"/usr/lib/dormouse/guestbook\", \"--socket\", \"{socket}\", \"--db\", \
         \"{db}\", \"--start-ms\", \"20000\"]\nhealth = \"/healthz\"\n",
    );
    fs::write("/etc/dormouse/dormouse.toml", config).unwrap();
    systemctl(&["restart", "dormouse.service"]);
    good("dormouse", &["add", SLOW, "--app", "slow"]);
}

#[test]
fn a_stop_ends_a_wake_that_is_under_way() {
    booted("a_stop_ends_a_wake_that_is_under_way", || {
        start();
        is_served();
        add_a_slow_one();
        let waiting = std::thread::spawn(|| client::request(address(), "GET", SLOW, "/", None));
        is_in_state(SLOW, "starting");
        let wal = format!("/var/lib/dormouse/hosts/{SLOW}/app.db-wal");
        // Before that its database is none that can be followed, and stays unsynced.
        until(PATIENCE, "the app has made its tables", || {
            Ok(fs::metadata(&wal).is_ok_and(|wal| wal.len() > 0))
        })
        .unwrap();
        systemctl(&["stop", "dormouse.service"]);
        assert_eq!(property("dormouse", "Result"), "success", "{}", log());
        assert!(!run("pgrep", &["-x", "guestbook"]).0, "an instance is left");
        for host in [HOST, SLOW] {
            let record = record(Path::new(STORE), host);
            assert!(record.contains("released"), "{host}: {record}\n{}", log());
        }
        assert!(session(Path::new(STORE)).contains("\"ended\":true"));
        assert_eq!(waiting.join().unwrap().unwrap().status, 503);
    });
}

#[test]
fn a_wake_that_a_restart_cuts_is_begun_again_for_the_same_request() {
    booted("a_wake_that_a_restart_cuts_is_begun_again_for_the_same_request", || {
        start();
        add_a_slow_one();
        let waiting = std::thread::spawn(|| client::request(address(), "GET", SLOW, "/", None));
        is_in_state(SLOW, "starting");
        let config = fs::read_to_string("/etc/dormouse/dormouse.toml").unwrap();
        fs::write("/etc/dormouse/dormouse.toml", config.replace("20000", "10")).unwrap();
        systemctl(&["restart", "dormouse.service"]);
        let answer = waiting.join().unwrap().unwrap();
        assert_eq!(answer.status, 200, "{}\n{}", answer.text(), log());
    });
}

fn drop_in(text: &str) {
    let folder = Path::new("/etc/systemd/system/dormouse.service.d");
    fs::create_dir_all(folder).unwrap();
    fs::write(folder.join("test.conf"), format!("[Service]\n{text}\n")).unwrap();
    systemctl(&["daemon-reload"]);
}

fn sign_much(rounds: u32) {
    let entry = serde_json::json!({ "name": "big", "text": "x".repeat(60_000) }).to_string();
    for _ in 0..rounds {
        let answer = client::request(address(), "POST", HOST, "/api/entries", Some(&entry));
        assert_eq!(answer.unwrap().status, 201);
    }
}

/// The activator is away while its app writes 6,000 pages and more, and its WAL would be begun anew
/// by the app's own checkpoints.
fn writes_much_in_a_gap(settings: &str) {
    drop_in(&format!("RestartSec=8\n{settings}"));
    start();
    sign_much(100);
    is_durable(HOST);
    for _ in 0..2 {
        let before = run_of(HOST);
        systemctl(&["kill", "-s", "KILL", "--kill-who=main", "dormouse.service"]);
        until(PATIENCE, "systemd waits", || Ok(property("dormouse", "SubState") == "auto-restart"))
            .unwrap();
        sign_much(400);
        assert_eq!(property("dormouse", "SubState"), "auto-restart", "all of it in the gap");
        systemctl(&["start", "dormouse.service"]);
        is_in_state(HOST, "awake");
        assert_eq!(run_of(HOST), before);
        sign(HOST, "after");
        is_durable(HOST);
    }
    let wanted = format!("/var/lib/dormouse/hosts/{HOST}/app.db");
    let wanted = dormouse_e2e::world::names_in(Path::new(&wanted)).unwrap();
    assert_eq!(wanted.len(), 902);
    are_stored(&wanted);
}

#[test]
fn an_app_that_writes_much_while_no_activator_runs_goes_on_by_increments() {
    booted("an_app_that_writes_much_while_no_activator_runs_goes_on_by_increments", || {
        writes_much_in_a_gap("");
        let said = own_log();
        assert_eq!(said.matches("replication goes on").count(), 2, "{said}");
        assert_eq!(said.matches("how=Continuing").count(), 2, "{said}");
        assert_eq!(property("dormouse", "NFileDescriptorStore"), "2");
        good("dormouse", &["sleep", HOST]);
        is_in_state(HOST, "asleep");
        until(PATIENCE, "nothing is stored", || {
            Ok(property("dormouse", "NFileDescriptorStore") == "0")
        })
        .unwrap();
        let wal = format!("/var/lib/dormouse/hosts/{HOST}/app.db-wal");
        assert!(!Path::new(&wal).exists(), "no lock is left");
        is_served();
        assert_eq!(property("dormouse", "NFileDescriptorStore"), "2");
    });
}

#[test]
fn without_a_store_of_descriptors_it_costs_an_image_and_nothing_else() {
    booted("without_a_store_of_descriptors_it_costs_an_image_and_nothing_else", || {
        writes_much_in_a_gap("FileDescriptorStoreMax=0");
        let said = own_log();
        assert_eq!(said.matches("how=NeedsFullImage").count(), 2, "{said}");
    });
}

#[test]
fn a_reload_is_taken_by_both_and_one_with_an_error_is_refused() {
    booted("a_reload_is_taken_by_both_and_one_with_an_error_is_refused", || {
        start();
        is_served();
        let before = [property("dormouse", "MainPID"), property("dormouse-proxy", "MainPID")];
        let config = fs::read_to_string("/etc/dormouse/dormouse.toml").unwrap();
        let changed = config.replace("idle = \"15m\"", "idle = \"300ms\"");
        let route = "[[route]]\nhost = \"plain.test\"\nupstream = \"unix:/run/none.sock\"\n";
        fs::write("/etc/dormouse/dormouse.toml", changed + route).unwrap();
        systemctl(&["reload", "dormouse.service", "dormouse-proxy.service"]);
        is_in_state(HOST, "asleep");
        until(PATIENCE, "the proxy has the route", || {
            Ok(client::request(address(), "GET", "plain.test", "/", None)?.status != 404)
        })
        .unwrap();
        fs::write("/etc/dormouse/dormouse.toml", config + "[nonsense]\n").unwrap();
        for unit in ["dormouse", "dormouse-proxy"] {
            assert!(!run("systemctl", &["reload", unit]).0, "{unit}");
            let said = run("journalctl", &["-u", unit, "-o", "cat", "--no-pager"]).1;
            assert!(said.contains("nonsense"), "{said}");
            assert_eq!(property(unit, "ActiveState"), "active");
        }
        is_served();
        let after = [property("dormouse", "MainPID"), property("dormouse-proxy", "MainPID")];
        assert_eq!(before, after);
    });
}

#[test]
fn a_reboot_puts_every_host_to_sleep() {
    const NAME: &str = "a_reboot_puts_every_host_to_sleep";
    if std::env::var_os(INSIDE).is_some() {
        start();
        sign(HOST, "one");
        fs::write(Path::new(STORE).join("awake"), session(Path::new(STORE))).unwrap();
        systemctl(&["reboot"]);
        until(PATIENCE, "the machine goes down", || Ok(false)).unwrap();
    }
    let store = tempfile::tempdir().unwrap();
    let bind = format!("{}:{STORE}", store.path().display());
    let units = deploy("systemd").display().to_string();
    let output = boot_to_the_end(NAME, &["-u", &units, "-b", &bind]);
    let live = fs::read_to_string(store.path().join("awake")).unwrap_or_default();
    assert!(live.contains("\"ended\":false"), "{live} {}", told(&output));
    assert!(session(store.path()).contains("\"ended\":true"), "{}", told(&output));
    let record = record(store.path(), HOST);
    assert!(record.contains("released"), "{record} {}", told(&output));
}

#[test]
fn an_activator_that_hangs_is_killed_by_the_watchdog_and_apps_go_on() {
    booted("an_activator_that_hangs_is_killed_by_the_watchdog_and_apps_go_on", || {
        drop_in("WatchdogSec=2");
        start();
        sign(HOST, "one");
        is_durable(HOST);
        let (before, main) = (run_of(HOST), property("dormouse", "MainPID"));
        good("kill", &["-s", "STOP", &main]);
        until(PATIENCE, "systemd starts another", || {
            let now = property("dormouse", "MainPID");
            Ok(now != main && property("dormouse", "ActiveState") == "active")
        })
        .unwrap();
        let said = run("journalctl", &["--no-pager", "-o", "cat"]).1;
        assert!(said.contains("Watchdog timeout"), "{said}");
        is_in_state(HOST, "awake");
        assert_eq!(run_of(HOST), before);
        is_served();
    });
}

#[test]
fn a_request_wakes_a_host_and_restarts_of_the_proxy_fail_none() {
    booted("a_request_wakes_a_host_and_restarts_of_the_proxy_fail_none", || {
        start();
        is_served();
        let over_unix = client::over_unix(Path::new("/run/dormouse-proxy.sock"), "/").unwrap();
        assert_eq!(over_unix.status, 404, "an unknown host, by the same proxy");
        let user = property("dormouse-proxy", "MainPID");
        let uid = fs::read_to_string(format!("/proc/{user}/status")).unwrap();
        assert!(!uid.contains("Uid:\t0\t"), "{uid}");
        let log = run("journalctl", &["-u", "dormouse-proxy", "-o", "cat"]).1;
        assert!(log.contains("engine=\"uring\"") || log.contains("io_uring is refused"), "{log}");
        let load = Load::start(address(), HOST, "/healthz", 8);
        let reach = |count: u64| {
            until(PATIENCE, "requests are answered", || Ok(load.done() >= count)).unwrap();
        };
        for _ in 0..5 {
            reach(load.done() + 3500);
            systemctl(&["restart", "dormouse-proxy.service"]);
        }
        reach(load.done() + 3500);
        let report = load.stop();
        assert_eq!(report.failed, Vec::<String>::new(), "of {}", report.answered);
        assert!(report.answered >= 20_000, "{}", report.answered);
        assert_eq!(property("dormouse-proxy", "Result"), "success");
    });
}

#[test]
fn a_stop_puts_every_host_to_sleep_and_ends_the_session() {
    booted("a_stop_puts_every_host_to_sleep_and_ends_the_session", || {
        start();
        is_served();
        until(PATIENCE, "the status names it", || {
            Ok(property("dormouse", "StatusText").contains("1 of 1 hosts awake"))
        })
        .unwrap();
        let live = session(Path::new(STORE));
        systemctl(&["stop", "dormouse.service"]);
        assert_eq!(property("dormouse", "Result"), "success", "{}", log());
        let ended = session(Path::new(STORE));
        assert!(live.contains("\"ended\":false"), "{live}");
        assert!(ended.contains("\"ended\":true"), "{ended}");
        assert!(!run("pgrep", &["-x", "guestbook"]).0, "an instance is left");
        systemctl(&["start", "dormouse.service"]);
        is_served();
    });
}

#[test]
fn a_killed_activator_is_started_again_and_a_second_one_is_refused() {
    booted("a_killed_activator_is_started_again_and_a_second_one_is_refused", || {
        start();
        is_served();
        let (second, said) = run("dormouse", &["serve"]);
        assert!(!second && said.contains("another activator runs"), "{said}");
        let before = property("dormouse", "MainPID");
        let own = fs::read_to_string(format!("/proc/{before}/cgroup")).unwrap();
        assert!(own.trim().ends_with("/dormouse.service/activator"), "{own}");
        systemctl(&["kill", "-s", "KILL", "--kill-who=main", "dormouse.service"]);
        until(PATIENCE, "systemd starts another", || {
            let after = property("dormouse", "MainPID");
            Ok(after != before && property("dormouse", "ActiveState") == "active")
        })
        .unwrap();
        is_served();
        assert_eq!(status()["session"], "live");
    });
}

#[test]
fn the_package_is_installed_upgraded_removed_and_purged() {
    const DEB: &str = "/run/dormouse-package";
    let Some(_inside) = std::env::var_os(INSIDE) else {
        let out = tempfile::tempdir().unwrap();
        dormouse_e2e::package::build(&root(), &programs().unwrap(), out.path()).unwrap();
        let bind = format!("{}:{DEB}", out.path().display());
        return boot("the_package_is_installed_upgraded_removed_and_purged", &["-b", &bind]);
    };
    let mut files = fs::read_dir(DEB).unwrap().map(|entry| entry.unwrap().path());
    let deb = files.find(|path| path.extension().is_some_and(|it| it == "deb")).unwrap();
    let deb = deb.display().to_string();
    let said = good("dpkg", &["-i", &deb]);
    assert!(said.contains("not started yet"), "{said}");
    fs::create_dir_all("/srv/dormouse-store").unwrap();
    good("dormouse", &["config", "check"]);
    systemctl(&["start", "dormouse", "dormouse-proxy.socket", "dormouse-proxy"]);
    good("dormouse", &["add", HOST, "--app", "guestbook"]);
    is_served();
    is_durable(HOST);
    let app = run_of(HOST);
    let before = [property("dormouse", "MainPID"), property("dormouse-proxy", "MainPID")];
    good("dpkg", &["-i", &deb]);
    let after = [property("dormouse", "MainPID"), property("dormouse-proxy", "MainPID")];
    assert!(before[0] != after[0] && before[1] != after[1], "{before:?} {after:?}");
    is_served();
    assert_eq!(run_of(HOST), app, "an upgrade leaves apps running");
    good("dpkg", &["-r", "dormouse"]);
    assert!(!run("pgrep", &["-x", "dormouse|dormouse-proxy|guestbook"]).0, "something runs on");
    assert_eq!(property("dormouse-proxy.socket", "LoadState"), "not-found");
    let said = good("dpkg", &["-P", "dormouse"]);
    assert!(said.contains("/var/lib/dormouse is left"), "{said}");
    assert!(Path::new("/var/lib/dormouse/box-id").exists());
    assert!(!Path::new("/etc/dormouse/dormouse.toml").exists());
}

/// Starts a proxy of a unit of its own; what it said before it failed.
fn refused(name: &str, sockets: &[(&str, &str)]) -> String {
    let units = Path::new("/etc/systemd/system");
    let mut service =
        "[Service]\nType=notify\nExecStart=/usr/bin/dormouse-proxy\nSockets=".to_owned();
    for (number, (fd_name, port)) in sockets.iter().enumerate() {
        let socket = format!("{name}-{number}.socket");
        service.extend([socket.as_str(), " "]);
        let text = format!(
            "[Socket]\nListenStream=127.0.0.1:{port}\nFileDescriptorName={fd_name}\n\
             Service={name}.service\n"
        );
        fs::write(units.join(&socket), text).unwrap();
    }
    fs::write(units.join(format!("{name}.service")), service).unwrap();
    systemctl(&["daemon-reload"]);
    for number in 0..sockets.len() {
        systemctl(&["start", &format!("{name}-{number}.socket")]);
    }
    assert!(!run("systemctl", &["start", name]).0, "it must fail");
    run("journalctl", &["-u", name, "-o", "cat", "--no-pager"]).1
}

#[test]
fn sockets_that_do_not_fit_the_config_are_told_by_name() {
    booted("sockets_that_do_not_fit_the_config_are_told_by_name", || {
        install();
        let none = refused("none", &[]);
        assert!(none.contains("\"http\"") && none.contains("no socket of that name"), "{none}");
        let wrong = refused("wrong", &[("web", "8081")]);
        assert!(wrong.contains("no socket of that name"), "{wrong}");
        let extra = refused("extra", &[("http", "8082"), ("admin", "8083")]);
        assert!(extra.contains("\"admin\", which no edge.listen names"), "{extra}");
    });
}

#[test]
fn the_units_are_clean_and_the_proxy_is_shut_in() {
    booted("the_units_are_clean_and_the_proxy_is_shut_in", || {
        install();
        for unit in [
            "dormouse.service",
            "dormouse-guard.service",
            "dormouse-proxy.service",
            "dormouse-proxy.socket",
        ] {
            let said = good("systemd-analyze", &["verify", "--man=no", unit]);
            let ours: Vec<_> = said.lines().filter(|line| line.contains("dormouse")).collect();
            assert!(ours.is_empty(), "{ours:?}");
        }
        let at_most = "--threshold=25";
        good("systemd-analyze", &["security", "--no-pager", at_most, "dormouse-proxy.service"]);
    });
}
