//! Hostile names: valid names have separate keys in the right slot, invalid names are refused, and
//! no name gets into a log or a metric unescaped.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use proptest::prelude::*;
use proptest::strategy::ValueTree as _;
use proptest::test_runner::TestRunner;
use serde_json::json;
use tollgate_proto::doorman::capacity_client::CapacityClient;
use tollgate_proto::doorman::{GetCapacityRequest, ResourceRequest};
use tollgate_server::domain::lease::{Band, Holder, HolderRequest, Rules};
use tollgate_server::domain::names::{check_bucket, check_namespace};
use tollgate_server::domain::sharing::SharingAlgorithm;
use tollgate_server::domain::time::ManualClock;
use tollgate_server::service::allow::{Query, Status};
use tollgate_server::store::redis::slot;
use tollgate_server::store::{LeaseRequest, LeaseStore as _};
use tonic::Code;

use testkit::corrupt_values::CorruptValue;
use testkit::grpc::channel;
use testkit::http::{get, post_allow};
use testkit::redis_cluster::RedisCluster;
use testkit::{LimitsFile, Node, Redis, START, Service, eventually, redis_store};

/// Part of all hostile names, to search for.
const MARK: &str = "evil";

const LIMITS: &str = r#"
global_default_bucket: { size: 1000, fill_rate: 1000 }
namespaces:
  spread: { dynamic_bucket_template: { size: 1000, fill_rate: 1 } }
  together: { max_dynamic_buckets: 100000, dynamic_bucket_template: { size: 1000, fill_rate: 1 } }
resources:
  - { identifier_glob: "*", capacity: 100, algorithm: { kind: FAIR_SHARE, lease_length: 60, refresh_interval: 5, learning_mode_duration: 0 } }
"#;

fn names(count: usize) -> BTreeSet<String> {
    let part = prop_oneof![
        4 => "[a%{}:]{1,3}",
        1 => "[\\x00\\n\\r\\x1b\\x7f ]",
        1 => "[\u{80}\u{ff}\u{202e}\u{feff}\u{10ffff}]",
        1 => any::<char>().prop_map(String::from),
    ];
    let name = proptest::collection::vec(part, 1..6).prop_map(|parts| parts.concat());
    let mut runner = TestRunner::default();
    let mut next = || name.new_tree(&mut runner).expect("a name").current();
    (0..count).map(|_| next()).chain([MARK.repeat(64), "é".repeat(128)]).collect()
}

#[tokio::test]
async fn each_name_has_keys_of_its_own_where_the_cluster_says() {
    let redis = RedisCluster::start_with(1, 0);
    let mut inside = redis.connection(0);
    let clock = ManualClock::new(START);
    let service = Service::new(redis_store(&redis, clock.clone()).await, clock, LIMITS);
    let (mut buckets, names) = (0, names(300));
    for name in &names {
        for namespace in ["spread", "together", name] {
            let query = Query { namespace, bucket: name, tokens: 1, ..Query::default() };
            let answer = service.allow.allow(&query).await.unwrap();
            let valid = check_namespace(namespace).is_ok() && check_bucket(name).is_ok();
            assert_eq!(
                answer.status,
                if valid { Status::Ok } else { Status::Invalid },
                "{query:?}"
            );
            // A separate state: the size less one token.
            if valid && namespace != name {
                assert_eq!(answer.tokens_available, 999.0, "{query:?}");
                buckets += 1;
            }
        }
        let rules = Rules {
            algorithm: Some(SharingAlgorithm::FairShare),
            capacity: 100.0,
            lease_s: 60,
            learning_s: 0,
            from_parent: false,
        };
        let bands = [Band { priority: 0, subclients: 1, wants: 100.0 }];
        for holder in [Holder::Client(name), Holder::Server(name)] {
            let request = HolderRequest { holder, bands: &bands, claim: None, learn_for_us: 0 };
            let asks = [LeaseRequest::new(name, rules, request)];
            let grant = service.capacity.store().lease(&asks).await.pop().unwrap().unwrap();
            // A separate resource: the first holder gets all.
            assert_eq!(grant.has, if matches!(holder, Holder::Client(_)) { 100.0 } else { 0.0 });
        }
    }

    let keys: Vec<Vec<u8>> = redis::cmd("KEYS").arg("*").query(&mut inside).unwrap();
    let mut kinds: BTreeMap<u8, usize> = BTreeMap::new();
    for key in &keys {
        *kinds.entry(key[0]).or_default() += 1;
        let there: u16 = redis::cmd("CLUSTER").arg("KEYSLOT").arg(key).query(&mut inside).unwrap();
        assert_eq!(slot(key), there, "{:?}", String::from_utf8_lossy(key));
        // All keys of a resource are in one slot.
        if key[0] == b'w' || key[0] == b'e' {
            assert_eq!(slot(&[b"h", &key[1..]].concat()), there);
        }
        assert!(key.len() <= 3 * 256 + 10, "{} bytes", key.len());
    }
    let count = |letter: u8| kinds.get(&letter).copied().unwrap_or_default();
    assert_eq!(count(b'b'), buckets);
    assert_eq!(["h", "w", "e"].map(|letter| count(letter.as_bytes()[0])), [names.len(); 3]);
    assert_eq!((count(b'i'), count(b'g')), (1, 1));
}

