//! Envoy's rate limit service: the hits of a request on several descriptors of a domain.
//!
//! A descriptor that a rule limits has a bucket like any other, so that it has the same metrics, looks,
//! failure policy and shadow. All of them are asked in one call to the store. Each counts by itself, even if
//! another one is over its limit; and as in Envoy's service, also the hits count that are over it.

use std::iter;

use metrics::Counter;
use smallvec::SmallVec;

use super::{AllowService, Answer, Query, Status, store_request};
use crate::config::model::{Bucket, FailurePolicy, ResolvedBucket};
use crate::domain::bucket::BucketLimit;
use crate::domain::descriptor::{self, Entry, Unit};
use crate::domain::names::CallerId;
use crate::domain::time::Micros;
use crate::domain::window::{Window, WindowKind};
use crate::service::Error;
use crate::service::limits::Snapshot;
use crate::store::{BucketRequest, MAX_REQUESTS_PER_CALL, Store, StoreError, TokenAction};

/// A caller's request.
#[derive(Clone, Copy, Debug)]
pub struct RateLimitQuery<'a> {
    /// The domain.
    pub domain: &'a str,
    /// What the hits count for.
    pub descriptors: &'a [Descriptor<'a>],
}

/// What hits count for.
#[derive(Clone, Debug)]
pub struct Descriptor<'a> {
    /// The keys with their values.
    pub entries: Vec<Entry<'a>>,
    /// How many.
    pub hits: Hits,
    /// A limit that applies in place of the one of the rules: so many hits within a unit of time.
    pub limit: Option<(u32, Unit)>,
}

/// The hits on a descriptor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hits {
    /// To count; 0: none, to see whether those before are over the limit.
    Count(u64),
    /// To forget.
    GiveBack(u64),
}

/// The answer for one descriptor. The default is that for a descriptor without a limit.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DescriptorAnswer {
    /// Whether the hits are over the limit.
    pub is_over: bool,
    /// The limit; `None` if there is none.
    pub limit: Option<CurrentLimit>,
    /// How many more hits there is room for.
    pub remaining: u32,
    /// Until the window is over, in seconds, rounded up.
    pub reset_s: i64,
}

/// The limit of a descriptor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CurrentLimit {
    /// Its name.
    pub name: Option<Box<str>>,
    /// The most hits within a unit of time.
    pub requests_per_unit: u32,
    /// The unit; `None` if it is none of those that have a name.
    pub unit: Option<Unit>,
}

/// A descriptor that has a bucket.
struct Target<'a> {
    /// Its position in the request.
    position: usize,
    hits: Hits,
    found: ResolvedBucket<'a>,
    limit_name: Option<&'a str>,
    bucket: String,
}

impl Target<'_> {
    fn request<'a>(
        &'a self,
        hits: Hits,
        (domain, caller): (&'a str, Option<CallerId>),
        snapshot: &'a Snapshot,
    ) -> BucketRequest<'a> {
        let query =
            Query { namespace: domain, bucket: &self.bucket, tokens: 1, ..Query::default() };
        let (tokens, action) = match hits {
            Hits::Count(hits) => (hits, TokenAction::Count),
            Hits::GiveBack(hits) => (hits, TokenAction::GiveBack),
        };
        let request = store_request(&query, (tokens, None), caller, &self.found, snapshot);
        BucketRequest { action, ..request }
    }
}

