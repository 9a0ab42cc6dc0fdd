//! Fuzzing of all input: limits files, gRPC messages, HTTP requests, names. Nothing panics, takes
//! long, or leads to an internal error.

mod json;
mod limits;
mod names;
mod requests;

/// Limits with a bucket of each kind, some with extreme numbers.
const LIMITS: &str = r#"
global_default_bucket: { size: 1000, fill_rate: 1000 }
namespaces:
  ns:
    buckets:
      b: { size: 100, fill_rate: 50 }
      huge: { size: 9007199254740992, fill_rate: 100000000, max_tokens_per_request: -1, wait_timeout_millis: 126230400000, max_debt_millis: 126230400000 }
      slow: { size: 1, fill_rate: 1/d, wait_timeout_millis: 0 }
    default_bucket: { size: 20, fill_rate: 10 }
  dynamic: { dynamic_bucket_template: { size: 10, fill_rate: 10, max_tokens_per_request: -1 } }
  bounded: { max_dynamic_buckets: 3, dynamic_bucket_template: { size: 10, fill_rate: 10, max_idle_millis: 1000 } }
resources:
  - { identifier_glob: "fair*", capacity: 100, algorithm: { kind: FAIR_SHARE, lease_length: 60, refresh_interval: 5, learning_mode_duration: 0 } }
  - { identifier_glob: "part*", capacity: 1.0e+300, algorithm: { kind: PROPORTIONAL_SHARE, lease_length: 60, refresh_interval: 5, learning_mode_duration: 0 } }
  - { identifier_glob: "all*", capacity: 0, algorithm: { kind: NO_ALGORITHM, lease_length: 60, refresh_interval: 5, learning_mode_duration: 0 } }
  - { identifier_glob: "each*", capacity: 10, algorithm: { kind: STATIC, lease_length: 60, refresh_interval: 5 } }
throttles:
  - { resource: "s*", tiers: [{ limit: 5, window: 1s, active: 10s }, { limit: 500, window: 1s, active: 1s, cooldown: 9s, skippable: true }] }
  - { resource: "none", tiers: [] }
holds:
  - { resource: "h*", domain_limit: 5, global_limit: 20, max_holds: 9 }
envoy:
  - { domain: d, descriptors: [{ key: k, rate_limit: { unit: minute, requests_per_unit: 5 }, descriptors: [{ key: l, value: "v*", rate_limit: { unit: second, requests_per_unit: 0 } }] }] }
"#;
