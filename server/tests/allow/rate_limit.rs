//! Scenarios of Envoy's rate limits, run on every store. The files are those of the documentation of Envoy's rate
//! limit service.

use testkit::Service;
use testkit::metrics::Scrape;
use tollgate_server::domain::descriptor::{Entry, Unit};
use tollgate_server::service::Error;
use tollgate_server::service::allow::{
    CurrentLimit, Descriptor, DescriptorAnswer, Hits, Query, RateLimitQuery, Status,
};
use tollgate_server::store::look::Looks;

const SECOND: i64 = 1_000_000;
const DAY: i64 = 86_400 * SECOND;

type Asked<'a> = &'a [&'a [Entry<'a>]];

async fn ask_for<S: Looks>(
    s: &Service<S>,
    hits: Hits,
    domain: &str,
    descriptors: Asked<'_>,
) -> Vec<DescriptorAnswer> {
    let descriptors: Vec<_> = descriptors
        .iter()
        .map(|entries| Descriptor { entries: entries.to_vec(), hits, limit: None })
        .collect();
    let query = RateLimitQuery { domain, descriptors: &descriptors };
    s.allow.rate_limit(&query, None).await.unwrap()
}

async fn ask<S: Looks>(
    s: &Service<S>,
    domain: &str,
    descriptors: Asked<'_>,
) -> Vec<DescriptorAnswer> {
    ask_for(s, Hits::Count(1), domain, descriptors).await
}

