//! The send loop for lease clients: one thread, a few shared connections.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::task::{self, JoinSet};
use tollgate_proto::doorman::{
    self, GetCapacityRequest, GetCapacityResponse, ReleaseCapacityRequest, ResourceRequest,
    ResourceResponse,
};
use tollgate_server::client::capacity::match_answers;

use crate::commands::capacity::fleet::{DueRefresh, Fleet, Lease};
use crate::commands::capacity::tally::Tally;
use crate::load::driver::{Failure, LeaseClient};
use crate::load::pace::Pacer;
use crate::load::tally::{LiveCounts, Window};

/// Requests sent before the loop yields, so that answers are processed.
const SENDS_PER_YIELD: u32 = 16;

/// Names of clients and resources.
#[derive(Clone, Debug)]
pub struct Names {
    /// Prefix of client names; the client number follows.
    pub clients: String,
    /// Pattern of resource names; {} stands for the resource number.
    pub resources: String,
}

impl Names {
    /// Name of client number `client`.
    pub fn client(&self, client: usize) -> String {
        format!("{}-{client}", self.clients)
    }

    /// Name of resource number `resource`.
    pub fn resource(&self, resource: usize) -> String {
        self.resources.replace("{}", &resource.to_string())
    }
}

/// Configuration of the send loop.
#[derive(Debug)]
pub struct Driver {
    /// Connections, used round-robin.
    pub connections: Vec<LeaseClient>,
    /// Names of clients and resources.
    pub names: Names,
    /// Resource names by number.
    pub resources: Vec<String>,
    /// Start and end of the run.
    pub window: Window,
    /// When demand jumps, and by what factor.
    pub jump: Option<(Duration, f64)>,
    /// Limit of unanswered requests.
    pub max_outstanding: usize,
    /// Whether latency counts from sending: clients that refresh right after each answer have no
    /// due time.
    pub closed_loop: bool,
    /// Counters of the progress line.
    pub live: Arc<LiveCounts>,
}

/// A finished request.
struct Answer {
    due_refresh: DueRefresh,
    sent: Instant,
    ended: Instant,
    result: Result<GetCapacityResponse, Failure>,
}

impl Driver {
    fn since_start(&self, at: Instant) -> Duration {
        at.saturating_duration_since(self.window.start)
    }

    fn request(&self, due_refresh: &DueRefresh) -> GetCapacityRequest {
        let resource = due_refresh.items.iter().map(|item| ResourceRequest {
            resource_id: self.resources[item.resource].clone(),
            priority: 0,
            has: item.has.map(|lease| doorman::Lease {
                expiry_time: lease.expiry_s,
                refresh_interval: lease.refresh_s,
                capacity: lease.capacity,
            }),
            wants: item.wants,
        });
        GetCapacityRequest {
            client_id: self.names.client(due_refresh.client),
            resource: resource.collect(),
        }
    }

    /// Sends the refreshes of `fleet` until the window ends, then waits for the last answers.
    pub async fn run(&self, fleet: &mut Fleet, tally: &mut Tally, pacer: &Pacer) {
        let Window { start, end, .. } = self.window;
        let mut jump = self.jump;
        let mut in_flight = JoinSet::new();
        let mut sends = 0_u32;
        loop {
            while let Some(answer) = in_flight.try_join_next() {
                self.record_answer(fleet, tally, answer);
            }
            let instant = Instant::now();
            if instant >= end {
                break;
            }
            let now = self.since_start(instant);
            if let Some((_, factor)) = jump.take_if(|(at, _)| *at <= now) {
                fleet.jump(now, factor);
            }
            let free = in_flight.len() < self.max_outstanding;
            if let Some(due_refresh) = free.then(|| fleet.due_refresh(now)).flatten() {
                self.send(due_refresh, instant, sends as usize, tally, &mut in_flight);
                sends = sends.wrapping_add(1);
                if sends.is_multiple_of(SENDS_PER_YIELD) {
                    task::yield_now().await;
                }
                continue;
            }
            fleet.close(now);
            let due_refresh = fleet.next_due().filter(|_| free);
            let next = due_refresh.into_iter().chain(jump.map(|(at, _)| at)).map(|at| start + at);
            let next = next.fold(end, Instant::min);
            tokio::select! {
                biased;
                Some(answer) = in_flight.join_next() => self.record_answer(fleet, tally, answer),
                () = pacer.until(next) => {}
            }
        }
        while let Some(answer) = in_flight.join_next().await {
            self.record_answer(fleet, tally, answer);
        }
        fleet.finish(self.since_start(Instant::now()));
    }

