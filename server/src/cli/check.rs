//! `tollgate check`: validates a limits file or an access file.

use std::path::PathBuf;
use std::process::ExitCode;

use crate::access;
use crate::config::access::CallerEntry;
use crate::config::{self, LoadError, Parsed};
use crate::service::limits;

#[derive(clap::Args)]
pub(super) struct Args {
    /// The limits file, or with --access the access file
    file: PathBuf,
    /// The file is an access file: print the callers and their permissions
    #[arg(long)]
    access: bool,
}

pub(super) fn run(args: &Args) -> Result<ExitCode, String> {
    let checked = match args.access {
        true => access::read(&args.file).map(|callers| shown_callers(&callers)),
        false => limits::read(&args.file).map(|parsed| shown_limits(&parsed)),
    };
    let (text, code) = match checked {
        Ok(text) => (text, ExitCode::SUCCESS),
        Err(LoadError::Faulty { faults, .. }) => (format!("{faults}\n"), ExitCode::FAILURE),
        Err(error @ LoadError::Unreadable(_)) => return Err(error.to_string()),
    };
    super::print(&text)?;
    Ok(code)
}

/// One paragraph per caller.
fn shown_callers(callers: &[CallerEntry]) -> String {
    callers.iter().map(|caller| format!("{caller}\n")).collect()
}

/// The limits as YAML with all defaults. Prints the settings without effect to standard error.
fn shown_limits(parsed: &Parsed) -> String {
    for notice in &parsed.notices {
        eprintln!("{notice}");
    }
    config::to_yaml(&parsed.limits)
}
