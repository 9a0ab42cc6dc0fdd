//! Properties of limits files: parsing never panics, and the printed form of a valid file parses to
//! the same limits.

use std::fs;
use std::time::{Duration, Instant};

use proptest::prelude::*;
use proptest::sample::{Index, select};
use serde_json::{Map, Value, json};
use tollgate_server::config::glob::Glob;
use tollgate_server::config::model::{Limits, Unconfigured};
use tollgate_server::config::rules::DomainRules;
use tollgate_server::config::{parse, to_yaml};
use tollgate_server::domain::names::{check_bucket, check_namespace};

/// Panics if `text` is a valid file whose printed form differs.
fn round_trip(text: &str) -> Option<Limits> {
    let Ok(parsed) = parse(text) else { return None };
    let printed = to_yaml(&parsed.limits);
    let again = parse(&printed).unwrap_or_else(|faults| panic!("{faults}\n{text:?}\n{printed}"));
    let mut limits = again.limits;
    assert_eq!(limits.version, crc32fast::hash(printed.as_bytes()));
    limits.version = parsed.limits.version;
    assert_eq!(limits, parsed.limits, "{text:?}\n{printed}");
    Some(limits)
}

/// Asserts that each bucket has a distinct index below the count.
fn assert_indexed(limits: &Limits) {
    let mut seen = vec![false; limits.bucket_count];
    let owned = limits.namespaces.values().flat_map(|owner| {
        let (unconfigured, rules) = match &owner.unconfigured {
            Unconfigured::GlobalDefault => (None, None),
            Unconfigured::NamespaceDefault(bucket)
            | Unconfigured::Dynamic { template: bucket, .. } => (Some(bucket), None),
            Unconfigured::Rules(rules) => (None, Some(rules)),
        };
        let limited = rules.into_iter().flat_map(DomainRules::buckets).map(|(_, bucket)| bucket);
        owner.buckets.values().chain(unconfigured).chain(limited)
    });
    for bucket in limits.global_default.iter().chain(owned) {
        assert!(!std::mem::replace(&mut seen[bucket.index], true));
        assert_eq!(bucket.terms, bucket.limit.terms());
    }
    assert!(seen.iter().all(|seen| *seen));
}

fn policy() -> impl Strategy<Value = Option<Value>> {
    prop::option::of(select(vec![json!("local"), json!("allow"), json!("deny")]))
}

fn minus_one_or(number: impl Strategy<Value = i64>) -> impl Strategy<Value = Value> {
    prop_oneof![Just(json!(-1)), number.prop_map(|number| json!(number))]
}

fn fill_rate() -> impl Strategy<Value = Value> {
    prop_oneof![
        (1_u32..1_000_000).prop_map(|rate| json!(rate)),
        (0.001..1e8).prop_map(|rate: f64| json!(rate)),
        (1_u32..1_000_000, select(vec!["s", "m", "hour", "day"]))
            .prop_map(|(tokens, unit)| json!(format!("{tokens}/{unit}"))),
    ]
}

/// An object of the given fields.
fn object(fields: Vec<(&str, Option<Value>)>) -> Value {
    let given = fields.into_iter().filter_map(|(key, value)| Some((key.to_string(), value?)));
    Value::Object(given.collect())
}

fn bucket() -> impl Strategy<Value = Value> {
    let some = prop::option::of::<BoxedStrategy<Value>>;
    (
        some((1_u64..1000).prop_map(|size| json!(size)).boxed()),
        some(fill_rate().boxed()),
        some((0..i64::MAX).prop_map(|ms| json!(ms)).boxed()),
        some(minus_one_or(1..i64::MAX).boxed()),
        some((0_u64..=126_230_400_000).prop_map(|ms| json!(ms)).boxed()),
        some(minus_one_or(1..i64::MAX).boxed()),
        some((0.001..=100.0).prop_map(|percent: f64| json!(percent)).boxed()),
        some((0..=100_u8).prop_map(|percent| json!(format!("{percent}%"))).boxed()),
    )
        .prop_map(|(size, fill_rate, wait, idle, debt, tokens, soft, reserve)| {
            object(vec![
                ("size", size),
                ("fill_rate", fill_rate),
                ("wait_timeout_millis", wait),
                ("max_idle_millis", idle),
                ("max_debt_millis", debt),
                ("max_tokens_per_request", tokens),
                ("soft_limit_percent", soft),
                ("reserve", reserve),
            ])
        })
}

