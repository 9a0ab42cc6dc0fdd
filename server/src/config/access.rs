//! The access file: the callers and their permissions. Read like a limits file: all faults at
//! once, each with its line and path. No fault quotes the value of a token hash, as a user may have
//! put the token itself there.

use std::collections::HashMap;
use std::fmt;

use super::Faults;
use super::fault::{Path, quoted};
use super::glob::{self, Glob};
use super::read::{Entry, Fields, Keys, Reader};
use super::tree::{self, Node};
use crate::domain::lease::MAX_SUBCLIENTS;
use crate::domain::names::check_bucket;

/// Length of a SHA-256 hash, in bytes.
pub const HASH_BYTES: usize = 32;

/// The SHA-256 hash of a token.
pub type TokenHash = [u8; HASH_BYTES];

/// The most callers. Bounded because the names in a certificate are matched against every caller.
const MAX_CALLERS: usize = 10_000;

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
        "client_ids",
        "lend",
        "max_resources",
        "shared",
        "description",
    ],
    ignored: &[],
};

const LEND_KEYS: Keys =
    Keys { shape: "a mapping: { max_clients: 10000 }", known: &["max_clients"], ignored: &[] };

/// The values of a key that is on or off.
const FLAG: [(&str, bool); 2] = [("true", true), ("false", false)];

/// Placeholder for the caller's name in `client_ids`.
const OWN_NAME: &str = "{caller}";

const NOT_A_HASH: &str = "must be the SHA-256 of a token in 64 hexadecimal digits, as \
                          `tollgate token` prints it; not the token itself";

/// Prefixes for the kinds of names in a certificate.
const CERTIFICATE_PREFIXES: [&str; 3] = ["dns:", "uri:", "cn:"];

/// The role of a caller.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Role {
    /// May request tokens in its namespaces and leases on its resources.
    #[default]
    Ask,
    /// May read status pages of its resources. With all namespaces and resources, also the metrics.
    Observe,
    /// May do everything, in all namespaces and for all resources.
    Administer,
}

impl Role {
    /// The role's name in the file.
    pub fn name(self) -> &'static str {
        match self {
            Self::Ask => "ask",
            Self::Observe => "observe",
            Self::Administer => "administer",
        }
    }
}

/// One caller in the access file.
#[derive(Clone, Debug, PartialEq)]
pub struct CallerEntry {
    /// The name in logs.
    pub name: Box<str>,
    /// The role.
    pub role: Role,
    /// Hashes of the caller's tokens.
    pub tokens: Vec<TokenHash>,
    /// Globs over the names in the caller's certificates, with a prefix `dns:`, `uri:` or `cn:`.
    pub certificates: Vec<Glob>,
    /// Whether requests without credentials count as this caller's.
    pub anyone: bool,
    /// Globs over the namespaces that the caller may use.
    pub namespaces: Vec<Glob>,
    /// Globs over the resources that the caller may lease or look at.
    pub resources: Vec<Glob>,
    /// Glob over the client and cluster ids that the caller may use; `None`: any.
    pub client_ids: Option<Glob>,
    /// If set, the caller may request leases for lower clusters, for at most this many clients.
    pub lend: Option<u32>,
    /// The most resources that the caller may hold leases on at once, per node; `None`: no limit.
    pub max_resources: Option<u64>,
    /// Whether the caller may see the pages that show all namespaces and resources.
    pub everything: bool,
    /// Whether the caller forwards the requests of many clients, as a load balancer does. Its share
    /// of a busy node is then not limited.
    pub shared: bool,
}

impl fmt::Display for CallerEntry {
    /// Name and role, permissions, and credentials, one per line. Globs as in the file.
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
        if let Some(ids) = &self.client_ids {
            write!(f, "\n    client ids  {:?}", ids.as_str())?;
        }
        if let Some(most) = self.lend {
            write!(f, "\n    lends       to clusters of at most {most} clients")?;
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
        // An empty list of tokens is valid, to keep a caller that has no token at present.
        let known_by = if known_by.is_empty() { "nothing".into() } else { known_by.join(", or ") };
        write!(f, "\n    known by    {known_by}")?;
        if self.shared {
            write!(f, "\n    shared      its share of a busy node is not bounded")?;
        }
        Ok(())
    }
}