/// The answer for one descriptor: whether it is over its limit, the limit, and the hits left.
async fn one<S: Looks>(
    s: &Service<S>,
    domain: &str,
    entries: &[Entry<'_>],
) -> (bool, Option<(u32, Unit)>, u32) {
    let answer = &ask(s, domain, &[entries]).await[0];
    let limit = answer.limit.as_ref().map(|limit| (limit.requests_per_unit, limit.unit.unwrap()));
    (answer.is_over, limit, answer.remaining)
}

const NO_LIMIT: (bool, Option<(u32, Unit)>, u32) = (false, None, 0);

fn to_start_of_day<S: Looks>(s: &Service<S>) {
    s.clock.advance(DAY - s.clock.now().0.rem_euclid(DAY));
}

async fn windows_are_aligned<S: Looks>(s: &Service<S>) {
    s.set_limits(
        "envoy: { domain: d, descriptors: [{ key: k, rate_limit: { unit: minute, requests_per_unit: 3 } }] }",
    );
    to_start_of_day(s);
    s.clock.advance(58 * SECOND + 1);
    let limit = |remaining, is_over, reset_s| DescriptorAnswer {
        is_over,
        limit: Some(CurrentLimit { name: None, requests_per_unit: 3, unit: Some(Unit::Minute) }),
        remaining,
        reset_s,
    };
    assert_eq!(ask(s, "d", &[&[("k", "v")]]).await, [limit(2, false, 2)]);
    assert_eq!(ask(s, "d", &[&[("k", "v")]]).await, [limit(1, false, 2)]);
    assert_eq!(ask(s, "d", &[&[("k", "v")]]).await, [limit(0, false, 2)]);
    assert_eq!(ask(s, "d", &[&[("k", "v")]]).await, [limit(0, true, 2)]);
    assert_eq!(ask(s, "d", &[&[("k", "w")]]).await, [limit(2, false, 2)]);
    s.clock.advance(2 * SECOND - 1);
    assert_eq!(ask(s, "d", &[&[("k", "v")]]).await, [limit(2, false, 60)]);
}

async fn every_unit<S: Looks>(s: &Service<S>) {
    for (word, unit) in Unit::ALL {
        let length = unit.length_us();
        s.set_limits(&format!(
            "envoy: [{{ domain: d, descriptors: [{{ key: {word}, rate_limit: {{ unit: {}, \
             requests_per_unit: 1 }} }}] }}]",
            word.to_uppercase()
        ));
        s.clock.advance(length - s.clock.now().0.rem_euclid(length));
        for at in [0, length - 1] {
            s.clock.advance(at);
            let expected = (at > 0, Some((1, unit)), 0);
            assert_eq!(one(s, "d", &[(word, "x")]).await, expected, "{word} {at}");
        }
        s.clock.advance(1);
        assert_eq!(one(s, "d", &[(word, "x")]).await, (false, Some((1, unit)), 0), "{word}");
    }
}

/// Examples 1 to 4 of the documentation.
async fn the_most_specific_rule_at_each_level<S: Looks>(s: &Service<S>) {
    s.set_limits(
        "envoy:
           - domain: mongo_cps
             descriptors:
               - { key: database, value: users, rate_limit: { unit: second, requests_per_unit: 500 } }
               - { key: database, value: default, rate_limit: { unit: second, requests_per_unit: 400 } }
           - domain: messaging
             descriptors:
               - key: message_type
                 value: marketing
                 descriptors:
                   - { key: to_number, rate_limit: { unit: day, requests_per_unit: 5 } }
               - { key: to_number, rate_limit: { unit: day, requests_per_unit: 100 } }
           - domain: edge_proxy_per_ip
             descriptors:
               - { key: remote_address, rate_limit: { unit: second, requests_per_unit: 10 } }
               - { key: remote_address, value: 50.0.0.5, rate_limit: { unit: second, requests_per_unit: 0 } }
           - domain: example4
             descriptors:
               - { key: key, value: value, rate_limit: { unit: second, requests_per_unit: 300 } }
               - key: key
                 value: deep
                 descriptors: [{ key: subkey, rate_limit: { unit: second, requests_per_unit: 300 } }]",
    );
    to_start_of_day(s);
    let second = |count| Some((count, Unit::Second));
    for (value, expected) in [
        ("users", (false, second(500), 499)),
        ("users", (false, second(500), 498)),
        ("default", (false, second(400), 399)),
        ("other", NO_LIMIT),
    ] {
        assert_eq!(one(s, "mongo_cps", &[("database", value)]).await, expected, "{value}");
    }
    assert_eq!(one(s, "other", &[("database", "users")]).await, NO_LIMIT);
    let scrape = Scrape::parse(&s.metrics.render());
    assert_eq!(scrape.get("tollgate_descriptors_without_limit_total", &[]), Some(2.0));
    // Both descriptors count, though one of them is over its limit.
    let number: Asked<'_> = &[
        &[("message_type", "marketing"), ("to_number", "2061111111")],
        &[("to_number", "2061111111")],
    ];
    for count in 1..=7 {
        let answers = ask(s, "messaging", number).await;
        let found: Vec<_> =
            answers.iter().map(|answer| (answer.is_over, answer.remaining)).collect();
        assert_eq!(found, [(count > 5, 5_u32.saturating_sub(count)), (false, 100 - count)]);
        assert_eq!(answers[1].reset_s, 86_400);
    }
    for (entries, expected) in [
        (
            &[("message_type", "marketing"), ("to_number", "2")][..],
            (false, Some((5, Unit::Day)), 4),
        ),
        (&[("message_type", "marketing")], NO_LIMIT),
        (&[("message_type", "news"), ("to_number", "2")], NO_LIMIT),
        (&[("to_number", "2"), ("message_type", "marketing")], NO_LIMIT),
        (&[("to_number", "2"), ("to_number", "3")], NO_LIMIT),
        (&[], NO_LIMIT),
    ] {
        assert_eq!(one(s, "messaging", entries).await, expected, "{entries:?}");
    }
    let per_ip = "edge_proxy_per_ip";
    assert_eq!(one(s, per_ip, &[("remote_address", "50.0.0.1")]).await, (false, second(10), 9));
    assert_eq!(one(s, per_ip, &[("remote_address", "50.0.0.2")]).await, (false, second(10), 9));
    assert_eq!(one(s, per_ip, &[("remote_address", "50.0.0.5")]).await, (true, second(0), 0));
    let deep = (false, second(300), 299);
    for (value, expected) in [("value", NO_LIMIT), ("deep", deep)] {
        let entries = [("key", value), ("subkey", "subvalue")];
        assert_eq!(one(s, "example4", &entries).await, expected, "{value}");
    }
}

