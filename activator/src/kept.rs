//! Small files that one of our processes keeps for another: replaced whole, never half written.
//! Without fsync: they are of use only while the machine is up, which the boot id in them proves.

use std::path::Path;
use std::{fs, io};

use serde::Serialize;
use serde::de::DeserializeOwned;

pub(crate) fn write(path: &Path, file: &impl Serialize) -> io::Result<()> {
    let fresh = path.with_extension("json.tmp");
    fs::write(&fresh, serde_json::to_vec(file).map_err(io::Error::other)?)?;
    fs::rename(fresh, path)
}

/// None where it is missing, torn, or of another version.
pub(crate) fn read<T: DeserializeOwned>(path: &Path) -> Option<T> {
    serde_json::from_slice(&fs::read(path).ok()?).ok()
}

/// Tells this boot of the machine from every other.
pub(crate) fn boot_id() -> io::Result<String> {
    Ok(fs::read_to_string("/proc/sys/kernel/random/boot_id")?.trim().to_owned())
}
