//! What may be a namespace's or a bucket's name: case-sensitive UTF-8 without white space
//! or control characters, 1 to 256 bytes. A namespace holds no `:`, so that
//! `namespace:bucket` splits in one way only.

use std::hash::{DefaultHasher, Hash, Hasher as _};
use std::num::NonZeroU64;

/// The longest name, in bytes.
pub const MAX_NAME_BYTES: usize = 256;

/// The longest id of a client, a cluster or a resource, in bytes. It may be any text.
pub const MAX_ID_BYTES: usize = 1024;

/// What a namespace's default bucket is called. With a space in it this is nobody's name.
pub const DEFAULT_BUCKET: &str = "default bucket";

/// The same for the default bucket of them all.
pub const GLOBAL_DEFAULT_BUCKET: &str = "global default bucket";

/// A caller that an access file names, as far as other parts need to tell callers apart: a hash of
/// its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CallerId(NonZeroU64);

impl CallerId {
    /// The same name always makes the same id.
    pub fn new(name: &str) -> Self {
        let mut hasher = DefaultHasher::new();
        name.hash(&mut hasher);
        // Not zero, so that an option of an id is no larger than the id.
        Self(NonZeroU64::new(hasher.finish()).unwrap_or(NonZeroU64::MAX))
    }

    /// As a number.
    pub fn number(self) -> u64 {
        self.0.get()
    }
}

/// Why a name is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NameFault {
    /// The name has no characters.
    #[error("is empty")]
    Empty,
    /// The name is longer than [`MAX_NAME_BYTES`].
    #[error("is {0} bytes long, at most 256 are allowed")]
    TooLong(usize),
    /// The name holds white space or a control character.
    #[error("has white space or a control character at byte {0}")]
    BadCharacter(usize),
    /// A namespace holds a colon.
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
    match name.find(':') {
        Some(at) => Err(NameFault::Colon(at)),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_every_kind() {
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
