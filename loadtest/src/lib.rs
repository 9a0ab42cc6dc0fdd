//! Load for tollgate, and a check of its books.
//!
//! [`allow`] reads the arguments and runs; [`load`] has the two loops that send, [`driver`]
//! the transport under them, [`keys`] and [`pace`] what is asked and when; [`tally`] counts,
//! [`books`] holds grants against limits, and [`report`] tells. [`capacity`] does the same for
//! leases, and [`scenario`] simulates leases without a network. [`floor`] serves what
//! nodes are compared with, and [`mod@bench`] compares. They share [`figures`], [`walk`] and
//! [`series`].

pub mod allow;
pub mod bench;
pub mod books;
pub mod capacity;
pub mod driver;
pub mod figures;
pub mod floor;
pub mod keys;
pub mod load;
pub mod pace;
pub mod progress;
pub mod report;
pub mod scenario;
pub mod series;
pub mod tally;
pub mod walk;
