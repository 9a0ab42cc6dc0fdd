//! The `tollgate` command.

use std::process::ExitCode;

/// A tenth faster than the system allocator, whose locks are shared by all threads.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> ExitCode {
    tollgate_server::cli::main()
}
