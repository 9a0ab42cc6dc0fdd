//! Why a command failed.

use std::path::PathBuf;

use tollgate_server::service::limits::LoadError;

use crate::commands::scenario::tree;

/// Why a run failed to start or finish.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    /// Invalid arguments, or an invalid combination of them.
    #[error("{0}")]
    Usage(String),
    /// The limits file is unreadable or faulty.
    #[error(transparent)]
    Limits(#[from] LoadError),
    /// A thread or a runtime could not be started.
    #[error("can't start a thread: {0}")]
    Thread(#[from] std::io::Error),
    /// The latency histogram could not be created.
    #[error("can't make a histogram: {0}")]
    Histogram(#[from] hdrhistogram::CreationError),
    /// A simulation failed.
    #[error(transparent)]
    Simulation(#[from] tree::Error),
    /// A file could not be written.
    #[error("can't write {}: {error}", path.display())]
    Write {
        /// The file.
        path: PathBuf,
        /// The cause.
        error: std::io::Error,
    },
    /// A server could not bind its address.
    #[error("--listen: {0}")]
    Listen(std::io::Error),
    /// The store is unreachable or answered with an error.
    #[error("--store: {0}")]
    Store(#[from] redis::RedisError),
    /// A server failed while serving.
    #[error("can't go on serving: {0}")]
    Serve(#[from] tonic::transport::Error),
    /// A sending thread panicked.
    #[error("a sending thread panicked")]
    Panicked,
}
