//! Writing L0 files to the spool.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, BufWriter, Write as _};
use std::os::unix::fs::FileExt as _;
use std::path::Path;

use dormouse_core::ids::{Nonce, Txid};

use super::error::FollowError;
use super::{Follower, Source, SpooledFile, WalMark};
use crate::ltx::{Encoder, Encoding, Header, Pgno, WAL_HEADER_LEN};
use crate::spool;
use crate::wal::{Salts, WalEnd, WalHeader};

/// Where a page of an L0 comes from.
#[derive(Clone, Copy, Debug)]
enum From {
    Source(Source),
    Database,
}

impl Follower {
    /// Writes the pending commits, or a full image where one is needed, as L0 `txid`.
    /// None when nothing is pending. On an error everything stays pending.
    pub fn spool(
        &mut self,
        txid: Txid,
        nonce: &Nonce,
        timestamp_ms: i64,
    ) -> Result<Option<SpooledFile>, FollowError> {
        if self.image_needed().is_some() {
            return self.spool_image(txid, nonce, timestamp_ms).map(Some);
        }
        let Some(pending) = &self.pending else { return Ok(None) };
        let mut header = Header::new(self.page_size, pending.commit, txid, txid);
        header.timestamp_ms = timestamp_ms;
        header.wal_offset = pending.from.max(WAL_HEADER_LEN);
        header.wal_size = pending.end.offset.saturating_sub(pending.from);
        let Salts(salt1, salt2) = pending.end.salts;
        header.salts = (salt1, salt2);
        let mut pages: BTreeMap<Pgno, From> = pending
            .pages
            .range(..=Pgno(pending.commit))
            .map(|(page, source)| (*page, From::Source(*source)))
            .collect();
        self.add_growth(&mut pages, pending.commit)?;
        let end = pending.end;
        let file = match self.write(header, &pages, nonce, false) {
            Ok(file) => self.marked(file, Some(end)),
            Err(error) => {
                // A full disk leaves everything pending; anything else is told apart by a poll.
                self.poll()?;
                return Err(error);
            }
        };
        self.page_count = header.commit;
        self.pending = None;
        self.carry.clear();
        Ok(Some(file))
    }

    fn spool_image(
        &mut self,
        txid: Txid,
        nonce: &Nonce,
        timestamp_ms: i64,
    ) -> Result<SpooledFile, FollowError> {
        let needed = self.database.len()?.saturating_add(self.limits.disk_free_min);
        if self.disk_free()? < needed {
            let source = io::Error::from(io::ErrorKind::StorageFull);
            return Err(FollowError::io(&self.state_dir, source));
        }
        let (image, place) = self.view()?;
        let mut header = Header::new(self.page_size, image.page_count, txid, txid);
        header.timestamp_ms = timestamp_ms;
        header.wal_offset = WAL_HEADER_LEN;
        if let Some(end) = image.end {
            header.wal_size = end.offset - WAL_HEADER_LEN;
            header.salts = (end.salts.0, end.salts.1);
        }
        let mut pages = BTreeMap::new();
        let mut page = self.page_size.next_stored(Pgno(0));
        while page.0 <= image.page_count {
            let from = match image.frames.get(&page) {
                Some(offset) => From::Source(Source::Wal(*offset)),
                None => From::Database,
            };
            pages.insert(page, from);
            page = self.page_size.next_stored(page);
        }
        self.database.sync()?;
        let file = self.write(header, &pages, nonce, true)?;
        let file = self.marked(file, image.end);
        self.page_count = image.page_count;
        self.pending = None;
        self.carry.clear();
        self.place = place;
        self.pin_again();
        Ok(file)
    }

    /// Pages by which the database grew but that have no frame: an older frame of this WAL, or
    /// the file, or zeros. A restore needs every page.
    fn add_growth(&self, pages: &mut BTreeMap<Pgno, From>, commit: u32) -> Result<(), FollowError> {
        let mut missing = Vec::new();
        let mut page = self.page_size.next_stored(Pgno(self.page_count));
        while page.0 <= commit {
            if !pages.contains_key(&page) {
                missing.push(page);
            }
            page = self.page_size.next_stored(page);
        }
        if missing.is_empty() {
            return Ok(());
        }
        let wal = self.wal()?;
        let fail = |error| FollowError::io(self.database.wal_path(), error);
        let older = match WalHeader::read(&wal).map_err(fail)? {
            Some(header) => header.scan(&wal, header.start()).map_err(fail)?,
            None => None,
        };
        for page in missing {
            let frame = older.as_ref().and_then(|scan| scan.pages.get(&page));
            let from = match frame {
                Some(offset) => From::Source(Source::Wal(*offset)),
                None => From::Database,
            };
            pages.insert(page, from);
        }
        Ok(())
    }

