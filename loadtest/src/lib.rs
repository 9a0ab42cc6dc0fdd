//! Load for tollgate, and a check of its books.
//!
//! [`allow`] reads the arguments and runs; [`load`] has the two loops that send, [`driver`]
//! the transport under them, [`keys`] and [`pace`] what is asked and when; [`tally`] counts,
//! [`books`] holds grants against limits, and [`report`] tells.

pub mod allow;
pub mod books;
pub mod driver;
pub mod keys;
pub mod load;
pub mod pace;
pub mod progress;
pub mod report;
pub mod tally;