/// A bucket that is not a template: nodes may prefetch up to half of its size.
fn one_bucket() -> impl Strategy<Value = Value> {
    (bucket(), prop::option::of(0.0..=1.0)).prop_map(|(mut bucket, part)| {
        let half = bucket["size"].as_u64().unwrap_or(100) / 2;
        if let Some(part) = part.filter(|_| half > 0 && bucket["reserve"].is_null()) {
            let part: f64 = part;
            bucket["prefetch"] = json!(((half as f64 * part) as u64).max(1));
        }
        bucket
    })
}

/// Text without refused control characters, sometimes with spaces and line breaks.
fn text() -> impl Strategy<Value = String> {
    let odd = |c: char| c.is_control() && c != '\n' && c != '\t' || "\u{2028}\u{2029}".contains(c);
    let text = prop_oneof![any::<String>(), "[ \\n\\ta:#'\"|>-]{0,12}"];
    text.prop_map(move |text| text.chars().filter(|c| !odd(*c)).collect())
}

/// Names, often such that YAML would parse as something else.
fn name(allowed: fn(&str) -> bool) -> impl Strategy<Value = String> {
    let tricky = vec![
        "null",
        "~",
        "true",
        "no",
        "123",
        "1e3",
        "0x10",
        ".inf",
        "-",
        "?",
        "=",
        "---",
        "...",
        "*a",
        "&b",
        "!c",
        "#d",
        "%e",
        "@f",
        "`g",
        "'s",
        "\"q\"",
        "{x}",
        "[y]",
        "a,b",
        "a#b",
        "|",
        ">",
        "2001-01-01",
        "\u{feff}x",
        "\u{fffe}",
        "\u{200b}",
        "\u{e000}",
        "size",
        "buckets",
    ];
    prop_oneof![
        select(tricky).prop_map(String::from),
        "[a-zA-Z_:.-]{1,20}",
        any::<String>(),
        "\\PC{1,10}",
    ]
    .prop_map(|name| name.chars().filter(|c| !c.is_whitespace()).take(60).collect())
    .prop_filter("a name", move |name: &String| name != "<<" && allowed(name))
}

fn named(
    name: impl Strategy<Value = String>,
    value: impl Strategy<Value = Value>,
    most: usize,
) -> impl Strategy<Value = Value> {
    prop::collection::vec((name, value), 0..=most)
        .prop_map(|entries| Value::Object(entries.into_iter().collect::<Map<_, _>>()))
}

fn namespace() -> impl Strategy<Value = Value> {
    let buckets = named(name(|name| check_bucket(name).is_ok()), one_bucket(), 4);
    let unconfigured = prop_oneof![
        Just(Vec::new()),
        one_bucket().prop_map(|shared| vec![("default_bucket", Some(shared))]),
        (bucket(), prop::option::of(0_u64..1000)).prop_map(|(template, most)| vec![
            ("max_dynamic_buckets", most.map(|most| json!(most))),
            ("dynamic_bucket_template", Some(template)),
        ]),
    ];
    (prop::option::of(buckets), unconfigured, policy()).prop_map(|(buckets, mut fields, policy)| {
        fields.extend([("buckets", buckets), ("on_store_failure", policy)]);
        object(fields)
    })
}

fn algorithm() -> impl Strategy<Value = Value> {
    let kinds = vec!["NO_ALGORITHM", "STATIC", "PROPORTIONAL_SHARE", "FAIR_SHARE"];
    let parameters = prop::collection::vec((text(), prop::option::of(text())), 0..3);
    (select(kinds), 1_u64..1000, 0_u64..1000, prop::option::of(0_u64..1000), parameters).prop_map(
        |(kind, refresh, more, learning, parameters)| {
            let parameters = parameters.into_iter().map(|(name, value)| {
                object(vec![
                    ("name", Some(json!(name))),
                    ("value", value.map(|value| json!(value))),
                ])
            });
            object(vec![
                ("kind", Some(json!(kind))),
                ("lease_length", Some(json!(refresh + more))),
                ("refresh_interval", Some(json!(refresh))),
                ("learning_mode_duration", learning.map(|seconds| json!(seconds))),
                ("parameters", Some(parameters.collect())),
            ])
        },
    )
}

