//! The rules for names of namespaces and buckets: case-sensitive UTF-8 without white space or
//! control characters, 1 to 256 bytes. The name of a namespace contains no `:`, so that
//! `namespace:bucket` is unambiguous.

use std::hash::{DefaultHasher, Hash, Hasher as _};
use std::num::NonZeroU64;

/// The longest name, in bytes.
pub const MAX_NAME_BYTES: usize = 256;

/// The longest id of a client, a cluster or a resource, in bytes. Ids may contain any text.
pub const MAX_ID_BYTES: usize = 1024;

/// The name of a namespace's default bucket. The space keeps it apart from all valid names.
pub const DEFAULT_BUCKET: &str = "default bucket";

/// The name of the definition of a namespace's dynamic buckets.
pub const DYNAMIC_TEMPLATE: &str = "dynamic template";

/// The name of the definition of the buckets of an Envoy domain whose limits are in the requests.
pub const LIMIT_OVERRIDE: &str = "limit override";

/// The name of the default bucket of all namespaces.
pub const GLOBAL_DEFAULT_BUCKET: &str = "global default bucket";

/// The identity of a caller from the access file: a 64-bit hash of its name.
///
/// Two callers with equal hashes would count as one in the queues for the store and in
/// `max_resources`. Their rights do not depend on it. Among the 10,000 callers that an access file
/// may have, a collision has a probability of 3 in 10^12.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CallerId(NonZeroU64);

impl CallerId {
    /// The id of a name: equal names have equal ids.
    pub fn new(name: &str) -> Self {
        let mut hasher = DefaultHasher::new();
        name.hash(&mut hasher);
        // Never zero, so that `Option<CallerId>` has the size of a `CallerId`.
        Self(NonZeroU64::new(hasher.finish()).unwrap_or(NonZeroU64::MAX))
    }

    /// The id as a number.
    pub fn number(self) -> u64 {
        self.0.get()
    }
}

/// Why a name is invalid.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NameFault {
    /// The name has no characters.
    #[error("is empty")]
    Empty,
    /// The name is longer than [`MAX_NAME_BYTES`].
    #[error("is {0} bytes long, at most 256 are allowed")]
    TooLong(usize),
    /// The name contains white space or a control character.
    #[error("has white space or a control character at byte {0}")]
    BadCharacter(usize),
    /// The name of a namespace contains a colon.
    #[error("has a ':' at byte {0}, which a namespace can't have")]
    Colon(usize),
}

/// Checks a bucket's name.
pub fn check_bucket(name: &str) -> Result<(), NameFault> {
    if name.is_empty() {
        return Err(NameFault::Empty);
    }
    if name.len() > MAX_NAME_BYTES {
        return Err(NameFault::TooLong(name.len()));
    }
    // Printable ASCII, which nearly every name is, needs no decoding.
    if name.bytes().all(|byte| byte.is_ascii_graphic()) {
        return Ok(());
    }
    match name.char_indices().find(|(_, c)| c.is_whitespace() || c.is_control()) {
        Some((at, _)) => Err(NameFault::BadCharacter(at)),
        None => Ok(()),
    }
}

/// Checks a namespace's name.
pub fn check_namespace(name: &str) -> Result<(), NameFault> {
    check_bucket(name)?;
    // `find` is made for longer texts.
    match name.bytes().position(|byte| byte == b':') {
        Some(at) => Err(NameFault::Colon(at)),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn valid_and_invalid_names() {
        let long = "x".repeat(257);
        let longest = "é".repeat(128);
        let cases = [
            ("users", Ok(())),
            ("2001:db8::1", Ok(())),
            ("{braces}%*", Ok(())),
            ("naïve-ключ-名前", Ok(())),
            (longest.as_str(), Ok(())),
            ("", Err(NameFault::Empty)),
            (long.as_str(), Err(NameFault::TooLong(257))),
            ("a b", Err(NameFault::BadCharacter(1))),
            ("tab\t", Err(NameFault::BadCharacter(3))),
            ("nul\0", Err(NameFault::BadCharacter(3))),
            ("é\u{a0}", Err(NameFault::BadCharacter(2))),
            ("c1\u{85}", Err(NameFault::BadCharacter(2))),
            ("\u{7f}", Err(NameFault::BadCharacter(0))),
        ];
        for (name, expected) in cases {
            assert_eq!(check_bucket(name), expected, "{name:?}");
        }
        assert_eq!(check_namespace("Pinky_TheBrain"), Ok(()));
        assert_eq!(check_namespace("a:b"), Err(NameFault::Colon(1)));
    }
}
