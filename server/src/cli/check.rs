//! `tollgate check`: validates a limits file or an access file.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use crate::access;
use crate::config;
use crate::service::limits::{self, LoadError};

#[derive(clap::Args)]
pub(super) struct Args {
    /// The limits file, or with --access the access file
    file: PathBuf,
    /// The file is an access file: print the callers and their permissions
    #[arg(long)]
    access: bool,
}

pub(super) fn run(args: &Args) -> Result<ExitCode, String> {
    if args.access {
        return check_access(&args.file);
    }
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

fn check_access(file: &Path) -> Result<ExitCode, String> {
    match access::read(file) {
        Ok(callers) => {
            let lines = callers.iter().map(|caller| format!("{caller}\n"));
            super::print(&lines.collect::<String>())?;
            Ok(ExitCode::SUCCESS)
        }
        Err(access::LoadError::Faulty { faults, .. }) => {
            super::print(&format!("{faults}\n"))?;
            Ok(ExitCode::FAILURE)
        }
        Err(error @ access::LoadError::Unreadable(_)) => Err(error.to_string()),
    }
}
