//! Replication that goes on after a restart of the activator, while the app runs on.
//!
//! The position says what is durable. What was spooled behind it may have been sent: it is sent
//! first, byte for byte, or the number would be met as another writer's. The next L0 is an increment
//! where the place in the WAL proves itself, else a whole image.

use std::fs::{self, File};
use std::io::{self, BufReader};
use std::path::Path;

use dormouse_core::ids::{Nonce, Txid};
use dormouse_core::position::Position;
use dormouse_store::Store;

use super::{Base, OpenError, Opened, Replica, Settings};
use crate::follow::{FollowError, Follower, FreshMark, SpooledFile, WalMark};
use crate::holders::Holders;
use crate::levels::{self, Inventory};
use crate::ltx::{Decoder, Header, LtxError};
use crate::put::Place;
use crate::watch::Watcher;
use crate::{position_file, spool};

/// What an earlier process left.
struct Left {
    base: Base,
    follower: Option<Follower>,
    unsent: Option<SpooledFile>,
    own_nonces: Vec<Nonce>,
    inventory: Option<Inventory>,
    former: Vec<u64>,
}

impl<S: Store> Replica<S> {
    /// As [`Replica::open`], over an app that an earlier process of ours started under this very
    /// generation and that runs.
    pub async fn resume(
        place: Place<S>,
        watcher: Watcher,
        settings: Settings,
        holders: Holders,
    ) -> Result<(Self, Opened), OpenError> {
        let (own, held) = (settings.clone(), holders.clone());
        let left = tokio::task::spawn_blocking(move || find_again(&own, &held));
        let Left { base, follower, unsent, own_nonces, inventory, former } =
            left.await.map_err(|_| OpenError::Runtime)??;
        let continues = follower.as_ref().is_some_and(|f| f.image_needed().is_none());
        let opened = if continues {
            Opened::Continuing { txid: base.txid() }
        } else {
            Opened::NeedsFullImage
        };
        let this = Self {
            place,
            watcher,
            settings,
            base,
            follower,
            own_nonces,
            inventory,
            unsent,
            holders,
            former,
        };
        Ok((this, opened))
    }
}

/// No file has it: what was followed counts as changed, whatever the position says.
const NO_INODE: u64 = 0;

/// Blocks.
fn find_again(settings: &Settings, holders: &Holders) -> Result<Left, OpenError> {
    let state_dir = &settings.state_dir;
    let spooled = |source| OpenError::Spool { path: state_dir.clone(), source };
    let position = position_file::load(state_dir)?.filter(|position| !position.clean);
    let Some(position) = position.filter(|p| p.generation == settings.generation) else {
        let what = format!("no open position of generation {}", settings.generation);
        return Err(OpenError::NotOpen(what));
    };
    let durable = position.txid;
    levels::clear(state_dir).map_err(spooled)?;
    let inventory = Inventory::take(state_dir, settings.generation, durable);
    // Of the WAL nothing is known: of one that lost its name, the app's own processes tell.
    let mut former = vec![position.file.inode];
    let opened = holders.check(&settings.database, &former);
    if opened.is_err() {
        former.push(NO_INODE);
    }
    let mut follower = match opened.and_then(|()| open_again(settings, durable)) {
        Ok(follower) => Some(follower),
        // Tried again as long as the app runs, and told meanwhile.
        Err(
            FollowError::Absent { .. } | FollowError::NotWal { .. } | FollowError::Former { .. },
        ) => None,
        Err(error) => return Err(error.into()),
    };
    let unsent = unsent(state_dir, durable, follower.as_mut())?;
    let own_nonces = unsent.iter().map(|file| file.nonce.clone()).collect();
    Ok(Left { base: base(position), follower, unsent, own_nonces, inventory, former })
}

fn base(position: Position) -> Base {
    match position.txid {
        Txid(0) => Base::Image { after: Txid(0) },
        txid => Base::Current { txid, etag: position.etag },
    }
}

fn open_again(settings: &Settings, durable: Txid) -> Result<Follower, FollowError> {
    let Settings { database, state_dir, limits, keeper, .. } = settings;
    let (mark, fresh) = match durable {
        Txid(0) => (None, None),
        txid => (WalMark::load(state_dir, txid), FreshMark::load(state_dir, txid)),
    };
    let (mark, fresh, keeper) = (mark.as_ref(), fresh.as_ref(), keeper.as_ref());
    let mut follower = Follower::open_again(database, state_dir, mark, fresh, keeper)?;
    follower.set_limits(*limits);
    Ok(follower)
}

/// The L0 behind the position, when one was spooled; those before it are no longer needed.
fn unsent(
    state_dir: &Path,
    durable: Txid,
    follower: Option<&mut Follower>,
) -> Result<Option<SpooledFile>, OpenError> {
    let spooled = |source| OpenError::Spool { path: state_dir.to_owned(), source };
    let mut ahead = Vec::new();
    for (txid, nonce) in spool::left_over(state_dir).map_err(spooled)? {
        let path = spool::dir(state_dir).join(spool::name(txid, &nonce));
        if txid <= durable {
            fs::remove_file(path).map_err(spooled)?;
        } else {
            ahead.push((txid, nonce, path));
        }
    }
    let Some((txid, nonce, path)) = ahead.pop() else { return Ok(None) };
    if !ahead.is_empty() || txid != durable.next() {
        let what = format!("the spool holds {} files behind {durable}", ahead.len() + 1);
        return Err(OpenError::NotOpen(what));
    }
    let file = File::open(&path).map_err(spooled)?;
    let size = file.metadata().map_err(spooled)?.len();
    let (header, is_image) = look(&path, file).map_err(|e| spooled(io::Error::other(e)))?;
    // An earlier place than where that file ends: what comes behind it holds all the same.
    let mark = follower.and_then(|follower| follower.mark_as(txid));
    Ok(Some(SpooledFile {
        txid,
        nonce,
        path,
        timestamp_ms: header.timestamp_ms,
        size,
        is_image,
        page_count: header.commit,
        mark,
    }))
}

/// Its header, and whether it holds every page.
fn look(path: &Path, file: File) -> Result<(Header, bool), LtxError> {
    let name = path.to_string_lossy();
    let mut decoder = Decoder::new(BufReader::new(file), &name)?;
    let header = *decoder.header();
    let (mut page, mut wanted) = (Vec::new(), header.page_size.next_stored(crate::ltx::Pgno(0)));
    let mut is_whole = true;
    while let Some(found) = decoder.next_page(&mut page)? {
        is_whole &= found == wanted;
        wanted = header.page_size.next_stored(wanted);
    }
    Ok((header, is_whole && wanted.0 > header.commit))
}

#[cfg(test)]
#[path = "resume_tests.rs"]
mod tests;
