//! What is configured for certain domains, by name.

use hashbrown::HashMap;

use super::fault::YamlPath;
use super::read::Reader;
use super::tree::YamlNode;
use crate::domain::names::MAX_ID_BYTES;

/// Reads a mapping of limits by domain, each with `read`.
pub(super) fn by_domain<T>(
    reader: &mut Reader,
    node: &YamlNode<'_>,
    path: &YamlPath<'_>,
    read: impl Fn(&mut Reader, &YamlNode<'_>, &YamlPath<'_>) -> T,
) -> HashMap<Box<str>, T> {
    let mut all = HashMap::new();
    for entry in reader.entries(node, path, "a mapping of limits by domain") {
        let path = path.name(entry.key);
        if !(1..=MAX_ID_BYTES).contains(&entry.key.len()) {
            let message = format!("the name of a domain has 1 to {MAX_ID_BYTES} bytes");
            reader.fault_of_name(entry.line, &path, message);
        }
        if entry.key.contains(['*', '?']) {
            let message = "is the name of a domain: a glob has no meaning here";
            reader.notice(entry.line, &path, message, false);
        }
        all.insert(entry.key.into(), read(reader, entry.value, &path));
    }
    all
}
