//! Explains what a request for hits would be answered, step by step, without granting any.

use super::{
    HitAnswer, HitQuery, Target, ThrottleService, answer, check, check_no_holds, no_throttle,
    request_of_node,
};
use crate::config::model::{FailurePolicy, Throttle};
use crate::domain::names::CallerId;
use crate::domain::throttle::{Decision, HitLimits, Standing, Tier, TierStanding, TierState};
use crate::service::Error;
use crate::service::explain::{Effect, Explanation, Steps, time, whole, why_not_enforced};
use crate::store::StoreError;
use crate::store::throttle::{HitRequest, ThrottleStore};

impl<S: ThrottleStore> ThrottleService<S> {
    /// Explains what a request would be answered; `caller` is `None` for an unnamed caller. Grants and counts
    /// nothing. Fails where the request itself would.
    pub async fn explain(
        &self,
        query: &HitQuery<'_>,
        caller: Option<CallerId>,
    ) -> Result<Explanation<HitAnswer>, Error> {
        let (copies, min_copies) = check(query)?;
        let names = (query.resource, query.domain);
        let mut steps = Steps::default();
        request_step(&mut steps, names, copies, min_copies);
        let snapshot = self.state.limits.current();
        let Some((template, throttle)) = snapshot.limits.throttles.find(query.resource) else {
            snapshot.check_known()?;
            check_no_holds(&snapshot, query.resource)?;
            if !snapshot.limits.allows_unconfigured(query.resource) {
                return Err(no_throttle());
            }
            let text = "no throttle is configured for the resource, and it needs none (allow_unconfigured)";
            steps.add("throttle", Effect::Permits, text, []);
            let decision = Decision { granted: copies, ..Decision::default() };
            let answer = HitAnswer { decision, ..HitAnswer::default() };
            return Ok(steps.explain(summary(&answer, copies, false), answer));
        };
        steps.add("throttle", Effect::Notes, served_by(throttle, query.domain), []);
        let now = self.state.clock.now();
        let target = Target::new(&snapshot, (template, throttle), names, now);
        let request = HitRequest { caller, copies, min_copies, ..target.request };
        let mut tiers = Vec::new();
        let (standing, limits, degraded) = match self.store.look_at_hits(&request).await {
            Ok(standing) => (Ok(standing), request.limits, false),
            Err(StoreError::Overloaded) => return Err(Error::Overloaded),
            Err(error) => {
                let policy = snapshot.limits.on_store_failure;
                let of_node =
                    self.look_without_store(&mut steps, &request, policy, &error, &mut tiers);
                let (standing, limits) = of_node.await;
                (standing, limits, true)
            }
        };
        let is_by_policy = standing.is_err();
        let decision = match standing {
            Ok(mut standing) => {
                if standing.next.not_known {
                    standing.next.retry_after_us = target.room_in_us(now);
                }
                if let Some(most) = throttle.max_domains.filter(|_| target.is_counted) {
                    domains_step(&mut steps, &standing, most);
                }
                limits_steps(&mut steps, &standing, &limits, min_copies);
                standing.next
            }
            Err(decision) => decision,
        };
        let mut answer = HitAnswer { degraded, ..answer(decision, &request.limits) };
        let is_enforced = snapshot.limits.enforce && throttle.enforce;
        if let Some(why) = why_not_enforced(&self.state, is_enforced) {
            let is_lifted = answer.decision.granted < copies;
            steps.add("shadow", if is_lifted { Effect::Lifts } else { Effect::Notes }, why, []);
            if is_lifted {
                answer.lift(copies);
            }
        }
        Ok(steps.explain(summary(&answer, copies, is_by_policy), answer))
    }

    /// What this node's own hits stand at and the limits that it decides by; or what the failure policy decides.
    async fn look_without_store<'a>(
        &self,
        steps: &mut Steps,
        request: &HitRequest<'a>,
        policy: FailurePolicy,
        error: &StoreError,
        tiers: &'a mut Vec<Tier>,
    ) -> (Result<Standing, Decision>, HitLimits<'a>) {
        if let (FailurePolicy::Local, Some(fallback)) = (policy, &self.state.fallback) {
            let nodes = fallback.health.nodes();
            let request = request_of_node(request, nodes, tiers);
            if let Ok(standing) = fallback.local.look_at_hits(&request).await {
                let text = format!(
                    "{error}: this node decides by its share, one of {nodes} (on_store_failure: local)"
                );
                steps.add("store", Effect::Notes, text, [("nodes", f64::from(nodes))]);
                return (Ok(standing), request.limits);
            }
        }
        let (granted, effect, text) = match policy {
            FailurePolicy::Allow => {
                (request.copies, Effect::Permits, "granted (on_store_failure: allow)")
            }
            _ => (0, Effect::Refuses, "refused (on_store_failure: deny)"),
        };
        steps.add("store", effect, format!("{error}: every request is {text}"), []);
        (Err(Decision { granted, ..Decision::default() }), request.limits)
    }
}

