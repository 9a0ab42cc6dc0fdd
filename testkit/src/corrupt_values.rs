//! Corrupt values for keys that nodes read, of every Redis type.

use proptest::prelude::*;
use proptest::sample::select;

/// A value of any Redis type.
#[derive(Clone, Debug)]
pub enum CorruptValue {
    /// A string.
    Text(Vec<u8>),
    /// A list.
    List(Vec<Vec<u8>>),
    /// A set.
    Set(Vec<Vec<u8>>),
    /// A hash.
    Hash(Vec<(Vec<u8>, Vec<u8>)>),
    /// A sorted set; scores in Redis notation.
    Sorted(Vec<(Vec<u8>, String)>),
    /// A stream with one entry.
    Stream(Vec<u8>),
}

impl CorruptValue {
    /// Replaces the value of `key`.
    pub fn put(&self, connection: &mut redis::Connection, key: &str) {
        redis::cmd("DEL").arg(key).exec(connection).unwrap();
        let mut put = redis::cmd(match self {
            Self::Text(_) => "SET",
            Self::List(_) => "RPUSH",
            Self::Set(_) => "SADD",
            Self::Hash(_) => "HSET",
            Self::Sorted(_) => "ZADD",
            Self::Stream(_) => "XADD",
        });
        put.arg(key);
        match self {
            Self::Text(text) => put.arg(text),
            Self::List(items) | Self::Set(items) => put.arg(items),
            Self::Hash(fields) => put.arg(fields),
            Self::Sorted(members) => {
                members.iter().fold(&mut put, |put, (member, score)| put.arg(score).arg(member))
            }
            Self::Stream(value) => put.arg("*").arg("field").arg(value),
        };
        put.exec(connection).unwrap();
    }
}

/// Doubles including NaN, infinities and other extreme values.
pub fn number() -> impl Strategy<Value = f64> {
    prop_oneof![
        2 => select(vec![
            f64::NAN, f64::INFINITY, f64::NEG_INFINITY, f64::MAX, f64::MIN, 0.0, -0.0, -1.0,
            1e18, -1e18, 1e300, f64::MIN_POSITIVE, 0.5, 4_294_967_296.0, 9.3e18,
        ]),
        1 => any::<u64>().prop_map(f64::from_bits),
    ]
}

/// Byte strings: empty, short, long, text, numbers as text, packed doubles.
pub fn bytes() -> impl Strategy<Value = Vec<u8>> {
    let words = ["", "0", "-1", "nan", "inf", "1e400", "0x10", "99999999999999999999", "no state"];
    prop_oneof![
        4 => proptest::collection::vec(any::<u8>(), 0..40),
        1 => proptest::collection::vec(any::<u8>(), 200..3000),
        2 => select(words.to_vec()).prop_map(|word| word.as_bytes().to_vec()),
        3 => proptest::collection::vec(number(), 1..20)
            .prop_map(|numbers| numbers.iter().flat_map(|n| n.to_le_bytes()).collect()),
    ]
}

/// A value of any type.
pub fn corrupt_value() -> impl Strategy<Value = CorruptValue> {
    let byte_strings = || proptest::collection::vec(bytes(), 1..5);
    let field = || prop_oneof![bytes(), Just(Vec::new()), Just(b"f".to_vec()), Just(b"a".to_vec())];
    let score = prop_oneof![
        select(vec!["inf", "-inf", "0", "1e300", "-5", "50"]).prop_map(str::to_owned),
        any::<i64>().prop_map(|score| score.to_string()),
    ];
    prop_oneof![
        3 => bytes().prop_map(CorruptValue::Text),
        1 => byte_strings().prop_map(CorruptValue::List),
        1 => byte_strings().prop_map(CorruptValue::Set),
        2 => proptest::collection::vec((field(), bytes()), 1..5).prop_map(CorruptValue::Hash),
        2 => proptest::collection::vec((field(), score), 1..5).prop_map(CorruptValue::Sorted),
        1 => bytes().prop_map(CorruptValue::Stream),
    ]
}
