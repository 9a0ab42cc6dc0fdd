//! Connections and logins.

pub(super) mod advice;
pub(super) mod connection;
pub(super) mod login;
