//! Client of tollgate, the quota service.
//!
//! A service asks tollgate for tokens before it calls what it shares with others: a database, an
//! API. [`Client::acquire`] waits for them, [`Client::allow`] only asks. With the library in the
//! way, an application never waits longer than it said, and goes on when the quota service does not
//! answer: a [`Fallback`] decides then.
//!
//! ```no_run
//! # async fn example() -> Result<(), Box<dyn std::error::Error>> {
//! use std::time::Duration;
//! use tollgate_client::{Client, Fallback, Request};
//!
//! let client = Client::builder(["tollgate.internal:10990"])
//!     .fallback(Fallback::rate(10.0, 20))
//!     .build()?;
//!
//! client.acquire(Request::new("db", "reads").max_wait(Duration::from_secs(1))).await?;
//! // Now call the database.
//! # Ok(())
//! # }
//! ```
//!
//! A client that makes many calls leases a share of a resource's capacity instead, and limits itself
//! to it, without a call for each use: see [`Client::lease`]. Or it takes the tokens of a bucket ahead
//! of need: see [`SmartBucket`]. What each tenant may use is limited by hits ([`Client::hits`]), or by
//! copies that are held ([`Client::hold`]).
//!
//! With the feature `tower`, `QuotaLayer` takes tokens before each request that a server of axum or
//! tonic handles, or each call that a tonic client makes.
//!
//! # When nodes fail
//!
//! A call that fails at one node is made to another one, as long as the deadline lasts. A node that
//! can't be reached, or has failed three times in a row, is not called any more until it answers a
//! health check: first after 0.1 s, then after ever longer pauses of up to 10 s. Then it gets one
//! call at a time until it answers one. A node that says that it is overloaded is left alone for as
//! long as it says, for 10 s at most. When there is no answer within the deadline, or no node to
//! call, the fallback decides, without a wait in the latter case. A node that hangs takes up the
//! deadline of the first calls, and counts as failing if they had 50 ms or more. Requests that a
//! node has decided but not answered cost their tokens.
//!
//! # Metrics
//!
//! They go to the recorder that the application installs for the crate `metrics`:
//!
//! | metric | labels | meaning |
//! |---|---|---|
//! | `tollgate_client_requests_total` | `namespace`, `outcome`, `decided_by` | requests. `outcome`: `granted`, `refused`, `invalid`, `no_decision`. `namespace` is empty if the request is invalid or the limits have no such bucket, and beyond the first 1000. `decided_by`: `node`, `degraded_node`, `remembered`, `fallback`, `nobody` |
//! | `tollgate_client_tenant_requests_total` | `kind`, `outcome`, `decided_by` | requests for hits (`kind` is `hits`) and copies (`hold`); the other labels as above |
//! | `tollgate_client_request_seconds` | | how long it took until a node had decided, or none would; a histogram |
//! | `tollgate_client_wait_seconds` | | how long [`Client::acquire`], [`Client::hits`] and [`Client::hold`] took, a histogram |
//! | `tollgate_client_failed_calls_total` | `reason` | calls to nodes that have failed: `timeout`, `unreachable`, `overloaded`, `forbidden`, `not_configured`, `error` |
//! | `tollgate_client_smart_tokens_total` | `outcome` | tokens of smart buckets that were `used` or `refused` |
//! | `tollgate_client_charged_tokens_total` | | tokens that were taken for what [`Client::charge`] said |
//! | `tollgate_client_held_copies` | | the copies that this process holds |
//! | `tollgate_client_lost_holds_total` | | holds that were lost before the application released them |
//! | `tollgate_client_lease_wants`, `tollgate_client_lease_capacity` | `resource` | what the client asked for at the last refresh, and what it may use |
//! | `tollgate_client_failed_refreshes_total` | | refreshes of the leases that have failed |
//! | `tollgate_client_nodes`, `tollgate_client_nodes_called` | | the nodes that are known, and those that are called; the circuits of the others are open, or they do not answer yet |

mod backend;
mod builder;
mod charges;
mod client;
#[doc(hidden)]
pub mod connection;
mod decision;
mod fake;
mod fallback;
mod holds;
#[cfg(feature = "tower")]
mod layer;
mod leases;
mod metrics;
mod nodes;
mod refusals;
mod request;
mod smart;
mod tasks;
mod tenants;
mod waiting;

pub use builder::{BuildError, Builder};
pub use client::Client;
pub use decision::{AcquireError, DecidedBy, Decision, Error, Grant, NoAnswer, Reason, Refusal};
pub use fake::{Fake, FakeAnswer};
pub use fallback::{Fallback, LocalRate};
pub use holds::Hold;
#[cfg(feature = "tower")]
pub use layer::{Bucket, QuotaBody, QuotaLayer, QuotaService};
pub use leases::{Capacity, Closed, Gauge, LeaseBuilder, LeaseError, Mode, Place, RateLimiter};
pub use request::Request;
pub use smart::{SmartBucket, SmartBuilder};
pub use tenants::{Hits, TenantRequest};

/// Compiles the examples of the README.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
