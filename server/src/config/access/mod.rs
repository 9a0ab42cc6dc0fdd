//! The access file: the callers and their permissions. Read like a limits file: all faults at
//! once, each with its line and path. No fault quotes the value of a token hash, as a user may have
//! put the token itself there.
//!
//! [`parse`] reads the file, `caller` the mapping of one caller, and [`CallerEntry`] is the result.

mod caller;
mod entry;

pub use entry::{CallerEntry, HASH_BYTES, Role, TokenHash};

use caller::{FirstLines, caller};

use super::Faults;
use super::fault::YamlPath;
use super::read::{Keys, Reader};
use super::tree;

/// The most callers. Bounded because the names in a certificate are matched against every caller.
const MAX_CALLERS: usize = 10_000;

const FILE_KEYS: Keys = Keys {
    shape: "a mapping of callers, such as { callers: [{ name: shop, anyone: true }] }",
    known: &["callers"],
    ignored: &[],
};

/// Parses an access file.
pub fn parse(text: &str) -> Result<Vec<CallerEntry>, Faults> {
    let (root, faults) = tree::read(text).map_err(|fault| Faults(vec![fault]))?;
    let mut reader = Reader::default();
    let top = reader.fields(&root, &YamlPath::ROOT, &FILE_KEYS);
    let mut callers = Vec::new();
    match top.get("callers") {
        Some(entry) => {
            let path = YamlPath::ROOT.key(entry.key);
            let mut first_lines = FirstLines::default();
            for (index, item) in reader.items(entry.value, &path).enumerate() {
                callers.push(caller(&mut reader, item, &path.item(index), &mut first_lines));
            }
            if callers.len() > MAX_CALLERS {
                reader.fault(entry.line, &path, format!("are more than {MAX_CALLERS}"));
            }
        }
        None if !top.not_a_mapping => {
            reader.fault(top.line, &YamlPath::ROOT.key("callers"), "is missing: nobody could ask");
        }
        None => {}
    }
    faults.followed_by(reader.faults)?;
    Ok(callers)
}

#[cfg(test)]
mod tests;
