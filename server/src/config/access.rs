//! The access file: who may ask, for what. Read like a limits file: every fault at once, each
//! with its line and path. No fault repeats what stands where a token's hash should: it may be
//! the token.

use std::collections::HashMap;
use std::fmt;

use super::Faults;
use super::fault::{Path, quoted};
use super::glob::Glob;
use super::read::{Entry, Fields, Keys, Reader};
use super::tree::{self, Node};
use crate::domain::names::check_bucket;

/// Bytes of a SHA-256.
pub const HASH_BYTES: usize = 32;

/// The SHA-256 of a token.
pub type TokenHash = [u8; HASH_BYTES];

/// The most callers: of a certificate, the names are held against each of them.
const MOST_CALLERS: usize = 10_000;

const FILE_KEYS: Keys = Keys {
    shape: "a mapping of callers, such as { callers: [{ name: shop, anyone: true }] }",
    known: &["callers"],
    ignored: &[],
};

const CALLER_KEYS: Keys = Keys {
    shape: "a mapping, such as { name: shop, token_sha256: [...], namespaces: [\"shop\"] }",
    known: &[
        "name",
        "role",
        "token_sha256",
        "certificates",
        "anyone",
        "namespaces",
        "resources",
        "description",
    ],
    ignored: &[],
};

const NOT_A_HASH: &str = "must be the SHA-256 of a token in 64 hexadecimal digits, as \
                          `tollgate token` prints it; not the token itself";

/// What each kind of name in a certificate begins with.
const CERTIFICATE_KINDS: [&str; 3] = ["dns:", "uri:", "cn:"];

/// What a caller may do.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Role {
    /// Ask for tokens and leases, in its namespaces and of its resources.
    #[default]
    Ask,
    /// Look at pages and metrics, of its resources.
    Observe,
    /// Both, everywhere; and whatever else there is.
    Administer,
}

impl Role {
    /// As the file has it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Ask => "ask",
            Self::Observe => "observe",
            Self::Administer => "administer",
        }
    }
}

/// One caller.
#[derive(Clone, Debug, PartialEq)]
pub struct Caller {
    /// What it is called in logs.
    pub name: Box<str>,
    /// What it may do.
    pub role: Role,
    /// Of its tokens, if it has any.
    pub tokens: Vec<TokenHash>,
    /// Of the names in its certificates, each with its kind in front: `dns:`, `uri:` or `cn:`.
    pub certificates: Vec<Glob>,
    /// It is whoever shows nothing.
    pub anyone: bool,
    /// Of the namespaces that it may ask in.
    pub namespaces: Vec<Glob>,
    /// Of the resources that it may ask for, or look at.
    pub resources: Vec<Glob>,
    /// It may look at what shows all namespaces and resources.
    pub everything: bool,
}

impl fmt::Display for Caller {
    /// Who it is, what it may do, and what it is known by, in a line each; globs as in the file.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let listed = |globs: &[Glob]| {
            let globs: Vec<_> = globs.iter().map(Glob::as_str).collect();
            if globs.is_empty() { "none".to_owned() } else { format!("{globs:?}") }
        };
        write!(f, "{}: {}", self.name, self.role.name())?;
        match self.role {
            Role::Administer => write!(f, "\n    everything")?,
            Role::Ask | Role::Observe => {
                write!(f, "\n    namespaces  {}", listed(&self.namespaces))?;
                write!(f, "\n    resources   {}", listed(&self.resources))?;
            }
        }
        let known_by = [
            match self.tokens.len() {
                0 => None,
                1 => Some("1 token".to_owned()),
                count => Some(format!("{count} tokens")),
            },
            (!self.certificates.is_empty())
                .then(|| format!("certificates {}", listed(&self.certificates))),
            self.anyone.then(|| "showing nothing that is known".to_owned()),
        ];
        let known_by: Vec<_> = known_by.into_iter().flatten().collect();
        // An empty list of tokens is no fault: somebody may be without one for a while.
        let known_by = if known_by.is_empty() { "nothing".into() } else { known_by.join(", or ") };
        write!(f, "\n    known by    {known_by}")
    }
}

