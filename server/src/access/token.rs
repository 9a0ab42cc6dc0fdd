//! Bearer tokens: how they are made, and what is kept of them.

use std::fmt;

use ring::digest::{SHA256, digest};
use ring::rand::{SecureRandom, SystemRandom};
use subtle::{Choice, ConstantTimeEq};

use crate::config::access::{HASH_BYTES, TokenHash};

/// Random bytes of a token: nobody guesses 256 bits, so that a bare hash of it is safe to keep.
/// (It would not be of a password that people make up.)
const RANDOM_BYTES: usize = 32;

/// What a token begins with, so that scanners for secrets find one that got somewhere else.
const PREFIX: &str = "tollgate_";

/// A new token.
pub struct Token {
    /// The token itself.
    pub secret: String,
    /// Its hash, as the access file has it.
    pub sha256: String,
}

impl Token {
    /// From the system's random numbers; an error says that it has none.
    pub fn new() -> Result<Self, &'static str> {
        let mut random = [0; RANDOM_BYTES];
        SystemRandom::new().fill(&mut random).map_err(|_| "the system has no random numbers")?;
        Ok(Self::of(&format!("{PREFIX}{}", Hex(&random))))
    }

    /// One that there is already.
    pub fn of(secret: &str) -> Self {
        let sha256 = Hex(&hash(secret.as_bytes())).to_string();
        Self { secret: secret.to_owned(), sha256 }
    }
}

struct Hex<'b>(&'b [u8]);

impl fmt::Display for Hex<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

/// The SHA-256 of a token.
pub(super) fn hash(token: &[u8]) -> TokenHash {
    let mut hash = [0; HASH_BYTES];
    hash.copy_from_slice(digest(&SHA256, token).as_ref());
    hash
}

/// Which of `hashes` a token has. Takes as long whichever it is, and whether it is any.
pub(super) fn find<'h>(
    token: &[u8],
    hashes: impl IntoIterator<Item = (&'h TokenHash, usize)>,
) -> Option<usize> {
    let own = hash(token);
    let (mut any, mut found) = (Choice::from(0), 0_u64);
    for (one, place) in hashes {
        let same = own.ct_eq(one);
        any |= same;
        // No two are the same, so that at most one adds anything.
        found |= place as u64 * u64::from(same.unwrap_u8());
    }
    bool::from(any).then_some(found as usize)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_and_its_hash() {
        let (one, other) = (Token::new().unwrap(), Token::new().unwrap());
        assert_ne!(one.secret, other.secret);
        assert_eq!(one.secret.len(), PREFIX.len() + 2 * RANDOM_BYTES);
        assert_eq!(one.sha256, Hex(&hash(one.secret.as_bytes())).to_string());
        let known = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
        assert_eq!(Hex(&hash(b"abc")).to_string(), known, "NIST's example");
    }

    #[test]
    fn every_token_is_found_at_its_place() {
        let hashes: Vec<TokenHash> = (0..50_u8).map(|number| hash(&[number])).collect();
        let places = || hashes.iter().zip((0..50).rev());
        for number in 0..50 {
            assert_eq!(find(&[number], places()), Some(49 - usize::from(number)));
        }
        assert_eq!(find(&[50], places()), None);
        assert_eq!(find(b"", places()), None);
    }
}
