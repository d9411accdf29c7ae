//! The state at a time: which files are not younger, by a binary search over each level's headers.

use std::collections::BTreeMap;

use dormouse_core::ids::{Host, Txid};
use dormouse_store::Store;

use super::error::RestoreError;
use super::header_of;
use super::plan::{Listing, RemoteFile};

/// Drops files that are younger than `ms`; returns the requests that it took. Within a level times
/// rise with the TXIDs.
pub(super) async fn keep_until<S: Store>(
    store: &S,
    prefix: &str,
    host: &Host,
    listing: &mut Listing,
    ms: i64,
) -> Result<u64, RestoreError> {
    let mut levels: BTreeMap<u8, Vec<RemoteFile>> = BTreeMap::new();
    for file in &listing.files {
        levels.entry(file.key.level).or_default().push(*file);
    }
    let mut requests = 0;
    let mut kept = Vec::new();
    for mut files in levels.into_values() {
        // Files that begin at the same TXID, as all snapshots do, are in the order of their last.
        files.sort_unstable_by_key(|file| (file.key.max, file.key.min));
        let (mut low, mut high) = (0, files.len());
        while low < high {
            let middle = low.midpoint(high);
            let Some(file) = files.get(middle) else { break };
            let key = store.layout().ltx_key(prefix, host, &file.key);
            requests += 1;
            if header_of(store, &key).await?.timestamp_ms <= ms {
                low = middle + 1;
            } else {
                high = middle;
            }
        }
        kept.extend(files.into_iter().take(low));
    }
    let is_first = |file: &&RemoteFile| file.key.min == Txid(1);
    if kept.iter().any(|file| is_first(&file)) {
        kept.sort_unstable();
        listing.files = kept;
        return Ok(requests);
    }
    // Every state begins with a file of the first TXID, or there is a gap.
    let first = listing.files.iter().filter(is_first).min_by_key(|file| file.key.max);
    if let Some(first) = first {
        let key = store.layout().ltx_key(prefix, host, &first.key);
        let oldest_ms = header_of(store, &key).await?.timestamp_ms;
        return Err(RestoreError::TooOld { wanted_ms: ms, oldest_ms });
    }
    Ok(requests)
}