    fn send(
        &self,
        due_refresh: DueRefresh,
        sent: Instant,
        number: usize,
        tally: &mut Tally,
        in_flight: &mut JoinSet<Answer>,
    ) {
        tally.sent(self.due(&due_refresh, sent), sent);
        let mut connection = self.connections[number % self.connections.len()].clone();
        let request = self.request(&due_refresh);
        in_flight.spawn_local(async move {
            let result = connection.get(request).await.map_err(Failure::from);
            Answer { due_refresh, sent, ended: Instant::now(), result }
        });
    }

    fn due(&self, due_refresh: &DueRefresh, sent: Instant) -> Instant {
        if self.closed_loop { sent } else { self.window.start + due_refresh.due }
    }

    fn record_answer(
        &self,
        fleet: &mut Fleet,
        tally: &mut Tally,
        answer: Result<Answer, task::JoinError>,
    ) {
        let Answer { due_refresh, sent, ended, result } = match answer {
            Ok(answer) => answer,
            // Propagates a panic of a task instead of reporting a partial run.
            Err(error) => match error.try_into_panic() {
                Ok(panic) => std::panic::resume_unwind(panic),
                Err(_) => return,
            },
        };
        let due = self.due(&due_refresh, sent);
        let (sent, answered) = (self.since_start(sent), self.since_start(ended));
        match result {
            Ok(response) => {
                let leases = self.leases(&due_refresh, &response);
                tally.answered(due, ended, &leases, &response);
                let full =
                    due_refresh.items.iter().zip(&leases).all(|(item, lease)| {
                        lease.is_some_and(|lease| lease.capacity >= item.wants)
                    });
                self.live.decided(full);
                fleet.answered(&due_refresh, sent, answered, &leases);
            }
            Err(failure) => {
                self.live.failed();
                tally.failed(due, ended, failure);
                fleet.failed(&due_refresh, sent, answered);
            }
        }
    }

    /// The lease granted for each item of `due_refresh`; `None` if there is no answer for it.
    fn leases(
        &self,
        due_refresh: &DueRefresh,
        response: &GetCapacityResponse,
    ) -> Vec<Option<Lease>> {
        let names = due_refresh.items.iter().map(|item| self.resources[item.resource].as_str());
        let answers = match_answers(names, &response.response, |answer| &answer.resource_id);
        let lease = |answer: &ResourceResponse| Lease {
            expiry_s: answer.gets.expiry_time,
            refresh_s: answer.gets.refresh_interval,
            capacity: answer.gets.capacity,
        };
        answers.into_iter().map(|answer| answer.ok().map(lease)).collect()
    }

    /// Releases all leases that are still held. Returns the number of clients that released theirs,
    /// and the number of failures.
    pub async fn release(&self, fleet: &Fleet) -> (u64, u64) {
        let mut in_flight = JoinSet::new();
        let (mut released, mut failed) = (0, 0);
        let mut count = |result: Result<bool, task::JoinError>| match result {
            Ok(true) => released += 1,
            _ => failed += 1,
        };
        for (number, (client, held)) in fleet.holders().enumerate() {
            if in_flight.len() >= self.max_outstanding
                && let Some(result) = in_flight.join_next().await
            {
                count(result);
            }
            let mut connection = self.connections[number % self.connections.len()].clone();
            let request = ReleaseCapacityRequest {
                client_id: self.names.client(client),
                resource_id: held.iter().map(|held| self.resources[*held].clone()).collect(),
            };
            in_flight.spawn_local(async move { connection.release(request).await.is_ok() });
        }
        while let Some(result) = in_flight.join_next().await {
            count(result);
        }
        (released, failed)
    }
}

/// Shortest refresh interval of `resources`, found by a client that requests each of them with
/// wants of 0 and then releases them.
pub async fn probe(
    connection: &mut LeaseClient,
    client_id: String,
    resources: &[String],
) -> Result<Duration, Failure> {
    let wanted = resources.iter().map(|resource_id| ResourceRequest {
        resource_id: resource_id.clone(),
        priority: 0,
        has: None,
        wants: 0.0,
    });
    let request = GetCapacityRequest { client_id: client_id.clone(), resource: wanted.collect() };
    let response = connection.get(request).await?;
    let release = ReleaseCapacityRequest { client_id, resource_id: resources.to_vec() };
    // An unreleased lease expires.
    let _ = connection.release(release).await;
    let intervals = response.response.iter().map(|answer| answer.gets.refresh_interval);
    let seconds = intervals.min().and_then(|seconds| u64::try_from(seconds).ok());
    Ok(Duration::from_secs(seconds.unwrap_or(0)))
}