impl<S: Store> AllowService<S> {
    /// Answers a request, for each descriptor in their order; `caller` is `None` for an unnamed caller. Takes
    /// no longer than the store's deadline.
    pub async fn rate_limit(
        &self,
        query: &RateLimitQuery<'_>,
        caller: Option<CallerId>,
    ) -> Result<Vec<DescriptorAnswer>, Error> {
        check(query)?;
        let snapshot = self.state.limits.current();
        if !snapshot.limits.namespaces.contains_key(query.domain) {
            snapshot.check_known()?;
        }
        let mut answers = vec![DescriptorAnswer::default(); query.descriptors.len()];
        let overrides = overrides(query, &snapshot);
        let targets = targets(
            query,
            (&overrides, &snapshot),
            &self.state.descriptors_without_limit,
            &mut answers,
        );
        let request =
            |target, hits| Target::request(target, hits, (query.domain, caller), &snapshot);
        let mut requests = SmallVec::<[BucketRequest<'_>; 4]>::new();
        for target in &targets {
            requests.push(request(target, target.hits));
            // What is given back is followed by a look, which answers.
            if let Hits::GiveBack(_) = target.hits {
                requests.push(request(target, Hits::Count(0)));
            }
        }
        let outcomes = match requests.is_empty() {
            true => SmallVec::new(),
            false => self.store.decide(&requests).await,
        };
        let missing = iter::repeat(Err(StoreError::Unreachable));
        let outcomes = outcomes.into_iter().chain(missing);
        let mut decided = iter::zip(&requests, outcomes)
            .filter(|(request, _)| request.action != TokenAction::GiveBack);
        let (now, mut failure) = (self.state.clock.now(), None);
        for target in &targets {
            let Some((request, outcome)) = decided.next() else { break };
            match self.answer_to(outcome, request, &target.found, &snapshot) {
                Ok(answer) => {
                    let answer = self.conclude(answer, query.domain, (target, &snapshot), now);
                    answers[target.position] = answer;
                }
                Err(error) => failure = Some(error),
            }
        }
        // What is over a limit is refused whatever is unknown of other limits.
        match failure {
            Some(error) if answers.iter().all(|answer| !answer.is_over) => Err(error),
            _ => Ok(answers),
        }
    }

    fn conclude(
        &self,
        mut answer: Answer<'_>,
        domain: &str,
        (target, snapshot): (&Target<'_>, &Snapshot),
        now: Micros,
    ) -> DescriptorAnswer {
        let found = &target.found;
        let (bucket, was_refused) = (found.bucket, answer.status != Status::Ok);
        if let Hits::Count(hits) = target.hits {
            self.count_and_lift(&mut answer, (domain, hits), found, snapshot);
        }
        let is_unknown = answer.degraded && found.on_store_failure == FailurePolicy::Allow;
        let left = match (was_refused, is_unknown) {
            (true, _) => 0.0,
            (false, true) => bucket.terms.cap_us,
            (false, false) => answer.tokens_available.max(0.0),
        };
        DescriptorAnswer {
            is_over: answer.status != Status::Ok,
            limit: Some(current_limit(bucket, target.limit_name)),
            remaining: left as u32,
            reset_s: reset_s(bucket, now),
        }
    }
}

fn check(query: &RateLimitQuery<'_>) -> Result<(), Error> {
    if query.domain.is_empty() {
        return Err(Error::Invalid("domain is empty".to_owned()));
    }
    match query.descriptors.len() {
        0 => Err(Error::Invalid("there are no descriptors".to_owned())),
        1..=MAX_REQUESTS_PER_CALL => Ok(()),
        count => Err(Error::Invalid(format!(
            "there are {count} descriptors, at most {MAX_REQUESTS_PER_CALL} are allowed"
        ))),
    }
}

/// For each descriptor, the bucket with the limit that the request has for it.
fn overrides(query: &RateLimitQuery<'_>, snapshot: &Snapshot) -> Vec<Option<Bucket>> {
    let Some(found) = snapshot.limits.find_overrides(query.domain) else { return Vec::new() };
    if query.descriptors.iter().all(|descriptor| descriptor.limit.is_none()) {
        return Vec::new();
    }
    let bucket = |(requests, unit): (u32, Unit)| {
        let window = Window { length_us: unit.length_us(), kind: WindowKind::Fixed };
        Bucket::new(found.bucket.index, BucketLimit::of_window(requests.into(), window))
    };
    query.descriptors.iter().map(|descriptor| descriptor.limit.map(bucket)).collect()
}

/// The descriptors that have buckets. Answers for those that are unlimited, and counts those without a limit.
fn targets<'a>(
    query: &RateLimitQuery<'_>,
    (overrides, snapshot): (&'a [Option<Bucket>], &'a Snapshot),
    without_limit: &Counter,
    answers: &mut [DescriptorAnswer],
) -> SmallVec<[Target<'a>; 2]> {
    let limits = &snapshot.limits;
    let mut targets = SmallVec::<[Target<'_>; 2]>::new();
    let mut replaced = SmallVec::<[&str; 4]>::new();
    for (position, descriptor) in query.descriptors.iter().enumerate() {
        let (entries, hits) = (|| descriptor.entries.iter().copied(), descriptor.hits);
        let own = overrides.get(position).and_then(Option::as_ref);
        if let (Some(bucket), Some((_, unit)), Some(found)) =
            (own, descriptor.limit, limits.find_overrides(query.domain))
        {
            let found = ResolvedBucket { bucket, ..found };
            let bucket = descriptor::override_name(entries(), unit);
            targets.push(Target { position, hits, found, limit_name: None, bucket });
        } else {
            let Some((limit, found)) = limits.find_rule(query.domain, entries()) else {
                without_limit.increment(1);
                continue;
            };
            replaced.extend(limit.replaces.iter().map(|name| &**name));
            let Some(found) = found else {
                answers[position].remaining = u32::MAX;
                continue;
            };
            let (limit_name, bucket) = (limit.name.as_deref(), descriptor::bucket_name(entries()));
            targets.push(Target { position, hits, found, limit_name, bucket });
        }
    }
    targets.retain(|target| target.limit_name.is_none_or(|name| !replaced.contains(&name)));
    targets
}

fn current_limit(bucket: &Bucket, name: Option<&str>) -> CurrentLimit {
    let limit = &bucket.limit;
    CurrentLimit {
        name: name.map(Into::into),
        requests_per_unit: u32::try_from(limit.size_tokens).unwrap_or(u32::MAX),
        unit: limit.algorithm.windows().and_then(|window| Unit::of_length(window.length_us)),
    }
}

/// The seconds until the window of a bucket is over, rounded up: for a log, that which begins now.
fn reset_s(bucket: &Bucket, now: Micros) -> i64 {
    let left_us = match bucket.limit.algorithm.windows() {
        Some(Window { length_us, kind: WindowKind::Log }) => length_us,
        Some(Window { length_us, .. }) => length_us - now.0.rem_euclid(length_us),
        None => 0,
    };
    (left_us + 999_999) / 1_000_000
}
