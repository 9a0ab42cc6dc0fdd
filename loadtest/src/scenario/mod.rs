//! `tollgate-loadtest scenario`: the simulations of the older doorman's design document, against
//! the service itself and on a clock of their own.
//!
//! [`plan`] says what is simulated, [`sim`] lets it happen, [`measure`] looks on; [`report`] and
//! [`svg`] tell.

pub mod measure;
pub mod plan;
pub mod report;
pub mod sim;
pub mod svg;
