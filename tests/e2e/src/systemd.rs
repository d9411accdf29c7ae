//! The units of `deploy/` under a real systemd, PID 1 of namespaces of its own. A test boots one and
//! runs itself inside of it.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]
#![expect(clippy::missing_panics_doc, reason = "a test fails by panicking")]
#![expect(clippy::must_use_candidate, reason = "what a program said is for those who want it")]

use std::fs;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use serde_json::Value;

use crate::client;
use crate::edge::PATIENCE;
use crate::programs;
use crate::wait::until;

/// The host of most tests.
pub const HOST: &str = "a.test";
/// Where its store is.
pub const STORE: &str = "/srv/dormouse-store";
/// Set inside.
pub const INSIDE: &str = "DORMOUSE_INSIDE_SYSTEMD";
const ADMIN: &str = "/run/dormouse/admin.sock";

/// The workspace.
pub fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().unwrap()
}

/// A file of `deploy/`.
pub fn deploy(name: &str) -> PathBuf {
    root().join("deploy").join(name)
}

/// Runs `inside` under a systemd that has our units; `test`: the calling test's name.
pub fn booted(test: &str, inside: impl Fn()) {
    if std::env::var_os(INSIDE).is_some() {
        return inside();
    }
    boot(test, &["-u", &deploy("systemd").display().to_string()]);
}

/// Boots with these options; the test must pass inside.
pub fn boot(test: &str, options: &[&str]) {
    let output = boot_to_the_end(test, options);
    let said = told(&output);
    assert!(output.status.success() && said.contains("1 passed"), "{}: {said}", output.status);
}

/// Boots with these options, and returns what it came to.
pub fn boot_to_the_end(test: &str, options: &[&str]) -> Output {
    assert!(nix::unistd::Uid::effective().is_root(), "this test boots a systemd: run it as root");
    let own = std::env::current_exe().unwrap();
    let bind = |path: &Path| format!("{0}:{0}", path.display());
    let mut boot = Command::new(root().join("tests/systemd/boot.sh"));
    boot.args(options).args(["-t", "120"]);
    boot.args(["-b", &bind(&programs().unwrap()), "-b", &bind(&root().join("deploy"))]);
    boot.args(["--", "env", &format!("{INSIDE}=1"), "RUST_BACKTRACE=0"]).arg(own);
    boot.args(["--exact", test, "--nocapture"]).output().unwrap()
}

/// What a program said.
pub fn told(output: &Output) -> String {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    format!("{}{}", text(&output.stdout), text(&output.stderr))
}

/// Runs a program: whether it ended well, and what it said.
pub fn run(program: &str, args: &[&str]) -> (bool, String) {
    let output = Command::new(program).args(args).output().unwrap();
    (output.status.success(), told(&output))
}

/// Runs a program that must end well; what it said.
pub fn good(program: &str, args: &[&str]) -> String {
    let (success, said) = run(program, args);
    assert!(success, "{program} {args:?}: {said}\n{}", log());
    said
}

/// `systemctl`, which must end well.
pub fn systemctl(args: &[&str]) -> String {
    good("systemctl", args)
}

/// A property of a unit.
pub fn property(unit: &str, name: &str) -> String {
    systemctl(&["show", "--value", "-p", name, unit]).trim().to_owned()
}

/// The newest lines of the journal.
pub fn log() -> String {
    run("journalctl", &["--no-pager", "-o", "cat", "-n", "80"]).1
}

/// Where the proxy listens.
pub fn address() -> SocketAddr {
    SocketAddr::from(([127, 0, 0, 1], 80))
}

/// As a package does it, with a store of its own.
pub fn install() {
    let bin = programs().unwrap();
    let config = fs::read_to_string(deploy("dormouse.toml")).unwrap();
    fs::create_dir_all("/usr/lib/dormouse").unwrap();
    fs::create_dir_all("/srv/dormouse-store").unwrap();
    for (name, to) in [
        ("dormouse", "/usr/bin/dormouse"),
        ("dormouse-proxy", "/usr/bin/dormouse-proxy"),
        ("guestbook", "/usr/lib/dormouse/guestbook"),
    ] {
        fs::copy(bin.join(name), to).unwrap();
    }
    let path = |name: &str| deploy(name).display().to_string();
    good("systemd-sysusers", &[&path("sysusers.d/dormouse.conf")]);
    good("systemd-tmpfiles", &["--create", &path("tmpfiles.d/dormouse.conf")]);
    fs::write("/etc/dormouse/dormouse.toml", config).unwrap();
}

/// Installs and starts everything, with one host.
pub fn start() {
    install();
    systemctl(&["start", "dormouse-proxy.socket", "dormouse.service", "dormouse-proxy.service"]);
    good("dormouse", &["add", HOST, "--app", "guestbook"]);
}

/// `dormouse status`.
pub fn status() -> Value {
    let answer = client::over_unix(Path::new(ADMIN), "/status").unwrap();
    serde_json::from_slice(&answer.body).unwrap()
}

/// The host answers.
pub fn is_served() {
    let answer = client::request(address(), "GET", HOST, "/api/entries", None).unwrap();
    assert_eq!(answer.status, 200, "{}\n{}", answer.text(), log());
}

/// `dormouse status HOST`.
pub fn host_status(host: &str) -> Value {
    let answer = client::over_unix(Path::new(ADMIN), &format!("/hosts/{host}")).unwrap();
    serde_json::from_slice(&answer.body).unwrap()
}

/// Waits for a state of a host.
pub fn is_in_state(host: &str, state: &str) {
    good("dormouse", &["wait", host, "--state", state, "--timeout-s", "30"]);
}

/// Everything that was written is in the store.
pub fn is_durable(host: &str) {
    until(PATIENCE, "it is durable", || Ok(host_status(host)["lag_ms"] == 0)).unwrap();
}

/// Waits until a restore has these entries and no other ones.
pub fn are_stored<T: AsRef<str>>(names: &[T]) {
    let file = Path::new("/run/restored.db");
    until(PATIENCE, "all of it is in the store", || {
        fs::remove_file(file).ok();
        good("dormouse", &["restore", HOST, "--to", "/run/restored.db"]);
        let stored = crate::world::names_in(file)?;
        Ok(stored.iter().map(String::as_str).eq(names.iter().map(AsRef::as_ref)))
    })
    .unwrap();
}

/// Signs the guestbook.
pub fn sign(host: &str, name: &str) {
    let entry = serde_json::json!({ "name": name, "text": "a text" }).to_string();
    let answer = client::request(address(), "POST", host, "/api/entries", Some(&entry)).unwrap();
    assert_eq!(answer.status, 201, "{}\n{}", answer.text(), log());
}

/// A host's record in a store.
pub fn record(store: &Path, host: &str) -> String {
    fs::read_to_string(store.join("dormouse").join(host).join("lock.json")).unwrap()
}

/// The box's session in a store.
pub fn session(store: &Path) -> String {
    fs::read_to_string(store.join("dormouse/sessions/box-1.json")).unwrap()
}

/// What names one start of an app; the host's record besides.
pub fn run_of(host: &str) -> String {
    let status = host_status(host);
    format!("{} {} {}", status["pid"], status["run"], record(Path::new(STORE), host))
}

/// The activator's journal.
pub fn own_log() -> String {
    run("journalctl", &["-u", "dormouse", "-o", "cat", "--no-pager"]).1
}
