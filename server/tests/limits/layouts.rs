//! Layouts of states: the store tells a node that starts for how long states of earlier limits may
//! exist, so that it looks them up only then.

use std::time::Duration;

use testkit::http::post_allow;
use testkit::{LimitsFile, Node, Redis, command_stats, redis_store_by_its_own_clock};
use tollgate_server::store::{Layout, Layouts as _};

const LIFE: Duration = Duration::from_secs(3600);

fn layout(bucket_hash: u64, settings_hash: u64) -> Layout {
    Layout { bucket_hash, settings_hash, life: LIFE, registered_in: None }
}

/// Whether `left` is `length` less the time since the start of the test.
fn about(left: Duration, length: Duration) -> bool {
    left <= length && left + Duration::from_secs(10) > length
}

#[tokio::test]
async fn unchanged_layouts_are_settled() {
    let redis = Redis::start();
    let store = redis_store_by_its_own_clock(&redis).await;
    let told = [layout(1, 10), layout(2, 20)];
    assert_eq!(store.record_layouts(&told).await.unwrap(), [Duration::ZERO; 2], "a new store");
    assert_eq!(store.record_layouts(&told).await.unwrap(), [Duration::ZERO; 2], "reported again");

    let longer = Layout { life: 2 * LIFE, ..layout(1, 11) };
    let left = store.record_layouts(&[longer, layout(2, 20)]).await.unwrap();
    assert!(about(left[0], 2 * LIFE) && left[1].is_zero(), "{left:?}");
    // A node with the old limits is told as well,
    let left = store.record_layouts(&told).await.unwrap();
    assert!(about(left[0], 2 * LIFE), "the longer life counts: {left:?}");
    // and no report ends the time early.
    let left = store.record_layouts(&[layout(1, 11)]).await.unwrap();
    assert!(about(left[0], 2 * LIFE), "{left:?}");

    // More layouts than fit into one call, all new.
    let many: Vec<Layout> = (100..1100).map(|of| layout(of, of)).collect();
    assert_eq!(store.record_layouts(&many).await.unwrap(), vec![Duration::ZERO; 1000]);
}

/// More than the queues of a node hold.
#[tokio::test]
async fn registers_of_ten_thousand_namespaces_are_kept() {
    let redis = Redis::start();
    let store = redis_store_by_its_own_clock(&redis).await;
    let mut inside = redis.connection();
    redis::cmd("ZADD").arg("i{ns-9999}").arg(1).arg("x").exec(&mut inside).unwrap();
    let bounded = |number: u64| Layout {
        registered_in: Some(format!("ns-{number}").into()),
        ..layout(number, number)
    };
    let told: Vec<Layout> = (0..10_000).map(bounded).collect();
    assert_eq!(store.record_layouts(&told).await.unwrap().len(), told.len());
    let ttl: i64 = redis::cmd("TTL").arg("i{ns-9999}").query(&mut inside).unwrap();
    assert!(ttl > 0, "{ttl}");
}

#[tokio::test]
async fn unknown_layouts_of_an_old_store_are_not_settled() {
    let redis = Redis::start();
    let now: (i64, i64) = redis::cmd("TIME").query(&mut redis.connection()).unwrap();
    let born = (now.0 - 60) * 1_000_000;
    redis::cmd("SET").arg("o").arg(born).exec(&mut redis.connection()).unwrap();
    let store = redis_store_by_its_own_clock(&redis).await;
    let left = store.record_layouts(&[layout(1, 10)]).await.unwrap();
    assert!(about(left[0], LIFE), "{left:?}");
    let left = store.record_layouts(&[layout(1, 10), layout(2, 20)]).await.unwrap();
    assert!(about(left[0], LIFE) && about(left[1], LIFE), "{left:?}");
}

/// How often Redis has run a command.
fn calls(redis: &Redis, command: &str) -> u64 {
    command_stats(&mut redis.connection(), command).calls
}

fn tokens_left(node: &Node) -> f64 {
    let body = r#"{"namespace": "ns", "bucketName": "b", "tokensRequested": 10}"#;
    let answer = post_allow(node, body).json();
    assert_eq!(answer["status"], "OK", "{answer}");
    assert_eq!(answer["degraded"], false, "{answer}");
    answer["tokensAvailable"].as_f64().unwrap().round()
}

#[test]
fn a_node_looks_for_other_states_only_after_a_change() {
    // The buckets fill within a day: states of earlier limits may exist for as long.
    let limits = |size: u64, more: &str| {
        let template = format!("{{ size: {size}, fill_rate: 1000/d, max_tokens_per_request: -1 }}");
        format!("namespaces: {{ ns: {{ {more} dynamic_bucket_template: {template} }} }}")
    };
    let redis = Redis::start();
    let file = LimitsFile::new(&limits(1000, ""));
    let patient = ["--store", &redis.url(), "--store-timeout", "2s"];
    let node = || Node::start(&file.path(), &patient);

    let first = node();
    assert_eq!(tokens_left(&first), 990.0);
    assert_eq!(tokens_left(&first), 980.0);
    assert_eq!(tokens_left(&first), 970.0);
    let kept = calls(&redis, "setrange");
    assert!(kept >= 1, "of two grants, one at most passes a step of the expiries' grid");
    drop(first);

    let again = node();
    assert_eq!(tokens_left(&again), 960.0);
    assert_eq!(tokens_left(&again), 950.0);
    let kept_again = calls(&redis, "setrange");
    assert!(kept_again > kept, "also after a restart");
    drop(again);

    // Another size: every decision writes the expiry, until all states have the new one.
    file.write(&limits(2000, ""));
    let larger = node();
    assert_eq!(tokens_left(&larger), 940.0, "a change refills nothing");
    assert_eq!(tokens_left(&larger), 930.0);
    assert_eq!(calls(&redis, "setrange"), kept_again, "no decision keeps the expiry");
    drop(larger);

    // A bound: the bucket is registered, though it has a state.
    file.write(&limits(2000, "max_dynamic_buckets: 5,"));
    let bounded = node();
    assert_eq!(tokens_left(&bounded), 920.0);
    let names: Vec<String> =
        redis::cmd("ZRANGE").arg("i{ns}").arg(0).arg(-1).query(&mut redis.connection()).unwrap();
    assert_eq!(names, ["b"]);
}
