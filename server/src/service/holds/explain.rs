//! Explains what a request for a hold would be answered, step by step, without making one.

use super::{
    HoldService, ReserveAnswer, ReserveQuery, Resource, answer, check_name, check_ttl,
    check_unconfigured, decide_without_store,
};
use crate::config::model::{FailurePolicy, HoldTemplate};
use crate::domain::holds::{HoldLimits, HoldOutcome, MAX_HELD, NewHold, Reservation, room};
use crate::domain::names::CallerId;
use crate::service::Error;
use crate::service::capacity::check_id;
use crate::service::explain::{Effect, Explanation, Steps, whole, why_not_enforced};
use crate::service::throttle::check_copies;
use crate::store::StoreError;
use crate::store::holds::HoldStore;

impl<S: HoldStore> HoldService<S> {
    /// Explains what a request for a new hold in a new session would be answered, whatever names the query has
    /// for them; `caller` is `None` for an unnamed caller. Makes and counts nothing. Fails where the request
    /// itself would.
    pub async fn explain(
        &self,
        query: &ReserveQuery<'_>,
        caller: Option<CallerId>,
    ) -> Result<Explanation<ReserveAnswer>, Error> {
        let ReserveQuery { resource: name, domain, .. } = *query;
        check_id("resource", name)?;
        check_id("domain", domain)?;
        for (field, name) in [("session", query.session), ("hold", query.hold)] {
            if !name.is_empty() {
                check_name(field, name)?;
            }
        }
        check_ttl("session_ttl_millis", query.ttl_ms)?;
        let (copies, min_copies) = check_copies(query.copies, query.min_copies)?;
        // No client can have a session or a hold without a name.
        let new = NewHold { session: "", ttl_ms: 0, hold: "", domain, copies, min_copies };
        let mut steps = Steps::default();
        request_step(&mut steps, name, &new);
        let snapshot = self.state.limits.current();
        let resource = Resource::find(&self.state, &snapshot, name);
        if resource.limits.is_none() {
            check_unconfigured(&snapshot, name)?;
        }
        let text = served_by(resource.limits, domain);
        steps.add("holds", Effect::Notes, text, []);
        let groups = resource.groups_of(domain);
        let limits = HoldLimits {
            bounds: resource.bounds((name, ""), self.state.clock.now()),
            ..resource.limits_of(domain, &groups)
        };
        // More than can be held are refused, and the answer tells what is held.
        let look = NewHold { copies: MAX_HELD + 1, min_copies: MAX_HELD + 1, ..new };
        let enforced = resource.is_enforced(&self.state, &snapshot);
        let target = resource.target(name, caller);
        let (decided, degraded) = match self.store.reserve(&target, &look, &limits).await {
            Ok(held) => {
                limits_steps(&mut steps, &held, &limits, min_copies);
                let limits = HoldLimits { enforced, ..limits };
                match held.outcome {
                    HoldOutcome::TooMany => (held, false),
                    _ => (held.decide(&new, &limits), false),
                }
            }
            Err(StoreError::Overloaded) => return Err(Error::Overloaded),
            Err(error) => {
                let policy = snapshot.limits.on_store_failure;
                let decided = decide_without_store(&new, &limits, policy);
                store_step(&mut steps, &error, policy, decided.granted);
                (decided, true)
            }
        };
        let outcome = decided.outcome;
        let answer = answer(decided, &new, &HoldLimits { enforced, ..limits }, degraded);
        let is_enforced = resource.limits.is_none_or(|limits| limits.enforce);
        if let Some(why) = why_not_enforced(&self.state, snapshot.limits.enforce && is_enforced) {
            let effect = if answer.shadow { Effect::Lifts } else { Effect::Notes };
            steps.add("shadow", effect, why, []);
        }
        Ok(steps.explain(summary(&answer, outcome, copies), answer))
    }
}

fn held_copies(number: u64) -> String {
    whole(number, "copy", "copies")
}

