//! Other programs, run and judged.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, bail};

/// The workspace's root.
pub(crate) fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap_or(Path::new("/")).to_owned()
}

/// Cargo, in the workspace's root.
pub(crate) fn cargo(args: &[&str]) -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.current_dir(root()).args(args);
    // Set by the cargo that runs this program; they would make the inner one rebuild.
    for (name, _) in std::env::vars().filter(|(name, _)| name.starts_with("CARGO_PKG_")) {
        command.env_remove(name);
    }
    command
}

/// The command as a person would type it.
fn shown(command: &Command) -> String {
    let program = Path::new(command.get_program()).file_name().unwrap_or_default();
    let words = [program].into_iter().chain(command.get_args());
    words.map(|word| word.to_string_lossy().into_owned()).collect::<Vec<_>>().join(" ")
}

/// Runs it; an error names it and how it ended.
pub(crate) fn run(command: &mut Command) -> Result<()> {
    let status = command.status().with_context(|| shown(command))?;
    if !status.success() {
        bail!("{}: {status}", shown(command));
    }
    Ok(())
}

/// Runs it and returns its standard output.
pub(crate) fn output(command: &mut Command) -> Result<String> {
    let output = command.output().with_context(|| shown(command))?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        bail!("{}: {}: {said}", shown(command), output.status);
    }
    Ok(String::from_utf8(output.stdout)?)
}

/// Builds the programs under test and returns the folder that they lie in.
pub(crate) fn build(profile: &str) -> Result<PathBuf> {
    let args = ["build", "--quiet", "--bins", "--profile", profile, "-p", "dormouse", "-p"];
    run(cargo(&args).args(["dormouse-proxy", "-p", "guestbook"]))?;
    Ok(binaries(profile))
}

/// The folder of a profile's programs.
pub(crate) fn binaries(profile: &str) -> PathBuf {
    let target =
        std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| root().join("target"), PathBuf::from);
    target.join(if profile == "dev" { "debug" } else { profile })
}
