//! The leases of clients, kept as an application keeps them: refreshed in time and dropped at
//! expiry. Has no I/O and no clock: times and answers are passed in.

use std::collections::BTreeMap;
use std::time::Duration;

use tokio::time::Instant;
use tollgate_proto::doorman::{Lease, ResourceRequest, ResourceResponse};

/// Delay before a retry after a failed request.
const RETRY: Duration = Duration::from_secs(1);

/// Upper limit of scheduled delays, in seconds, so that adding times cannot overflow.
const MAX_DELAY_S: u64 = 24 * 60 * 60;

/// One moment on two clocks.
#[derive(Clone, Copy, Debug)]
pub struct Now {
    /// Monotonic, for timers.
    pub at: Instant,
    /// Seconds since the epoch, for lease expiry.
    pub epoch_s: i64,
}

impl Now {
    /// `seconds` from now, at least 1, so that no node is asked in a busy loop.
    fn after_s(self, seconds: i64) -> Instant {
        let seconds = u64::try_from(seconds).unwrap_or_default().clamp(1, MAX_DELAY_S);
        self.at + Duration::from_secs(seconds)
    }
}

/// What a client wants and holds of one resource.
#[derive(Debug)]
pub struct LeaseState {
    /// The capacity last requested.
    pub wants: f64,
    /// `None` before the first answer and after expiry.
    lease: Option<Lease>,
    /// Capacity that may be used without a lease; `None` if no node has said.
    pub safe: Option<f64>,
    /// When the store of the last answer ends learning, in seconds since the epoch.
    pub learning_until_s: Option<i64>,
    /// The last answer was decided without the shared store.
    pub degraded: bool,
    /// The last request failed.
    pub failing: bool,
    /// When to send the next request.
    due: Instant,
}

impl LeaseState {
    /// The lease, unless it has expired.
    pub fn has(&self, now_s: i64) -> Option<Lease> {
        self.lease.filter(|lease| lease.expiry_time > now_s)
    }
}

/// Client id and resource id.
type Key = (String, String);

/// What each client wants and holds, by client and resource.
#[derive(Debug, Default)]
pub struct Leases(BTreeMap<Key, LeaseState>);

impl Leases {
    /// The request for `wants`, which reports the lease already held.
    pub fn request(&self, client: &str, resource: &str, wants: f64, now: Now) -> ResourceRequest {
        let has = self.get(client, resource).and_then(|held| held.has(now.epoch_s));
        ResourceRequest { resource_id: resource.to_owned(), priority: 0, has, wants }
    }

    /// Stores an answer. Returns whether it differs from the previous one.
    pub fn on_answer(
        &mut self,
        client: &str,
        wants: f64,
        answer: &ResourceResponse,
        now: Now,
    ) -> bool {
        let key = (client.to_owned(), answer.resource_id.clone());
        let before = self.0.get(&key);
        let held = LeaseState {
            wants,
            lease: Some(answer.gets),
            safe: answer.safe_capacity,
            learning_until_s: answer.learning_until,
            degraded: answer.degraded(),
            failing: false,
            due: now.after_s(answer.gets.refresh_interval),
        };
        let visible = |held: &LeaseState| {
            let capacity = held.lease.map(|lease| lease.capacity);
            (capacity, held.learning_until_s.is_some(), held.degraded, held.failing)
        };
        let changed = before.map(visible) != Some(visible(&held));
        self.0.insert(key, held);
        changed
    }

    /// Records a failed request. Returns whether it is the first failure in a row. A held lease
    /// stays until it expires.
    pub fn on_failure(&mut self, client: &str, resource: &str, wants: f64, now: Now) -> bool {
        let key = (client.to_owned(), resource.to_owned());
        let held = self.0.entry(key).or_insert(LeaseState {
            wants,
            lease: None,
            safe: None,
            learning_until_s: None,
            degraded: false,
            failing: false,
            due: now.at,
        });
        held.wants = wants;
        held.due = now.at + RETRY;
        !std::mem::replace(&mut held.failing, true)
    }