/// Examples 5 to 9 of the documentation, without the metrics.
async fn unlimited_shadow_replaces_and_wildcards<S: Looks>(s: &Service<S>) {
    s.set_limits(
        "envoy:
           - domain: internal
             descriptors:
               - { key: ldap, rate_limit: { unlimited: true } }
               - { key: azure, rate_limit: { unit: minute, requests_per_unit: 100 } }
           - domain: example6
             descriptors:
               - key: service
                 descriptors:
                   - { key: user, value: user-a, shadow_mode: true, rate_limit: { unit: second, requests_per_unit: 1 } }
                   - { key: user, value: user-b, rate_limit: { unit: second, requests_per_unit: 1 } }
           - domain: example7
             descriptors:
               - key: key_1
                 value: value_1
                 descriptors:
                   - { key: user, value: bkthomps, rate_limit: { name: specific_limit, unit: second, requests_per_unit: 1 } }
               - key: key_2
                 value: value_2
                 descriptors:
                   - { key: user, value: bkthomps, rate_limit: { replaces: [{ name: specific_limit }], unit: second, requests_per_unit: 10 } }
           - domain: example9
             descriptors:
               - { key: key1, value: 'value*', rate_limit: { unit: minute, requests_per_unit: 20 } }
               - { key: key1, value: 'value_long*', rate_limit: { unit: minute, requests_per_unit: 30 } }
               - { key: key1, value: 'value_longest', rate_limit: { unit: minute, requests_per_unit: 40 } }
               - { key: key1, rate_limit: { unit: minute, requests_per_unit: 50 } }",
    );
    to_start_of_day(s);
    assert_eq!(one(s, "internal", &[("ldap", "x")]).await, (false, None, u32::MAX));
    assert_eq!(one(s, "internal", &[("x", "x")]).await, NO_LIMIT);
    for (user, is_over) in [("user-a", false), ("user-b", true)] {
        let entries = [("service", "auth-service"), ("user", user)];
        let limit = Some((1, Unit::Second));
        assert_eq!(one(s, "example6", &entries).await, (false, limit, 0), "{user}");
        assert_eq!(one(s, "example6", &entries).await, (is_over, limit, 0), "{user}");
    }
    let first: &[_] = &[("key_1", "value_1"), ("user", "bkthomps")];
    let second: &[_] = &[("key_2", "value_2"), ("user", "bkthomps")];
    for descriptors in [[first, second], [second, first]] {
        let mut answers = ask(s, "example7", &descriptors).await;
        let [replaced, _] = &mut answers[..] else { panic!("two answers") };
        if descriptors[0] == second {
            answers.swap(0, 1);
        } else {
            assert_eq!(*replaced, DescriptorAnswer::default());
        }
        assert_eq!(answers[0], DescriptorAnswer::default());
        assert_eq!(answers[1].limit.as_ref().unwrap().requests_per_unit, 10);
    }
    // It was not counted.
    let answer = &ask(s, "example7", &[first]).await[0];
    let name = answer.limit.as_ref().unwrap().name.as_deref();
    assert_eq!((answer.is_over, answer.remaining, name), (false, 0, Some("specific_limit")));
    for (value, limit) in [
        ("value_1", 20),
        ("value_2", 20),
        ("value", 20),
        ("value_long", 30),
        ("value_longer", 30),
        ("value_longest", 40),
        ("valu", 50),
        ("", 50),
    ] {
        let expected = (false, Some((limit, Unit::Minute)), limit - 1);
        assert_eq!(one(s, "example9", &[("key1", value)]).await, expected, "{value}");
    }
}