fn amount() -> impl Strategy<Value = Value> {
    prop_oneof![
        (0_u64..1_000_000).prop_map(|amount| json!(amount)),
        (0.0..1e300).prop_map(|amount: f64| json!(amount)),
        (0.0..10.0).prop_map(|amount: f64| json!(amount)),
    ]
}

fn resources() -> impl Strategy<Value = Value> {
    let template = (
        amount(),
        prop::option::of(amount()),
        prop::option::of(text()),
        prop::option::of(algorithm()),
    );
    let globs = prop::collection::hash_set("[a-z.?/]{0,5}[*x]x|\\[[!^]?[a-f]\\]", 0..4);
    (globs, prop::collection::vec(template, 5), algorithm()).prop_map(|(globs, templates, last)| {
        let globs = globs.into_iter().chain(["*".to_string()]);
        let templates = globs.zip(templates).map(|(glob, (capacity, safe, description, own))| {
            let algorithm = if glob == "*" { Some(last.clone()) } else { own };
            object(vec![
                ("identifier_glob", Some(json!(glob))),
                ("capacity", Some(capacity)),
                ("safe_capacity", safe),
                ("description", description.map(|text| json!(text))),
                ("algorithm", algorithm),
            ])
        });
        templates.collect()
    })
}

fn throttles() -> impl Strategy<Value = Value> {
    let span = || {
        (0_u64..400_000_000, select(vec!["ms", "s", "m"])).prop_map(|(number, unit)| {
            let most = match unit {
                "ms" => number,
                "s" => number % 1_000_000,
                _ => number % 10_000,
            };
            json!(format!("{most}{unit}"))
        })
    };
    let window = (1_u64..1000).prop_map(|seconds| json!(format!("{seconds}s")));
    let flag = || prop::option::of(any::<bool>().prop_map(|flag| json!(flag)));
    let tier = (0_u64..1 << 32, window, span(), prop::option::of(span()), flag()).prop_map(
        |(limit, window, active, cooldown, skippable)| {
            object(vec![
                ("limit", Some(json!(limit))),
                ("window", Some(window)),
                ("active", Some(active)),
                ("cooldown", cooldown),
                ("skippable", skippable),
            ])
        },
    );
    let by_second = || prop::option::of((-1_i64..1 << 32).prop_map(|limit| json!(limit)));
    let limits = (prop::collection::vec(tier, 0..4), by_second())
        .prop_map(|(tiers, hard)| vec![("tiers", Some(json!(tiers))), ("hard_limit", hard)]);
    let domains = named("\\PC{1,10}", limits.clone().prop_map(object), 3);
    let throttle = (limits, by_second(), prop::option::of(domains), flag());
    let globs = prop::collection::hash_set("[a-z.?/]{0,5}[*x]x|\\[[!^]?[a-f]\\]", 0..4);
    (globs, prop::collection::vec(throttle, 5)).prop_map(|(globs, throttles)| {
        let globs = globs.into_iter().chain(["*".to_string()]);
        let throttles =
            globs.zip(throttles).map(|(glob, (mut fields, global, domains, enforce))| {
                fields.extend([
                    ("resource", Some(json!(glob))),
                    ("global_limit", global),
                    ("domains", domains),
                    ("enforce", enforce),
                ]);
                object(fields)
            });
        throttles.collect()
    })
}

fn holds() -> impl Strategy<Value = Value> {
    let limit = || minus_one_or(0_i64..=1_000_000_000_000_000);
    let some = prop::option::of::<BoxedStrategy<Value>>;
    let hold = (
        some(limit().boxed()),
        some(limit().boxed()),
        some(named("\\PC{1,10}", limit(), 3).boxed()),
        some((0..i64::MAX).prop_map(|most| json!(most)).boxed()),
        some(any::<bool>().prop_map(|flag| json!(flag)).boxed()),
    );
    let globs = prop::collection::hash_set("[a-z.?/]{0,5}[*x]x|\\[[!^]?[a-f]\\]", 0..4);
    (globs, prop::collection::vec(hold, 5)).prop_map(|(globs, holds)| {
        let globs = globs.into_iter().chain(["*".to_string()]);
        let holds = globs.zip(holds).map(|(glob, (domain, global, domains, most, enforce))| {
            object(vec![
                ("resource", Some(json!(glob))),
                ("domain_limit", domain),
                ("global_limit", global),
                ("domains", domains),
                ("max_holds", most),
                ("enforce", enforce),
            ])
        });
        holds.collect()
    })
}

