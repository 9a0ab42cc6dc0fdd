//! `tollgate check`: validates limits, or an access file.

use std::path::PathBuf;
use std::process::ExitCode;

use crate::access;
use crate::config::access::CallerEntry;
use crate::config::{self, LoadError, Parsed};
use crate::service::limits::LimitsFiles;

#[derive(clap::Args)]
pub(super) struct Args {
    /// The limits file, or with --access the access file
    #[arg(required_unless_present = "envoy_limits")]
    file: Option<PathBuf>,
    /// A directory of configuration files of Envoy's rate limit service
    #[arg(long, value_name = "DIR")]
    envoy_limits: Option<PathBuf>,
    /// The file is an access file: print the callers and their permissions
    #[arg(long, conflicts_with = "envoy_limits", requires = "file")]
    access: bool,
}

pub(super) fn run(args: &Args) -> Result<ExitCode, String> {
    let checked = match (&args.file, args.access) {
        (Some(file), true) => access::read(file).map(|callers| shown_callers(&callers)),
        (file, _) => {
            let files = LimitsFiles { file: file.clone(), envoy: args.envoy_limits.clone() };
            files.read().map(|parsed| shown_limits(&parsed))
        }
    };
    let (text, code) = match checked {
        Ok(text) => (text, ExitCode::SUCCESS),
        Err(LoadError::Faulty { path, faults }) if args.file.as_ref() != Some(&path) => {
            (format!("{}:\n{faults}\n", path.display()), ExitCode::FAILURE)
        }
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
