//! tollgate loadtest
fn main() {}