/// Text that is not empty.
fn nonempty_text() -> impl Strategy<Value = String> {
    text().prop_filter("empty", |text| !text.is_empty())
}

/// What limits an entry of Envoy's descriptors.
fn rate_limit() -> impl Strategy<Value = Value> {
    let units = vec!["second", "MINUTE", "Hour", "day", "week", "month", "year"];
    let algorithms = vec![None, Some("fixed_window"), Some("sliding_window"), Some("sliding_log")];
    let limited = (select(units), 0_u64..1 << 32, select(algorithms)).prop_map(
        |(unit, requests, algorithm)| {
            vec![
                ("unit", Some(json!(unit))),
                ("requests_per_unit", Some(json!(requests))),
                ("algorithm", algorithm.map(|word| json!(word))),
            ]
        },
    );
    let unlimited = Just(vec![("unlimited", Some(json!(true)))]);
    let others = prop::collection::vec(nonempty_text(), 0..3);
    (prop_oneof![4 => limited, 1 => unlimited], prop::option::of(nonempty_text()), others).prop_map(
        |(mut fields, name, others)| {
            let others = others.into_iter().filter(|other| Some(other) != name.as_ref());
            let others: Vec<_> = others.map(|other| json!({ "name": other })).collect();
            fields.extend([
                ("name", name.map(|name| json!(name))),
                ("replaces", Some(json!(others))),
            ]);
            object(fields)
        },
    )
}

/// The rules of an Envoy domain.
fn descriptors() -> impl Strategy<Value = Value> {
    let leaf = Just(json!([])).boxed();
    leaf.prop_recursive(3, 12, 3, |below| {
        let value = prop_oneof![text(), "[a-c]{1,3}[*]?"];
        let rule = (
            prop::option::of(value),
            prop::option::of(rate_limit()),
            prop::option::of(any::<bool>()),
            prop::option::of(below),
        );
        let keys = prop::collection::hash_set(nonempty_text(), 0..4);
        (keys, prop::collection::vec(rule, 4)).prop_map(|(keys, rules)| {
            let rules = keys.into_iter().zip(rules);
            let rules = rules.map(|(key, (value, rate_limit, shadow, below))| {
                object(vec![
                    ("key", Some(json!(key))),
                    ("value", value.map(|value| json!(value))),
                    ("rate_limit", rate_limit),
                    ("shadow_mode", shadow.map(|shadow| json!(shadow))),
                    ("descriptors", below),
                ])
            });
            rules.collect()
        })
    })
}

/// Envoy domains, with names that are not those of namespaces.
fn envoy() -> impl Strategy<Value = Value> {
    let names = prop::collection::hash_set("envoy[a-z/._-]{1,5}", 0..4);
    let domain = (prop::option::of(descriptors()), policy(), prop::option::of(any::<bool>()));
    (names, prop::collection::vec(domain, 4)).prop_map(|(names, domains)| {
        let domains = names.into_iter().zip(domains);
        let domains = domains.map(|(name, (descriptors, policy, enforce))| {
            object(vec![
                ("domain", Some(json!(name))),
                ("descriptors", descriptors),
                ("on_store_failure", policy),
                ("enforce", enforce.map(|enforce| json!(enforce))),
            ])
        });
        domains.collect()
    })
}

/// A valid file as JSON, which is also YAML, but printed by another library.
fn valid_file() -> impl Strategy<Value = String> {
    let namespaces = named(name(|name| check_namespace(name).is_ok()), namespace(), 4);
    (
        prop::option::of(one_bucket()),
        prop::option::of(namespaces),
        prop::option::of(resources()),
        prop::option::of(throttles()),
        prop::option::of(holds()),
        prop::option::of(envoy()),
        policy(),
    )
        .prop_map(|(global, namespaces, resources, throttles, holds, envoy, policy)| {
            let file = object(vec![
                ("global_default_bucket", global),
                ("namespaces", namespaces),
                ("resources", resources),
                ("throttles", throttles),
                ("holds", holds),
                ("envoy", envoy),
                ("on_store_failure", policy),
            ]);
            escaped(&file.to_string())
        })
}