/// A descriptor has a bucket like any other, whatever is in it.
async fn descriptors_are_buckets<S: Looks>(s: &Service<S>) {
    s.set_limits(
        "envoy: { domain: d, descriptors: [
            { key: path, rate_limit: { unit: day, requests_per_unit: 3 } },
            { key: fixed, value: a, rate_limit: { unit: day, requests_per_unit: 3 } }] }",
    );
    to_start_of_day(s);
    let long = "/y".repeat(1000);
    for (value, name) in [
        ("/a b", "path=/a%20b"),
        ("{x}:y", "path={x}:y"),
        ("é\n,=%", "path=é%0A%2C=%25"),
        ("", "path="),
        (&long, ""),
    ] {
        let limit = Some((3, Unit::Day));
        assert_eq!(one(s, "d", &[("path", value)]).await, (false, limit, 2), "{value}");
        if name.is_empty() {
            continue;
        }
        let query = Query { namespace: "d", bucket: name, tokens: 1, ..Query::default() };
        let answer = s.allow.allow(&query).await.unwrap();
        assert_eq!((answer.status, answer.tokens_available), (Status::Ok, 1.0), "{name}");
        let view = s.allow.look(("d", name), None).await.unwrap().unwrap();
        let because = "is limited by the rule path of the Envoy domain d";
        assert_eq!(view.served_by.why, because);
        assert_eq!(one(s, "d", &[("path", value)]).await, (false, limit, 0), "{value}");
        assert_eq!(one(s, "d", &[("path", value)]).await, (true, limit, 0), "{value}");
        s.allow.fill(("d", name), false, None).await.unwrap();
        assert_eq!(one(s, "d", &[("path", value)]).await, (false, limit, 2), "{value}");
    }
    for name in ["path", "path=%41", "other=a", "fixed=b", "path=a,b=c"] {
        let query = Query { namespace: "d", bucket: name, tokens: 1, ..Query::default() };
        assert_eq!(s.allow.allow(&query).await.unwrap().status, Status::NoBucket, "{name}");
    }
}

async fn a_change_of_the_limit_keeps_the_count<S: Looks>(s: &Service<S>) {
    let set = |limit: u32| {
        s.set_limits(&format!(
            "envoy: {{ domain: d, descriptors: [{{ key: k, rate_limit: {{ unit: hour, requests_per_unit: {limit} }} }}] }}"
        ));
    };
    set(5);
    to_start_of_day(s);
    ask_for(s, Hits::Count(4), "d", &[&[("k", "v")]]).await;
    set(3);
    assert_eq!(one(s, "d", &[("k", "v")]).await, (true, Some((3, Unit::Hour)), 0));
    set(6);
    // What was over the limit counts, too.
    assert_eq!(one(s, "d", &[("k", "v")]).await, (false, Some((6, Unit::Hour)), 0));
}

