use super::*;
use crate::ids::Epoch;
use crate::record::Owner;

const FILE: FileId = FileId { inode: 1, size: 4096, ctime_ns: 5 };

fn me() -> BoxId {
    "me".into()
}

fn position(generation: u64, txid: u64, clean: bool) -> Position {
    Position {
        version: POSITION_VERSION,
        generation: Generation(generation),
        txid: Txid(txid),
        etag: (txid > 0).then(|| "\"tag\"".into()),
        file: FILE,
        page_count: 1,
        page_size: 4096,
        clean,
    }
}

fn local(position: Option<Position>) -> LocalCopy {
    LocalCopy {
        file: Some(FILE),
        position,
        wal_bytes: 0,
        spool: Vec::from(["mine".into()]),
        damaged: false,
    }
}

fn record(id: &str, generation: u64, since: u64, state: HostState, txid: u64) -> HostRecord {
    HostRecord {
        generation: Generation(generation),
        owner: Owner { name: "box".into(), epoch: Epoch(1) },
        nonce: "n".into(),
        id: id.into(),
        state,
        since: Generation(since),
        txid: Txid(txid),
        etag: None,
        build: None,
    }
}

fn tip(txid: u64, tag: &str) -> Remote {
    Remote::named(RemoteTip { txid: Txid(txid), etag: Some(tag.into()) })
}

/// As a LIST finds it: with the nonce of whoever sent it.
fn sent(txid: u64, nonce: &str) -> Remote {
    let tip = RemoteTip { txid: Txid(txid), etag: Some("x".into()) };
    Remote::Known(Some(Newest { tip, nonce: Some(nonce.into()) }))
}

const EMPTY: Remote = Remote::Known(None);

fn verdict(
    before: Option<&HostRecord>,
    unbroken: Option<u64>,
    local: &LocalCopy,
    remote: &Remote,
) -> Verdict {
    let id = me();
    judge(Claimed { before, unbroken: unbroken.map(Generation), box_id: &id }, local, remote)
}

#[test]
fn no_file_restores_what_the_remote_has() {
    let none = LocalCopy::default();
    assert_eq!(verdict(None, None, &none, &Remote::Unasked), Verdict::List);
    assert_eq!(verdict(None, None, &none, &tip(3, "x")), Verdict::Restore { set_aside: false });
    assert_eq!(verdict(None, None, &none, &EMPTY), Verdict::Fresh);
}

#[test]
fn no_file_and_an_empty_remote_refuse_when_a_txid_is_named() {
    let refused = Verdict::Refuse(CopyRefusal::RemoteEmpty);
    let positioned = LocalCopy { position: Some(position(1, 4, true)), ..LocalCopy::default() };
    assert_eq!(verdict(None, None, &positioned, &EMPTY), refused);
    let before = record("other", 3, 3, HostState::Released, 4);
    assert_eq!(verdict(Some(&before), None, &LocalCopy::default(), &EMPTY), refused);
}

#[test]
fn a_remote_behind_the_record_is_never_restored_silently() {
    let before = record("other", 3, 3, HostState::Released, 9);
    assert_eq!(
        verdict(Some(&before), None, &LocalCopy::default(), &tip(4, "x")),
        Verdict::Refuse(CopyRefusal::RemoteOlder)
    );
}

#[test]
fn a_clean_copy_of_an_unbroken_generation_asks_the_store_nothing() {
    let copy = local(Some(position(7, 3, true)));
    assert_eq!(verdict(None, Some(7), &copy, &Remote::Unasked), Verdict::Use);
}

#[test]
fn a_clean_copy_from_before_another_turn_is_not_used_for_its_session_alone() {
    let copy = local(Some(position(5, 3, true)));
    assert_eq!(verdict(None, Some(7), &copy, &Remote::Unasked), Verdict::List);
    assert_eq!(verdict(None, Some(7), &copy, &tip(4, "x")), Verdict::Restore { set_aside: true });
}

