//! The figures and the worked example of the paper "Charon", on every store. The paper's figures of bursts have
//! no numbers: those are ours.

use testkit::redis_cluster::RedisCluster;
use testkit::{Redis, START, Service, redis_store};
use tollgate_server::domain::time::ManualClock;
use tollgate_server::service::holds::{RenewQuery, ReserveQuery, TransferQuery};
use tollgate_server::service::throttle::{HitAnswer, HitQuery};
use tollgate_server::store::Store;
use tollgate_server::store::holds::HoldStore;
use tollgate_server::store::memory::MemoryStore;
use tollgate_server::store::throttle::ThrottleStore;

const LIMITS: &str = "
throttles:
  - resource: burst
    tiers:
      - { limit: 2, window: 10s, active: 100s }
      - { limit: 3, window: 10s, active: 30s, cooldown: 60s }
  - { resource: rate, tiers: [{ limit: 6, window: 4s, active: 4s }] }
holds:
  - { resource: copies, domain_limit: 15 }
";

/// A client of the service.
struct Client<'a, S> {
    service: &'a Service<S>,
    session: &'a str,
}

impl<S: Store + HoldStore> Client<'_, S> {
    /// Holds copies for a domain; those granted.
    async fn hold(&self, domain: &str, copies: i64) -> u64 {
        let query = ReserveQuery {
            resource: "copies",
            session: self.session,
            ttl_ms: 10_000,
            hold: "h",
            domain,
            copies,
            min_copies: 1,
        };
        self.service.holds.reserve(&query, None).await.unwrap().granted
    }

    /// Keeps so many copies of its hold.
    async fn keep(&self, copies: i64) -> u64 {
        let names = ("copies", self.session, "h");
        self.service.holds.release(names, copies, None).await.unwrap().0
    }

    /// Renews its session; the copies that it holds.
    async fn renew(&self) -> Option<u64> {
        let sessions = [RenewQuery { resource: "copies", session: self.session, ttl_ms: 0 }];
        let answer = self.service.holds.keep_alive(&sessions, None).await.unwrap().remove(0);
        answer.live.map(|live| live.holds.iter().map(|hold| hold.copies).sum())
    }

    async fn end(&self) -> u64 {
        self.service.holds.end_session(("copies", self.session), None).await.unwrap()
    }
}

async fn hits<S: Store + ThrottleStore>(
    service: &Service<S>,
    resource: &str,
    copies: i64,
) -> HitAnswer {
    let query = HitQuery { resource, domain: "d", copies, min_copies: 1 };
    service.throttles.request(&query, None).await.unwrap()
}

/// The copies that domains hold.
async fn held<S: Store + HoldStore>(service: &Service<S>, domain: &str) -> u64 {
    let view = service.holds.look("copies", None).await.unwrap().unwrap();
    let sessions = view.list.sessions.iter().flat_map(|(_, session)| &session.holds);
    sessions.filter(|hold| &*hold.domain == domain).map(|hold| hold.copies).sum()
}

/// Figures 2 and 3: a burst, and one that a cooldown blocks.
async fn bursting(service: &Service<impl Store + ThrottleStore>) {
    let mut now_s = 0;
    for (at_s, expected) in [
        // The first hit enters tier 1; one more than its limit enters tier 2.
        (0, (1, 1, 1, true)),
        (1, (1, 1, 2, false)),
        (2, (1, 2, 1, true)),
        (3, (1, 2, 2, false)),
        (4, (1, 2, 3, false)),
        (5, (0, 2, 3, false)),
        // Tier 2 is active until 32, and hits go to it although tier 1 has room.
        (31, (1, 2, 1, false)),
        // Then tier 1 is the current one again. Tier 2 cools down until 92, and blocks a burst.
        (32, (1, 1, 1, false)),
        (33, (1, 1, 2, false)),
        (34, (0, 1, 2, false)),
        (92, (1, 1, 1, false)),
        (93, (1, 1, 2, false)),
        (94, (1, 2, 1, true)),
    ] {
        service.clock.advance((at_s - now_s) * 1_000_000);
        now_s = at_s;
        let decision = hits(service, "burst", 1).await.decision;
        let got = (decision.granted, decision.tier, decision.tier_hits, decision.burst);
        assert_eq!(got, expected, "at {at_s} s");
    }
}

