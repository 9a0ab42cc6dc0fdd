//! Explains what a request would be answered, step by step, without taking tokens.

use std::sync::Arc;

use super::look::{Balance, ServedBy, why_none};
use super::{
    AllowService, Answer, Query, Status, answer_from, ban, store_request, tokens_on_wire, validate,
};
use crate::config::model::{FailurePolicy, ResolvedBucket};
use crate::domain::algorithm::Retry;
use crate::domain::ban::Ban;
use crate::domain::bucket::{self, Terms};
use crate::domain::names::CallerId;
use crate::domain::window::{Window, WindowKind};
use crate::service::Error;
use crate::service::explain::{Effect, Explanation, Steps, amount, count, time, why_not_enforced};
use crate::store::look::{Look, Looks};
use crate::store::{BucketRequest, TokenAction};

impl<S: Looks> AllowService<S> {
    /// Explains what a request would be answered; `caller` is `None` for an unnamed caller. Takes,
    /// counts and registers nothing. Fails where the request itself would.
    pub async fn explain<'a>(
        &self,
        query: &Query<'a>,
        caller: Option<CallerId>,
    ) -> Result<Explanation<Answer<'a>>, Error> {
        let mut steps = Steps::default();
        let (count, max_wait_ms) = match validate(query) {
            Ok(request) => request,
            Err(fault) => {
                steps.add("request", Effect::Refuses, fault.to_string(), []);
                return Ok(explained(steps, Answer::refused(Status::Invalid)));
            }
        };
        let asked = if count == 1 { "1 token".to_owned() } else { format!("{count} tokens") };
        let text = format!("asks for {asked} of {}:{}", query.namespace, query.bucket);
        steps.add("request", Effect::Notes, text, [("tokens", count as f64)]);
        let snapshot = Arc::clone(&self.state.limits.current());
        let limits = &snapshot.limits;
        let Some(found) = limits.find(query.namespace, query.bucket) else {
            snapshot.check_known()?;
            steps.add("bucket", Effect::Refuses, why_none(limits, query.namespace), []);
            let answer = Answer::refused(Status::NoBucket);
            let enforced = limits.enforces_namespace(query.namespace);
            return Ok(self.in_shadow(steps, answer, count, enforced));
        };
        steps.add("bucket", Effect::Notes, ServedBy::of(limits, &found, query).sentence(), []);
        max_tokens_step(&mut steps, &found, count);
        let mut answer = if found.takes_too_many(count) {
            Answer::refused(Status::TooManyTokens)
        } else {
            let request = store_request(query, (count, max_wait_ms), caller, &found, &snapshot);
            match self.explain_ban(&mut steps, &request, &found).await? {
                Some(answer) => answer,
                None => self.explain_bucket(&mut steps, &request, &found).await?,
            }
        };
        answer.add_bucket(&found, query);
        Ok(self.in_shadow(steps, answer, count, found.enforced))
    }
}

