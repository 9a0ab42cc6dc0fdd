//! What a node tells of a file that it has refused.

use std::fmt::Display;
use std::sync::{Mutex, PoisonError};

use serde::Serialize;

/// The most characters of an error that are kept. The log has all of it.
const MOST_CHARS: usize = 2000;

/// Why the last version of a file is not in use.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Refusal {
    /// Since when nothing was read that could be used, in seconds since the epoch.
    pub since_s: u64,
    /// The last error.
    pub error: String,
}

/// The refusal of a file, as long as it lasts.
#[derive(Default)]
pub struct Refused(Mutex<Option<Refusal>>);

impl Refused {
    /// Notes that the file was refused.
    pub fn set(&self, error: &dyn Display) {
        let mut error = error.to_string();
        if let Some((end, _)) = error.char_indices().nth(MOST_CHARS) {
            error.truncate(end);
            error.push('…');
        }
        let mut refusal = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let since_s = refusal.as_ref().map_or_else(now_s, |before| before.since_s);
        *refusal = Some(Refusal { since_s, error });
    }

    /// Notes that the file is in use.
    pub fn clear(&self) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }

    /// The refusal that lasts; `None`: the file is in use.
    pub fn get(&self) -> Option<Refusal> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

/// Seconds since the epoch.
#[expect(clippy::disallowed_methods, reason = "a time for people, which nothing decides by")]
fn now_s() -> u64 {
    let now = std::time::SystemTime::now();
    now.duration_since(std::time::UNIX_EPOCH).unwrap_or_default().as_secs()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refusal_lasts_until_the_file_is_in_use() {
        let refused = Refused::default();
        assert_eq!(refused.get(), None);
        refused.set(&"ä".repeat(MOST_CHARS + 1));
        let first = refused.get().unwrap();
        assert_eq!(first.error, "ä".repeat(MOST_CHARS) + "…");
        assert!(first.since_s > 1_700_000_000);
        refused.0.lock().unwrap().as_mut().unwrap().since_s = 7;
        refused.set(&"again");
        assert_eq!(refused.get(), Some(Refusal { since_s: 7, error: "again".to_owned() }));
        refused.clear();
        assert_eq!(refused.get(), None);
    }
}
