//! The `tollgate` command.

use std::process::ExitCode;

fn main() -> ExitCode {
    tollgate_server::cli::main()
}