impl<S: Looks> AllowService<S> {
    /// The explanation, with the last step if the limit is in shadow. `enforced`: as configured.
    fn in_shadow<'a>(
        &self,
        mut steps: Steps,
        mut answer: Answer<'a>,
        count: u64,
        enforced: bool,
    ) -> Explanation<Answer<'a>> {
        let Some(text) = why_not_enforced(&self.state, enforced) else {
            return explained(steps, answer);
        };
        let effect = if answer.lift(count) { Effect::Lifts } else { Effect::Notes };
        steps.add("shadow", effect, text, []);
        explained(steps, answer)
    }

    /// What the ban of the bucket would decide, if it refuses the request. If the store does not answer, that is for the
    /// bucket to explain.
    async fn explain_ban(
        &self,
        steps: &mut Steps,
        request: &BucketRequest<'_>,
        found: &ResolvedBucket<'_>,
    ) -> Result<Option<Answer<'static>>, Error> {
        let Some((counting, limit)) =
            ban::count_request(request, found).zip(found.bucket.limit.ban)
        else {
            return Ok(None);
        };
        let (balance, lacks_place) = self.balance_and_place(&counting, found).await?;
        let Some((look, terms)) = balance.known() else { return Ok(None) };
        places_step(steps, look, lacks_place);
        if lacks_place {
            return Ok(Some(Answer::refused(Status::TooManyBuckets)));
        }
        let outcome = look.outcome(&BucketRequest { terms, ..counting });
        ban_step(steps, &limit, (terms, outcome.accrued_us), outcome.retry);
        let degraded = balance.error().is_some();
        Ok(ban::refusal(&outcome).map(|answer| Answer { degraded, ..answer }))
    }

    /// The balance of the bucket of a request, and whether it needs a place and gets none.
    async fn balance_and_place(
        &self,
        request: &BucketRequest<'_>,
        found: &ResolvedBucket<'_>,
    ) -> Result<(Balance, bool), Error> {
        let mut balance = self.balance(request, found).await?;
        let mut lacks_place = false;
        if let Balance::Shared { look, .. } = &balance
            && let Some(places) = look.needs_place()
        {
            match self.store.has_room(request, places).await {
                Ok(has_room) => lacks_place = !has_room,
                Err(error) => balance = self.balance_without_store(request, found, error)?,
            }
        }
        Ok((balance, lacks_place))
    }

    /// What the bucket, or the failure policy, would decide.
    async fn explain_bucket(
        &self,
        steps: &mut Steps,
        request: &BucketRequest<'_>,
        found: &ResolvedBucket<'_>,
    ) -> Result<Answer<'static>, Error> {
        if let Some(prefetched) = self.store.prefetched(request) {
            let outcome = prefetched.outcome(request);
            prefetch_step(steps, prefetched.here, outcome.is_some());
            if let Some(outcome) = outcome {
                let answer = answer_from(&outcome, request, found, || self.store.full_us(request));
                soft_limit_step(steps, &answer, found);
                return Ok(answer);
            }
        }
        let (balance, lacks_place) = self.balance_and_place(request, found).await?;
        match balance {
            Balance::Shared { terms, look } => {
                let request = BucketRequest { terms: &terms, ..*request };
                places_step(steps, &look, lacks_place);
                Ok(match lacks_place {
                    true => Answer::refused(Status::TooManyBuckets),
                    false => balance_steps(steps, &request, found, &look),
                })
            }
            Balance::Share { error, nodes, terms, look } => {
                let text = format!(
                    "{error}: this node decides by its share, one of {nodes} (on_store_failure: local)"
                );
                steps.add("store", Effect::Notes, text, [("nodes", f64::from(nodes))]);
                let request = BucketRequest { terms: &terms, prefetch: None, ..*request };
                let answer = balance_steps(steps, &request, found, &look);
                Ok(Answer { degraded: true, ..answer })
            }
            Balance::Unknown { error } => {
                let answer = match found.on_store_failure {
                    FailurePolicy::Allow => Answer {
                        tokens_granted: tokens_on_wire(request.tokens),
                        ..Answer::refused(Status::Ok)
                    },
                    _ => Answer::refused(Status::ServerError),
                };
                let (effect, text) = match answer.status {
                    Status::Ok => (Effect::Permits, "granted (on_store_failure: allow)"),
                    _ => (Effect::Refuses, "refused (on_store_failure: deny)"),
                };
                steps.add("store", effect, format!("{error}: every request is {text}"), []);
                Ok(Answer { degraded: true, ..answer })
            }
        }
    }
}

fn max_tokens_step(steps: &mut Steps, found: &ResolvedBucket<'_>, count: u64) {
    if let Some(most) = found.bucket.limit.max_tokens_per_request {
        let text = format!("one request may take {most} at most (max_tokens_per_request)");
        let effect = Effect::of_rule(count <= most);
        steps.add("max_tokens_per_request", effect, text, [("most", most as f64)]);
    }
}

fn prefetch_step(steps: &mut Steps, here: u64, is_enough: bool) {
    let (effect, text) = match is_enough {
        true => (Effect::Permits, "which suffice without the store"),
        false => (Effect::Notes, "which are too few, so the store decides"),
    };
    let text = format!("this node holds {} prefetched, {text}", tokens(here as f64));
    steps.add("prefetch", effect, text, [("held_by_this_node", here as f64)]);
}

fn places_step(steps: &mut Steps, look: &Look, lacks_place: bool) {
    let Some(places) = look.places else { return };
    let text = match (lacks_place, look.state.is_some() || places.has_place) {
        (true, _) => "none becomes free for another name",
        (false, true) => "the bucket is one of them",
        (false, false) => "there is one for this name",
    };
    let (taken, most) = (places.taken, places.most);
    let text = format!("{taken} of {most} dynamic buckets are in use, and {text}");
    let numbers = [("taken", taken as f64), ("most", most as f64)];
    steps.add("places", Effect::of_rule(!lacks_place), text, numbers);
}

