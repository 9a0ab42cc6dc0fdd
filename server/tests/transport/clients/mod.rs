//! Third-party clients: Python's grpcio and `requests`, Node's `fetch`, curl, and, if
//! `scripts/clients.sh` has fetched them, grpc-js and grpc-go. Scenarios are written once; a driver
//! program for each client executes their orders.
//!
//! With `TOLLGATE_REPORT=<folder>` each scenario writes a row of the table in
//! `docs/compatibility.md`; `scripts/clients.sh` prints the table.

mod curl;
mod driver;
mod grpc;
mod http;
mod report;
