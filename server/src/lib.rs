//! The tollgate node.
//!
//! Requests pass through transport, service and store, and answers return the same way.
//! `tests/layers.rs` enforces the dependencies:
//!
//! | module | contents | may use |
//! |---|---|---|
//! | `cli` | arguments, exit codes | everything |
//! | `app` | the composition root: starts, drains, stops | everything |
//! | `transport` | gRPC and HTTP: decode, call the service, encode | `service`, `store` (the trait), `domain`, `metrics`, `access`, `client`, `tls`, `files`, `logging` |
//! | `access` | identity and permissions of callers | `config`, `domain`, `files`, `logging`, `metrics` |
//! | `client` | calls to nodes: addresses, credentials, channels, leases | `tls`, `files`, `logging` |
//! | `tls` | certificates, handshakes | `files`, `logging`, `metrics` |
//! | `service` | one use case per file | `store`, `config`, `domain`, `files`, `metrics`, `logging` |
//! | `store` | storage of buckets and leases: in memory, in Redis | `domain`, `files`, `metrics`, `logging` |
//! | `config` | the limits file | `domain` |
//! | `domain` | bucket arithmetic, sharing of capacity, leases, names, time | nothing |
//! | `settings`, `logging`, `metrics`, `files` | command-line settings, log output, metrics, file watching | nothing |
//!
//! Two placements may surprise. The live snapshot of the limits is in `service::limits`, not in
//! `config`, because it contains the metric handles of each bucket. `transport` uses the trait
//! `Store` because the service is generic over it, which avoids a boxed future per request.

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
