//! Load generator and benchmarks for tollgate, with an audit of what was granted.
//!
//! [`allow`] runs token load and reports. [`load`] has the closed and the open loop, [`driver`] the
//! transport, [`keys`] the bucket names and [`pace`] the send times. [`tally`] counts, [`books`]
//! audits grants against limits. [`capacity`] does all that for leases, and [`scenario`] simulates
//! leases without a network. [`floor`] serves the baselines that nodes are compared with, and
//! [`mod@bench`] runs the comparison. They share
//! [`args`], [`error`], [`figures`], [`walk`] and [`series`].

pub mod allow;
pub mod args;
pub mod bench;
pub mod books;
pub mod capacity;
pub mod driver;
pub mod error;
pub mod figures;
pub mod floor;
pub mod keys;
pub mod load;
pub mod pace;
pub mod progress;
pub mod scenario;
pub mod series;
pub mod tally;
pub mod walk;