#[test]
fn a_clean_copy_that_equals_the_remote_is_used() {
    let before = record("other", 8, 8, HostState::Released, 3);
    let copy = local(Some(position(7, 3, true)));
    assert_eq!(verdict(Some(&before), None, &copy, &tip(3, "\"tag\"")), Verdict::Use);
    let other_tag = verdict(Some(&before), None, &copy, &tip(3, "\"else\""));
    assert_eq!(other_tag, Verdict::Restore { set_aside: true });
}

#[test]
fn a_changed_file_is_never_clean() {
    let mut copy = local(Some(position(7, 3, true)));
    copy.file = Some(FileId { ctime_ns: 6, ..FILE });
    assert_eq!(verdict(None, Some(7), &copy, &tip(3, "\"tag\"")), Verdict::Keep);
    assert_eq!(verdict(None, Some(7), &copy, &sent(4, "mine")), Verdict::Keep);
    let mut with_wal = local(Some(position(7, 3, true)));
    with_wal.wal_bytes = 32;
    assert_eq!(verdict(None, Some(7), &with_wal, &Remote::Unasked), Verdict::List);
}

#[test]
fn a_remote_older_than_what_was_acknowledged_is_refused() {
    let copy = local(Some(position(7, 5, false)));
    let older = Verdict::Refuse(CopyRefusal::RemoteOlder);
    assert_eq!(verdict(None, Some(7), &copy, &tip(4, "x")), older);
    let empty = Verdict::Refuse(CopyRefusal::RemoteEmpty);
    assert_eq!(verdict(None, Some(7), &copy, &EMPTY), empty);
}

#[test]
fn an_unclean_copy_of_our_own_is_kept_and_uploaded_whole() {
    let copy = local(Some(position(7, 3, false)));
    let before = record("me", 9, 6, HostState::Owned, 0);
    // What is newer is an upload of this disk whose answer never came.
    for remote in [tip(3, "\"tag\""), sent(4, "mine")] {
        assert_eq!(verdict(None, Some(7), &copy, &remote), Verdict::Keep);
        assert_eq!(verdict(Some(&before), None, &copy, &remote), Verdict::Keep);
    }
}

#[test]
fn a_position_without_a_tag_goes_by_its_number() {
    let copy = local(Some(Position { etag: None, ..position(7, 3, false) }));
    let before = record("me", 9, 6, HostState::Owned, 0);
    assert_eq!(verdict(Some(&before), None, &copy, &tip(3, "x")), Verdict::Keep);
    assert_eq!(verdict(Some(&before), None, &copy, &sent(3, "x")), Verdict::Keep);
}

#[test]
fn a_file_that_is_no_database_any_more_is_set_aside_for_what_the_replica_has() {
    let before = record("me", 9, 6, HostState::Owned, 0);
    for clean in [true, false] {
        let copy = LocalCopy { damaged: true, ..local(Some(position(7, 3, clean))) };
        assert_eq!(verdict(None, Some(7), &copy, &Remote::Unasked), Verdict::List);
        for remote in [tip(3, "\"tag\""), sent(4, "mine")] {
            let restored = Verdict::Restore { set_aside: true };
            assert_eq!(verdict(None, Some(7), &copy, &remote), restored);
            assert_eq!(verdict(Some(&before), None, &copy, &remote), restored);
        }
        let older = Verdict::Refuse(CopyRefusal::RemoteOlder);
        assert_eq!(verdict(Some(&before), None, &copy, &tip(2, "x")), older);
    }
}

#[test]
fn a_disk_that_was_put_back_to_an_earlier_state_is_never_the_newest() {
    let restored = Verdict::Restore { set_aside: true };
    let owned = record("me", 9, 6, HostState::Owned, 0);
    let released = record("me", 9, 6, HostState::Released, 5);
    for clean in [true, false] {
        let copy = local(Some(position(7, 3, clean)));
        // Uploaded by this box, but nothing on this disk knows of it.
        let remote = sent(4, "mine, later");
        assert_eq!(verdict(Some(&owned), None, &copy, &remote), restored);
        assert_eq!(verdict(Some(&released), None, &copy, &tip(5, "x")), restored);
        // Only its number is known, or another program sent it.
        assert_eq!(verdict(Some(&owned), None, &copy, &tip(4, "x")), restored);
        // Another file of the same number.
        assert_eq!(verdict(Some(&owned), None, &copy, &sent(3, "x")), restored);
        // Put back under a running activator, which knows how the last sleep ended.
        assert_eq!(verdict(Some(&owned), Some(7), &copy, &tip(5, "x")), restored);
    }
}

