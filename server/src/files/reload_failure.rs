//! The reason why a file's current version is not in use.

use std::fmt::Display;
use std::sync::{Mutex, PoisonError};

use serde::Serialize;

use crate::wall_clock;

/// The maximum number of characters kept of an error. The log has the full text.
const MAX_ERROR_CHARS: usize = 2000;

/// Why a file's current version was refused.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ReloadFailure {
    /// When the file was first refused after the last successful load, in seconds since the epoch.
    pub since_s: u64,
    /// The last error.
    pub error: String,
}

/// The last failure to reload a file, until a version of it is loaded.
#[derive(Default)]
pub struct LastReloadFailure(Mutex<Option<ReloadFailure>>);

impl LastReloadFailure {
    /// Records that the file was refused.
    pub fn set(&self, error: &dyn Display) {
        let mut error = error.to_string();
        if let Some((end, _)) = error.char_indices().nth(MAX_ERROR_CHARS) {
            error.truncate(end);
            error.push('…');
        }
        let mut last = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let since_s = last.as_ref().map_or_else(wall_clock::now_s, |previous| previous.since_s);
        *last = Some(ReloadFailure { since_s, error });
    }

    /// Records that the file was loaded.
    pub fn clear(&self) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }

    /// The last failure; `None` if the file's current version is in use.
    pub fn get(&self) -> Option<ReloadFailure> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failure_lasts_until_the_file_is_loaded() {
        let last = LastReloadFailure::default();
        assert_eq!(last.get(), None);
        last.set(&"ä".repeat(MAX_ERROR_CHARS + 1));
        let first = last.get().unwrap();
        assert_eq!(first.error, "ä".repeat(MAX_ERROR_CHARS) + "…");
        assert!(first.since_s > 1_700_000_000);
        last.0.lock().unwrap().as_mut().unwrap().since_s = 7;
        last.set(&"again");
        assert_eq!(last.get(), Some(ReloadFailure { since_s: 7, error: "again".to_owned() }));
        last.clear();
        assert_eq!(last.get(), None);
    }
}
