//! L0 files that wait for their upload: `<state>/spool/<txid>-<nonce>.ltx`.
//!
//! The nonce is part of the name, so that after a crash the same bytes go with the same nonce.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

use dormouse_core::ids::{Nonce, Txid};

/// The spool's directory below a host's state directory.
#[must_use]
pub fn dir(state_dir: &Path) -> PathBuf {
    state_dir.join("spool")
}

pub(crate) fn name(txid: Txid, nonce: &Nonce) -> String {
    format!("{:016x}-{nonce}.ltx", txid.0)
}

fn parse(name: &str) -> Option<(Txid, Nonce)> {
    let (txid, nonce) = name.strip_suffix(".ltx")?.split_once('-')?;
    let txid = u64::from_str_radix(txid, 16).ok()?;
    Some((Txid(txid), Nonce::from(nonce)))
}

/// What an earlier process left in the spool, in order: its nonces are our own journal of PUTs
/// whose outcome may be unknown. Half-written files are removed.
pub fn left_over(state_dir: &Path) -> io::Result<Vec<(Txid, Nonce)>> {
    let mut found = Vec::new();
    let entries = match fs::read_dir(dir(state_dir)) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(found),
        Err(error) => return Err(error),
    };
    for entry in entries {
        let entry = entry?;
        match entry.file_name().to_str().and_then(parse) {
            Some(file) => found.push(file),
            None => fs::remove_file(entry.path())?,
        }
    }
    found.sort();
    Ok(found)
}

/// Removes everything: the outcomes no longer matter.
pub fn clear(state_dir: &Path) -> io::Result<()> {
    match fs::remove_dir_all(dir(state_dir)) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        Ok(()) | Err(_) => Ok(()),
    }
}

pub(crate) fn sync_dir(dir: &Path) -> io::Result<()> {
    File::open(dir)?.sync_all()
}

/// A fresh nonce: 128 random bits in hex.
pub fn fresh_nonce() -> io::Result<Nonce> {
    let mut bytes = [0_u8; 16];
    getrandom::fill(&mut bytes).map_err(|error| io::Error::other(error.to_string()))?;
    Ok(Nonce(format!("{:032x}", u128::from_be_bytes(bytes))))
}