/// Hits that are over the limit count, as in Envoy's service: so a budget of what is only known afterwards, such
/// as tokens of a model, is used up in the end.
async fn hits_count_are_looked_at_and_given_back<S: Looks>(s: &Service<S>) {
    s.set_limits(
        "envoy: { domain: d, descriptors: [{ key: k, rate_limit: { unit: hour, requests_per_unit: 10 } }] }",
    );
    to_start_of_day(s);
    let hits = async |hits| {
        let answer = &ask_for(s, hits, "d", &[&[("k", "v")]]).await[0];
        (answer.is_over, answer.remaining)
    };
    for (asked, expected) in [
        (Hits::Count(0), (false, 10)),
        (Hits::Count(7), (false, 3)),
        (Hits::Count(0), (false, 3)),
        (Hits::Count(3), (false, 0)),
        (Hits::Count(0), (false, 0)),
        (Hits::GiveBack(2), (false, 2)),
        (Hits::Count(7), (true, 0)),
        (Hits::Count(0), (true, 0)),
        (Hits::Count(1), (true, 0)),
        // Now 16 count.
        (Hits::GiveBack(5), (true, 0)),
        (Hits::Count(0), (true, 0)),
        (Hits::GiveBack(1), (false, 0)),
        (Hits::Count(0), (false, 0)),
        (Hits::GiveBack(0), (false, 0)),
        (Hits::GiveBack(100), (false, 10)),
        (Hits::Count(u64::MAX), (true, 0)),
        (Hits::Count(u64::MAX), (true, 0)),
        (Hits::GiveBack(u64::MAX), (false, 10)),
        (Hits::Count(10), (false, 0)),
    ] {
        assert_eq!(hits(asked).await, expected, "{asked:?}");
    }
    s.clock.advance(3600 * SECOND);
    assert_eq!(hits(Hits::Count(0)).await, (false, 10));
    // Twice the same in one request counts twice.
    let twice = ask_for(s, Hits::Count(4), "d", &[&[("k", "w")], &[("k", "w")], &[("k", "w")]]);
    let found: Vec<_> =
        twice.await.iter().map(|answer| (answer.is_over, answer.remaining)).collect();
    assert_eq!(found, [(false, 6), (false, 2), (true, 0)]);
}

/// The example of the document, by a rule: 3 + 5 × 0.7 = 6.5, of which 6 count; and a log.
async fn rules_with_other_algorithms<S: Looks>(s: &Service<S>) {
    s.set_limits(
        "envoy: { domain: d, descriptors: [
            { key: slides, rate_limit: { algorithm: sliding_window, unit: minute, requests_per_unit: 7 } },
            { key: log, rate_limit: { algorithm: sliding_log, unit: minute, requests_per_unit: 2 } }] }",
    );
    to_start_of_day(s);
    let hits = async |key, hits| {
        let answer = &ask_for(s, hits, "d", &[&[(key, "v")]]).await[0];
        (answer.is_over, answer.remaining, answer.reset_s)
    };
    assert_eq!(hits("slides", Hits::Count(5)).await, (false, 2, 60));
    s.clock.advance(78 * SECOND);
    assert_eq!(hits("slides", Hits::Count(3)).await, (false, 1, 42));
    assert_eq!(hits("slides", Hits::Count(0)).await, (false, 1, 42));
    assert_eq!(hits("slides", Hits::Count(2)).await, (true, 0, 42));
    assert_eq!(hits("slides", Hits::Count(0)).await, (true, 0, 42));
    assert_eq!(hits("slides", Hits::GiveBack(2)).await, (false, 1, 42));
    assert_eq!(hits("log", Hits::Count(0)).await, (false, 2, 60));
    assert_eq!(hits("log", Hits::Count(1)).await, (false, 1, 60));
    s.clock.advance(30 * SECOND);
    assert_eq!(hits("log", Hits::Count(1)).await, (false, 0, 60));
    assert_eq!(hits("log", Hits::Count(1)).await, (true, 0, 60));
    assert_eq!(hits("log", Hits::Count(0)).await, (false, 0, 60));
    s.clock.advance(30 * SECOND + 1);
    assert_eq!(hits("log", Hits::Count(2)).await, (true, 0, 60));
    assert_eq!(hits("log", Hits::Count(1)).await, (false, 0, 60));
    assert_eq!(hits("log", Hits::GiveBack(5)).await, (false, 2, 60));
}

