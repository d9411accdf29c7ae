//! The Debian package: the programs, the units, and what `deploy/` says about them.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

/// Files of the package: where from, where to, mode. `bin:` lies among the programs, the rest in the
/// workspace.
const FILES: [(&str, &str, u32); 20] = [
    ("bin:dormouse", "usr/bin/dormouse", 0o755),
    ("bin:dormouse-proxy", "usr/bin/dormouse-proxy", 0o755),
    ("bin:guestbook", "usr/lib/dormouse/guestbook", 0o755),
    ("deploy/systemd/dormouse.service", "usr/lib/systemd/system/dormouse.service", 0o644),
    (
        "deploy/systemd/dormouse-guard.service",
        "usr/lib/systemd/system/dormouse-guard.service",
        0o644,
    ),
    (
        "deploy/systemd/dormouse-instances.slice",
        "usr/lib/systemd/system/dormouse-instances.slice",
        0o644,
    ),
    (
        "deploy/systemd/dormouse-proxy.service",
        "usr/lib/systemd/system/dormouse-proxy.service",
        0o644,
    ),
    ("deploy/systemd/dormouse-proxy.socket", "usr/lib/systemd/system/dormouse-proxy.socket", 0o644),
    ("deploy/systemd/dormouse-edge.slice", "usr/lib/systemd/system/dormouse-edge.slice", 0o644),
    ("deploy/sysusers.d/dormouse.conf", "usr/lib/sysusers.d/dormouse.conf", 0o644),
    ("deploy/tmpfiles.d/dormouse.conf", "usr/lib/tmpfiles.d/dormouse.conf", 0o644),
    ("deploy/dormouse.toml", "etc/dormouse/dormouse.toml", 0o644),
    ("deploy/RUNBOOK.md", "usr/share/doc/dormouse/RUNBOOK.md", 0o644),
    ("docs/trouble.md", "usr/share/doc/dormouse/docs/trouble.md", 0o644),
    ("docs/takeover.md", "usr/share/doc/dormouse/docs/takeover.md", 0o644),
    ("LICENSE-MIT", "usr/share/doc/dormouse/copyright", 0o644),
    ("LICENSE-APACHE", "usr/share/doc/dormouse/LICENSE-APACHE", 0o644),
    ("deploy/debian/postinst", "DEBIAN/postinst", 0o755),
    ("deploy/debian/prerm", "DEBIAN/prerm", 0o755),
    ("deploy/debian/postrm", "DEBIAN/postrm", 0o755),
];

/// Builds the package of the programs in `bin` into the folder `out`, and returns its file.
pub fn build(workspace: &Path, bin: &Path, out: &Path) -> Result<PathBuf> {
    fs::create_dir_all(out)?;
    let tree = tempfile::tempdir_in(out)?;
    fs::set_permissions(tree.path(), Permissions::from_mode(0o755))?;
    for (from, to, mode) in FILES {
        let from = match from.strip_prefix("bin:") {
            Some(program) => bin.join(program),
            None => workspace.join(from),
        };
        write(
            &tree.path().join(to),
            &fs::read(&from).with_context(|| from.display().to_string())?,
            mode,
        )?;
    }
    let version = env!("CARGO_PKG_VERSION");
    let architecture = said("dpkg", &["--print-architecture"])?;
    let libc = said("getconf", &["GNU_LIBC_VERSION"])?;
    let control = fs::read_to_string(workspace.join("deploy/debian/control"))?
        .replace("{version}", version)
        .replace("{architecture}", &architecture)
        .replace("{libc}", libc.trim_start_matches("glibc "));
    write(&tree.path().join("DEBIAN/control"), control.as_bytes(), 0o644)?;
    write(&tree.path().join("DEBIAN/conffiles"), b"/etc/dormouse/dormouse.toml\n", 0o644)?;
    let file = out.join(format!("dormouse_{version}_{architecture}.deb"));
    let (from, to) = (tree.path().display().to_string(), file.display().to_string());
    said("dpkg-deb", &["--root-owner-group", "-Zgzip", "--build", &from, &to])?;
    Ok(file)
}

fn write(path: &Path, bytes: &[u8], mode: u32) -> Result<()> {
    fs::create_dir_all(path.parent().context("a folder")?)?;
    fs::write(path, bytes)?;
    Ok(fs::set_permissions(path, Permissions::from_mode(mode))?)
}

fn said(program: &str, args: &[&str]) -> Result<String> {
    let output = Command::new(program).args(args).output().with_context(|| program.to_owned())?;
    if !output.status.success() {
        bail!("{program} {args:?}: {}", String::from_utf8_lossy(&output.stderr));
    }
    Ok(String::from_utf8(output.stdout)?.trim().to_owned())
}