    /// Drops expired leases and returns them, each with its client and resource.
    pub fn expire(&mut self, now: Now) -> Vec<(&str, &str, &LeaseState)> {
        let mut expired = Vec::new();
        for ((client, resource), held) in &mut self.0 {
            if held.lease.is_some() && held.has(now.epoch_s).is_none() {
                held.lease = None;
                expired.push((client.as_str(), resource.as_str(), &*held));
            }
        }
        expired
    }

    /// The requests that are due now, by client.
    pub fn due_requests(&self, now: Now) -> BTreeMap<String, Vec<ResourceRequest>> {
        let mut due = BTreeMap::<String, Vec<_>>::new();
        for ((client, resource), held) in self.0.iter().filter(|(_, held)| held.due <= now.at) {
            let request = self.request(client, resource, held.wants, now);
            due.entry(client.clone()).or_default().push(request);
        }
        due
    }

    /// When the next request is due or the next lease expires.
    pub fn next_wake(&self, now: Now) -> Option<Instant> {
        let moments = self.0.values().map(|held| match held.lease {
            Some(lease) => held.due.min(now.after_s(lease.expiry_time.saturating_sub(now.epoch_s))),
            None => held.due,
        });
        moments.min()
    }

    /// The state of one client's lease on one resource; `None` if it was never requested.
    pub fn get(&self, client: &str, resource: &str) -> Option<&LeaseState> {
        self.0.get(&(client.to_owned(), resource.to_owned()))
    }

