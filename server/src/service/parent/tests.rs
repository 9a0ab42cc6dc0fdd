use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use super::protocol::{clamp_times, parent_request};
use super::*;
use crate::domain::lease::{Band, Holder, HolderRequest, MAX_SUBCLIENTS, Rules};
use crate::domain::sharing::SharingAlgorithm;
use crate::domain::time::ManualClock;
use crate::store::memory::MemoryStore;
use crate::store::{Demand, LeaseRequest};

#[test]
fn parent_times_are_clamped() {
    let (now, algorithm) =
        (Micros(1_700_000_000_000_000), crate::domain::sharing::SharingAlgorithm::FairShare);
    for (input_s, expiry_s, span_s) in [
        (i64::MIN, 0, 1),
        (0, 0, 1),
        (60, 60, 60),
        (i64::MAX, 1_700_000_000 + 126_230_400, 126_230_400),
    ] {
        let lease = |expiry_s, refresh_s, lease_s| {
            let (capacity, safe_capacity) = (5.0, 1.0);
            ParentLease { capacity, expiry_s, refresh_s, safe_capacity, algorithm, lease_s }
        };
        let clamped = clamp_times(lease(input_s, input_s, input_s), now);
        assert_eq!(clamped, lease(expiry_s, span_s, span_s));
    }
}

#[test]
fn excess_bands_are_merged_into_the_last() {
    let band = |priority| Band {
        priority,
        subclients: if priority < 110 { 2 } else { u32::MAX },
        wants: 3.0,
    };
    let demand = |count| Demand { bands: (0..count).map(band).collect(), ..Demand::default() };
    let bands = |count| parent_request("r", Some(demand(count)), false, Micros(0)).bands;
    assert_eq!(bands(100), (0..100).map(band).collect::<Vec<_>>());
    let mut expected: Vec<_> = (0..100).map(band).collect();
    expected[99] = Band { priority: 99, subclients: 8, wants: 12.0 };
    assert_eq!(bands(103), expected);
    expected[99] = Band { priority: 99, subclients: MAX_SUBCLIENTS, wants: 75.0 };
    assert_eq!(bands(124), expected);
}

/// A parent that refuses any request that names an odd-numbered resource, and grants all others.
#[derive(Default)]
struct RefusesOdd {
    requests: AtomicUsize,
}

impl RefusesOdd {
    /// The number of requests since the last call.
    fn take_requests(&self) -> usize {
        self.requests.swap(0, Ordering::Relaxed)
    }
}

fn is_odd(resource: &str) -> bool {
    resource.ends_with(['1', '3', '5', '7', '9'])
}

impl Parent for RefusesOdd {
    async fn ask(&self, _: &str, requests: &[ParentRequest]) -> Result<Answers, ParentError> {
        self.requests.fetch_add(1, Ordering::Relaxed);
        if requests.iter().any(|request| is_odd(&request.resource)) {
            return Err(ParentError { text: "no".to_owned(), heard: false, refused: true });
        }
        let lease = ParentLease {
            capacity: 5.0,
            expiry_s: i64::MAX,
            refresh_s: 3600,
            safe_capacity: 0.0,
            algorithm: SharingAlgorithm::FairShare,
            lease_s: 7200,
        };
        Ok(vec![Ok(lease); requests.len()])
    }
}

