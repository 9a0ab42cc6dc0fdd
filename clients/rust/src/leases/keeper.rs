//! The task that keeps the leases of a client: asks for them, refreshes all in one call at the
//! interval that the nodes say, and releases them.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, timeout_at};
use tollgate_proto::doorman::{
    GetCapacityRequest, GetCapacityResponse, ReleaseCapacityRequest, ReleaseCapacityResponse,
    ResourceRequest, ResourceResponse,
};

use super::desk::{Desk, Stock};
use super::kept::{Kept, Now};
use super::resource::Resource;
use crate::backend::Backend;
use crate::decision::{Error, NoAnswer};
use crate::metrics;

/// How long an answer may take.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(2);

/// The pause after a refresh that has failed, and the least interval between two.
const RETRY: Duration = Duration::from_secs(1);

/// The least time between two calls when a handle is in a hurry.
const LEAST_PAUSE: Duration = Duration::from_millis(100);

/// The longest time between two refreshes.
const LONGEST_INTERVAL: Duration = Duration::from_secs(60 * 60);

/// When those that the nodes refuse to lease are asked for again.
const REFUSED_PAUSE: Duration = Duration::from_secs(30);

/// After so many calls for one refresh or release, groups that are refused are not split any more.
const MOST_CALLS: usize = 100;

/// How often demand is measured.
const SECOND: Duration = Duration::from_secs(1);

/// Who leases: nodes, or a fake.
pub(super) trait Lessor: Clone + Send + Sync {
    fn get_capacity(
        &self,
        request: &GetCapacityRequest,
        deadline: Instant,
    ) -> impl Future<Output = Result<GetCapacityResponse, Error>> + Send;

    fn release_capacity(
        &self,
        request: &ReleaseCapacityRequest,
        deadline: Instant,
    ) -> impl Future<Output = Result<ReleaseCapacityResponse, Error>> + Send;
}

impl Lessor for Arc<Backend> {
    async fn get_capacity(
        &self,
        request: &GetCapacityRequest,
        deadline: Instant,
    ) -> Result<GetCapacityResponse, Error> {
        match &**self {
            Backend::Nodes(nodes) => nodes.get_capacity(request, deadline).await,
            Backend::Fake(fake) => fake.get_capacity(request),
        }
    }

    async fn release_capacity(
        &self,
        request: &ReleaseCapacityRequest,
        deadline: Instant,
    ) -> Result<ReleaseCapacityResponse, Error> {
        match &**self {
            Backend::Nodes(nodes) => nodes.release_capacity(request, deadline).await,
            Backend::Fake(_) => Ok(ReleaseCapacityResponse::default()),
        }
    }
}

/// Makes the calls, in the name of the client.
#[derive(Clone)]
pub(super) struct Caller<L> {
    pub(super) lessor: L,
    pub(super) client_id: String,
}

impl<L: Lessor> Caller<L> {
    async fn get(&self, resource: Vec<ResourceRequest>) -> Result<GetCapacityResponse, Error> {
        let request = GetCapacityRequest { client_id: self.client_id.clone(), resource };
        self.lessor.get_capacity(&request, Instant::now() + ANSWER_TIMEOUT).await
    }

    /// Releases leases. If the nodes refuse the call because of a resource, releases each half.
    async fn release(&self, gone: Vec<String>) {
        for id in &gone {
            metrics::lease(id, 0.0, 0.0);
        }
        let mut groups = vec![gone];
        for _ in 0..MOST_CALLS {
            let Some(mut group) = groups.pop() else { return };
            if group.is_empty() {
                continue;
            }
            let request = ReleaseCapacityRequest {
                client_id: self.client_id.clone(),
                resource_id: group.clone(),
            };
            let deadline = Instant::now() + ANSWER_TIMEOUT;
            let Err(error) = self.lessor.release_capacity(&request, deadline).await else {
                continue;
            };
            tracing::debug!(%error, "leases are not released, and end when they expire");
            if !is_refused(&error) {
                return;
            }
            if group.len() > 1 {
                let half = group.split_off(group.len() / 2);
                groups.extend([half, group]);
            }
        }
    }
}