/// Reads an access file.
pub fn parse(text: &str) -> Result<Vec<Caller>, Faults> {
    let (root, mut faults) = tree::read(text).map_err(|fault| Faults(vec![fault]))?;
    let mut reader = Reader::default();
    let top = reader.fields(&root, &Path::ROOT, &FILE_KEYS);
    let mut callers = Vec::new();
    match top.get("callers") {
        Some(entry) => {
            let path = Path::ROOT.key(entry.key);
            let mut met = Met::default();
            for (index, item) in reader.items(entry.value, &path).enumerate() {
                callers.push(caller(&mut reader, item, &path.item(index), &mut met));
            }
            if callers.len() > MOST_CALLERS {
                reader.fault(entry.line, &path, format!("are more than {MOST_CALLERS}"));
            }
        }
        None if !top.wrong => {
            reader.fault(top.line, &Path::ROOT.key("callers"), "is missing: nobody could ask");
        }
        None => {}
    }
    faults.extend(reader.faults);
    if faults.is_empty() {
        return Ok(callers);
    }
    faults.sort_by_key(|fault| fault.line);
    Err(Faults(faults))
}

/// The lines of what must be there only once.
#[derive(Default)]
struct Met {
    names: HashMap<String, usize>,
    tokens: HashMap<TokenHash, usize>,
    anyone: Option<usize>,
}

fn caller(reader: &mut Reader, node: &Node<'_>, path: &Path<'_>, met: &mut Met) -> Caller {
    let fields = reader.fields(node, path, &CALLER_KEYS);
    let name = name(reader, &fields, path, met);
    let role = fields.get("role").and_then(|entry| {
        let choices = [Role::Ask, Role::Observe, Role::Administer].map(|role| (role.name(), role));
        reader.choice(entry.value, &path.key(entry.key), &choices)
    });
    let unknown = role.is_none() && fields.get("role").is_some();
    let role = role.unwrap_or_default();
    if let Some(entry) = fields.get("description") {
        reader.text(entry.value, &path.key(entry.key), "text");
    }
    let tokens = tokens(reader, &fields, path, met);
    let certificates = globs(reader, fields.get("certificates"), path, of_certificates);
    let anyone = fields.get("anyone").filter(|entry| {
        let choices = [("true", true), ("false", false)];
        reader.choice(entry.value, &path.key(entry.key), &choices) == Some(true)
    });
    if let Some(entry) = anyone {
        if let Some(first) = met.anyone {
            reader.fault(entry.line, &path.key("anyone"), format!("is already on line {first}"));
        }
        met.anyone = Some(entry.line);
        if role == Role::Administer {
            reader.fault(entry.line, &path.key("anyone"), "can't administer: give it a token");
        }
    }
    let shown = ["token_sha256", "certificates", "anyone"];
    if !fields.wrong && shown.iter().all(|key| fields.get(key).is_none()) {
        let message = "can't be told from others: give it token_sha256 or certificates";
        reader.fault(fields.line, path, message);
    }
    let namespaces = globs(reader, fields.get("namespaces"), path, Glob::new);
    let resources = globs(reader, fields.get("resources"), path, Glob::new);
    // What a role that is none of ours may do nobody knows.
    if !unknown {
        scope(reader, &fields, path, role);
    }
    let all = |globs: &[Glob]| globs.iter().any(Glob::is_everything);
    let everything = role == Role::Administer || (all(&namespaces) && all(&resources));
    Caller {
        name,
        role,
        tokens,
        certificates,
        anyone: anyone.is_some(),
        namespaces,
        resources,
        everything,
    }
}

