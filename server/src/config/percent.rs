//! Shares of a whole, such as `20%`.

use super::fault::{YamlPath, quoted};
use super::read::{Entry, Reader};

/// Reads a share in whole percent, 0 to 100. `None` if it is invalid.
pub(super) fn percent(reader: &mut Reader, entry: &Entry<'_>, path: &YamlPath<'_>) -> Option<u8> {
    const EXPECTED: &str = "a share in whole percent from 0% to 100%, such as 20%";
    let path = path.key(entry.key);
    let text = reader.text(entry.value, &path, EXPECTED)?;
    let share = text.strip_suffix('%').filter(|digits| digits.bytes().all(|b| b.is_ascii_digit()));
    let share = share.and_then(|digits| digits.parse().ok()).filter(|share| *share <= 100);
    if share.is_none() {
        reader.fault(entry.value.line, &path, format!("must be {EXPECTED}, not {}", quoted(text)));
    }
    share
}

/// A share, as the file may have it.
pub(super) fn percent_text(share: u8) -> String {
    format!("{share}%")
}
