//! Envoy's rate limit service: the hits of a request on several descriptors of a domain.
//!
//! A descriptor that a rule limits has a bucket like any other, so that it has the same metrics, looks,
//! failure policy and shadow. All of them are asked in one call to the store. Each counts by itself: a
//! descriptor that is within its limit counts even if another one is over.

use std::iter;

use smallvec::SmallVec;

use super::{AllowService, Answer, Query, Status, store_request};
use crate::config::model::ResolvedBucket;
use crate::domain::descriptor::{self, Entry, Unit};
use crate::domain::names::CallerId;
use crate::domain::time::Micros;
use crate::domain::window::WindowKind;
use crate::service::Error;
use crate::store::{MAX_REQUESTS_PER_CALL, Store};

/// A caller's request.
#[derive(Clone, Copy, Debug)]
pub struct RateLimitQuery<'a> {
    /// The domain.
    pub domain: &'a str,
    /// The entries of each descriptor.
    pub descriptors: &'a [Vec<Entry<'a>>],
    /// The number of hits; 0 means 1.
    pub hits: u32,
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
    /// After a refusal: until equal hits could be granted if there were no others. Else: until the window is over,
    /// or the bucket full. In seconds, rounded up.
    pub reset_s: i64,
}

/// The limit of a descriptor, as configured.
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
    found: ResolvedBucket<'a>,
    limit_name: Option<&'a str>,
    bucket: String,
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
        let hits = u64::from(query.hits.max(1));
        let snapshot = self.state.limits.current();
        if !snapshot.limits.namespaces.contains_key(query.domain) {
            snapshot.check_known()?;
        }
        let mut answers = vec![DescriptorAnswer::default(); query.descriptors.len()];
        let mut targets = SmallVec::<[Target<'_>; 4]>::new();
        let mut replaced = SmallVec::<[&str; 4]>::new();
        for (position, entries) in query.descriptors.iter().enumerate() {
            let entries = || entries.iter().copied();
            let Some((limit, found)) = snapshot.limits.find_rule(query.domain, entries()) else {
                continue;
            };
            replaced.extend(limit.replaces.iter().map(|name| &**name));
            let limit_name = limit.name.as_deref();
            match found {
                Some(found) => {
                    let bucket = descriptor::bucket_name(entries());
                    targets.push(Target { position, found, limit_name, bucket });
                }
                None => answers[position].remaining = u32::MAX,
            }
        }
        targets.retain(|target| target.limit_name.is_none_or(|name| !replaced.contains(&name)));
        let requests: SmallVec<[_; 4]> = targets
            .iter()
            .map(|Target { found, bucket, .. }| {
                let namespace = query.domain;
                let query = Query { namespace, bucket, tokens: 1, max_wait_ms: None };
                store_request(&query, (hits, Some(0)), caller, found, &snapshot)
            })
            .collect();
        let outcomes = match requests.is_empty() {
            true => SmallVec::new(),
            false => self.store.decide(&requests).await,
        };
        let outcomes = outcomes.into_iter().map(Some).chain(iter::repeat(None));
        for ((target, request), outcome) in iter::zip(&targets, &requests).zip(outcomes) {
            let Target { found, limit_name, .. } = target;
            let mut answer = self.answer_to(outcome, request, found, &snapshot)?;
            self.count_and_lift(&mut answer, (query.domain, hits), found, &snapshot);
            answers[target.position] =
                descriptor_answer(&answer, found, *limit_name, self.state.clock.now());
        }
        Ok(answers)
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

fn descriptor_answer(
    answer: &Answer<'_>,
    found: &ResolvedBucket<'_>,
    name: Option<&str>,
    now: Micros,
) -> DescriptorAnswer {
    let (limit, terms) = (&found.bucket.limit, &found.bucket.terms);
    let unit = match limit.algorithm.windows() {
        Some(window) => Unit::of_length(window.length_us),
        None => Some(Unit::Second),
    };
    let reset_us = match limit.algorithm.windows() {
        _ if answer.retry_after_ms > 0 => answer.retry_after_ms.saturating_mul(1000),
        Some(window) if window.kind == WindowKind::Log => window.length_us,
        Some(window) => window.length_us - now.0.rem_euclid(window.length_us),
        None => (terms.cap_us - answer.tokens_available * terms.interval_us).max(0.0) as i64,
    };
    DescriptorAnswer {
        is_over: answer.status != Status::Ok,
        limit: Some(CurrentLimit {
            name: name.map(Into::into),
            requests_per_unit: match limit.algorithm.windows() {
                Some(_) => u32::try_from(limit.size_tokens).unwrap_or(u32::MAX),
                None => limit.fill_rate as u32,
            },
            unit,
        }),
        remaining: answer.tokens_available.max(0.0) as u32,
        reset_s: reset_us.div_euclid(1_000_000) + i64::from(reset_us.rem_euclid(1_000_000) > 0),
    }
}
