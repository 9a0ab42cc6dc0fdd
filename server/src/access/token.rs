//! Bearer tokens: how they are made, and what is kept of them.

use std::collections::HashMap;
use std::fmt;
use std::hash::{BuildHasher, RandomState};

use ring::digest::{SHA256, digest};
use ring::rand::{SecureRandom, SystemRandom};
use smallvec::SmallVec;
use subtle::ConstantTimeEq;

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
fn hash(token: &[u8]) -> TokenHash {
    let mut hash = [0; HASH_BYTES];
    hash.copy_from_slice(digest(&SHA256, token).as_ref());
    hash
}

/// Whose tokens there are. A place is whatever goes with a token.
///
/// How long it takes to find one tells nothing about any. What is looked up is a keyed hash of a
/// token's hash, of which nobody outside of this process knows the key; what is found is
/// compared in constant time.
pub(super) struct Tokens {
    key: RandomState,
    by_key: HashMap<u64, SmallVec<[(TokenHash, usize); 1]>>,
}

impl Tokens {
    /// All of these; no two are the same.
    pub(super) fn new(all: impl Iterator<Item = (TokenHash, usize)>) -> Self {
        let mut tokens = Self { key: RandomState::new(), by_key: HashMap::new() };
        for (hash, place) in all {
            let key = tokens.key.hash_one(hash);
            tokens.by_key.entry(key).or_default().push((hash, place));
        }
        tokens
    }

    /// The place of a token, if there is one.
    pub(super) fn find(&self, token: &[u8]) -> Option<usize> {
        let own = hash(token);
        let found = self.by_key.get(&self.key.hash_one(own))?;
        let mut found = found.iter().filter(|(hash, _)| bool::from(own.ct_eq(hash)));
        found.next().map(|(_, place)| *place)
    }
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
        let tokens = Tokens::new((0..50_u8).map(|number| hash(&[number])).zip((0..50).rev()));
        for number in 0..50 {
            assert_eq!(tokens.find(&[number]), Some(49 - usize::from(number)));
        }
        assert_eq!((tokens.find(&[50]), tokens.find(b"")), (None, None));
    }
}