fn name(reader: &mut Reader, fields: &Fields<'_>, path: &Path<'_>, met: &mut Met) -> Box<str> {
    let Some(entry) = fields.get("name") else {
        if !fields.wrong {
            reader.fault(fields.line, &path.key("name"), "is missing: logs call the caller by it");
        }
        return Box::default();
    };
    let path = path.key(entry.key);
    let Some(name) = reader.text(entry.value, &path, "a name") else { return Box::default() };
    if let Err(fault) = check_bucket(name) {
        reader.fault(entry.line, &path, fault);
    }
    if let Some(first) = met.names.insert(name.to_owned(), entry.line) {
        reader.fault(entry.line, &path, format!("{} is already on line {first}", quoted(name)));
    }
    name.into()
}

fn tokens(
    reader: &mut Reader,
    fields: &Fields<'_>,
    path: &Path<'_>,
    met: &mut Met,
) -> Vec<TokenHash> {
    let Some(entry) = fields.get("token_sha256") else { return Vec::new() };
    let path = path.key(entry.key);
    let mut tokens = Vec::new();
    for (index, item) in reader.items(entry.value, &path).enumerate() {
        let here = path.item(index);
        let Some(text) = reader.text(item, &here, "a hash") else { continue };
        match hash(text) {
            None => reader.fault(item.line, &here, NOT_A_HASH),
            Some(hash) => {
                if let Some(first) = met.tokens.insert(hash, item.line) {
                    let message = format!("is already on line {first}: whose token is it?");
                    reader.fault(item.line, &here, message);
                }
                tokens.push(hash);
            }
        }
    }
    tokens
}

/// 64 hexadecimal digits.
fn hash(text: &str) -> Option<TokenHash> {
    let mut hash = [0; HASH_BYTES];
    if text.len() != 2 * HASH_BYTES || !text.bytes().all(|byte| byte.is_ascii_hexdigit()) {
        return None;
    }
    for (byte, at) in hash.iter_mut().zip((0..).step_by(2)) {
        *byte = u8::from_str_radix(text.get(at..at + 2)?, 16).ok()?;
    }
    Some(hash)
}

/// A list of globs; `check` says what else is wrong with one.
fn globs(
    reader: &mut Reader,
    entry: Option<Entry<'_>>,
    path: &Path<'_>,
    read: impl Fn(&str) -> Result<Glob, &'static str>,
) -> Vec<Glob> {
    let Some(entry) = entry else { return Vec::new() };
    let path = path.key(entry.key);
    let mut globs = Vec::new();
    for (index, item) in reader.items(entry.value, &path).enumerate() {
        let here = path.item(index);
        let Some(text) = reader.text(item, &here, "a glob") else { continue };
        match read(text) {
            Err(wrong) => reader.fault(item.line, &here, wrong),
            Ok(glob) => globs.push(glob),
        }
    }
    globs
}

fn of_certificates(text: &str) -> Result<Glob, &'static str> {
    if !CERTIFICATE_KINDS.iter().any(|kind| text.starts_with(kind)) {
        return Err("must begin with dns:, uri: or cn:, which says what kind of name it is");
    }
    match text.starts_with("dns:") {
        // Such names have no case, and those of certificates are in lower case here.
        true => Glob::new(&text.to_ascii_lowercase()),
        false => Glob::new(text),
    }
}

