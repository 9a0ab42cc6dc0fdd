//! Bearer tokens: generating them, and finding a caller by the hash of its token.

use std::collections::HashMap;
use std::fmt;
use std::hash::{BuildHasher, RandomState};

use ring::digest::{SHA256, digest};
use ring::rand::{SecureRandom, SystemRandom};
use smallvec::SmallVec;
use subtle::ConstantTimeEq;

use crate::config::access::{HASH_BYTES, TokenHash};

/// Random bytes in a token. 256 random bits can't be guessed, so an unsalted hash is safe to store
/// (unlike that of a password).
const RANDOM_BYTES: usize = 32;

/// The prefix of every token, by which secret scanners recognise leaked tokens.
const PREFIX: &str = "tollgate_";

/// A new token.
pub struct Token {
    /// The token itself.
    pub secret: String,
    /// Its SHA-256 in hexadecimal, as written in the access file.
    pub sha256: String,
}

impl Token {
    /// Generates a token. Fails if the system's random number generator fails.
    pub fn new() -> Result<Self, &'static str> {
        let mut random = [0; RANDOM_BYTES];
        SystemRandom::new().fill(&mut random).map_err(|_| "the system has no random numbers")?;
        Ok(Self::of(&format!("{PREFIX}{}", Hex(&random))))
    }

    /// Wraps an existing token and computes its hash.
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

/// A map from token hashes to caller indexes.
///
/// The time of a lookup reveals nothing about stored tokens: the map key is a keyed hash of the
/// token's hash, with a random key that never leaves this process, and entries are compared in
/// constant time.
pub(super) struct Tokens {
    key: RandomState,
    by_key: HashMap<u64, SmallVec<[(TokenHash, usize); 1]>>,
}

impl Tokens {
    /// Builds the map from (token hash, caller index) pairs. The hashes must be distinct.
    pub(super) fn new(pairs: impl Iterator<Item = (TokenHash, usize)>) -> Self {
        let mut tokens = Self { key: RandomState::new(), by_key: HashMap::new() };
        for (hash, index) in pairs {
            let key = tokens.key.hash_one(hash);
            tokens.by_key.entry(key).or_default().push((hash, index));
        }
        tokens
    }

    /// The index of the caller with this token; `None` if the token is unknown.
    pub(super) fn find(&self, token: &[u8]) -> Option<usize> {
        let token_hash = hash(token);
        let candidates = self.by_key.get(&self.key.hash_one(token_hash))?;
        let mut matches = candidates.iter().filter(|(hash, _)| bool::from(token_hash.ct_eq(hash)));
        matches.next().map(|(_, index)| *index)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_are_random_and_hashed_with_sha256() {
        let (one, other) = (Token::new().unwrap(), Token::new().unwrap());
        assert_ne!(one.secret, other.secret);
        assert_eq!(one.secret.len(), PREFIX.len() + 2 * RANDOM_BYTES);
        assert_eq!(one.sha256, Hex(&hash(one.secret.as_bytes())).to_string());
        let expected = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
        assert_eq!(Hex(&hash(b"abc")).to_string(), expected, "NIST test vector");
    }

    #[test]
    fn find_returns_the_index_of_each_token() {
        let tokens = Tokens::new((0..50_u8).map(|number| hash(&[number])).zip((0..50).rev()));
        for number in 0..50 {
            assert_eq!(tokens.find(&[number]), Some(49 - usize::from(number)));
        }
        assert_eq!((tokens.find(&[50]), tokens.find(b"")), (None, None));
    }
}
