//! The latencies that a `GrpcService` records.

use std::sync::Mutex;

use ::metrics::HistogramFn;

use super::*;
use crate::metrics::BudgetMetrics;

/// The values of a histogram.
#[derive(Default)]
struct Recorded(Mutex<Vec<f64>>);

impl HistogramFn for Recorded {
    fn record(&self, value: f64) {
        self.0.lock().expect("not poisoned").push(value);
    }
}

/// A service over a [`MemoryStore`], and the latencies that it records.
fn measured(budget: Budget) -> (Arc<GrpcService<MemoryStore>>, Arc<Recorded>) {
    let store = MemoryStore::new();
    let mut service = grpc_service(store, Routes::default(), DEFAULT_TIMEOUTS, budget);
    let recorded = Arc::new(Recorded::default());
    let latency = Histogram::from_arc(Arc::clone(&recorded));
    Arc::get_mut(&mut service).expect("not shared").latency = latency;
    (service, recorded)
}

#[tokio::test]
async fn the_arrival_of_a_request_is_no_latency() {
    // Time must really pass: the histogram shows durations.
    const LATE: Duration = Duration::from_millis(300);
    let (grpc_service, recorded) = measured(Budget::unlimited());
    let mut sender = connected(&grpc_service).await;
    let mut most = Vec::new();
    for path in [ALLOW, LEASES] {
        let begun = Instant::now();
        let (response, mut body) = begin_call(&mut sender, path);
        body.send_data(allow_request().slice(..7), false).expect("sent");
        settle().await;
        tokio::time::sleep(LATE).await;
        body.send_data(allow_request().slice(7..), true).expect("sent");
        status(response).await;
        most.push((begun.elapsed() - LATE).as_secs_f64());
    }
    let latencies = recorded.0.lock().expect("not poisoned");
    assert_eq!(latencies.len(), most.len());
    assert!(
        latencies.iter().zip(&most).all(|(one, most)| one <= most),
        "{latencies:?} of {most:?}"
    );
}

#[tokio::test]
async fn the_wait_for_bytes_is_latency() {
    const LIMIT: usize = 1 << 20;
    let budget = Budget::new(LIMIT, BudgetMetrics::noop());
    let (grpc_service, recorded) = measured(budget.clone());
    let mut sender = connected(&grpc_service).await;
    let all = budget.account().count(LIMIT);
    let response = send_call(&mut sender, LEASES, framed(&[0; 10_000]));
    wait_until(|| budget.used() > LIMIT).await;
    // The request has arrived, and waits until this time is over.
    let waiting = Instant::now();
    tokio::time::sleep(Duration::from_millis(50)).await;
    let least = waiting.elapsed();
    drop(all);
    assert_eq!(status(response).await, "12", "the router has no lease methods");
    let latencies = recorded.0.lock().expect("not poisoned");
    assert!(latencies[0] >= least.as_secs_f64(), "{latencies:?} without {least:?}");
}