    /// All leases, with client and resource, ordered by these.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &str, &LeaseState)> {
        self.0.iter().map(|((client, resource), held)| (client.as_str(), resource.as_str(), held))
    }

    /// The resources of each client.
    pub fn by_client(&self) -> BTreeMap<String, Vec<String>> {
        let mut all = BTreeMap::<String, Vec<_>>::new();
        for (client, resource) in self.0.keys() {
            all.entry(client.clone()).or_default().push(resource.clone());
        }
        all
    }

    /// Removes released resources.
    pub fn forget(&mut self, client: &str, resources: &[String]) {
        self.0.retain(|(name, resource), _| name != client || !resources.contains(resource));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// 2026-02-14T13:58:20Z
    const START_S: i64 = 1_771_077_500;

    struct Clock(Instant);

    impl Clock {
        fn new() -> Self {
            Self(Instant::now())
        }

        /// `seconds` after the start.
        fn at(&self, seconds: u32) -> Now {
            let at = self.0 + Duration::from_secs(seconds.into());
            Now { at, epoch_s: START_S + i64::from(seconds) }
        }
    }

    /// An answer with a refresh interval of 5 s that expires `expires_s` after the start.
    fn answer(resource: &str, capacity: f64, expires_s: i64) -> ResourceResponse {
        ResourceResponse {
            resource_id: resource.to_owned(),
            gets: Lease { expiry_time: START_S + expires_s, refresh_interval: 5, capacity },
            safe_capacity: Some(2.5),
            ..ResourceResponse::default()
        }
    }

    fn asked(leases: &Leases, now: Now) -> Vec<(String, f64, Option<f64>)> {
        let due = leases.due_requests(now).into_values().flatten();
        due.map(|r| (r.resource_id, r.wants, r.has.map(|lease| lease.capacity))).collect()
    }

    #[test]
    fn refresh_reports_the_held_lease() {
        let (clock, mut leases) = (Clock::new(), Leases::default());
        assert_eq!(leases.next_wake(clock.at(0)), None);
        assert!(leases.on_answer("a", 100.0, &answer("db", 60.0, 20), clock.at(0)));
        assert_eq!(leases.next_wake(clock.at(0)), Some(clock.at(5).at));
        assert_eq!(asked(&leases, clock.at(4)), []);
        assert_eq!(asked(&leases, clock.at(5)), [("db".to_owned(), 100.0, Some(60.0))]);
        // An equal answer is no change; another capacity is.
        assert!(!leases.on_answer("a", 100.0, &answer("db", 60.0, 25), clock.at(5)));
        assert_eq!(leases.next_wake(clock.at(5)), Some(clock.at(10).at));
        assert!(leases.on_answer("a", 100.0, &answer("db", 50.0, 30), clock.at(10)));
        assert_eq!(leases.get("a", "db").unwrap().has(START_S + 11).unwrap().capacity, 50.0);
        // Two clients, two resources.
        assert!(leases.on_answer("b", 1.0, &answer("db", 1.0, 30), clock.at(10)));
        assert!(leases.on_answer("b", 2.0, &answer("api", 2.0, 30), clock.at(12)));
        assert_eq!(asked(&leases, clock.at(15)).len(), 2);
        assert_eq!(leases.due_requests(clock.at(17)).len(), 2);
        assert_eq!(leases.due_requests(clock.at(17))["b"].len(), 2);
        assert_eq!(leases.by_client()["b"], ["api", "db"]);
        leases.forget("b", &["api".to_owned(), "none".to_owned()]);
        assert_eq!(leases.by_client()["b"], ["db"]);
        assert_eq!(leases.by_client().len(), 2);
    }

    #[test]
    fn expired_lease_is_dropped() {
        let (clock, mut leases) = (Clock::new(), Leases::default());
        leases.on_answer("a", 100.0, &answer("db", 60.0, 8), clock.at(0));
        // The node is down: one request a second, one message, and the lease holds until it
        // expires.
        assert!(leases.on_failure("a", "db", 100.0, clock.at(5)));
        assert!(!leases.on_failure("a", "db", 100.0, clock.at(6)));
        assert_eq!(leases.next_wake(clock.at(6)), Some(clock.at(7).at));
        assert!(leases.expire(clock.at(7)).is_empty());
        assert_eq!(asked(&leases, clock.at(7)), [("db".to_owned(), 100.0, Some(60.0))]);
        assert!(leases.get("a", "db").unwrap().failing);
        leases.on_failure("a", "db", 100.0, clock.at(7));
        assert_eq!(asked(&leases, clock.at(8)), [("db".to_owned(), 100.0, None)]);
        let dropped = leases.expire(clock.at(8));
        assert!(matches!(&*dropped, [("a", "db", held)] if held.safe == Some(2.5)), "{dropped:?}");
        assert!(leases.expire(clock.at(9)).is_empty());
        assert_eq!(leases.get("a", "db").unwrap().has(0), None);
        // An equal grant after an expiry counts as a change.
        assert!(leases.on_answer("a", 100.0, &answer("db", 60.0, 30), clock.at(10)));
    }

    #[test]
    fn wakes_at_expiry_without_due_requests() {
        let (clock, mut leases) = (Clock::new(), Leases::default());
        let mut late = answer("db", 60.0, 3);
        late.gets.refresh_interval = i64::MAX;
        leases.on_answer("a", 1.0, &late, clock.at(0));
        assert_eq!(leases.next_wake(clock.at(0)), Some(clock.at(3).at));
        assert_eq!(leases.expire(clock.at(3)).len(), 1);
        assert_eq!(leases.next_wake(clock.at(3)), Some(clock.at(86_400).at));
        // An interval below 1 s is raised to 1 s.
        late.gets = Lease { refresh_interval: -1, expiry_time: i64::MIN, capacity: 1.0 };
        leases.on_answer("a", 1.0, &late, clock.at(4));
        assert_eq!(leases.next_wake(clock.at(4)), Some(clock.at(5).at));
    }

    #[test]
    fn client_without_any_answer() {
        let (clock, mut leases) = (Clock::new(), Leases::default());
        assert!(leases.on_failure("a", "db", 7.0, clock.at(0)));
        assert_eq!(leases.next_wake(clock.at(0)), Some(clock.at(1).at));
        assert_eq!(asked(&leases, clock.at(1)), [("db".to_owned(), 7.0, None)]);
        assert_eq!(leases.get("a", "db").unwrap().has(START_S), None);
        assert!(leases.get("b", "db").is_none());
    }

    #[test]
    fn end_of_learning_is_a_change() {
        let (clock, mut leases) = (Clock::new(), Leases::default());
        let learning =
            ResourceResponse { learning_until: Some(START_S + 60), ..answer("db", 0.0, 20) };
        leases.on_answer("a", 10.0, &learning, clock.at(0));
        assert!(leases.on_answer("a", 10.0, &answer("db", 0.0, 80), clock.at(60)));
    }
}
