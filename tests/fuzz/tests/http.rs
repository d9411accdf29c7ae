//! The proxy's parsers and its connection machine under arbitrary bytes and arbitrary cuts.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::sync::LazyLock;

use dormouse_fuzz::{Outcome, Wire};
use dormouse_proxy_core::Host;
use dormouse_proxy_core::body::{Body, Framing, Output};
use dormouse_proxy_core::host::Authority;
use dormouse_proxy_core::request::{self, Peer};
use dormouse_proxy_core::response;
use proptest::prelude::*;

const OK: &[u8] = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello";

/// The inputs of the h1 cases that are written in one piece: seeds to change and to cut.
static SEEDS: LazyLock<Vec<Vec<u8>>> = LazyLock::new(|| {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../cases/h1-cases.json");
    let file: serde_json::Value =
        serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
    let raw = file["cases"].as_array().unwrap().iter().filter_map(|case| case["raw"].as_str());
    raw.map(|text| text.chars().map(|c| u8::try_from(u32::from(c)).unwrap()).collect()).collect()
});

fn whole(input: &[u8]) -> Outcome {
    Wire::new(OK, usize::MAX).run([input])
}

fn cut(input: &[u8], cuts: &[prop::sample::Index]) -> Vec<Vec<u8>> {
    let mut at: Vec<usize> = cuts.iter().map(|cut| cut.index(input.len() + 1)).collect();
    at.sort_unstable();
    at.push(input.len());
    let mut from = 0;
    at.into_iter()
        .map(|to| {
            let piece = input[from..to].to_vec();
            from = to;
            piece
        })
        .collect()
}

fn seed() -> impl Strategy<Value = Vec<u8>> {
    (0..SEEDS.len()).prop_map(|number| SEEDS[number].clone())
}

/// A seed with some bytes replaced, doubled or dropped.
fn mutant() -> impl Strategy<Value = Vec<u8>> {
    let change = (any::<prop::sample::Index>(), any::<u8>(), 0..4_u8);
    (seed(), prop::collection::vec(change, 1..6)).prop_map(|(mut bytes, changes)| {
        for (at, byte, kind) in changes {
            let at = at.index(bytes.len().max(1));
            match kind {
                0 if at < bytes.len() => bytes[at] = byte,
                1 if at < bytes.len() => drop(bytes.remove(at)),
                2 => bytes.insert(at.min(bytes.len()), b"\r\n: ,;\0"[usize::from(byte) % 7]),
                _ => bytes.insert(at.min(bytes.len()), byte),
            }
        }
        bytes
    })
}

#[test]
fn every_seed_cut_anywhere_gives_the_same() {
    for seed in SEEDS.iter() {
        let expected = whole(seed);
        for at in 0..=seed.len() {
            let (one, two) = seed.split_at(at);
            let outcome = Wire::new(OK, 7).run([one, two]);
            assert!(outcome == expected, "cut at {at}: {:?}", String::from_utf8_lossy(seed));
        }
        let bytes: Vec<&[u8]> = seed.chunks(1).collect();
        assert!(Wire::new(OK, 1).run(bytes) == expected, "byte by byte");
    }
}

#[test]
fn a_chunked_answer_cut_anywhere_has_the_same_payload() {
    let answer = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n\
                   5;x=y\r\nhello\r\n3\r\nabc\r\n0\r\nX-T: 1\r\n\r\n";
    let request = b"GET / HTTP/1.1\r\nHost: a.test\r\n\r\n";
    for pieces in 1..=answer.len() {
        let outcome = Wire::new(answer, pieces).run([request.as_slice()]);
        let end = outcome.to_client.windows(4).position(|four| four == b"\r\n\r\n").unwrap() + 4;
        let mut body = Body::new(Framing::Chunked, Output::Raw, u64::MAX);
        let mut payload = Vec::new();
        body.feed(&outcome.to_client[end..], &mut payload, usize::MAX).expect("well-formed");
        assert!(body.is_done() && payload == b"helloabc", "pieces of {pieces}");
        assert!(outcome.to_client.ends_with(b"0\r\nX-T: 1\r\n\r\n"));
    }
}

proptest! {
    #[test]
    fn a_mutant_gives_the_same_whatever_the_cuts(
        input in mutant(),
        cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..6),
        pieces in 1..50_usize,
    ) {
        let expected = whole(&input);
        let parts = cut(&input, &cuts);
        let outcome = Wire::new(OK, pieces).run(parts.iter().map(Vec::as_slice));
        prop_assert_eq!(outcome, expected);
    }

    #[test]
    fn arbitrary_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..400)) {
        let peer = Peer { address: String::new(), trusted: true, scheme: "http" };
        drop(request::parse(&bytes, 100, &peer, &mut Vec::new()));
        drop(Authority::parse(&bytes));
        for framing in [Framing::Chunked, Framing::Length(9), Framing::UntilClose] {
            let mut body = Body::new(framing, Output::Chunked, 100);
            body.feed(&bytes, &mut Vec::new(), 50).unwrap_or_default();
        }
        drop(whole(&bytes));
    }

    #[test]
    fn arbitrary_answers_never_panic(
        mut bytes in prop::collection::vec(any::<u8>(), 0..300),
        headed in any::<bool>(),
    ) {
        if headed {
            let head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n";
            bytes.splice(0..0, head.iter().copied());
        }
        let request = b"GET / HTTP/1.1\r\nHost: a.test\r\n\r\n";
        let peer = Peer { address: String::new(), trusted: false, scheme: "http" };
        let (parsed, _) =
            request::parse(request, 100, &peer, &mut Vec::new()).unwrap().unwrap();
        response::parse(&bytes, &parsed, false, &mut Vec::new()).unwrap_or_default();
    }

    #[test]
    fn a_host_is_its_own_canonical_form(bytes in "[a-zA-Z0-9._:\\[\\]-]{0,80}") {
        if let Ok(host) = Host::parse(bytes.as_bytes()) {
            prop_assert_eq!(Host::parse(host.as_str().as_bytes()), Ok(host.clone()));
        }
    }
}
