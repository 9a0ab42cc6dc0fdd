//! Hits and copies of a resource, which a domain may use: a user, or a tenant.

mod answer;
mod request;

pub use answer::Hits;
pub use request::TenantRequest;

pub(crate) use answer::{Copies, copies, hits};
pub(crate) use request::count;
