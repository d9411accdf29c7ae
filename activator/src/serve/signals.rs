//! What a signal asks for. SIGTERM says "end", and systemd sends it for a stop and for a restart
//! alike: its own job tells the two apart.

use std::fs;
use std::io::Read as _;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::Context as _;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::mpsc;
use tokio::task::spawn_blocking;
use tokio::time::timeout;

use super::driver::Input;

/// How long systemd may take to tell its job; an answer takes milliseconds.
const QUESTION_TIMEOUT: Duration = Duration::from_secs(1);

/// Turns signals into inputs of the loop.
pub(crate) fn listen(inputs: mpsc::UnboundedSender<Input>) -> anyhow::Result<()> {
    let mut terminate = signal(SignalKind::terminate()).context("SIGTERM")?;
    let mut interrupt = signal(SignalKind::interrupt()).context("SIGINT")?;
    let mut quit = signal(SignalKind::quit()).context("SIGQUIT")?;
    tokio::spawn(async move {
        let input = tokio::select! {
            _ = terminate.recv() => on_terminate().await,
            _ = interrupt.recv() => Input::Shutdown,
            _ = quit.recv() => Input::Leave,
        };
        tracing::info!("asked to stop");
        // A driver that is gone needs no stop.
        inputs.send(input).ok();
    });
    Ok(())
}

/// Whether this very process is a service's: then the service's cgroup is ours.
pub(crate) fn is_started_by_systemd() -> bool {
    let pid = std::process::id().to_string();
    std::env::var("SYSTEMD_EXEC_PID").is_ok_and(|named| named == pid)
}

async fn on_terminate() -> Input {
    if !is_started_by_systemd() {
        return Input::Shutdown;
    }
    match is_restart().await {
        Ok(true) => Input::Leave,
        Ok(false) => Input::Shutdown,
        Err(error) => {
            let error = format!("{error:#}");
            tracing::warn!(error, "systemd does not tell whether this is a restart: it is a stop");
            Input::Shutdown
        }
    }
}

/// Whether systemd's job for our unit is a restart.
async fn is_restart() -> anyhow::Result<bool> {
    let cgroup = fs::read_to_string("/proc/self/cgroup").context("/proc/self/cgroup")?;
    let unit = unit_of(&cgroup).context("no service in /proc/self/cgroup")?;
    // Of all jobs: a pattern would read some names otherwise.
    let mut child = Command::new("systemctl")
        .args(["list-jobs", "--no-legend", "--no-pager", "--plain", "--full"])
        .env("LC_ALL", "C")
        .env("SYSTEMD_COLORS", "0")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .context("systemctl")?;
    let pid = Pid::from_raw(i32::try_from(child.id())?);
    let told = spawn_blocking(move || said(&mut child));
    let Ok(told) = timeout(QUESTION_TIMEOUT, told).await else {
        // Not waited for yet, so the number is still its own; the wait then ends.
        kill(pid, Signal::SIGKILL).ok();
        anyhow::bail!("systemctl took more than {QUESTION_TIMEOUT:?}");
    };
    Ok(job_of(&told??, &unit).is_some_and(|job| job == "restart"))
}

fn said(child: &mut Child) -> anyhow::Result<String> {
    let mut text = String::new();
    child.stdout.take().context("no pipe")?.read_to_string(&mut text)?;
    let status = child.wait()?;
    anyhow::ensure!(status.success(), "systemctl: {status}");
    Ok(text)
}

/// The innermost service that this process runs in.
fn unit_of(cgroup: &str) -> Option<String> {
    let path_of = |prefix: &str| cgroup.lines().find_map(|line| line.strip_prefix(prefix));
    // Beside version 1, systemd's own hierarchy has a name.
    let paths = [
        path_of("0::"),
        cgroup.lines().find_map(|line| line.split_once(":name=systemd:").map(|found| found.1)),
    ];
    let service =
        |path: &str| path.rsplit('/').find(|part| part.ends_with(".service")).map(str::to_owned);
    paths.into_iter().flatten().find_map(service)
}

/// The type of a unit's job, out of `systemctl list-jobs`: number, unit, type, state.
fn job_of<'a>(jobs: &'a str, unit: &str) -> Option<&'a str> {
    jobs.lines().find_map(|line| {
        let mut words = line.split_whitespace().skip(1);
        (words.next() == Some(unit)).then(|| words.next())?
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_unit_is_the_innermost_service() {
        let pure = "0::/system.slice/dormouse.service/activator\n";
        assert_eq!(unit_of(pure).as_deref(), Some("dormouse.service"));
        let hybrid =
            "12:pids:/system.slice/other.service\n1:name=systemd:/system.slice/d@1.service\n0::/\n";
        assert_eq!(unit_of(hybrid).as_deref(), Some("d@1.service"));
        assert_eq!(unit_of("0::/user.slice/session-1.scope\n"), None);
    }

    #[test]
    fn the_job_is_that_of_our_own_unit() {
        let jobs =
            "412 dormouse-proxy.service restart waiting\n 411 dormouse.service stop running\n";
        assert_eq!(job_of(jobs, "dormouse.service"), Some("stop"));
        assert_eq!(job_of(jobs, "dormouse-proxy.service"), Some("restart"));
        assert_eq!(job_of(jobs, "mouse.service"), None);
        assert_eq!(job_of("No jobs running.\n", "dormouse.service"), None);
    }
}
