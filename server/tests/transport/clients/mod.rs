//! Clients that nobody here wrote, against nodes: Python's grpcio and `requests`, Node's `fetch`,
//! curl, and, where `scripts/clients.sh` has fetched them, grpc-js and grpc-go. Each scenario is
//! written once; a small program for each client does what the scenario tells it to.
//!
//! With `TOLLGATE_REPORT=<folder>` each scenario leaves a row for the table of
//! `docs/compatibility.md`; `scripts/clients.sh` prints that table.

mod curl;
mod driver;
mod grpc;
mod http;
mod report;