fn request_step(steps: &mut Steps, resource: &str, new: &NewHold<'_>) {
    let NewHold { domain, copies, min_copies, .. } = *new;
    let at_least = match min_copies {
        least if least == copies => String::new(),
        least => format!(", or {least} at least,"),
    };
    let asked = held_copies(copies);
    let text = format!("asks for {asked}{at_least} of {resource} for {domain}, in a new session");
    let numbers = [("copies", copies as f64), ("min_copies", min_copies as f64)];
    steps.add("request", Effect::Notes, text, numbers);
}

fn served_by(limits: Option<&HoldTemplate>, domain: &str) -> String {
    let Some(limits) = limits else {
        return "no holds are configured for the resource, and it needs none (allow_unconfigured)"
            .to_owned();
    };
    let glob = limits.glob.as_str();
    match limits.domains.contains_key(domain) {
        true => {
            format!("the limits on holds of {glob} decide, and the domain has a limit of its own")
        }
        false => format!("the limits on holds of {glob} decide"),
    }
}

/// What each of the limits decides about a request for `least` copies or more.
fn limits_steps(steps: &mut Steps, held: &Reservation, limits: &HoldLimits<'_>, least: u64) {
    if let Some(most) = limits.bounds.max_holds {
        let (effect, text) = match held.outcome {
            HoldOutcome::TooMany if limits.bounds.known_only => (
                Effect::Refuses,
                "this node knows as many sessions, on all resources of these limits",
            ),
            HoldOutcome::TooMany => (Effect::Refuses, "there are as many already"),
            _ => (Effect::Permits, "there are fewer"),
        };
        let text =
            format!("at most {most} holds, and as many sessions, at once (max_holds): {text}");
        steps.add("max_holds", effect, text, [("most", most as f64)]);
    }
    let mut limit_step = |name: &'static str, who: &str, limit: Option<u64>, held: u64| {
        let (text, most) = match limit {
            Some(most) => {
                let key = if name == "group" { String::new() } else { format!(" ({name})") };
                (format!("{who} {} of at most {most}{key}", held_copies(held)), most as f64)
            }
            None if room(limit, held) < least => (
                format!("{who} {}, and there can't be more than {MAX_HELD}", held_copies(held)),
                -1.0,
            ),
            None => (format!("{who} {}, without a limit", held_copies(held)), -1.0),
        };
        let effect = Effect::of_rule(room(limit, held) >= least);
        steps.add(name, effect, text, [("held", held as f64), ("most", most)]);
    };
    limit_step("domain_limit", "the domain holds", limits.domain, held.domain_held);
    for (group, held) in limits.groups.iter().zip(&held.groups_held) {
        let who = format!("its group {} holds", group.name);
        limit_step("group", &who, group.limit, *held);
    }
    limit_step("global_limit", "all domains hold", limits.global, held.all_held);
    if held.has_backlog {
        let text = "more sessions are over than one call frees: their copies still count";
        steps.add("backlog", Effect::Notes, text, []);
    }
}

fn store_step(steps: &mut Steps, error: &StoreError, policy: FailurePolicy, granted: u64) {
    let policy = match policy {
        FailurePolicy::Deny => "deny",
        FailurePolicy::Allow => "allow",
        FailurePolicy::Local => "local",
    };
    let (effect, text) = match granted {
        0 => (Effect::Refuses, "nothing is granted".to_owned()),
        granted => {
            (Effect::Permits, format!("the least, {}, without a record", held_copies(granted)))
        }
    };
    steps.add("store", effect, format!("{error}: {text} (on_store_failure: {policy})"), []);
}

/// The answer in a sentence.
fn summary(answer: &ReserveAnswer, outcome: HoldOutcome, copies: u64) -> String {
    let text = match answer.granted {
        0 if answer.degraded => {
            "would be refused: the store does not answer, and the failure policy grants nothing"
        }
        0 if outcome == HoldOutcome::TooMany => {
            "would be refused: there are too many holds or sessions"
        }
        0 if answer.retry_after_ms == 0 => {
            "would be refused, and never be granted: a limit is less than the least copies asked for"
        }
        0 => "would be refused until enough copies are released",
        granted if granted < copies => {
            return format!("{granted} of {} would be granted", held_copies(copies));
        }
        _ if answer.shadow => "would be granted, because the limits are not enforced",
        _ => "would be granted",
    };
    text.to_owned()
}
