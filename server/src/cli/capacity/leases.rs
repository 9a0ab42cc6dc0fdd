//! The leases of some clients, kept as a real client keeps its own: refreshed in time, and
//! gone once expired. What time it is, and what a node answers, is handed in.

use std::collections::BTreeMap;
use std::time::Duration;

use tokio::time::Instant;
use tollgate_proto::doorman::{Lease, ResourceRequest, ResourceResponse};

use super::get::verdict;
use crate::cli::text::{self, NOTHING, Table, left, number, rounded, shown};
use crate::service::capacity::NO_BOUND;

/// How soon to ask again who did not answer.
const RETRY: Duration = Duration::from_secs(1);

/// Nothing is planned further ahead, so that no sum of times overflows.
const HORIZON_S: u64 = 24 * 60 * 60;

/// One moment: for timers, and in seconds since the epoch as leases count.
#[derive(Clone, Copy, Debug)]
pub(super) struct Now {
    /// For timers.
    pub(super) at: Instant,
    /// For leases.
    pub(super) epoch_s: i64,
}

impl Now {
    /// The time on this machine.
    pub(super) fn read() -> Self {
        Self { at: Instant::now(), epoch_s: text::now_s() }
    }

    /// When that many seconds have passed: 1 at least, lest somebody be asked without pause.
    fn after_s(self, seconds: i64) -> Instant {
        let seconds = u64::try_from(seconds).unwrap_or_default().clamp(1, HORIZON_S);
        self.at + Duration::from_secs(seconds)
    }
}

/// A client and a resource.
type Key = (String, String);

struct Held {
    wants: f64,
    /// None before the first answer, and once expired.
    lease: Option<Lease>,
    safe: Option<f64>,
    learning_until_s: Option<i64>,
    degraded: bool,
    /// The last question was not answered.
    failing: bool,
    /// When to ask again.
    due: Instant,
}

impl Held {
    /// The lease, unless it has expired.
    fn has(&self, now_s: i64) -> Option<Lease> {
        self.lease.filter(|lease| lease.expiry_time > now_s)
    }
}

/// What the clients want and hold.
#[derive(Default)]
pub(super) struct Leases(BTreeMap<Key, Held>);

impl Leases {
    /// The question for so much, with what is held already.
    pub(super) fn request(&self, key: &Key, wants: f64, now: Now) -> ResourceRequest {
        let has = self.0.get(key).and_then(|held| held.has(now.epoch_s));
        ResourceRequest { resource_id: key.1.clone(), priority: 0, has, wants }
    }

    /// Notes an answer, and tells whether it differs from the one before.
    pub(super) fn granted(
        &mut self,
        client: &str,
        wants: f64,
        answer: &ResourceResponse,
        now: Now,
    ) -> bool {
        let key = (client.to_owned(), answer.resource_id.clone());
        let before = self.0.get(&key);
        let held = Held {
            wants,
            lease: Some(answer.gets),
            safe: answer.safe_capacity,
            learning_until_s: answer.learning_until,
            degraded: answer.degraded(),
            failing: false,
            due: now.after_s(answer.gets.refresh_interval),
        };
        let seen = |held: &Held| {
            let capacity = held.lease.map(|lease| lease.capacity);
            (capacity, held.learning_until_s.is_some(), held.degraded, held.failing)
        };
        let changed = before.map(seen) != Some(seen(&held));
        self.0.insert(key, held);
        changed
    }