/// What the bucket would decide, if it is as `look` says.
fn balance_steps(
    steps: &mut Steps,
    request: &BucketRequest<'_>,
    found: &ResolvedBucket<'_>,
    look: &Look,
) -> Answer<'static> {
    let (terms, accrued_us) = (request.terms, look.accrued_us(request.terms));
    let answer = answer_from(&look.outcome(request), request, found, || terms.cap_us);
    balance_step(steps, look, terms);
    // The steps of every request; that of the reserve follows.
    let (request, reserve) = match request.action {
        TokenAction::TakeUnreserved { max_wait_ms, reserve_percent } => {
            let action = TokenAction::Take { max_wait_ms };
            (&BucketRequest { action, ..*request }, Some(reserve_percent))
        }
        _ => (request, None),
    };
    match (&terms.window, terms.queue()) {
        (Some(window), _) => window_step(steps, request, window, accrued_us),
        (None, Some(queue)) => {
            wait_step(steps, request, accrued_us);
            queue_step(steps, request, accrued_us, queue);
        }
        // A request that leaves a reserve never waits, so these steps can't refuse it.
        (None, None) if reserve.is_some() => {}
        (None, None) => {
            wait_step(steps, request, accrued_us);
            debt_step(steps, request, accrued_us);
        }
    }
    if let Some(percent) = reserve {
        reserve_step(steps, request, accrued_us, percent);
    }
    soft_limit_step(steps, &answer, found);
    answer
}

/// `left`: what may still be asked for under `terms`.
fn ban_step(steps: &mut Steps, ban: &Ban, (terms, left): (&Terms, f64), banned: Option<Retry>) {
    let (asked, most) = (terms.cap_us - left, terms.cap_us);
    let window = time(ban.window_us / 1000);
    let text = match banned.map(|end| time(end.after_ms())) {
        Some(end) if left < 0.0 => format!(
            "more than {} were asked for within {window}: the bucket is banned for another {end} (ban)",
            tokens(most)
        ),
        Some(end) => format!(
            "with this request, more than {} are asked for within {window}: it bans the bucket for {end} (ban)",
            tokens(most)
        ),
        None => format!(
            "asked for in the window of {window} before this request: {}; more than {} ban the bucket until {} \
             after the window (ban)",
            tokens(asked),
            amount(most),
            time(ban.for_us / 1000)
        ),
    };
    let left_ms = banned.map_or(0, Retry::after_ms) as f64;
    let window_ms = ban.window_us as f64 / 1000.0;
    let numbers = [
        ("asked", asked),
        ("threshold", most),
        ("window_millis", window_ms),
        ("left_millis", left_ms),
    ];
    steps.add("ban", Effect::of_rule(banned.is_none()), text, numbers);
}

fn soft_limit_step(steps: &mut Steps, answer: &Answer<'_>, found: &ResolvedBucket<'_>) {
    if answer.soft_limited {
        let text = "the grant is past the soft limit, and says so (soft_limit_percent)";
        let percent = found.bucket.limit.soft_limit_percent.unwrap_or_default();
        steps.add("soft_limit", Effect::Notes, text, [("percent", percent)]);
    }
}

fn balance_step(steps: &mut Steps, look: &Look, terms: &Terms) {
    let accrued_us = look.accrued_us(terms);
    let (has, full) = (terms.tokens(accrued_us), terms.tokens(terms.cap_us));
    let full_in_ms = look.full_in_ms(terms);
    let text = match (has < 0.0, full_in_ms) {
        _ if terms.queue().is_some() => match full_in_ms {
            0 => "nothing is ahead".to_owned(),
            ms => format!("what is ahead takes {} to leave", time(ms)),
        },
        (true, _) => format!(
            "the bucket owes {}, which accrue in {}",
            tokens(-has),
            time(bucket::wait_ms(accrued_us))
        ),
        (false, 0) => format!("the bucket is full, with {}", tokens(has)),
        (false, ms) => {
            format!(
                "the bucket has {} of {}, and is full in {}",
                amount(has),
                tokens(full),
                time(ms)
            )
        }
    };
    let numbers = [("tokens", has), ("full_tokens", full), ("full_in_millis", full_in_ms as f64)];
    steps.add("balance", Effect::Notes, text, numbers);
}

fn window_step(steps: &mut Steps, request: &BucketRequest<'_>, window: &Window, left: f64) {
    let limit = request.terms.cap_us;
    let length = time(window.length_us / 1000);
    let kind = match window.kind {
        WindowKind::Fixed => "each fixed window",
        WindowKind::Sliding => "a sliding window",
        WindowKind::Log => "any window",
        // No bucket's own algorithm.
        WindowKind::Ban { .. } => "a window",
    };
    let text = format!("within {kind} of {length}, {} may be taken at most (limit)", tokens(limit));
    let effect = Effect::of_rule(request.charge().cost_us <= left);
    let window_ms = window.length_us as f64 / 1000.0;
    steps.add("window", effect, text, [("most", limit), ("window_millis", window_ms)]);
}