#[test]
fn a_parked_copy_is_used_without_a_list_when_it_is_what_the_last_sleep_left() {
    let copy = local(Some(position(7, 3, true)));
    assert_eq!(verdict(None, Some(7), &copy, &tip(3, "\"tag\"")), Verdict::Use);
    let untagged = Remote::named(RemoteTip { txid: Txid(3), etag: None });
    assert_eq!(verdict(None, Some(7), &copy, &untagged), Verdict::Use);
}

#[test]
fn an_unclean_copy_from_before_our_unbroken_ownership_is_set_aside() {
    let copy = local(Some(position(5, 3, false)));
    let before = record("me", 9, 6, HostState::Owned, 0);
    let restored = Verdict::Restore { set_aside: true };
    assert_eq!(verdict(Some(&before), None, &copy, &tip(4, "x")), restored);
}

#[test]
fn an_unclean_copy_after_another_owner_is_set_aside() {
    let copy = local(Some(position(7, 3, false)));
    let before = record("other", 8, 8, HostState::Released, 4);
    let restored = Verdict::Restore { set_aside: true };
    assert_eq!(verdict(Some(&before), None, &copy, &tip(4, "x")), restored);
}

#[test]
fn a_file_without_a_position_is_adopted_only_into_an_empty_replica() {
    let copy = local(None);
    assert_eq!(verdict(None, None, &copy, &EMPTY), Verdict::Adopt);
    let refused = Verdict::Refuse(CopyRefusal::UnknownFile);
    assert_eq!(verdict(None, None, &copy, &tip(1, "x")), refused);
}

#[test]
fn what_an_outside_supervisor_left_is_the_truth_on_the_box_that_handed_it_out() {
    let before = record("me", 9, 6, HostState::Outside, 3);
    let mut copy = local(Some(position(9, 3, true)));
    assert_eq!(verdict(Some(&before), Some(10), &copy, &Remote::Unasked), Verdict::List);
    assert_eq!(verdict(Some(&before), Some(10), &copy, &tip(3, "\"tag\"")), Verdict::Use);
    copy.file = Some(FileId { ctime_ns: 6, ..FILE });
    assert_eq!(verdict(Some(&before), Some(10), &copy, &tip(3, "\"tag\"")), Verdict::Keep);
    assert_eq!(verdict(Some(&before), Some(10), &local(None), &tip(3, "x")), Verdict::Keep);
    let older = Verdict::Refuse(CopyRefusal::RemoteOlder);
    assert_eq!(verdict(Some(&before), Some(10), &copy, &tip(2, "x")), older);
    let empty = Verdict::Refuse(CopyRefusal::RemoteEmpty);
    assert_eq!(verdict(Some(&before), Some(10), &copy, &EMPTY), empty);
    let put_back = local(Some(position(9, 2, true)));
    let restored = Verdict::Restore { set_aside: true };
    assert_eq!(verdict(Some(&before), Some(10), &put_back, &tip(3, "x")), restored);
    let elsewhere = record("other", 9, 9, HostState::Outside, 4);
    assert_eq!(verdict(Some(&elsewhere), Some(10), &copy, &tip(4, "x")), restored);
}

#[test]
fn a_position_survives_its_codec_and_a_newer_one_is_refused_by_version() {
    let position = position(1, 2, true);
    assert_eq!(Position::decode(&position.encode()).unwrap(), position);
    let newer = br#"{"version":2,"surprise":true}"#;
    assert_eq!(Position::decode(newer).unwrap_err(), PositionError::Version(2));
    assert!(matches!(Position::decode(b""), Err(PositionError::Malformed(_))));
}