/// Parses an access file.
pub fn parse(text: &str) -> Result<Vec<CallerEntry>, Faults> {
    let (root, faults) = tree::read(text).map_err(|fault| Faults(vec![fault]))?;
    let mut reader = Reader::default();
    let top = reader.fields(&root, &Path::ROOT, &FILE_KEYS);
    let mut callers = Vec::new();
    match top.get("callers") {
        Some(entry) => {
            let path = Path::ROOT.key(entry.key);
            let mut first_lines = FirstLines::default();
            for (index, item) in reader.items(entry.value, &path).enumerate() {
                callers.push(caller(&mut reader, item, &path.item(index), &mut first_lines));
            }
            if callers.len() > MAX_CALLERS {
                reader.fault(entry.line, &path, format!("are more than {MAX_CALLERS}"));
            }
        }
        None if !top.wrong => {
            reader.fault(top.line, &Path::ROOT.key("callers"), "is missing: nobody could ask");
        }
        None => {}
    }
    faults.followed_by(reader.faults)?;
    Ok(callers)
}

/// The lines of the first occurrence of values that must be unique.
#[derive(Default)]
struct FirstLines {
    names: HashMap<String, usize>,
    tokens: HashMap<TokenHash, usize>,
    anyone: Option<usize>,
}

fn caller(
    reader: &mut Reader,
    node: &Node<'_>,
    path: &Path<'_>,
    seen: &mut FirstLines,
) -> CallerEntry {
    let fields = reader.fields(node, path, &CALLER_KEYS);
    let name = name(reader, &fields, path, seen);
    let choices = [Role::Ask, Role::Observe, Role::Administer].map(|role| (role.name(), role));
    let role = choice(reader, &fields, path, "role", &choices);
    let invalid_role = role.is_none() && fields.get("role").is_some();
    let role = role.unwrap_or_default();
    if let Some(entry) = fields.get("description") {
        reader.text(entry.value, &path.key(entry.key), "text");
    }
    let tokens = tokens(reader, &fields, path, seen);
    let certificates = globs(reader, fields.get("certificates"), path, certificate_glob);
    let anyone = anyone(reader, &fields, path, role, seen);
    let credentials = ["token_sha256", "certificates", "anyone"];
    if !fields.wrong && credentials.iter().all(|key| fields.get(key).is_none()) {
        let message = "can't be told from others: give it token_sha256 or certificates";
        reader.fault(fields.line, path, message);
    }
    let shared = choice(reader, &fields, path, "shared", &FLAG);
    let namespaces = globs(reader, fields.get("namespaces"), path, Glob::new);
    let resources = globs(reader, fields.get("resources"), path, Glob::new);
    let client_ids = client_ids(reader, &fields, path, &name);
    let lend = lend(reader, &fields, path);
    let max_resources = fields.get("max_resources").and_then(|entry| {
        let most = reader.whole(entry.value, &path.key(entry.key), 1..=i64::MAX, None)?;
        u64::try_from(most).ok()
    });
    // For an invalid role, the valid permissions are unknown.
    if !invalid_role {
        scope(reader, &fields, path, role);
    }
    let all = |globs: &[Glob]| globs.iter().any(Glob::is_everything);
    let everything = role == Role::Administer || (all(&namespaces) && all(&resources));
    CallerEntry {
        name,
        role,
        tokens,
        certificates,
        anyone,
        namespaces,
        resources,
        client_ids,
        lend,
        max_resources,
        everything,
        shared: shared.unwrap_or_default(),
    }
}

fn name(
    reader: &mut Reader,
    fields: &Fields<'_>,
    path: &Path<'_>,
    seen: &mut FirstLines,
) -> Box<str> {
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
    if let Some(first) = seen.names.insert(name.to_owned(), entry.line) {
        reader.fault(entry.line, &path, format!("{} is already on line {first}", quoted(name)));
    }
    name.into()
}

/// One of the given values; `None` if the key is missing or its value is invalid.
fn choice<T: Copy>(
    reader: &mut Reader,
    fields: &Fields<'_>,
    path: &Path<'_>,
    key: &str,
    choices: &[(&str, T)],
) -> Option<T> {
    let entry = fields.get(key)?;
    reader.choice(entry.value, &path.key(entry.key), choices)
}

/// Whether requests without credentials are this caller's.
fn anyone(
    reader: &mut Reader,
    fields: &Fields<'_>,
    path: &Path<'_>,
    role: Role,
    seen: &mut FirstLines,
) -> bool {
    let anyone = choice(reader, fields, path, "anyone", &FLAG).unwrap_or_default();
    if let Some(entry) = fields.get("anyone").filter(|_| anyone) {
        if let Some(first) = seen.anyone {
            reader.fault(entry.line, &path.key("anyone"), format!("is already on line {first}"));
        }
        seen.anyone = Some(entry.line);
        if role == Role::Administer {
            reader.fault(entry.line, &path.key("anyone"), "can't administer: give it a token");
        }
    }
    anyone
}

