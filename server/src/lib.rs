//! The tollgate node.
//!
//! A request goes one way, and its answer comes back the same way:
//!
//! | place | lives there | may name |
//! |---|---|---|
//! | `cli` | arguments, exit codes | everything |
//! | `app` | the composition root: starts, drains, stops | everything |
//! | `transport` | gRPC and HTTP: decode, ask, encode | `service`, `store` (the trait), `domain`, `metrics`, `access`, `tls`, `files`, `logging` |
//! | `access` | who asks, and whether they may | `config`, `domain`, `files`, `logging`, `metrics` |
//! | `tls` | certificates, handshakes | `files`, `logging`, `metrics` |
//! | `service` | one use case a file | `store`, `config`, `domain`, `files`, `metrics`, `logging` |
//! | `store` | where buckets and leases live: in memory, in Redis | `domain`, `files`, `metrics`, `logging` |
//! | `config` | the limits file | `domain` |
//! | `domain` | bucket arithmetic, sharing of capacity, leases, names, time | nothing |
//! | `settings`, `logging`, `metrics`, `files` | how the process runs, speaks, counts and sees files change | nothing |
//!
//! Two things are not where one might look for them. The live snapshot of the limits is in
//! `service::limits`, not in `config`: it carries the metric handles of each bucket. And
//! `transport` names the trait `Store`, because the service is generic over it: that spares
//! every request a boxed future.

pub mod access;
pub mod app;
pub mod cli;
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