    /// Notes that nobody answered, and tells whether that is new. What is held stays as it is
    /// until it expires.
    pub(super) fn unanswered(
        &mut self,
        client: &str,
        resource: &str,
        wants: f64,
        now: Now,
    ) -> bool {
        let key = (client.to_owned(), resource.to_owned());
        let held = self.0.entry(key).or_insert(Held {
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

    /// Drops the leases that have expired, and gives a line for each.
    pub(super) fn expire(&mut self, now: Now) -> Vec<String> {
        let mut lines = Vec::new();
        for ((client, resource), held) in &mut self.0 {
            if held.lease.is_some() && held.has(now.epoch_s).is_none() {
                held.lease = None;
                lines.push(format!(
                    "{} {}: the lease has expired, {}",
                    shown(client),
                    shown(resource),
                    without_a_lease(held.safe)
                ));
            }
        }
        lines
    }

    /// The questions to ask now, by client.
    pub(super) fn due(&self, now: Now) -> BTreeMap<String, Vec<ResourceRequest>> {
        let mut due = BTreeMap::<String, Vec<_>>::new();
        for (key, held) in self.0.iter().filter(|(_, held)| held.due <= now.at) {
            due.entry(key.0.clone()).or_default().push(self.request(key, held.wants, now));
        }
        due
    }

    /// When there is next something to ask, or a lease to expire.
    pub(super) fn wake(&self, now: Now) -> Option<Instant> {
        let moments = self.0.values().map(|held| match held.lease {
            Some(lease) => held.due.min(now.after_s(lease.expiry_time.saturating_sub(now.epoch_s))),
            None => held.due,
        });
        moments.min()
    }

    /// Every client with its resources.
    pub(super) fn all(&self) -> BTreeMap<String, Vec<String>> {
        let mut all = BTreeMap::<String, Vec<_>>::new();
        for (client, resource) in self.0.keys() {
            all.entry(client.clone()).or_default().push(resource.clone());
        }
        all
    }

    /// Forgets what was given back.
    pub(super) fn forget(&mut self, client: &str, resources: &[String]) {
        self.0.retain(|(name, resource), _| name != client || !resources.contains(resource));
    }

    /// What one client gets of one resource, on a line.
    pub(super) fn line(&self, client: &str, resource: &str, now: Now) -> String {
        let name = format!("{} {}", shown(client), shown(resource));
        let Some(held) = self.0.get(&(client.to_owned(), resource.to_owned())) else {
            return format!("{name}: not asked for");
        };
        let Some(lease) = held.has(now.epoch_s) else {
            return format!("{name}: no lease, {}", without_a_lease(held.safe));
        };
        let mut line = format!("{name}: {}", verdict(lease.capacity, held.wants).1);
        if let Some(left) = left(lease.expiry_time, now.epoch_s) {
            line += &format!("; expires in {left}, asked again every {} s", lease.refresh_interval);
        }
        if let Some(until) = held.learning_until_s {
            let left =
                left(until, now.epoch_s).map_or(String::new(), |left| format!(" for {left} more"));
            line += &format!("; the store is learning{left}: it gets what it says it has");
        }
        if held.degraded {
            line += "; decided without the shared store: it keeps what it says it has";
        }
        line
    }

    /// All clients and what they hold.
    pub(super) fn table(&self, now: Now) -> String {
        if self.0.is_empty() {
            return "nobody has asked for anything here yet\n".to_owned();
        }
        let mut table = Table::new(&[
            ("client", false),
            ("resource", false),
            ("wants", true),
            ("has", true),
            ("expires in", true),
            ("state", false),
        ]);
        for ((client, resource), held) in &self.0 {
            let lease = held.has(now.epoch_s);
            let expires = lease.and_then(|lease| left(lease.expiry_time, now.epoch_s));
            table.row(vec![
                shown(client),
                shown(resource),
                rounded(held.wants),
                rounded(lease.map_or(0.0, |lease| lease.capacity)),
                expires.unwrap_or_else(|| NOTHING.to_owned()),
                state(held, now.epoch_s),
            ]);
        }
        table.to_string()
    }
}

fn state(held: &Held, now_s: i64) -> String {
    let mut words = Vec::new();
    if held.has(now_s).is_none() {
        words.push(format!("no lease, {}", without_a_lease(held.safe)));
    } else {
        if let Some(left) = held.learning_until_s.and_then(|until| left(until, now_s)) {
            words.push(format!("learning, {left} more"));
        }
        if held.degraded {
            words.push("degraded".to_owned());
        }
    }
    if held.failing {
        words.push("no answer".to_owned());
    }
    words.join("; ")
}

/// What is left to a client whose lease is gone.
fn without_a_lease(safe: Option<f64>) -> String {
    match safe {
        Some(NO_BOUND) => "and any amount may be used without one".to_owned(),
        Some(safe) => format!("and {} may be used without one", number(safe)),
        None => "and nothing may be used".to_owned(),
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

        /// So many seconds after the start.
        fn at(&self, seconds: u32) -> Now {
            let at = self.0 + Duration::from_secs(seconds.into());
            Now { at, epoch_s: START_S + i64::from(seconds) }
        }
    }

    /// A lease that is asked for again every 5 seconds, and lasts until then.
    fn answer(resource: &str, capacity: f64, expires_s: i64) -> ResourceResponse {
        ResourceResponse {
            resource_id: resource.to_owned(),
            gets: Lease { expiry_time: START_S + expires_s, refresh_interval: 5, capacity },
            safe_capacity: Some(2.5),
            ..ResourceResponse::default()
        }
    }

    fn asked(leases: &Leases, now: Now) -> Vec<(String, f64, Option<f64>)> {
        let due = leases.due(now).into_values().flatten();
        due.map(|r| (r.resource_id, r.wants, r.has.map(|lease| lease.capacity))).collect()
    }

    #[test]
    fn a_lease_is_refreshed_with_what_is_held() {
        let (clock, mut leases) = (Clock::new(), Leases::default());
        assert_eq!(leases.wake(clock.at(0)), None);
        assert!(leases.granted("a", 100.0, &answer("db", 60.0, 20), clock.at(0)));
        assert_eq!(leases.wake(clock.at(0)), Some(clock.at(5).at));
        assert_eq!(asked(&leases, clock.at(4)), []);
        assert_eq!(asked(&leases, clock.at(5)), [("db".to_owned(), 100.0, Some(60.0))]);
        // The same again is no news; another share is.
        assert!(!leases.granted("a", 100.0, &answer("db", 60.0, 25), clock.at(5)));
        assert_eq!(leases.wake(clock.at(5)), Some(clock.at(10).at));
        assert!(leases.granted("a", 100.0, &answer("db", 50.0, 30), clock.at(10)));
        assert_eq!(
            leases.line("a", "db", clock.at(11)),
            "a db: gets 50 of the 100 that it wants; expires in 19 s, asked again every 5 s"
        );
        // Two clients of two resources.
        assert!(leases.granted("b", 1.0, &answer("db", 1.0, 30), clock.at(10)));
        assert!(leases.granted("b", 2.0, &answer("api", 2.0, 30), clock.at(12)));
        assert_eq!(asked(&leases, clock.at(15)).len(), 2);
        assert_eq!(leases.due(clock.at(17)).len(), 2);
        assert_eq!(leases.due(clock.at(17))["b"].len(), 2);
        assert_eq!(leases.all()["b"], ["api", "db"]);
        leases.forget("b", &["api".to_owned(), "none".to_owned()]);
        assert_eq!(leases.all()["b"], ["db"]);
        assert_eq!(leases.all().len(), 2);
    }

    #[test]
    fn an_expired_lease_is_gone() {
        let (clock, mut leases) = (Clock::new(), Leases::default());
        leases.granted("a", 100.0, &answer("db", 60.0, 8), clock.at(0));
        // Nobody answers: asked every second, told once, and the lease goes on until its end.
        assert!(leases.unanswered("a", "db", 100.0, clock.at(5)));
        assert!(!leases.unanswered("a", "db", 100.0, clock.at(6)));
        assert_eq!(leases.wake(clock.at(6)), Some(clock.at(7).at));
        assert!(leases.expire(clock.at(7)).is_empty());
        assert_eq!(asked(&leases, clock.at(7)), [("db".to_owned(), 100.0, Some(60.0))]);
        assert!(
            leases
                .table(clock.at(7))
                .ends_with("a       db          100   60         1 s  no answer\n")
        );
        leases.unanswered("a", "db", 100.0, clock.at(7));
        assert_eq!(asked(&leases, clock.at(8)), [("db".to_owned(), 100.0, None)]);
        let line = "a db: the lease has expired, and 2.5 may be used without one";
        assert_eq!(leases.expire(clock.at(8)), [line]);
        assert!(leases.expire(clock.at(9)).is_empty());
        assert_eq!(
            leases.line("a", "db", clock.at(9)),
            "a db: no lease, and 2.5 may be used without one"
        );
        // The same grant is news when it comes back.
        assert!(leases.granted("a", 100.0, &answer("db", 60.0, 30), clock.at(10)));
    }

    #[test]
    fn an_expiry_wakes_even_when_nothing_is_due() {
        let (clock, mut leases) = (Clock::new(), Leases::default());
        let mut late = answer("db", 60.0, 3);
        late.gets.refresh_interval = i64::MAX;
        leases.granted("a", 1.0, &late, clock.at(0));
        assert_eq!(leases.wake(clock.at(0)), Some(clock.at(3).at));
        assert_eq!(leases.expire(clock.at(3)).len(), 1);
        assert_eq!(leases.wake(clock.at(3)), Some(clock.at(86_400).at));
        // A node that says "at once" is asked once a second.
        late.gets = Lease { refresh_interval: -1, expiry_time: i64::MIN, capacity: 1.0 };
        leases.granted("a", 1.0, &late, clock.at(4));
        assert_eq!(leases.wake(clock.at(4)), Some(clock.at(5).at));
    }

    #[test]
    fn who_never_got_an_answer() {
        let (clock, mut leases) = (Clock::new(), Leases::default());
        assert!(leases.unanswered("a", "db", 7.0, clock.at(0)));
        assert_eq!(leases.wake(clock.at(0)), Some(clock.at(1).at));
        assert_eq!(asked(&leases, clock.at(1)), [("db".to_owned(), 7.0, None)]);
        assert_eq!(leases.line("a", "db", clock.at(0)), "a db: no lease, and nothing may be used");
        assert_eq!(leases.line("b", "db", clock.at(0)), "b db: not asked for");
    }

    #[test]
    fn all_that_is_to_know() {
        let (clock, mut leases) = (Clock::new(), Leases::default());
        let learning =
            ResourceResponse { learning_until: Some(START_S + 60), ..answer("db", 0.0, 20) };
        leases.granted("a\u{7}", 10.0, &learning, clock.at(0));
        let degraded = ResourceResponse { degraded: Some(true), ..answer("db", 4.0, 20) };
        leases.granted("b", 4.0, &degraded, clock.at(0));
        leases.unanswered("c", "db", 1.0, clock.at(0));
        let expected = "\
client  resource  wants  has  expires in  state
a\\u{7}  db           10    0        20 s  learning, 60 s more
b       db            4    4        20 s  degraded
c       db            1    0           -  no lease, and nothing may be used; no answer
";
        assert_eq!(leases.table(clock.at(0)), expected);
        let line = leases.line("a\u{7}", "db", clock.at(0));
        assert!(
            line.ends_with("; the store is learning for 60 s more: it gets what it says it has")
        );
        let line = leases.line("b", "db", clock.at(0));
        assert!(line.ends_with("; decided without the shared store: it keeps what it says it has"));
        // The end of learning is news, whatever is granted.
        assert!(leases.granted("a\u{7}", 10.0, &answer("db", 0.0, 80), clock.at(60)));
    }
}