/// JSON with escapes for all but ASCII, some of which YAML does not allow.
fn escaped(json: &str) -> String {
    let mut text = String::new();
    for c in json.chars() {
        match c {
            ' '..='~' => text.push(c),
            _ => text += &format!("\\U{:08x}", u32::from(c)),
        }
    }
    text
}

fn good_files() -> Vec<String> {
    let folder = testkit::fixture("limits/good");
    fs::read_dir(folder)
        .expect("the folder of fixtures")
        .map(|entry| entry.expect("an entry").path())
        .filter(|file| file.extension().is_some_and(|end| end == "yaml"))
        .map(|file| fs::read_to_string(file).expect("a fixture in UTF-8"))
        .collect()
}

/// Pieces of valid and invalid limits files.
const PIECES: [&str; 61] = [
    "\n",
    "\n",
    "\n",
    "  ",
    "  ",
    "    ",
    "- ",
    ": ",
    ":",
    ", ",
    "{",
    "}",
    "[",
    "]",
    "&a ",
    "*a",
    "<<",
    "<<: *a",
    "'",
    "\"",
    "|",
    ">",
    "|2-\n",
    "!!str ",
    "!x ",
    "---\n",
    "...\n",
    "? ",
    "#",
    " #",
    "%TAG ! x",
    "\t",
    "\r",
    "\u{feff}",
    "\\",
    "\\x",
    "\u{0}",
    "~",
    "null",
    "-1",
    "1e400",
    ".nan",
    "100/m",
    "namespaces",
    "resources",
    "buckets",
    "size: 5",
    "fill_rate",
    "default_bucket",
    "identifier_glob",
    "algorithm",
    "throttles",
    "tiers",
    "60s",
    "holds",
    "resource: a",
    "domain_limit: 5",
    "envoy",
    "domain: a",
    "descriptors",
    "key: k",
];

proptest! {
    #[test]
    fn valid_files_load_and_survive_printing(text in valid_file()) {
        if let Err(faults) = parse(&text) {
            panic!("{faults}\n{text}");
        }
        assert_indexed(&round_trip(&text).expect("a valid file"));
    }

    /// The template is the one with the exact name, or else the first match.
    #[test]
    fn the_right_template_is_found(
        resources in resources(),
        last in any::<bool>(),
        names in prop::collection::vec("[a-z.?/]{0,5}[*x]?x|[a-g]", 8),
        pick in any::<Index>(),
    ) {
        let mut limits = parse(&json!({ "resources": resources }).to_string()).unwrap().limits;
        if !last {
            limits.resources = limits.resources[..limits.resources.len() - 1].to_vec().into();
        }
        let globs: Vec<&str> =
            limits.resources.iter().map(|template| template.glob.as_str()).collect();
        let named = (!globs.is_empty()).then(|| pick.get(&globs).to_string());
        for name in names.into_iter().chain(named) {
            let first = || globs.iter().position(|glob| Glob::new(glob).unwrap().matches(&name));
            let expected = globs.iter().position(|glob| **glob == name).or_else(first);
            let found = limits.resources.find(&name);
            prop_assert_eq!(found.map(|(position, _)| position), expected, "{} {:?}", name, globs);
            if let Some((position, template)) = found {
                prop_assert_eq!(template, &limits.resources[position]);
            }
        }
    }

    #[test]
    fn arbitrary_text_never_panics(text in any::<String>()) {
        round_trip(&text);
    }

    #[test]
    fn pieces_of_yaml_never_panic(pieces in prop::collection::vec(select(&PIECES[..]), 0..40)) {
        round_trip(&pieces.concat());
    }

    #[test]
    fn damaged_files_never_panic(
        text in select(good_files()),
        edits in prop::collection::vec((any::<Index>(), 0_usize..12, select(&PIECES[..])), 1..4),
    ) {
        let mut chars: Vec<char> = text.chars().collect();
        for (at, cut, piece) in edits {
            let at = at.index(chars.len() + 1);
            let end = (at + cut).min(chars.len());
            chars.splice(at..end, piece.chars());
        }
        round_trip(&chars.into_iter().collect::<String>());
    }

    #[test]
    fn faults_are_in_order_and_on_one_line_each(
        pieces in prop::collection::vec(select(&PIECES[..]), 0..40),
    ) {
        if let Err(faults) = parse(&pieces.concat()) {
            prop_assert!(!faults.0.is_empty());
            prop_assert!(faults.0.is_sorted_by_key(|fault| fault.line));
            prop_assert_eq!(faults.to_string().lines().count(), faults.0.len());
            prop_assert!(!faults.to_string().contains(|c: char| c.is_control() && c != '\n'));
        }
    }
}