fn tokens(
    reader: &mut Reader,
    fields: &Fields<'_>,
    path: &Path<'_>,
    seen: &mut FirstLines,
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
                if let Some(first) = seen.tokens.insert(hash, item.line) {
                    let message = format!("is already on line {first}: whose token is it?");
                    reader.fault(item.line, &here, message);
                }
                tokens.push(hash);
            }
        }
    }
    tokens
}

/// Parses a hash of 64 hexadecimal digits; `None` if invalid.
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

/// Reads a list of globs, each with `read`.
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
            Err(wrong) => reader.fault_of_item(item.line, &here, wrong),
            Ok(glob) => globs.push(glob),
        }
    }
    globs
}

/// Parses a glob over names in certificates.
fn certificate_glob(text: &str) -> Result<Glob, &'static str> {
    if !CERTIFICATE_PREFIXES.iter().any(|kind| text.starts_with(kind)) {
        return Err("must begin with dns:, uri: or cn:, which says what kind of name it is");
    }
    match text.starts_with("dns:") {
        // DNS names are case-insensitive, and those of certificates are converted to lower case.
        true => Glob::for_host_names(&text.to_ascii_lowercase()),
        false => Glob::new(text),
    }
}

/// The client and cluster ids that the caller `name` may use.
fn client_ids(
    reader: &mut Reader,
    fields: &Fields<'_>,
    path: &Path<'_>,
    name: &str,
) -> Option<Glob> {
    let entry = fields.get("client_ids")?;
    let path = path.key(entry.key);
    let text = reader.text(entry.value, &path, "a glob, such as \"{caller}/*\"")?;
    let read = Glob::new(&text.replace(OWN_NAME, &glob::escaped(name)));
    read.map_err(|wrong| reader.fault(entry.value.line, &path, wrong)).ok()
}

/// The most clients of a lower cluster for which a caller may request leases.
fn lend(reader: &mut Reader, fields: &Fields<'_>, path: &Path<'_>) -> Option<u32> {
    let entry = fields.get("lend")?;
    let path = path.key(entry.key);
    let lend = reader.fields(entry.value, &path, &LEND_KEYS);
    let Some(most) = lend.get("max_clients") else {
        if !lend.wrong {
            let message = "is missing: the most clients that the caller may speak for";
            reader.fault(entry.line, &path.key("max_clients"), message);
        }
        return None;
    };
    let range = 1..=i64::from(MAX_SUBCLIENTS);
    let most = reader.whole(most.value, &path.key(most.key), range, None)?;
    u32::try_from(most).ok()
}

