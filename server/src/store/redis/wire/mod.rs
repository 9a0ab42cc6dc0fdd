pub(super) mod batch;
pub(super) mod parts;
pub(super) mod script;
