//! The tollgate node.
//!
//! Requests pass through transport, service and store, and answers return the same way.
//! `tests/layers.rs` reads this table, and fails on any other dependency:
//!
//! | module | contents | may use |
//! |---|---|---|
//! | `cli` | arguments, exit codes | `app`, `transport`, `access`, `client`, `tls`, `service`, `config`, `files`, `settings`, `logging`, `wall_clock` |
//! | `app` | the composition root: starts, drains, stops | `transport`, `access`, `client`, `tls`, `service`, `store`, `store::memory`, `store::redis`, `config`, `files`, `settings`, `metrics`, `logging` |
//! | `transport` | gRPC and HTTP: decode, call the service, encode | `service`, `store`, `domain`, `metrics`, `access`, `client`, `tls`, `files`, `logging` |
//! | `access` | identity and permissions of callers | `config`, `domain`, `files`, `logging`, `metrics` |
//! | `client` | calls to nodes: leases, HTTP requests | nothing |
//! | `tls` | certificates, handshakes | `files`, `logging`, `metrics`, `wall_clock` |
//! | `service` | one use case per file | `store`, `store::memory`, `store::redis`, `config`, `domain`, `files`, `metrics`, `logging` |
//! | `store` | storage of buckets, leases, hits and holds: in memory, in Redis | `domain`, `files`, `metrics`, `logging` |
//! | `config` | the limits file, the access file | `domain` |
//! | `files` | files that are reloaded when they change | `metrics`, `logging`, `wall_clock` |
//! | `metrics` | every metric: name, labels, unit, help text | `wall_clock` |
//! | `domain` | bucket arithmetic, sharing of capacity, leases, hits, holds, names, time | nothing |
//! | `settings`, `logging`, `wall_clock` | command-line settings, log output, the time of day | nothing |
//!
//! Only `app` opens stores. `store::memory` and `store::redis` are used only where the table names
//! them; `store` alone is the traits and what goes with them. No file imports another in a circle.
//!
//! Three placements may surprise. The live snapshot of the limits is in `service::limits`, not in
//! `config`, because it contains the metric handles of each bucket. `service` names both stores
//! for its `Fallback`: while Redis does not answer, a node decides with buckets in its own memory,
//! and shares the limits by what Redis last said. `transport` uses the trait `Store` because the
//! service is generic over it, which avoids a boxed future per request.

pub mod access;
pub mod app;
pub mod cli;
pub mod client;
pub mod config;
pub mod domain;
pub mod files;
pub mod logging;
pub mod metrics;
pub mod service;
pub mod settings;
pub mod store;
pub mod tls;
pub mod transport;
pub mod wall_clock;