/// One fault per kind and line, with the number of others.
#[test]
fn many_faults_on_a_line_are_reported_as_one() {
    let keys = |count| (0..count).map(|at| format!("colour{at}: 1")).collect::<Vec<_>>().join(", ");
    let buckets = (0..30).map(|at| format!("b{at}: {{ size: x, prefetch: x }}"));
    let buckets = buckets.collect::<Vec<_>>().join(", ");
    let text = format!(
        "namespaces:\n  a: {{ default_bucket: {{ {} }} }}\n  b: {{ buckets: {{ {buckets} }} }}\n\
         \u{20} c: {{ default_bucket: {{ {} }} }}\n\
         holds:\n  - {{ resource: a, domains: {{ {} }} }}\n",
        keys(78),
        keys(1),
        keys(50).replace('1', "x")
    );
    let faults = parse(&text).expect_err("faults");
    let told: Vec<_> =
        faults.0.iter().map(|fault| (fault.line, &*fault.path, fault.more)).collect();
    assert_eq!(
        told,
        [
            (2, "namespaces.a.default_bucket.colour0", 77),
            (3, "namespaces.b.buckets.b0.size", 29),
            (3, "namespaces.b.buckets.b0.prefetch", 29),
            (4, "namespaces.c.default_bucket.colour0", 0),
            (6, "holds[0].domains.colour0", 49),
        ]
    );
    let first = faults.to_string();
    let first = first.lines().next().expect("a line");
    assert!(first.ends_with("enforce; and 77 more of this kind on this line"), "{first}");
    // The same if aliases repeat a line.
    let aliases = vec!["*a"; 1000].join(", ");
    let text = format!(
        "namespaces:\n  a: {{ buckets: &a {{ x: {{ colour: 1 }} }} }}\nresources: [{aliases}]\n"
    );
    let said = parse(&text).expect_err("faults").to_string();
    assert!(said.len() < 2000, "{said}");
}

#[test]
fn messages_stay_short_whatever_the_file_says() {
    let long = "x".repeat(1 << 20);
    let texts = [
        format!("namespaces: {{ {long}: {{}} }}"),
        format!("namespaces: {{ a: {{ {long}: {{}} }} }}"),
        format!("namespaces: {{ a: {{ default_bucket: {{ size: {long}, fill_rate: {long} }} }} }}"),
        format!("namespaces: {{ a: {{ default_bucket: {{ size: '{}' }} }} }}", "1".repeat(1 << 20)),
        format!("resources: [{{ identifier_glob: '[{long}', capacity: {long} }}]"),
        format!("on_store_failure: {long}"),
        format!("namespaces: !{long} {{}}"),
        format!("namespaces: *{long}"),
        long,
    ];
    for text in texts {
        let faults = parse(&text).expect_err("a fault");
        for fault in faults.0 {
            let length = fault.to_string().len();
            assert!(length < 600, "{length} bytes");
        }
    }
}

/// Time to parse a file with this number of buckets.
fn load_of(buckets: u32) -> Duration {
    let mut text = String::from("namespaces:\n  users:\n    buckets:\n");
    for index in 0..buckets {
        text += &format!("      bucket_{index}: {{ size: 20, fill_rate: 10 }}\n");
    }
    let start = Instant::now();
    let parsed = parse(&text).expect("a valid file");
    let took = start.elapsed();
    assert_eq!(parsed.limits.bucket_count, buckets as usize);
    assert_eq!(parsed.limits.version, crc32fast::hash(text.as_bytes()));
    took
}

#[test]
fn a_hundred_thousand_buckets_load_in_linear_time() {
    // The fastest of several, as other load only makes them slower.
    let fastest = |buckets| (0..3).map(|_| load_of(buckets)).min().expect("three of them");
    let (few, many) = (fastest(10_000), fastest(100_000));
    // Linear time would be ten times as long, quadratic time a hundred times.
    assert!(many < 40 * few, "{many:?} is more than 40 times {few:?}");
}