/// What is allowed must be said, and only where it has an effect.
fn scope(reader: &mut Reader, fields: &Fields<'_>, path: &Path<'_>, role: Role) {
    let given = ["namespaces", "resources"].map(|key| fields.get(key));
    match role {
        Role::Administer => {
            for entry in given.into_iter().flatten() {
                let message = "has no effect: who administers may do everything; remove it";
                reader.fault(entry.line, &path.key(entry.key), message);
            }
        }
        Role::Ask | Role::Observe => {
            if !fields.wrong && given.iter().all(Option::is_none) {
                let message = "may do nothing: give it namespaces or resources, [\"*\"] is all";
                reader.fault(fields.line, path, message);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HASH: &str = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";

    #[test]
    fn a_file() {
        let text = format!(
            "callers:
  - name: shop
    description: the shop's backends
    token_sha256: [{HASH}, \"{}\"]
    namespaces: [shop, 'cart-*']
  - {{ name: ops, role: administer, certificates: ['cn:Ops', 'uri:spiffe://x/*', 'dns:*.Example'] }}
  - {{ name: rest, role: observe, anyone: true, namespaces: ['*'], resources: ['*'] }}
",
            HASH.to_uppercase().replace('B', "C")
        );
        let callers = parse(&text).unwrap();
        let shown: Vec<_> =
            callers.iter().map(|c| (&*c.name, c.role, c.anyone, c.everything)).collect();
        assert_eq!(
            shown,
            [
                ("shop", Role::Ask, false, false),
                ("ops", Role::Administer, false, true),
                ("rest", Role::Observe, true, true)
            ]
        );
        assert_eq!(
            (callers[0].tokens[0][..2].to_vec(), callers[0].tokens[1][0]),
            (vec![0xba, 0x78], 0xca)
        );
        assert!(callers[0].namespaces[1].matches("cart-a") && callers[0].resources.is_empty());
        assert!(callers[1].certificates[1].matches("uri:spiffe://x/y"));
        assert!(!callers[1].certificates[0].matches("dns:ops"));
        assert!(callers[1].certificates[0].matches("cn:Ops"));
        assert!(!callers[1].certificates[0].matches("cn:ops"));
        assert!(callers[1].certificates[2].matches("dns:ops.example"));
    }

    #[test]
    fn what_is_wrong_is_said_and_no_token_repeated() {
        let text = format!(
            "callers:
  - {{ name: a, token_sha256: [hunter2], namespaces: [x] }}
  - {{ name: a, token_sha256: [{HASH}, {HASH}] }}
  - {{ role: administer, certificates: [ops, 'cn:['], resources: [x] }}
  - {{ name: b c, anyone: true, role: administer }}
  - {{ name: d, anyone: true, resources: [x], role: asks, tokens: [hunter2] }}
  - {{ name: e, namespaces: [x] }}
"
        );
        let faults = parse(&text).unwrap_err().to_string();
        let expected = "line 2: callers[0].token_sha256[0]: must be the SHA-256 of a token in 64 hexadecimal digits, as `tollgate token` prints it; not the token itself
line 3: callers[1].name: \"a\" is already on line 2
line 3: callers[1].token_sha256[1]: is already on line 3: whose token is it?
line 3: callers[1]: may do nothing: give it namespaces or resources, [\"*\"] is all
line 4: callers[2].name: is missing: logs call the caller by it
line 4: callers[2].certificates[0]: must begin with dns:, uri: or cn:, which says what kind of name it is
line 4: callers[2].certificates[1]: has a [ without its ]: write \\[ for the character itself
line 4: callers[2].resources: has no effect: who administers may do everything; remove it
line 5: callers[3].name: has white space or a control character at byte 1
line 5: callers[3].anyone: can't administer: give it a token
line 6: callers[4].tokens: unknown key \"tokens\", the keys known here are name, role, token_sha256, certificates, anyone, namespaces, resources, description
line 6: callers[4].role: must be one of ask, observe, administer, not \"asks\": did you mean ask?
line 6: callers[4].anyone: is already on line 5
line 7: callers[5]: can't be told from others: give it token_sha256 or certificates";
        assert_eq!(faults, expected);
        assert!(!faults.contains("hunter2"));
        for (text, fault) in [
            ("{}", "line 1: callers: is missing: nobody could ask"),
            ("[]", "line 1: must be a mapping"),
            ("callers: 5", "line 1: callers: must be a list, not 5"),
        ] {
            let found = parse(text).unwrap_err().to_string();
            assert!(found.starts_with(fault), "{found}");
        }
        assert_eq!(parse("callers: []"), Ok(Vec::new()), "nobody may ask, which is said");
    }
}
