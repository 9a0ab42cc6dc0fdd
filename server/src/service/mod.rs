//! The use cases, one a file: [`allow`] asks for tokens, [`limits`] keeps the limits in use.

pub mod allow;
pub mod limits;
