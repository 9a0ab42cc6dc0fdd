//! Reads and checks the mapping of one caller.

use std::collections::HashMap;

use super::entry::{CallerEntry, HASH_BYTES, Role, TokenHash};
use crate::config::fault::{YamlPath, quoted};
use crate::config::glob::{self, Glob};
use crate::config::read::{Fields, Keys, Reader};
use crate::config::template_globs::globs;
use crate::config::tree::YamlNode;
use crate::domain::lease::MAX_SUBCLIENTS;
use crate::domain::names::check_bucket;

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
        "domains",
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

/// The lines of the first occurrence of values that must be unique.
#[derive(Default)]
pub(super) struct FirstLines {
    names: HashMap<String, usize>,
    tokens: HashMap<TokenHash, usize>,
    anyone: Option<usize>,
}

/// Reads one caller. `seen`: the unique values of the callers before it.
pub(super) fn caller(
    reader: &mut Reader,
    node: &YamlNode<'_>,
    path: &YamlPath<'_>,
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
    check_credentials(reader, &fields, path);
    let shared = choice(reader, &fields, path, "shared", &FLAG);
    let namespaces = globs(reader, fields.get("namespaces"), path, Glob::new);
    let resources = globs(reader, fields.get("resources"), path, Glob::new);
    let domains = match fields.get("domains") {
        Some(entry) => globs(reader, Some(entry), path, Glob::for_domains),
        None => Glob::for_domains(glob::CATCH_ALL).into_iter().collect(),
    };
    let client_ids = client_ids(reader, &fields, path, &name);
    let lend = lend(reader, &fields, path);
    let max_resources = max_resources(reader, &fields, path);
    // For an invalid role, the valid permissions are unknown.
    if !invalid_role {
        check_permissions(reader, &fields, path, role);
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
        domains,
        client_ids,
        lend,
        max_resources,
        everything,
        shared: shared.unwrap_or_default(),
    }
}

/// The name of the caller; empty if it is missing or invalid.
fn name(
    reader: &mut Reader,
    fields: &Fields<'_>,
    path: &YamlPath<'_>,
    seen: &mut FirstLines,
) -> Box<str> {
    let Some(entry) = fields.get("name") else {
        if !fields.not_a_mapping {
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
    path: &YamlPath<'_>,
    key: &str,
    choices: &[(&str, T)],
) -> Option<T> {
    let entry = fields.get(key)?;
    reader.choice(entry.value, &path.key(entry.key), choices)
}

/// Checks that the caller has credentials, or is the one of requests without any.
fn check_credentials(reader: &mut Reader, fields: &Fields<'_>, path: &YamlPath<'_>) {
    let credentials = ["token_sha256", "certificates", "anyone"];
    if !fields.not_a_mapping && credentials.iter().all(|key| fields.get(key).is_none()) {
        let message = "can't be told from others: give it token_sha256 or certificates";
        reader.fault(fields.line, path, message);
    }
}

/// Whether requests without credentials are this caller's.
fn anyone(
    reader: &mut Reader,
    fields: &Fields<'_>,
    path: &YamlPath<'_>,
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

/// The hashes of the caller's tokens.
fn tokens(
    reader: &mut Reader,
    fields: &Fields<'_>,
    path: &YamlPath<'_>,
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
    path: &YamlPath<'_>,
    name: &str,
) -> Option<Glob> {
    let entry = fields.get("client_ids")?;
    let path = path.key(entry.key);
    let text = reader.text(entry.value, &path, "a glob, such as \"{caller}/*\"")?;
    let read = Glob::new(&text.replace(OWN_NAME, &glob::escaped(name)));
    read.map_err(|wrong| reader.fault(entry.value.line, &path, wrong)).ok()
}

/// The most clients of a lower cluster for which a caller may request leases.
fn lend(reader: &mut Reader, fields: &Fields<'_>, path: &YamlPath<'_>) -> Option<u32> {
    let entry = fields.get("lend")?;
    let path = path.key(entry.key);
    let lend = reader.fields(entry.value, &path, &LEND_KEYS);
    let Some(most) = lend.get("max_clients") else {
        if !lend.not_a_mapping {
            let message = "is missing: the most clients that the caller may speak for";
            reader.fault(entry.line, &path.key("max_clients"), message);
        }
        return None;
    };
    let range = 1..=i64::from(MAX_SUBCLIENTS);
    let most = reader.whole(most.value, &path.key(most.key), range, None)?;
    u32::try_from(most).ok()
}

/// The most resources that a caller may hold leases on at once.
fn max_resources(reader: &mut Reader, fields: &Fields<'_>, path: &YamlPath<'_>) -> Option<u64> {
    let entry = fields.get("max_resources")?;
    let most = reader.whole(entry.value, &path.key(entry.key), 1..=i64::MAX, None)?;
    u64::try_from(most).ok()
}

/// Checks that permissions are given, and only where they have an effect.
fn check_permissions(reader: &mut Reader, fields: &Fields<'_>, path: &YamlPath<'_>, role: Role) {
    let mut reject = |keys: &[&str], message: &str| {
        for entry in keys.iter().filter_map(|key| fields.get(key)) {
            reader.fault(entry.line, &path.key(entry.key), message);
        }
    };
    match role {
        Role::Administer => reject(
            &["namespaces", "resources", "domains", "client_ids", "lend"],
            "has no effect: who administers may do everything; remove it",
        ),
        Role::Observe => {
            reject(
                &["client_ids", "lend", "max_resources"],
                "has no effect: who observes leases nothing; remove it",
            );
            reject(&["domains"], "has no effect: who observes requests no hits; remove it");
        }
        Role::Ask => {}
    }
    let given = ["namespaces", "resources"].map(|key| fields.get(key));
    if role != Role::Administer && !fields.not_a_mapping && given.iter().all(Option::is_none) {
        let message = "may do nothing: give it namespaces or resources, [\"*\"] is all";
        reader.fault(fields.line, path, message);
    } else if role == Role::Ask && given[1].is_none() {
        for entry in ["domains", "client_ids", "lend"].iter().filter_map(|key| fields.get(key)) {
            let message = "has no effect without resources: say what it may use";
            reader.fault(entry.line, &path.key(entry.key), message);
        }
    }
}
