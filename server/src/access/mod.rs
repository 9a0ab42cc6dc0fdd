//! Who may ask. Off unless there is an access file: then a [`Guard`] knows each connection, and
//! finds out of each request who asks; the [`Caller`] that it gives back says what that one may.
//!
//! All that is refused is refused before anything is looked up, and in the same words whatever
//! there is: an answer tells nobody whether a bucket or a resource exists.

mod guard;
mod live;
mod token;

pub use guard::{Caller, Guard, Refusal};
pub use live::{Access, LoadError, read};
pub use token::Token;