pub(super) struct Keeper<L> {
    caller: Caller<L>,
    desk: Arc<Desk>,
    kept: Vec<Kept>,
    /// When the present second of demand began.
    second: Instant,
    next_refresh: Instant,
    /// When the last call for leases was made.
    last_call: Option<Instant>,
    /// When those that the nodes refuse to lease are asked for again, all together.
    refused_until: Instant,
    is_failing: bool,
    /// The desk knows that the task ends.
    has_ended: bool,
}

impl<L> Drop for Keeper<L> {
    /// Also when the runtime has ended.
    fn drop(&mut self) {
        if !self.has_ended {
            self.desk.task_has_ended();
        }
    }
}

impl<L: Lessor> Keeper<L> {
    pub(super) fn new(caller: Caller<L>, desk: Arc<Desk>) -> Self {
        let now = Instant::now();
        Self {
            caller,
            desk,
            kept: Vec::new(),
            second: now,
            next_refresh: now,
            last_call: None,
            refused_until: now,
            is_failing: false,
            has_ended: false,
        }
    }

    /// Runs until no handle is left, or the client is closed.
    pub(super) async fn run(mut self) {
        loop {
            let gone = match self.desk.stock(!self.kept.is_empty()) {
                Stock::Live(live) => self.take(live),
                Stock::Ended => {
                    self.has_ended = true;
                    return;
                }
                Stock::Closed => {
                    let all = self.kept.iter().filter_map(Kept::to_release).collect();
                    self.caller.release(all).await;
                    return;
                }
            };
            self.measure();
            let caller = self.caller.clone();
            // At the same time, as they are of different resources.
            tokio::join!(caller.release(gone), self.refresh());
            let mut wake = self.next_refresh.min(self.second + SECOND);
            if self.kept.iter().any(Kept::is_urgent) {
                wake = wake.min(self.soon());
            }
            let _ = timeout_at(wake, self.desk.bell.notified()).await;
        }
    }

    /// Begins to keep new resources. Returns those that have no handle any more.
    fn take(&mut self, live: Vec<Arc<Resource>>) -> Vec<String> {
        let live_ones: HashSet<_> = live.iter().map(Arc::as_ptr).collect();
        let (kept, gone): (Vec<_>, Vec<_>) =
            self.kept.drain(..).partition(|kept| live_ones.contains(&Arc::as_ptr(&kept.resource)));
        // One that has another handle already is asked for instead.
        let names: HashSet<_> = live.iter().map(|one| &*one.id).collect();
        let gone = gone.iter().filter_map(Kept::to_release);
        let gone = gone.filter(|id| !names.contains(&**id)).collect();
        let known: HashSet<_> = kept.iter().map(|kept| Arc::as_ptr(&kept.resource)).collect();
        let new = live.into_iter().filter(|one| !known.contains(&Arc::as_ptr(one)));
        self.kept = kept.into_iter().chain(new.map(Kept::new)).collect();
        gone
    }

    /// Measures the demand once a second.
    fn measure(&mut self) {
        let elapsed = self.second.elapsed();
        if elapsed >= SECOND {
            for kept in &mut self.kept {
                kept.measure(elapsed.as_secs_f64());
            }
            self.second = Instant::now();
        }
    }

    /// When what is urgent may be asked for, all in one call.
    fn soon(&self) -> Instant {
        let pause = if self.is_failing { RETRY } else { LEAST_PAUSE };
        self.last_call.map_or_else(Instant::now, |at| at + pause)
    }

    /// Asks for all resources in one call if it is time to, else for those that can't wait.
    async fn refresh(&mut self) {
        let (soon, now) = (self.soon(), Instant::now());
        let is_time = now >= self.next_refresh;
        let may_ask_refused = now >= self.refused_until;
        let is_due = |kept: &&mut Kept| {
            (is_time && (may_ask_refused || !kept.is_refused)) || (now >= soon && kept.is_urgent())
        };
        // Taken out meanwhile, as asking changes the keeper, too.
        let mut kept = std::mem::take(&mut self.kept);
        let due: Vec<_> = kept.iter_mut().filter(is_due).collect();
        if due.is_empty() && !is_time {
            self.kept = kept;
            return;
        }
        let refreshed = self.ask(due).await;
        self.kept = kept;
        self.schedule(*refreshed.as_ref().unwrap_or(&RETRY), is_time);
        if let Err(error) = &refreshed {
            metrics::refresh_failed();
            if !self.is_failing {
                tracing::warn!(%error, "leases are not refreshed; tried again every second");
            }
        }
        self.is_failing = refreshed.is_err();
    }