/// Checks that permissions are given, and only where they have an effect.
fn scope(reader: &mut Reader, fields: &Fields<'_>, path: &Path<'_>, role: Role) {
    let mut reject = |keys: &[&str], message: &str| {
        for entry in keys.iter().filter_map(|key| fields.get(key)) {
            reader.fault(entry.line, &path.key(entry.key), message);
        }
    };
    match role {
        Role::Administer => reject(
            &["namespaces", "resources", "client_ids", "lend"],
            "has no effect: who administers may do everything; remove it",
        ),
        Role::Observe => {
            reject(
                &["client_ids", "lend", "max_resources"],
                "has no effect: who observes leases nothing; remove it",
            );
        }
        Role::Ask => {}
    }
    let given = ["namespaces", "resources"].map(|key| fields.get(key));
    if role != Role::Administer && !fields.wrong && given.iter().all(Option::is_none) {
        let message = "may do nothing: give it namespaces or resources, [\"*\"] is all";
        reader.fault(fields.line, path, message);
    } else if role == Role::Ask && given[1].is_none() {
        for entry in ["client_ids", "lend"].iter().filter_map(|key| fields.get(key)) {
            let message = "has no effect without resources: say what it may lease";
            reader.fault(entry.line, &path.key(entry.key), message);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HASH: &str = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";

    #[test]
    fn valid_file() {
        let text = format!(
            "callers:
  - name: shop
    description: the shop's backends
    token_sha256: [{HASH}, \"{}\"]
    namespaces: [shop, 'cart-*']
    max_resources: 20
  - {{ name: ops, role: administer, certificates: ['cn:Ops', 'uri:spiffe://x/*', 'dns:*.Example'] }}
  - {{ name: rest, role: observe, anyone: true, namespaces: ['*'], resources: ['*'] }}
  - {{ name: 'a[b*', certificates: ['cn:a'], resources: ['*'], client_ids: 'x/{{caller}}/*', lend: {{ max_clients: 7 }} }}
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
                ("rest", Role::Observe, true, true),
                ("a[b*", Role::Ask, false, false)
            ]
        );
        assert_eq!(
            (callers[0].tokens[0][..2].to_vec(), callers[0].tokens[1][0]),
            (vec![0xba, 0x78], 0xca)
        );
        let restricted = &callers[3];
        assert_eq!(
            (callers[0].lend, restricted.lend, &callers[0].client_ids),
            (None, Some(7), &None)
        );
        let ids = restricted.client_ids.as_ref().unwrap();
        let names = ["x/a[b*/1", "x/a[b*/", "x/a[bc/1", "a[b*/1", "x/a[b*/1/2"];
        assert_eq!(names.map(|id| ids.matches(id)), [true, true, false, false, false]);
        assert_eq!((callers[0].max_resources, callers[2].max_resources), (Some(20), None));
        assert!(callers[0].namespaces[1].matches("cart-a") && callers[0].resources.is_empty());
        assert!(callers[1].certificates[1].matches("uri:spiffe://x/y"));
        assert!(!callers[1].certificates[0].matches("dns:ops"));
        assert!(callers[1].certificates[0].matches("cn:Ops"));
        assert!(!callers[1].certificates[0].matches("cn:ops"));
        assert!(callers[1].certificates[2].matches("dns:ops.example"));
        assert!(!callers[1].certificates[2].matches("dns:eu.ops.example"), "as in certificates");
    }

    #[test]
    fn ineffective_lease_permissions_are_faults() {
        let text = "callers:
  - { name: a, role: administer, certificates: ['cn:a'], lend: { max_clients: 1 } }
  - { name: b, role: observe, certificates: ['cn:b'], resources: ['*'], client_ids: b }
  - { name: c, certificates: ['cn:c'], namespaces: ['*'], lend: { max_clients: 1 } }
  - { name: d, certificates: ['cn:d'], resources: ['*'], lend: {} }
  - { name: e, certificates: ['cn:e'], resources: ['*'], lend: 10 }
  - { name: f, certificates: ['cn:f'], resources: ['*'], lend: { max_clients: 0 } }
  - { name: g, certificates: ['cn:g'], resources: ['*'], lend: { max_clients: 1000000001 } }
  - { name: h, certificates: ['cn:h'], resources: ['*'], client_ids: '[' }
  - { name: i, certificates: ['cn:i'], resources: ['*'], client_ids: ['a'] }
  - { name: j, role: observe, certificates: ['cn:j'], resources: ['*'], max_resources: 5 }
";
        let expected =
            "line 2: callers[0].lend: has no effect: who administers may do everything; remove it
line 3: callers[1].client_ids: has no effect: who observes leases nothing; remove it
line 4: callers[2].lend: has no effect without resources: say what it may lease
line 5: callers[3].lend.max_clients: is missing: the most clients that the caller may speak for
line 6: callers[4].lend: must be a mapping: { max_clients: 10000 }, not 10
line 7: callers[5].lend.max_clients: must be a whole number of at least 1, not 0
line 8: callers[6].lend.max_clients: must be a whole number of at most 1000000000, not 1000000001
line 9: callers[7].client_ids: has a [ without its ]: write \\[ for the character itself
line 10: callers[8].client_ids: must be a glob, such as \"{caller}/*\", not a list
line 11: callers[9].max_resources: has no effect: who observes leases nothing; remove it";
        assert_eq!(parse(text).unwrap_err().to_string(), expected);
    }

    #[test]
    fn all_faults_are_reported_without_tokens() {
        let text = format!(
            "callers:
  - {{ name: a, token_sha256: [hunter2], namespaces: [x] }}
  - {{ name: a, token_sha256: [{HASH}, {HASH}] }}
  - {{ role: administer, certificates: [ops, 'cn:['], resources: [x] }}
  - {{ name: b c, anyone: true, role: administer }}
  - {{ name: d, anyone: true, resources: [x], role: asks, tokens: [hunter2] }}
  - {{ name: e, namespaces: [x] }}
  - {{ name: f, anyone: false, resources: [x], max_resources: 0 }}
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
line 6: callers[4].tokens: unknown key \"tokens\", the keys known here are name, role, token_sha256, certificates, anyone, namespaces, resources, client_ids, lend, max_resources, shared, description
line 6: callers[4].role: must be one of ask, observe, administer, not \"asks\": did you mean ask?
line 6: callers[4].anyone: is already on line 5
line 7: callers[5]: can't be told from others: give it token_sha256 or certificates
line 8: callers[6].max_resources: must be a whole number of at least 1, not 0";
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
