//! The guard's unit under a real systemd: what runs is below it, and outlives everything but a stop.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::fs;
use std::path::{Path, PathBuf};

use dormouse_e2e::edge::PATIENCE;
use dormouse_e2e::systemd::{
    HOST, booted, good, host_status, install, is_served, log, property, run, run_of, start, status,
    systemctl,
};
use dormouse_e2e::wait::until;

/// The cgroup of the host's instance.
fn instance() -> PathBuf {
    let pid = host_status(HOST)["pid"].to_string();
    let own = fs::read_to_string(format!("/proc/{pid}/cgroup")).unwrap();
    let path = own.lines().find_map(|line| line.strip_prefix("0::")).unwrap();
    Path::new("/sys/fs/cgroup").join(path.trim_start_matches('/'))
}

fn add_to_config(text: &str) {
    let path = "/etc/dormouse/dormouse.toml";
    let config = fs::read_to_string(path).unwrap();
    fs::write(path, format!("{config}\n{text}\n")).unwrap();
}

#[test]
fn instances_are_below_the_guard_and_outlive_its_restart_and_its_kill() {
    booted("instances_are_below_the_guard_and_outlive_its_restart_and_its_kill", || {
        start();
        is_served();
        let cgroup = instance().display().to_string();
        assert!(
            cgroup.contains("/dormouse-instances.slice/dormouse-guard.service/dormouse-instances."),
            "{cgroup}"
        );
        let uid = fs::read_to_string(format!("/proc/{}/status", host_status(HOST)["pid"])).unwrap();
        assert!(uid.contains("Uid:\t2000000000\t2000000000\t2000000000\t2000000000"), "{uid}");
        let before = run_of(HOST);
        systemctl(&["restart", "dormouse-guard.service"]);
        systemctl(&["kill", "-s", "KILL", "--kill-who=main", "dormouse-guard.service"]);
        until(PATIENCE, "systemd starts another", || {
            Ok(property("dormouse-guard", "ActiveState") == "active"
                && property("dormouse-guard", "NRestarts") == "1")
        })
        .unwrap();
        systemctl(&["restart", "dormouse.service"]);
        is_served();
        assert_eq!(run_of(HOST), before, "{}", log());
        // Woken anew, it is where it was.
        good("dormouse", &["sleep", HOST]);
        is_served();
        assert_eq!(instance().parent(), Path::new(&cgroup).parent());
        assert!(status()["guard"].as_str().unwrap().starts_with("runs"));
        systemctl(&["stop", "dormouse.service", "dormouse-guard.service"]);
        assert!(!run("pgrep", &["-x", "guestbook"]).0, "an instance is left");
        systemctl(&["start", "dormouse.service"]);
        is_served();
    });
}

#[test]
fn with_automatic_takeover_the_guard_ends_what_a_suspended_activator_leaves() {
    booted("with_automatic_takeover_the_guard_ends_what_a_suspended_activator_leaves", || {
        install();
        let path = "/etc/dormouse/dormouse.toml";
        let config = fs::read_to_string(path).unwrap();
        let config = config
            .replace("takeover = \"manual\"", "takeover = \"automatic\"")
            .replace("ttl = \"30s\"", "ttl = \"2s\"")
            .replace("margin = \"5s\"", "margin = \"500ms\"");
        fs::write(path, config).unwrap();
        systemctl(&["start", "dormouse-proxy.socket", "dormouse", "dormouse-proxy"]);
        good("dormouse", &["add", HOST, "--app", "guestbook"]);
        is_served();
        let events = instance().join("cgroup.events");
        systemctl(&["kill", "-s", "STOP", "--kill-who=main", "dormouse.service"]);
        until(
            PATIENCE,
            "it is killed",
            || Ok(fs::read_to_string(&events)?.contains("populated 0")),
        )
        .unwrap();
        let said = run("journalctl", &["-u", "dormouse-guard", "-o", "cat", "--no-pager"]).1;
        assert!(said.contains("the session is over") && said.contains("a.test@"), "{said}");
        systemctl(&["kill", "-s", "CONT", "--kill-who=main", "dormouse.service"]);
        until(PATIENCE, "it is served again", || Ok(run("dormouse", &["wake", HOST]).0)).unwrap();
        is_served();
    });
}

#[test]
fn limits_hold_where_there_are_controllers_and_outlive_the_guard() {
    booted("limits_hold_where_there_are_controllers_and_outlive_the_guard", || {
        install();
        add_to_config("limits = { memory_max_mib = 200, pids_max = 50 }");
        systemctl(&["start", "dormouse-proxy.socket", "dormouse", "dormouse-proxy"]);
        good("dormouse", &["add", HOST, "--app", "guestbook"]);
        is_served();
        let told = host_status(HOST)["limits"].as_str().unwrap().to_owned();
        let controllers = fs::read_to_string("/sys/fs/cgroup/cgroup.controllers").unwrap();
        let enforces = controllers.split_whitespace().any(|name| name == "pids");
        assert_eq!(told.contains("NOT ENFORCED"), !enforces, "{told}, of {controllers}");
        let pids = |at: &str| match fs::read_to_string(instance().join("pids.max")) {
            Ok(text) => assert_eq!(text.trim(), "50", "{at}"),
            Err(_) => assert!(!enforces, "no limit {at}"),
        };
        pids("at first");
        let before = run_of(HOST);
        systemctl(&["restart", "dormouse-guard.service"]);
        pids("after a restart of the guard");
        is_served();
        assert_eq!(run_of(HOST), before);
    });
}