async fn limits_in_the_request<S: Looks>(s: &Service<S>) {
    s.set_limits(
        "envoy: { domain: d, descriptors: [{ key: k, rate_limit: { unit: hour, requests_per_unit: 5 } }] }",
    );
    to_start_of_day(s);
    let ask = async |domain, key, limit| {
        let (entries, hits) = (vec![(key, "v")], Hits::Count(1));
        let descriptors = [Descriptor { entries, hits, limit }];
        let query = RateLimitQuery { domain, descriptors: &descriptors };
        let answer = s.allow.rate_limit(&query, None).await.unwrap().remove(0);
        let limit = answer.limit.map(|limit| (limit.requests_per_unit, limit.unit.unwrap()));
        (answer.is_over, limit, answer.remaining)
    };
    let own = |limit, unit| Some((limit, unit));
    let (hour, minute) = (Unit::Hour, Unit::Minute);
    assert_eq!(ask("d", "k", None).await, (false, own(5, hour), 4));
    // Each unit counts by itself, whether or not there is a rule.
    for key in ["k", "other"] {
        assert_eq!(ask("d", key, own(2, minute)).await, (false, own(2, minute), 1));
        assert_eq!(ask("d", key, own(2, hour)).await, (false, own(2, hour), 1));
        assert_eq!(ask("d", key, own(2, minute)).await, (false, own(2, minute), 0));
        assert_eq!(ask("d", key, own(2, minute)).await, (true, own(2, minute), 0));
        assert_eq!(ask("d", key, own(4, minute)).await, (false, own(4, minute), 0));
        assert_eq!(ask("d", key, own(0, minute)).await, (true, own(0, minute), 0));
    }
    assert_eq!(ask("d", "k", None).await, (false, own(5, hour), 3));
    assert_eq!(ask("elsewhere", "k", own(1, minute)).await, NO_LIMIT);
}

/// Limits that are equal but for the unit and their requests are decided in one call to the store.
async fn limits_of_a_request_beside_others<S: Looks>(s: &Service<S>) {
    s.set_limits("{ enforce: false, envoy: { domain: d, descriptors: [{ key: k, rate_limit: { unit: hour, requests_per_unit: 1 } }] } }");
    to_start_of_day(s);
    let descriptor =
        |key, limit| Descriptor { entries: vec![(key, "v")], hits: Hits::Count(1), limit };
    let descriptors = [
        descriptor("k", None),
        descriptor("k", Some((3, Unit::Second))),
        descriptor("x", None),
        descriptor("k", None),
        descriptor("x", Some((0, Unit::Day))),
    ];
    let query = RateLimitQuery { domain: "d", descriptors: &descriptors };
    let answers = s.allow.rate_limit(&query, None).await.unwrap();
    let found: Vec<_> = answers
        .iter()
        .map(|answer| (answer.is_over, answer.limit.is_some(), answer.remaining))
        .collect();
    let shadow = (false, true, 0);
    assert_eq!(found, [shadow, (false, true, 2), (false, false, 0), shadow, shadow]);
}

async fn what_is_no_request<S: Looks>(s: &Service<S>) {
    s.set_limits("envoy: []");
    let descriptor = Descriptor { entries: vec![("k", "v")], hits: Hits::Count(1), limit: None };
    let descriptors = vec![descriptor; 127];
    for (domain, count, expected) in [
        ("", 1, "domain is empty"),
        ("d", 0, "there are no descriptors"),
        ("d", 127, "there are 127 descriptors, at most 126 are allowed"),
    ] {
        let query = RateLimitQuery { domain, descriptors: &descriptors[..count] };
        let refused = s.allow.rate_limit(&query, None).await;
        assert_eq!(refused, Err(Error::Invalid(expected.to_owned())));
    }
    let query = RateLimitQuery { domain: "d", descriptors: &descriptors[..126] };
    assert_eq!(s.allow.rate_limit(&query, None).await.unwrap().len(), 126);
}

testkit::scenarios! {
    windows_are_aligned,
    every_unit,
    the_most_specific_rule_at_each_level,
    unlimited_shadow_replaces_and_wildcards,
    descriptors_are_buckets,
    a_change_of_the_limit_keeps_the_count,
    hits_count_are_looked_at_and_given_back,
    rules_with_other_algorithms,
    limits_in_the_request,
    limits_of_a_request_beside_others,
    what_is_no_request,
}
