//! Header blocks written by hand. The tests of [`super::super`] use random ones.

use super::*;

/// The translated blocks; `None` for an unchanged one.
fn translated<const N: usize>(blocks: [&[u8]; N]) -> [Option<Vec<u8>>; N] {
    let mut table = Table::default();
    blocks.map(|block| {
        let mut out = Vec::new();
        table.translate(block, &mut out).expect("a block").then_some(out)
    })
}

/// `:authority` with this value, as a literal with indexing.
fn indexed(value: &[u8]) -> Vec<u8> {
    [&[0x41, value.len() as u8], value].concat()
}

#[test]
fn only_invalid_authorities_are_removed() {
    for value in ["node", "node:80", "[::1]:80", "10.0.0.1:1"] {
        assert_eq!(translated([&indexed(value.as_bytes())]), [None], "{value}");
        let encoded = huffman::encode(value.as_bytes());
        let block = [&[0x41, 0x80 | encoded.len() as u8], &*encoded].concat();
        assert_eq!(translated([&block]), [None], "{value}");
    }
    for value in ["", "a%2Cb", "a:b:c", "::1", "/tmp/x", "a b", "1.1.1.1:1,2.2.2.2:2", "é", "\0"] {
        let block = [&b"\x82"[..], &indexed(value.as_bytes()), b"\x86"].concat();
        assert_eq!(translated([&block]), [Some(b"\x82\x86".to_vec())], "{value}");
        let encoded = huffman::encode(value.as_bytes());
        // Never indexed, with the name and the value Huffman-coded.
        let name = [&[0x10, 0x88], AUTHORITY_ENCODED].concat();
        let block = [&name, &[0x80 | encoded.len() as u8][..], &encoded].concat();
        assert_eq!(translated([&block]), [Some(Vec::new())], "{value}");
    }
    // The entry of the static table, which has no value.
    assert_eq!(translated([b"\x82\x81\x86"]), [Some(b"\x82\x86".to_vec())]);
}

#[test]
fn indices_are_translated_to_the_table_of_h2() {
    // a: 1 (inserted first), then the authority, then b: 2.
    let first = [b"\x40\x01a\x011", &*indexed(b"/path"), b"\x40\x01b\x012"].concat();
    // The newest entry has index 62: b, the authority, a.
    let [first, second, named, third] = translated([
        &first,
        b"\xbe\xbf\xc0",
        // Literals with the name of the authority: a valid value, and an invalid one.
        b"\x0f\x30\x04node\x0f\x30\x03a b",
        // c: 3 is inserted after the name of a.
        b"\x7f\x01\x013\xbe\xc1",
    ]);
    assert_eq!(first.expect("changed"), b"\x40\x01a\x011\x40\x01b\x012");
    assert_eq!(second.expect("changed"), b"\xbe\xbf");
    assert_eq!(named.expect("changed"), b"\x01\x04node");
    assert_eq!(third.expect("changed"), b"\x7f\x00\x013\xbe\xc0");
}

#[test]
fn malformed_blocks_are_detected() {
    let malformed: [&[u8]; 7] = [
        b"\x80",
        b"\x41",
        b"\x41\x05abc",
        b"\x40\x01",
        b"\xff\xff\xff\xff\xff\xff\x01",
        b"\x7f",
        b"\x0f\x2f\x01a",
    ];
    for block in malformed {
        let translated = Table::default().translate(block, &mut Vec::new());
        assert_eq!(translated, Err(Malformed), "{block:x?}");
    }
}

#[test]
fn evicted_entries_are_forgotten() {
    let mut table = Table::default();
    for _ in 0..1000 {
        table.translate(&indexed(b"a b"), &mut Vec::new()).expect("a block");
    }
    assert!(table.authorities.len() as u64 <= MAX_ENTRIES, "{}", table.authorities.len());
    assert!(table.differs());
}