fn hits(number: u64) -> String {
    whole(number, "hit", "hits")
}

/// A time, from microseconds; rounded up, as it is too early before.
fn time_of(us: i64) -> String {
    time((us + 999).div_euclid(1000))
}

fn request_step(steps: &mut Steps, (resource, domain): (&str, &str), copies: u64, least: u64) {
    let at_least = match least {
        least if least == copies => String::new(),
        least => format!(", or {least} at least,"),
    };
    let text = format!("asks for {}{at_least} on {resource} for {domain}", hits(copies));
    let numbers = [("copies", copies as f64), ("min_copies", least as f64)];
    steps.add("request", Effect::Notes, text, numbers);
}

fn served_by(throttle: &Throttle, domain: &str) -> String {
    let glob = throttle.glob.as_str();
    match throttle.domains.contains_key(domain) {
        true => format!("the throttle of {glob} decides, by the domain's own limits"),
        false => format!("the throttle of {glob} decides"),
    }
}

fn domains_step(steps: &mut Steps, standing: &Standing, most: u64) {
    let (effect, text) = match standing.next.not_known {
        true => (Effect::Refuses, "there are as many domains already, and this is none of them"),
        false => (Effect::Notes, "other domains may be refused"),
    };
    let domains = whole(most, "domain has", "domains have");
    let text = format!("at most {domains} hits at once (max_domains): {text}");
    steps.add("max_domains", effect, text, [("most", most as f64)]);
}

/// What each of the limits decides about a request for `least` hits or more.
fn limits_steps(steps: &mut Steps, standing: &Standing, limits: &HitLimits<'_>, least: u64) {
    for (name, whose, limit, had) in [
        ("hard_limit", "the domain", limits.hard, standing.domain_hits),
        ("global_limit", "all domains", limits.global, standing.all_hits),
    ] {
        let Some((limit, had)) = limit.zip(had) else { continue };
        let effect = Effect::of_rule(limit.saturating_sub(had) >= least);
        let text =
            format!("{whose} had {} in the last second; {limit} at most ({name})", hits(had));
        steps.add(name, effect, text, [("hits", had as f64), ("most", limit as f64)]);
    }
    for (number, (tier, now)) in (1..).zip(limits.tiers.iter().zip(&standing.tiers)) {
        let text = tier_text(number, standing.tier, tier, now);
        let numbers =
            [("tier", number as f64), ("hits", now.hits as f64), ("most", tier.limit as f64)];
        steps.add("tier", Effect::Notes, text, numbers);
    }
    let room = standing.room(limits.tiers);
    let text = match limits.tiers {
        [] => "there are no tiers, and without any, nothing is granted".to_owned(),
        _ => format!("the tiers have room for {}", hits(room)),
    };
    steps.add("tiers", Effect::of_rule(room >= least), text, [("room", room as f64)]);
}

fn tier_text(number: usize, current: usize, tier: &Tier, now: &TierStanding) -> String {
    let window = time_of(tier.window_us);
    let ends = now.ends_us.map(time_of).unwrap_or_default();
    let most = format!("{} in {window}", hits(tier.limit));
    let if_closed = if tier.skippable { "is passed by" } else { "bars those above it" };
    match now.state {
        _ if number < current => format!("tier {number} is below the current one"),
        TierState::Active => {
            format!("tier {number} is active for another {ends}, with {} of {most}", now.hits)
        }
        _ if tier.limit == 0 => format!("tier {number} grants nothing, and {if_closed}"),
        TierState::Cooling => {
            format!("tier {number} is cooling down for another {ends}, and {if_closed}")
        }
        TierState::Inactive => format!("tier {number} can be entered: {most}"),
    }
}

/// The answer in a sentence.
fn summary(answer: &HitAnswer, copies: u64, is_by_policy: bool) -> String {
    let text = match (answer.decision.granted, answer.decision.retry_after_us) {
        (0, Some(us)) => {
            let time = time_of(us);
            return format!("would be refused; it could be granted in {time} if nobody else asks");
        }
        (0, None) if is_by_policy => {
            "would be refused: the store does not answer, and the failure policy is to deny"
        }
        (0, None) => "would be refused, and never be granted: the limits never have so much room",
        (granted, _) if granted < copies => {
            return format!("{granted} of {} would be granted", hits(copies));
        }
        _ if answer.shadow => "would be granted, because the limits are not enforced",
        _ => "would be granted",
    };
    text.to_owned()
}