    /// Sets the time of the next refresh of all, after one of all or of some.
    fn schedule(&mut self, interval: Duration, was_all: bool) {
        let (now, interval) = (Instant::now(), interval.clamp(RETRY, LONGEST_INTERVAL));
        // Those who began together do not stay together.
        let mut next = now + interval.mul_f64(rand::random_range(0.9..=1.0));
        if self.kept.iter().any(|kept| kept.is_refused) {
            next = next.min(self.refused_until);
        }
        self.next_refresh =
            if was_all { next.max(now + RETRY) } else { next.min(self.next_refresh) };
    }

    /// Asks for these resources in one call. If the nodes refuse the call because of a resource,
    /// asks for each half, so that the others get their leases. Returns the time until the next
    /// refresh.
    async fn ask(&mut self, due: Vec<&mut Kept>) -> Result<Duration, Error> {
        // Those that were refused before may be again, and are not asked for with the others.
        let (refused, others) = due.into_iter().partition(|kept| kept.is_refused);
        let mut groups: Vec<Vec<_>> = vec![refused, others];
        let mut result = Ok(LONGEST_INTERVAL);
        let mut calls = 0;
        while let Some(mut group) = groups.pop() {
            if group.is_empty() {
                continue;
            }
            // No node answers: they are not asked again and again.
            if result.is_err() {
                group.into_iter().for_each(Kept::not_answered);
                continue;
            }
            let (now, seconds) = (Now::read(), self.second.elapsed().as_secs_f64());
            let request = group.iter_mut().map(|kept| kept.request(seconds, now)).collect();
            self.last_call = Some(now.at);
            let answer = self.caller.get(request).await;
            calls += 1;
            match answer {
                Ok(answer) => {
                    let interval = take_answers(group, &answer, Now::read());
                    result = result.map(|least| interval.min(least));
                }
                Err(error) if is_refused(&error) => {
                    if group.len() > 1 && calls < MOST_CALLS {
                        let half = group.split_off(group.len() / 2);
                        groups.extend([half, group]);
                    } else if group.len() > 1 && !group[0].is_refused {
                        // Not all of them may be refused. The others of the group will be found at
                        // the next refreshes.
                        group.into_iter().for_each(Kept::not_answered);
                        result = Ok(RETRY);
                    } else {
                        self.take_refusal(group, &error);
                    }
                }
                Err(Error::NoDecision(NoAnswer::Unreachable)) => {
                    group.into_iter().for_each(Kept::not_answered);
                    result = Err(Error::NoDecision(NoAnswer::Unreachable));
                }
                Err(error) => {
                    group.into_iter().for_each(Kept::maybe_answered);
                    result = Err(error);
                }
            }
        }
        result
    }

    /// Leaves resources alone for a while that the nodes refuse to lease.
    fn take_refusal(&mut self, group: Vec<&mut Kept>, error: &Error) {
        let now = Instant::now();
        if now >= self.refused_until {
            self.refused_until = now + REFUSED_PAUSE;
        }
        for kept in group {
            let resource = &kept.resource.id;
            tracing::warn!(resource, %error, "the nodes refuse to lease a resource");
            kept.refused();
        }
    }
}

/// Whether the request is wrong, or not allowed; it will be the next time.
fn is_refused(error: &Error) -> bool {
    matches!(error, Error::Invalid(_) | Error::NoDecision(NoAnswer::Forbidden(_)))
}

/// Gives each resource its answer. Returns the time until the next refresh.
fn take_answers(group: Vec<&mut Kept>, answer: &GetCapacityResponse, now: Now) -> Duration {
    let mut answers: HashMap<&str, Option<&ResourceResponse>> = HashMap::new();
    for answer in &answer.response {
        // A node that answers twice for a resource has not answered.
        answers
            .entry(&*answer.resource_id)
            .and_modify(|known| *known = None)
            .or_insert(Some(answer));
    }
    let mut interval = LONGEST_INTERVAL;
    for kept in group {
        match answers.get(&*kept.resource.id) {
            Some(Some(answer)) => {
                let seconds = answer.gets.refresh_interval.try_into().unwrap_or(0);
                interval = interval.min(Duration::from_secs(seconds));
                kept.answered(answer, now);
            }
            _ => {
                interval = RETRY;
                kept.not_answered();
            }
        }
    }
    interval
}
