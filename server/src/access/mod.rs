//! Access control: which callers may do what. Without an access file every caller may do
//! everything. With one, each connection has a [`Guard`], which identifies the caller of each
//! request and returns a [`Caller`] with the caller's rights.
//!
//! A request is refused before any lookup, and the refusal does not depend on what exists. So an
//! answer never tells whether a bucket or a resource exists.

mod caller;
mod credentials;
mod guard;
mod live;
mod token;

pub use caller::{Caller, Refusal};
pub use guard::Guard;
pub use live::{Access, AccessFile, read};

pub use crate::config::LoadError;
pub use token::Token;
