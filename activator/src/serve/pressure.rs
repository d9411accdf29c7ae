//! Pressure stall information of memory (kernel documentation, `accounting/psi.rst`): the kernel tells
//! when the upper level is reached, and the file is read every second until it is over.

use std::fs;
use std::io;
use std::path::Path;
use std::time::Duration;

use dormouse_core::event::Event;
use dormouse_instances::StallTrigger;
use dormouse_link::config::Pressure;
use tokio::sync::mpsc;

use super::driver::{Driver, Input};

/// Between two reports while hosts are put to sleep.
const REPORT: Duration = Duration::from_secs(1);
/// Between two reads of a file that cannot tell by itself.
const READ: Duration = Duration::from_secs(2);

/// Starts to watch; a machine without it is told once.
pub(crate) fn watch(config: &Pressure, inputs: mpsc::UnboundedSender<Input>) {
    if config.high_percent == 0 {
        return;
    }
    let file = config.file.clone();
    if let Err(error) = read(&file) {
        tracing::warn!(
            file = %file.display(),
            %error,
            "memory pressure is not watched: hosts sleep when they are idle, and not before"
        );
        return;
    }
    let trigger = StallTrigger::set(&file, config.high_percent);
    if let Err(error) = &trigger {
        tracing::info!(file = %file.display(), %error, "memory pressure is read every 2 s");
    }
    let (high, low) = (config.high_percent * 10, config.low_percent * 10);
    tokio::spawn(async move {
        let mut trigger = trigger.ok();
        loop {
            match &trigger {
                Some(stalls) => {
                    if stalls.told().await.is_err() {
                        trigger = None;
                    }
                }
                None => tokio::time::sleep(READ).await,
            }
            let mut permille = read(&file).unwrap_or_default();
            if trigger.is_some() {
                // Its window is shorter than that of the file's average.
                permille = permille.max(high);
            }
            while permille >= low && permille > 0 {
                if inputs.send(Input::Pressure(permille)).is_err() {
                    return;
                }
                tokio::time::sleep(REPORT).await;
                permille = read(&file).unwrap_or_default();
                if trigger.is_none() && permille < high {
                    break;
                }
            }
            if inputs.send(Input::Pressure(permille)).is_err() {
                return;
            }
        }
    });
}

/// `some` of the last 10 s, in thousandths.
fn read(file: &Path) -> io::Result<u32> {
    let text = fs::read_to_string(file)?;
    let share = text.lines().find_map(|line| line.strip_prefix("some avg10="));
    let share = share.and_then(|rest| rest.split_whitespace().next());
    share
        .and_then(permille)
        .ok_or_else(|| io::Error::other("it has no line \"some avg10=\"; is PSI turned off?"))
}

/// `12.34`, percent.
fn permille(text: &str) -> Option<u32> {
    let (whole, part) = text.split_once('.')?;
    let tenth = part.chars().next()?.to_digit(10)?;
    whole.parse::<u32>().ok()?.checked_mul(10)?.checked_add(tenth)
}

impl Driver {
    /// A report: the core chooses who sleeps.
    pub(crate) fn press(&mut self, permille: u32) {
        if permille == 0 && !self.core.is_pressed() {
            return;
        }
        let before = self.core.is_pressed();
        let samples = self.samples();
        self.step(Event::Pressure(permille, samples));
        match (before, self.core.is_pressed()) {
            (false, true) => {
                tracing::warn!(permille, "memory is short: idle hosts are put to sleep");
            }
            (true, false) => tracing::info!(permille, "memory is no longer short"),
            (true, true) | (false, false) => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernels_file_is_read_in_thousandths() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("memory");
        fs::write(
            &path,
            "some avg10=12.34 avg60=0.00 avg300=0.00 total=1\nfull avg10=1.00 avg60=0 avg300=0\n",
        )
        .unwrap();
        assert_eq!(read(&path).unwrap(), 123);
        fs::write(&path, "").unwrap();
        assert!(read(&path).unwrap_err().to_string().contains("is PSI turned off"));
    }
}
