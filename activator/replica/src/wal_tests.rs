use std::fs::File;
use std::path::Path;

use proptest::prelude::*;
use rusqlite::Connection;

use super::*;

fn database(dir: &Path, page_size: u32) -> Connection {
    let conn = Connection::open(dir.join("db")).unwrap();
    conn.pragma_update(None, "page_size", page_size).unwrap();
    conn.pragma_update(None, "journal_mode", "wal").unwrap();
    conn.pragma_update(None, "wal_autocheckpoint", 0).unwrap();
    conn.execute_batch("CREATE TABLE t (a)").unwrap();
    conn
}

fn wal(dir: &Path) -> File {
    File::options().read(true).write(true).open(dir.join("db-wal")).unwrap()
}

fn page_count(conn: &Connection) -> u32 {
    conn.query_row("PRAGMA page_count", (), |row| row.get(0)).unwrap()
}

#[test]
fn a_scan_ends_at_the_last_commit_in_every_page_size() {
    for shift in 9..=16 {
        let dir = tempfile::tempdir().unwrap();
        let conn = database(dir.path(), 1 << shift);
        let wal = wal(dir.path());
        let header = WalHeader::read(&wal).unwrap().unwrap();
        assert_eq!(header.page_size.get(), 1 << shift);
        let first = header.scan(&wal, header.start()).unwrap().unwrap();
        assert_eq!(first.commit, page_count(&conn));
        assert_eq!(header.scan(&wal, first.end).unwrap(), None, "nothing new");
        conn.execute_batch("INSERT INTO t SELECT randomblob(3000)").unwrap();
        let second = header.scan(&wal, first.end).unwrap().unwrap();
        assert_eq!(second.commit, page_count(&conn));
        assert_eq!(second.end.offset, wal.metadata().unwrap().len());
        for (page, offset) in &second.pages {
            let mut bytes = [0; 4];
            wal.read_at(&mut bytes, offset - WAL_FRAME_HEADER_LEN).unwrap();
            assert_eq!(u32::from_be_bytes(bytes), page.0);
        }
    }
}

#[test]
fn an_uncommitted_tail_does_not_count() {
    let dir = tempfile::tempdir().unwrap();
    let conn = database(dir.path(), 512);
    let wal = wal(dir.path());
    let header = WalHeader::read(&wal).unwrap().unwrap();
    let before = header.scan(&wal, header.start()).unwrap().unwrap();
    conn.pragma_update(None, "cache_size", 2).unwrap();
    conn.execute_batch("BEGIN; INSERT INTO t SELECT randomblob(50000)").unwrap();
    assert!(wal.metadata().unwrap().len() > before.end.offset, "the cache spilled");
    assert_eq!(header.scan(&wal, before.end).unwrap(), None);
    conn.execute_batch("COMMIT").unwrap();
    assert!(header.scan(&wal, before.end).unwrap().is_some());
}

#[test]
fn a_torn_frame_ends_the_scan_at_the_commit_before() {
    let dir = tempfile::tempdir().unwrap();
    let conn = database(dir.path(), 512);
    let wal = wal(dir.path());
    let header = WalHeader::read(&wal).unwrap().unwrap();
    let first = header.scan(&wal, header.start()).unwrap().unwrap();
    conn.execute_batch("INSERT INTO t VALUES (1)").unwrap();
    let len = wal.metadata().unwrap().len();
    wal.write_at(&[0xff], len - 1).unwrap();
    assert_eq!(header.scan(&wal, header.start()).unwrap().unwrap(), first);
    wal.set_len(len - 1).unwrap();
    assert_eq!(header.scan(&wal, header.start()).unwrap().unwrap(), first);
}

#[test]
fn a_restarted_wal_has_the_first_salt_plus_one() {
    let dir = tempfile::tempdir().unwrap();
    let conn = database(dir.path(), 4096);
    let wal = wal(dir.path());
    let old = WalHeader::read(&wal).unwrap().unwrap();
    conn.query_row("PRAGMA wal_checkpoint(PASSIVE)", (), |_| Ok(())).unwrap();
    conn.execute_batch("INSERT INTO t VALUES (1)").unwrap();
    let new = WalHeader::read(&wal).unwrap().unwrap();
    assert!(old.salts.precede(new.salts));
    assert!(!old.salts.precede(old.salts));
    assert!(Salts(u32::MAX, 1).precede(Salts(0, 9)), "the salt wraps");
    let scan = new.scan(&wal, new.start()).unwrap().unwrap();
    assert_eq!(scan.pages.len(), 1, "frames of the generation before do not count");
}

#[test]
fn a_big_endian_wal_is_read() {
    let mut bytes = vec![0_u8; 32];
    let put = |bytes: &mut Vec<u8>, n: usize, word: u32| {
        bytes[n..n + 4].copy_from_slice(&word.to_be_bytes());
    };
    for (n, word) in [MAGIC_BIG, VERSION, 512, 0, 7, 8].into_iter().enumerate() {
        put(&mut bytes, n * 4, word);
    }
    let sum = WalSum::default().update(WordOrder::Big, &bytes[..24]);
    put(&mut bytes, 24, sum.0);
    put(&mut bytes, 28, sum.1);
    let mut frame = vec![7_u8; 24 + 512];
    for (n, word) in [1, 1, 7, 8].into_iter().enumerate() {
        put(&mut frame, n * 4, word);
    }
    let sum = sum.update(WordOrder::Big, &frame[..8]).update(WordOrder::Big, &frame[24..]);
    put(&mut frame, 16, sum.0);
    put(&mut frame, 20, sum.1);
    bytes.extend_from_slice(&frame);
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("db-wal"), &bytes).unwrap();
    let wal = wal(dir.path());
    let header = WalHeader::read(&wal).unwrap().unwrap();
    let scan = header.scan(&wal, header.start()).unwrap().unwrap();
    assert_eq!((scan.commit, scan.end.offset), (1, 32 + 24 + 512));
}

proptest! {
    #[test]
    fn no_bytes_panic(bytes in proptest::collection::vec(any::<u8>(), 0..2000)) {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("db-wal"), &bytes).unwrap();
        let wal = wal(dir.path());
        if let Some(header) = WalHeader::read(&wal).unwrap() {
            header.scan(&wal, header.start()).unwrap();
        }
    }
}
