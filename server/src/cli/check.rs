//! `tollgate check`.

use std::path::PathBuf;
use std::process::ExitCode;

use crate::config;
use crate::service::limits::{self, LoadError};

#[derive(clap::Args)]
pub(super) struct Args {
    /// The limits file
    file: PathBuf,
}

pub(super) fn run(args: &Args) -> Result<ExitCode, String> {
    match limits::read(&args.file) {
        Ok(parsed) => {
            for notice in &parsed.notices {
                eprintln!("{notice}");
            }
            super::print(&config::understood(&parsed.limits))?;
            Ok(ExitCode::SUCCESS)
        }
        Err(LoadError::Faulty { faults, .. }) => {
            super::print(&format!("{faults}\n"))?;
            Ok(ExitCode::FAILURE)
        }
        Err(error @ LoadError::Unreadable { .. }) => Err(error.to_string()),
    }
}