fn wait_step(steps: &mut Steps, request: &BucketRequest<'_>, accrued_us: f64) {
    let TokenAction::Take { max_wait_ms } = request.action else { return };
    let wait_ms = bucket::wait_ms(accrued_us);
    let (effect, text) = match wait_ms {
        0 => (Effect::Permits, "no wait is needed".to_owned()),
        ms if bucket::is_wait_allowed(accrued_us, &request.charge()) => {
            (Effect::Delays, format!("the tokens may be used after {}", time(ms)))
        }
        ms => (Effect::Refuses, format!("the wait would be {}", time(ms))),
    };
    let most_ms = i64::try_from(max_wait_ms).unwrap_or(i64::MAX);
    let source = match request.terms.queue() {
        Some(_) => "that of a full queue",
        None => "wait_timeout_millis",
    };
    let text = format!(
        "{text}; the longest is {} ({source}, or less if the request says so)",
        time(most_ms)
    );
    let numbers = [("wait_millis", wait_ms as f64), ("most_millis", max_wait_ms as f64)];
    steps.add("wait", effect, text, numbers);
}

fn debt_step(steps: &mut Steps, request: &BucketRequest<'_>, accrued_us: f64) {
    let (terms, charge) = (request.terms, request.charge());
    let debt_ms = bucket::wait_ms(accrued_us - charge.cost_us);
    let text = match debt_ms {
        0 => "the grant leaves no debt".to_owned(),
        ms => format!("the grant leaves a debt of {}", time(ms)),
    };
    let most_ms = terms.max_debt_us / 1000.0;
    let text = format!("{text}; the longest is {} (max_debt_millis)", time(most_ms as i64));
    let numbers = [("debt_millis", debt_ms as f64), ("most_millis", most_ms)];
    let effect = Effect::of_rule(bucket::is_debt_allowed(accrued_us, terms, &charge));
    steps.add("debt", effect, text, numbers);
}

fn queue_step(steps: &mut Steps, request: &BucketRequest<'_>, accrued_us: f64, queue: u64) {
    let (terms, charge) = (request.terms, request.charge());
    // The first of them leaves at once.
    let waiting = (terms.tokens(charge.cost_us - accrued_us) - 1.0).max(0.0);
    let text = format!("with the request, {} wait; at most {queue} may (queue)", tokens(waiting));
    let effect = Effect::of_rule(bucket::is_debt_allowed(accrued_us, terms, &charge));
    steps.add("queue", effect, text, [("waiting", waiting), ("most", queue as f64)]);
}

fn reserve_step(steps: &mut Steps, request: &BucketRequest<'_>, accrued_us: f64, percent: u8) {
    let terms = request.terms;
    let kept = terms.reserve_tokens(percent);
    let what = match terms.queue() {
        Some(_) => format!("room for {} in the queue", tokens(kept)),
        None => tokens(kept),
    };
    let text = format!("the request is not critical, and must leave {what} (reserve: {percent}%)");
    let charge = terms.take_unreserved(request.charge().cost_us, u64::MAX, percent);
    let effect = Effect::of_rule(bucket::is_wait_allowed(accrued_us, &charge));
    steps.add("reserve", effect, text, [("reserved", kept), ("percent", f64::from(percent))]);
}

fn explained(steps: Steps, answer: Answer<'_>) -> Explanation<Answer<'_>> {
    steps.explain(summary(&answer), answer)
}

/// The answer in a sentence.
fn summary(answer: &Answer<'_>) -> String {
    let text = match (answer.status, answer.wait_ms, answer.retry_after_ms) {
        (Status::Ok, _, _) if answer.shadow => {
            "would be granted at once, because the limit is not enforced"
        }
        (Status::Ok, 0, _) => "would be granted at once",
        (Status::Ok, ms, _) => return format!("would be granted, to be used after {}", time(ms)),
        (Status::Timeout, _, 0) => {
            "would be refused, and never be granted: it asks for more than the limits of the bucket \
             allow"
        }
        (Status::Timeout, _, ms) => {
            let time = time(ms);
            return format!("would be refused; it could be granted in {time} if nobody else asks");
        }
        (Status::Banned, _, ms) => {
            return format!("would be refused: the bucket is banned for {}", time(ms));
        }
        (Status::NoBucket, _, _) => "would be refused: no bucket serves the name",
        (Status::TooManyBuckets, _, _) => {
            "would be refused: the namespace has its maximum number of dynamic buckets"
        }
        (Status::TooManyTokens, _, _) => {
            "would be refused: it asks for more tokens than one request may take"
        }
        (Status::Invalid, _, _) => "would be refused as invalid",
        (Status::ServerError, _, _) => {
            "would be refused: the store does not answer, and the failure policy is to deny"
        }
    };
    text.to_owned()
}

/// A number of tokens.
fn tokens(number: f64) -> String {
    count(number, "token", "tokens")
}
