//! The rules of an Envoy domain: which limit a descriptor has.

use std::cmp::Reverse;

use hashbrown::HashMap;

use super::bucket::Bucket;
use crate::domain::descriptor::Entry;
use crate::domain::names::LIMIT_OVERRIDE;

/// How an Envoy domain limits descriptors.
#[derive(Clone, Debug, PartialEq)]
pub struct DomainRules {
    /// The rules for the first entry.
    pub rules: Rules,
    /// The definition of what is limited by a request itself; the limit is a placeholder.
    pub overrides: Bucket,
}

impl DomainRules {
    /// All buckets, with the names of their definitions.
    pub fn buckets(&self) -> impl Iterator<Item = (&str, &Bucket)> {
        let rules = self.rules.buckets().map(|(rule, bucket)| (&*rule.path, bucket));
        rules.chain([(LIMIT_OVERRIDE, &self.overrides)])
    }
}

/// The rules of one level: those of a domain, or those below a rule.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Rules {
    /// In the order of the file.
    all: Vec<Rule>,
    by_key: HashMap<Box<str>, ByValue>,
}

/// The rules of one level for one key, as positions in [`Rules::all`].
#[derive(Clone, Debug, Default, PartialEq)]
struct ByValue {
    exact: HashMap<Box<str>, usize>,
    /// By the beginning of the value, the longest first.
    prefixes: Vec<(Box<str>, usize)>,
    any: Option<usize>,
}

/// What is limited by one key.
#[derive(Clone, Debug, PartialEq)]
pub struct Rule {
    /// The rule's place in its domain, as the name of a bucket without the values that are open:
    /// `message_type=marketing,to_number`.
    pub path: Box<str>,
    /// The key.
    pub key: Box<str>,
    /// The value, or with `*` at the end the beginning of the value; `None`: any.
    pub value: Option<Box<str>>,
    /// The limit of descriptors that end here; `None`: they have none.
    pub limit: Option<RuleLimit>,
    /// The rules for the next entry.
    pub rules: Rules,
}

/// The limit of a rule.
#[derive(Clone, Debug, PartialEq)]
pub struct RuleLimit {
    /// Its name.
    pub name: Option<Box<str>>,
    /// The names of limits that don't apply to requests to which this one does.
    pub replaces: Vec<Box<str>>,
    /// The bucket, or the template of one for each descriptor; `None`: unlimited.
    pub bucket: Option<Bucket>,
}

impl Rule {
    /// The beginning of the values that it matches, if it has a wildcard.
    fn prefix(&self) -> Option<&str> {
        self.value.as_deref()?.strip_suffix('*')
    }
}

impl Rules {
    /// Adds a rule. Returns whether it is the first for its key and value.
    pub(super) fn add(&mut self, rule: Rule) -> bool {
        let position = self.all.len();
        let by_value = self.by_key.entry(rule.key.clone()).or_default();
        let is_first = match (&rule.value, rule.prefix()) {
            (_, Some(prefix)) => {
                let is_first = by_value.prefixes.iter().all(|(other, _)| **other != *prefix);
                by_value.prefixes.push((prefix.into(), position));
                by_value.prefixes.sort_by_key(|(prefix, _)| Reverse(prefix.len()));
                is_first
            }
            (Some(value), None) => by_value.exact.insert(value.clone(), position).is_none(),
            (None, None) => by_value.any.replace(position).is_none(),
        };
        self.all.push(rule);
        is_first
    }

    /// The rules, in the order of the file.
    pub fn iter(&self) -> impl Iterator<Item = &Rule> {
        self.all.iter()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.all.is_empty()
    }

    /// The buckets of these rules and of those below.
    pub fn buckets(&self) -> Box<dyn Iterator<Item = (&Rule, &Bucket)> + '_> {
        Box::new(self.all.iter().flat_map(|rule| {
            let own = rule.limit.as_ref().and_then(|limit| limit.bucket.as_ref());
            own.map(|bucket| (rule, bucket)).into_iter().chain(rule.rules.buckets())
        }))
    }

    /// The rule for a descriptor, and whether it is for no other one. At each level, the most specific rule
    /// is taken: one with the same value, else the one with the longest beginning, else the one for any
    /// value. `None` if there is no rule for one of the entries.
    pub fn find<'e>(&self, entries: impl IntoIterator<Item = Entry<'e>>) -> Option<(&Rule, bool)> {
        let (mut level, mut found, mut is_exact) = (self, None, true);
        for (key, value) in entries {
            let by_value = level.by_key.get(key)?;
            let exact = by_value.exact.get(value).copied();
            is_exact &= exact.is_some();
            let prefix =
                || by_value.prefixes.iter().find(|(prefix, _)| value.starts_with(&**prefix));
            let position = exact.or_else(|| prefix().map(|(_, position)| *position));
            let rule = &level.all[position.or(by_value.any)?];
            (level, found) = (&rule.rules, Some(rule));
        }
        Some((found?, is_exact))
    }
}
