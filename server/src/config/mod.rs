//! The limits file: from YAML text to a validated model, with every fault reported at once.

pub mod model;