/// A hostile name with control characters.
fn hostile(what: &str) -> String {
    format!("{MARK}-{what}\n{{\"level\":\"ERROR\"}}\u{202e}\u{1b}[31m\"\\{}", "x".repeat(400))
}

#[tokio::test(flavor = "multi_thread")]
async fn no_name_gets_into_logs_or_metrics() {
    let redis = Redis::start();
    let mut inside = redis.connection();
    let limits = LimitsFile::new(LIMITS);
    let logs = ["--log-level", "info,tollgate_server=trace"];
    let store = ["--store", &redis.url(), "--store-timeout", "2s"];
    let node = Node::start(&limits.path(), &[store.as_slice(), &logs].concat());
    node.wait_for_store();
    node.logged();
    let allowed = format!("{MARK}:\"\\{{}}%\u{202e}{}", "x".repeat(200));
    let rejected = [hostile("bucket"), MARK.repeat(65), format!("{MARK} space")];
    for namespace in ["spread", "together"] {
        // A corrupt value, which is logged.
        let key = format!("i{{{namespace}}}");
        CorruptValue::List(vec![b"x".to_vec()]).put(&mut inside, &key);
        let body = json!({ "namespace": namespace, "bucketName": allowed });
        assert_eq!(post_allow(&node, &body.to_string()).json()["status"], "OK");
        for name in &rejected {
            let body = json!({ "namespace": namespace, "bucketName": name });
            let answer = post_allow(&node, &body.to_string()).json();
            assert_eq!(answer["status"], "REJECTED_INVALID_REQUEST");
            assert_eq!(answer["bucket"], "", "an invalid name is not repeated");
        }
    }
    let mut client = CapacityClient::new(channel(node.grpc).await);
    let resource = hostile("resource");
    let ask = |client_id: String, resource_id: String, wants| GetCapacityRequest {
        client_id,
        resource: vec![ResourceRequest { resource_id, priority: 0, has: None, wants }],
    };
    let answer = client.get_capacity(ask(hostile("client"), resource.clone(), 5.0)).await.unwrap();
    assert_eq!(answer.into_inner().response[0].gets.capacity, 5.0);
    // Errors about these keys: a corrupt value, and missing rights.
    let keys: Vec<Vec<u8>> = redis::cmd("KEYS").arg("h*").query(&mut inside).unwrap();
    for key in keys {
        redis::cmd("SET").arg(key).arg("x").exec(&mut inside).unwrap();
    }
    let id: String = resource.bytes().map(|byte| format!("%{byte:02X}")).collect();
    let page = get(&node, &format!("/debug/resource.json?id={id}"));
    assert_eq!(page.status, 404, "{page:?}");
    let rights = ["on", "nopass", "resetkeys", "~g", "~n", "~o", "~l", "~x", "+@all"];
    redis::cmd("ACL").arg("SETUSER").arg("default").arg(&rights).exec(&mut inside).unwrap();
    let answer = client.get_capacity(ask(hostile("client"), resource.clone(), 5.0)).await.unwrap();
    assert_eq!(answer.into_inner().response[0].degraded, Some(true));

    // Error messages include only a part of a long name.
    for (id, wants) in
        [(hostile("id"), f64::NAN), ("y".repeat(1024), -1.0), ("z".repeat(1025), 1.0)]
    {
        let refused = client.get_capacity(ask("c".to_owned(), id, wants)).await.unwrap_err();
        assert_eq!(refused.code(), Code::InvalidArgument);
        assert!(refused.message().len() < 400, "{}", refused.message());
        assert!(!refused.message().contains(|c: char| c.is_control() || c == '\u{202e}'));
    }
    let long = get(&node, &format!("/debug/resource.json?id={}", "y".repeat(1025)));
    assert_eq!(long.status, 400);

    let page = get(&node, "/metrics").body;
    assert!(!page.contains(MARK), "{page}");
    eventually("it is logged that the store refuses", Duration::from_secs(5), || {
        // One line a second is logged.
        let body = json!({ "namespace": "spread", "bucketName": allowed }).to_string();
        post_allow(&node, &body);
        let lines = node.logged();
        for line in &lines {
            let values = line.as_object().unwrap().values().filter_map(|value| value.as_str());
            for text in values {
                assert!(text.len() < 2000, "{} bytes in a line", text.len());
                assert!(!text.contains(|c: char| c.is_control() || c == '\u{202e}'), "{line}");
            }
        }
        lines
            .iter()
            .any(|line| line["detail"].as_str().is_some_and(|text| text.contains("no permissions")))
    });
}
