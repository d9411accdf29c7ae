//! What a signal asks for.

use anyhow::Context as _;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::mpsc;

use super::driver::Input;

/// Turns signals into inputs of the loop.
///
/// systemd sends SIGTERM for a stop; for a restart SIGQUIT, as the unit tells it to.
pub(crate) fn listen(inputs: mpsc::UnboundedSender<Input>) -> anyhow::Result<()> {
    let mut terminate = signal(SignalKind::terminate()).context("SIGTERM")?;
    let mut interrupt = signal(SignalKind::interrupt()).context("SIGINT")?;
    let mut quit = signal(SignalKind::quit()).context("SIGQUIT")?;
    let mut hangup = signal(SignalKind::hangup()).context("SIGHUP")?;
    tokio::spawn(async move {
        loop {
            let input = tokio::select! {
                _ = terminate.recv() => Input::Shutdown,
                _ = interrupt.recv() => Input::Shutdown,
                _ = quit.recv() => Input::Leave,
                _ = hangup.recv() => Input::Reload,
            };
            if !matches!(input, Input::Reload) {
                tracing::info!("asked to stop");
            }
            // A driver that is gone needs no stop.
            if inputs.send(input).is_err() {
                return;
            }
        }
    });
    Ok(())
}

/// Whether this very process is a service's: then the service's cgroup is ours.
pub(crate) fn is_started_by_systemd() -> bool {
    let pid = std::process::id().to_string();
    std::env::var("SYSTEMD_EXEC_PID").is_ok_and(|named| named == pid)
}