/// The parent refuses every second resource, so every full batch contains refused ones.
#[tokio::test]
async fn refused_resources_are_retried_alone() {
    const RESOURCES: usize = 200;
    let clock = ManualClock::new(Micros(1_700_000_000_000_000));
    let store = MemoryStore::with_clock(clock.clone());
    let names: Vec<String> = (0..RESOURCES).map(|number| format!("r.{number:03}")).collect();
    let rules =
        Rules { algorithm: None, capacity: 0.0, lease_s: 600, learning_s: 0, from_parent: true };
    let bands = [Band { priority: 0, subclients: 1, wants: 5.0 }];
    let request =
        HolderRequest { holder: Holder::Client("a"), bands: &bands, claim: None, learn_for_us: 0 };
    for resource in &names {
        let asks = [LeaseRequest::new(resource, rules, request)];
        assert!(store.lease(&asks).await[0].is_ok());
    }

    let (up, parent) = (Arc::new(AtomicU64::new(2.0_f64.to_bits())), RefusesOdd::default());
    let mut renewal = Renewal::new(store.clone(), "node".to_owned(), "south".to_owned())
        .with_gauge(Gauge::from_arc(Arc::clone(&up)));
    let is_up = || f64::from_bits(up.load(Ordering::Relaxed));
    let mut rounds = 0;
    loop {
        renewal.round(&parent, clock.now()).await;
        let max_requests = MAX_REDUCED_BATCHES + RESOURCES.div_ceil(MAX_BATCH);
        assert!(parent.take_requests() <= max_requests, "round {rounds}");
        clock.advance(TICK.as_micros() as i64);
        rounds += 1;
        let all = store.resources(RESOURCES).await.expect("it is in memory").items;
        assert_eq!(all.len(), RESOURCES);
        let is_leased = |(name, totals): &(String, crate::domain::lease::Totals)| {
            assert!(totals.parent.is_none() || !is_odd(name), "{name}");
            totals.parent.is_some()
        };
        if all.iter().filter(|resource| is_leased(resource)).count() == RESOURCES / 2 {
            break;
        }
        assert!(rounds < 60, "15 seconds");
    }
    assert_eq!(is_up(), 1.0, "the parent leases some");

    // Each refused resource is now retried every ten seconds, which does not count as an outage.
    let ten_s = 10_000_000 / TICK.as_micros() as i64;
    let mut requests = 0;
    for _ in 0..2 * ten_s {
        renewal.round(&parent, clock.now()).await;
        requests += parent.take_requests();
        clock.advance(TICK.as_micros() as i64);
        assert_eq!(is_up(), 1.0);
    }
    assert!((RESOURCES / 2..=RESOURCES + 10).contains(&requests), "{requests}");

    // A refused resource that is no longer wanted is forgotten: it has no lease to give back.
    let odd: Vec<&str> = names.iter().map(String::as_str).filter(|name| is_odd(name)).collect();
    store.release(Holder::Client("a"), &odd).await.expect("it is in memory");
    for _ in 0..2 * ten_s {
        renewal.round(&parent, clock.now()).await;
        clock.advance(TICK.as_micros() as i64);
    }
    assert_eq!(renewal.resources.len(), RESOURCES - odd.len());
    parent.take_requests();
    renewal.round(&parent, clock.now()).await;
    assert_eq!(parent.take_requests(), 0);
}

/// A parent that can't be reached.
struct Unreachable;

impl Parent for Unreachable {
    async fn ask(&self, _: &str, _: &[ParentRequest]) -> Result<Answers, ParentError> {
        Err(ParentError { text: "unreachable".to_owned(), heard: false, refused: false })
    }
}

#[tokio::test]
async fn gauge_is_0_while_an_unreachable_parent_is_needed() {
    let clock = ManualClock::new(Micros(1_700_000_000_000_000));
    let store = MemoryStore::with_clock(clock.clone());
    let rules =
        Rules { algorithm: None, capacity: 0.0, lease_s: 600, learning_s: 0, from_parent: true };
    let bands = [Band { priority: 0, subclients: 1, wants: 5.0 }];
    let request =
        HolderRequest { holder: Holder::Client("a"), bands: &bands, claim: None, learn_for_us: 0 };
    assert!(store.lease(&[LeaseRequest::new("r", rules, request)]).await[0].is_ok());
    let up = Arc::new(AtomicU64::new(2.0_f64.to_bits()));
    let mut renewal = Renewal::new(store.clone(), "node".to_owned(), "south".to_owned())
        .with_gauge(Gauge::from_arc(Arc::clone(&up)));
    let is_up = || f64::from_bits(up.load(Ordering::Relaxed));
    for _ in 0..20 {
        renewal.round(&Unreachable, clock.now()).await;
        assert_eq!(is_up(), 0.0);
        clock.advance(TICK.as_micros() as i64);
    }
    store.release(Holder::Client("a"), &["r"]).await.expect("it is in memory");
    for _ in 0..20 {
        renewal.round(&Unreachable, clock.now()).await;
        clock.advance(TICK.as_micros() as i64);
    }
    assert_eq!((is_up(), renewal.resources.len()), (1.0, 0));
}