/// Figure 4: who waits as long as the answer says is granted the hits.
async fn waiting(service: &Service<impl Store + ThrottleStore>) {
    assert_eq!(hits(service, "rate", 6).await.decision.granted, 6);
    service.clock.advance(1_000_000);
    let refused = hits(service, "rate", 1).await;
    assert_eq!((refused.decision.granted, refused.retry_after_ms()), (0, 3000));
    service.clock.advance(2_999_000);
    assert_eq!(hits(service, "rate", 1).await.retry_after_ms(), 1);
    service.clock.advance(1000);
    assert_eq!(hits(service, "rate", 1).await.decision.granted, 1);
    service.clock.advance(10_000_000);
}

/// Figure 5: copies are released in part, and the rest at the end.
async fn releasing(service: &Service<impl Store + HoldStore>) {
    let client = Client { service, session: "five" };
    assert_eq!(client.hold("d", 10).await, 10);
    assert_eq!(client.keep(5).await, 5);
    assert_eq!(held(service, "d").await, 5);
    assert_eq!(client.end().await, 5);
    assert_eq!(held(service, "d").await, 0);
}

/// Figure 6: copies go from one process to another, and the rest of each is released by itself.
async fn transferring(service: &Service<impl Store + HoldStore>) {
    let (first, second) =
        (Client { service, session: "process 1" }, Client { service, session: "secret" });
    assert_eq!(first.hold("d", 15).await, 15);
    let transfer = TransferQuery {
        resource: "copies",
        session: first.session,
        hold: "h",
        copies: 10,
        to_session: second.session,
        ttl_ms: 30_000,
    };
    assert_eq!(service.holds.transfer(&transfer, None).await, Ok(10));
    assert_eq!((first.renew().await, held(service, "d").await), (Some(5), 15));
    assert_eq!(first.end().await, 5);
    // The other process may take its time.
    service.clock.advance(29_000_000);
    assert_eq!(second.renew().await, Some(10));
    assert_eq!(second.keep(5).await, 5);
    assert_eq!(held(service, "d").await, 5);
    assert_eq!(second.end().await, 5);
    assert_eq!(held(service, "d").await, 0);
}

/// Figure 7: as many copies of one resource as hits of another.
async fn both_kinds(service: &Service<impl Store + HoldStore + ThrottleStore>) {
    let client = Client { service, session: "seven" };
    let copies = client.hold("d", 8).await;
    assert_eq!(copies, 8);
    let granted = hits(service, "rate", 8).await.decision.granted;
    assert_eq!(granted, 6);
    assert_eq!(client.keep(6).await, 6);
    assert_eq!((client.renew().await, held(service, "d").await), (Some(6), 6));
    assert_eq!(client.end().await, 6);
}

/// The example of section 4.3.2. There, a server loses its clients; here no server keeps any, and the clients
/// themselves fall silent.
async fn lost_clients(service: &Service<impl Store + HoldStore>) {
    let client = |session| Client { service, session };
    assert_eq!(client("c1").hold("d1", 4).await, 4);
    assert_eq!(client("c2").hold("d2", 5).await, 5);
    assert_eq!(client("c3").hold("d2", 6).await, 6);
    assert_eq!((held(service, "d1").await, held(service, "d2").await), (4, 11));
    service.clock.advance(9_000_000);
    assert_eq!(client("c3").renew().await, Some(6));
    service.clock.advance(1_000_000);
    assert_eq!((held(service, "d1").await, held(service, "d2").await), (0, 6));
    assert_eq!(client("c4").hold("d2", 15).await, 9, "what the limit leaves beside the six");
    assert_eq!((client("c1").renew().await, client("c2").renew().await), (None, None));
}

async fn all<S: Store + ThrottleStore + HoldStore>(store: S, clock: ManualClock) {
    let service = Service::new(store, clock, LIMITS);
    bursting(&service).await;
    waiting(&service).await;
    releasing(&service).await;
    transferring(&service).await;
    both_kinds(&service).await;
    lost_clients(&service).await;
}

#[tokio::test]
async fn on_the_embedded_store() {
    let clock = ManualClock::new(START);
    all(MemoryStore::with_clock(clock.clone()), clock).await;
}

#[tokio::test]
async fn on_redis() {
    let (redis, clock) = (Redis::start(), ManualClock::new(START));
    all(redis_store(&redis, clock.clone()).await, clock).await;
}

#[tokio::test]
async fn on_a_redis_cluster() {
    let (cluster, clock) = (RedisCluster::start_with(3, 0), ManualClock::new(START));
    all(redis_store(&cluster, clock.clone()).await, clock).await;
}
