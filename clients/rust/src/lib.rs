//! Client.

pub mod connection;
