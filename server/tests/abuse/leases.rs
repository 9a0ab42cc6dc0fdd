//! Endless new names, and leases that expire together.

use std::future::Future;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use tollgate_proto::doorman::capacity_client::CapacityClient;
use tollgate_proto::doorman::{GetCapacityRequest, ResourceRequest};
use tollgate_proto::quotaservice::quota_service_client::QuotaServiceClient;
use tonic::transport::{Channel, Endpoint};

use super::measure::{Target, assert_withstands, duration};
use testkit::grpc::{channel, request};
use testkit::{Redis, runtime};

/// Makes calls on one connection, `at_once` concurrently, until stopped. Results are ignored.
pub fn call_until_stopped<F, R>(node: SocketAddr, at_once: usize, stop: &AtomicBool, ask: F)
where
    F: Fn(Channel) -> R + Clone + Send + 'static,
    R: Future<Output = ()> + Send + 'static,
{
    runtime().block_on(async {
        let endpoint = Endpoint::from_shared(format!("http://{node}")).unwrap();
        let channel = endpoint.timeout(Duration::from_secs(20)).connect_lazy();
        let all: Vec<_> = (0..at_once)
            .map(|_| {
                let (channel, ask) = (channel.clone(), ask.clone());
                tokio::spawn(async move {
                    loop {
                        ask(channel.clone()).await;
                        tokio::task::yield_now().await;
                    }
                })
            })
            .collect();
        while !stop.load(Ordering::Relaxed) {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        all.iter().for_each(tokio::task::JoinHandle::abort);
    });
}

/// A request for leases on these resources.
fn leases(client: u64, resources: impl Iterator<Item = String>) -> GetCapacityRequest {
    let resource = resources
        .map(|resource_id| ResourceRequest { resource_id, priority: 0, has: None, wants: 1.0 })
        .collect();
    GetCapacityRequest { client_id: format!("client {client}"), resource }
}

/// Requests leases on new names only.
fn fresh_names(name: &str, target: &Target, at_once: usize, names: u64) {
    let (grpc, next) = (target.node.grpc, Arc::new(AtomicU64::new(0)));
    let attack = move |_: usize, stop: &AtomicBool| {
        let next = Arc::clone(&next);
        call_until_stopped(grpc, at_once, stop, move |channel| {
            let first = next.fetch_add(names, Ordering::Relaxed);
            async move {
                let resources = (first..first + names).map(|number| format!("fresh/{number}"));
                let asked = leases(0, resources);
                // It may be refused.
                let _ = CapacityClient::new(channel).get_capacity(asked).await;
            }
        });
    };
    assert_withstands(name, target, 1, 1, attack);
}

#[test]
fn fresh_names_9900_a_request() {
    if duration().is_some() {
        fresh_names("9,900 fresh names a request", &Target::on_redis(), 16, 9_900);
    }
}

#[test]
fn fresh_names_one_a_request() {
    if duration().is_some() {
        fresh_names("one fresh name a request", &Target::on_redis(), 200, 1);
    }
}

#[test]
fn fresh_names_in_the_embedded_store() {
    if duration().is_some() {
        fresh_names("9,900 fresh names, embedded", &Target::embedded(&[]), 16, 9_900);
    }
}

/// A request for the resources whose leases last 20 s.
fn short_leases(client: u64) -> GetCapacityRequest {
    leases(client, (0..126).map(|number| format!("short/{number}")))
}

/// Takes leases on these for a thousand clients. Returns the number of granted leases.
fn take_short_leases(node: SocketAddr) -> usize {
    runtime().block_on(async {
        let (channel, next) = (channel(node).await, Arc::new(AtomicU64::new(0)));
        let workers: Vec<_> = (0..2)
            .map(|_| {
                let (mut client, next) = (CapacityClient::new(channel.clone()), Arc::clone(&next));
                tokio::spawn(async move {
                    let mut take_short_leases = 0;
                    loop {
                        let number = next.fetch_add(1, Ordering::Relaxed);
                        if number >= 1_000 {
                            return take_short_leases;
                        }
                        // Under load it may be refused.
                        let Ok(answer) = client.get_capacity(short_leases(number)).await else {
                            continue;
                        };
                        let answers = answer.into_inner().response;
                        take_short_leases += answers.iter().filter(|one| !one.degraded()).count();
                    }
                })
            })
            .collect();
        let mut take_short_leases = 0;
        for worker in workers {
            take_short_leases += worker.await.unwrap();
        }
        take_short_leases
    })
}

/// 126,000 leases have expired when one request decides all 126 resources.
#[test]
fn leases_that_expire_together() {
    if duration().is_none() {
        return;
    }
    let redis = Redis::start();
    let url = redis.url();
    // Taken at another node, with a long store timeout.
    let patient = Target::embedded(&["--store", &url, "--store-timeout", "20s"]);
    let take_short_leases = take_short_leases(patient.node.grpc);
    drop(patient);
    println!("{take_short_leases} leases expire");
    assert!(take_short_leases > 100_000, "{take_short_leases} leases are no attack");
    let target = Target::embedded(&["--store", &url]);
    let grpc = target.node.grpc;
    // Real time: the leases expire by the clock of Redis.
    std::thread::sleep(Duration::from_secs(21));
    let attack = move |_: usize, stop: &AtomicBool| {
        // The first of these requests finds all leases expired.
        call_until_stopped(grpc, 1, stop, |channel| async move {
            // It may be refused.
            let _ = CapacityClient::new(channel).get_capacity(short_leases(0)).await;
            tokio::time::sleep(Duration::from_secs(1)).await;
        });
    };
    assert_withstands("126,000 leases expire together", &target, 1, 1, attack);
}

/// Dynamic buckets that expire in the embedded store.
#[test]
fn buckets_that_expire() {
    if duration().is_none() {
        return;
    }
    let target = Target::embedded(&[]);
    let (grpc, next) = (target.node.grpc, Arc::new(AtomicU64::new(0)));
    let attack = move |_: usize, stop: &AtomicBool| {
        let next = Arc::clone(&next);
        call_until_stopped(grpc, 200, stop, move |channel| {
            let bucket = format!("b{}", next.fetch_add(1, Ordering::Relaxed));
            async move {
                // It may be refused.
                let _ = QuotaServiceClient::new(channel).allow(request("fresh", &bucket, 1)).await;
            }
        });
    };
    assert_withstands("buckets that expire", &target, 1, 1, attack);
}
