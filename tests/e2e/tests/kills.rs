//! A few rounds of kills; `cargo xtask soak kill` runs many.

use anyhow::{Result, ensure};
use dormouse_e2e::{binary, kills};

#[test]
fn what_was_reported_durable_survives_kills_and_the_loss_of_the_disk() -> Result<()> {
    let bin = binary("dormouse")?.parent().map(ToOwned::to_owned).unwrap_or_default();
    binary("dormouse-proxy")?;
    binary("guestbook")?;
    let report = kills::rounds(&bin, None, 6, 1)?;
    ensure!(report.durable > 0, "{report:?}");
    Ok(())
}
