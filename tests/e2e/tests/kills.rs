//! A few rounds of kills; `cargo xtask soak kill` runs many.

use anyhow::{Result, ensure};
use dormouse_e2e::{kills, programs};

#[test]
fn what_was_reported_durable_survives_kills_and_the_loss_of_the_disk() -> Result<()> {
    let report = kills::rounds(&programs()?, None, 6, 1)?;
    ensure!(report.durable > 0, "{report:?}");
    Ok(())
}
