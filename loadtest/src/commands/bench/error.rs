//! Why a benchmark failed.

use std::io;

use crate::error::RunError;

/// Why a benchmark failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A process did not start.
    #[error("{0} does not start: {1}")]
    Start(String, io::Error),
    /// Redis returned an error.
    #[error("Redis: {0}")]
    Redis(#[from] redis::RedisError),
    /// A load run failed.
    #[error(transparent)]
    Run(#[from] RunError),
    /// A file or another system call failed.
    #[error("{0}")]
    Io(io::Error),
    /// Any other error.
    #[error("{0}")]
    Other(String),
}