    fn write(
        &self,
        header: Header,
        pages: &BTreeMap<Pgno, From>,
        nonce: &Nonce,
        is_image: bool,
    ) -> Result<SpooledFile, FollowError> {
        let dir = spool::dir(&self.state_dir);
        let name = spool::name(header.min, nonce);
        let path = dir.join(&name);
        let fail = |error: io::Error| FollowError::io(&path, error);
        fs::create_dir_all(&dir).map_err(fail)?;
        let wal = self.database.open_wal()?;
        if let Some(wal) = &wal {
            // What the store knows must survive here too, whatever the app's `synchronous` says.
            wal.sync_data().map_err(|error| FollowError::io(self.database.wal_path(), error))?;
        }
        let temporary = dir.join(format!("{name}.tmp"));
        let size = match self.write_to(&temporary, &name, header, pages, wal.as_ref()) {
            Ok(size) => size,
            Err(error) => {
                // A full disk must not be filled further by what it broke off.
                drop(fs::remove_file(&temporary));
                return Err(error);
            }
        };
        fs::rename(&temporary, &path).map_err(fail)?;
        spool::sync_dir(&dir).map_err(fail)?;
        Ok(SpooledFile {
            txid: header.min,
            nonce: nonce.clone(),
            path,
            timestamp_ms: header.timestamp_ms,
            size,
            is_image,
            page_count: header.commit,
            mark: None,
        })
    }

    fn marked(&self, file: SpooledFile, end: Option<WalEnd>) -> SpooledFile {
        let mark = end.map(|end| {
            let inode = self.database.inode();
            WalMark::new(file.txid, inode, end, self.page_size, file.page_count)
        });
        SpooledFile { mark, ..file }
    }

    /// An L0 that changes nothing: page 1 as it is, to close its number. The position must hold,
    /// and nothing must be pending.
    pub fn spool_touch(
        &mut self,
        txid: Txid,
        nonce: &Nonce,
        timestamp_ms: i64,
    ) -> Result<SpooledFile, FollowError> {
        let mut header = Header::new(self.page_size, self.page_count, txid, txid);
        header.timestamp_ms = timestamp_ms;
        header.wal_offset = WAL_HEADER_LEN;
        let wal = self.wal()?;
        let fail = |error| FollowError::io(self.database.wal_path(), error);
        let scan = match WalHeader::read(&wal).map_err(fail)? {
            Some(found) => {
                header.salts = (found.salts.0, found.salts.1);
                found.scan(&wal, found.start()).map_err(fail)?
            }
            None => None,
        };
        let frame = scan.and_then(|scan| scan.pages.get(&Pgno(1)).copied());
        let from = frame.map_or(From::Database, |offset| From::Source(Source::Wal(offset)));
        self.write(header, &[(Pgno(1), from)].into(), nonce, false)
    }

    fn write_to(
        &self,
        temporary: &Path,
        name: &str,
        header: Header,
        pages: &BTreeMap<Pgno, From>,
        wal: Option<&File>,
    ) -> Result<u64, FollowError> {
        let fail = |error: io::Error| FollowError::io(temporary, error);
        let to = BufWriter::with_capacity(1 << 16, File::create(temporary).map_err(fail)?);
        let mut encoder = Encoder::new(to, name, header, Encoding::Frame)?;
        let mut buffer = vec![0; self.page_size.buffer_len()];
        for (page, from) in pages {
            self.read(*from, *page, wal, &mut buffer)?;
            encoder.page(*page, &buffer)?;
        }
        self.check_generation(header, pages, wal)?;
        let (mut to, written) = encoder.finish()?;
        to.flush().map_err(fail)?;
        to.get_ref().sync_data().map_err(fail)?;
        Ok(written.size)
    }

    /// A restart of the WAL writes its header before any frame: an unchanged header proves that
    /// the frames just read were those that the scan saw.
    fn check_generation(
        &self,
        header: Header,
        pages: &BTreeMap<Pgno, From>,
        wal: Option<&File>,
    ) -> Result<(), FollowError> {
        let uses_wal = pages.values().any(|from| matches!(from, From::Source(Source::Wal(_))));
        let Some(wal) = wal.filter(|_| uses_wal) else { return Ok(()) };
        let fail = |error| FollowError::io(self.database.wal_path(), error);
        let now = WalHeader::read(wal).map_err(fail)?;
        if now.is_some_and(|now| (now.salts.0, now.salts.1) == header.salts) {
            return Ok(());
        }
        Err(fail(io::Error::other("the WAL was restarted while it was read")))
    }

    fn read(
        &self,
        from: From,
        page: Pgno,
        wal: Option<&File>,
        into: &mut [u8],
    ) -> Result<(), FollowError> {
        match (from, wal) {
            (From::Database, _) => self.database.read_page(self.page_size, page, into),
            (From::Source(Source::Carry(slot)), _) => self
                .carry
                .get(slot, self.page_size, into)
                .map_err(|error| FollowError::io(&self.state_dir, error)),
            (From::Source(Source::Wal(offset)), Some(wal)) => wal
                .read_exact_at(into, offset)
                .map_err(|error| FollowError::io(self.database.wal_path(), error)),
            (From::Source(Source::Wal(_)), None) => {
                Err(FollowError::io(self.database.wal_path(), io::ErrorKind::NotFound.into()))
            }
        }
    }
}
