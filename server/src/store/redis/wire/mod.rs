pub(super) mod batch;
pub(super) mod script;
