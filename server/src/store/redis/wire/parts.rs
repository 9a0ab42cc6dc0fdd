//! Many requests as one call of a script with `lua/parts.lua`, which describes the arguments and the
//! reply.

use redis::{Cmd, Value};
use smallvec::SmallVec;

use super::script::Scripted;
use crate::store::redis::owner::Owner;

/// The most parts of a call. More would make a part little cheaper, and whoever else uses the server
/// waits for all of them, of which some may have a session with many holds to free.
pub(crate) const PARTS: usize = 32;

/// What one request asks a script.
#[derive(Debug)]
pub(crate) struct Part {
    pub(crate) script: Scripted,
    /// Whom it is counted for while it waits.
    pub(crate) owner: Owner,
    /// All are in one slot.
    pub(crate) keys: SmallVec<[Vec<u8>; 2]>,
    /// As many for each part of a script.
    pub(crate) args: SmallVec<[Vec<u8>; 4]>,
    /// Whether it may take so long that it has a call of its own.
    pub(crate) is_long: bool,
}

/// A call for at least one part, all of one script. It declares so many of the first keys of each: of several
/// parts all keys, or none.
pub(crate) fn call<P: AsRef<Part>>(parts: &[P], declared_keys: impl Fn(&Part) -> usize) -> Cmd {
    let script = parts[0].as_ref().script;
    let (mut declared, mut undeclared) = (Vec::new(), Vec::new());
    let mut counts = Vec::with_capacity(parts.len());
    for part in parts.iter().map(AsRef::as_ref) {
        counts.push(part.keys.len() as u8);
        let (first, rest) = part.keys.split_at(declared_keys(part));
        declared.extend(first);
        undeclared.extend(rest);
    }
    let mut cmd = script.call(declared.len());
    cmd.arg(declared).arg(counts);
    for arg in parts.iter().flat_map(|part| &part.as_ref().args) {
        cmd.arg(arg);
    }
    cmd.arg(undeclared);
    cmd
}

/// Reads a reply: that of each of `parts` parts. Gives it back if the script can't have made it.
pub(crate) fn replies(reply: Value, parts: usize) -> Result<Vec<Value>, Value> {
    match reply {
        Value::Array(replies) if replies.len() == parts => Ok(replies),
        reply => Err(reply),
    }
}
