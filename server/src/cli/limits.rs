//! `tollgate limits`: the document that a node has in use, and how a file differs from it.

use std::io::IsTerminal as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::Subcommand;

use super::api::{ApiArgs, Output};
use super::http::escaped_json;
use super::text::escaped_lines;
use crate::config::{self, Difference, LoadError};
use crate::service::limits;

#[derive(clap::Args)]
#[command(after_help = "Examples:
  tollgate limits show > limits.yaml
      The document that the node has in use, as it was written
  tollgate limits diff limits.yaml
      What the file would change

Exit codes: 0 done, or no difference; 1 a difference, a file with faults, or the node refused; 2 no
answer.")]
pub(super) struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Print the document that the node has in use: YAML as it was written, or JSON with defaults
    Show(Show),
    /// Show what a file would change: each value that differs, with all defaults filled in
    Diff(Diff),
}

#[derive(clap::Args)]
struct Show {
    #[command(flatten)]
    api: ApiArgs,
}

#[derive(clap::Args)]
struct Diff {
    /// The limits file
    file: PathBuf,
    #[command(flatten)]
    api: ApiArgs,
}

pub(super) fn run(args: &Args) -> Result<ExitCode, String> {
    match &args.command {
        Command::Show(Show { api }) => show(api),
        Command::Diff(Diff { file, api }) => diff(file, api),
    }
}

fn show(api: &ApiArgs) -> Result<ExitCode, String> {
    let accept = match api.output {
        Output::Text => "application/yaml",
        Output::Json => "application/json",
    };
    let Some(text) = api.document(accept)? else { return Ok(ExitCode::FAILURE) };
    let text = match api.output {
        Output::Json => escaped_json(&text),
        // A file gets the document as it was written.
        Output::Text if !std::io::stdout().is_terminal() => text,
        Output::Text => escaped_lines(&text),
    };
    super::print(&text).map(|()| ExitCode::SUCCESS)
}

fn diff(file: &Path, api: &ApiArgs) -> Result<ExitCode, String> {
    let new = match limits::read(file) {
        Ok(new) => new,
        Err(LoadError::Faulty { faults, .. }) => {
            return super::print(&format!("{faults}\n")).map(|()| ExitCode::FAILURE);
        }
        Err(error @ LoadError::Unreadable(_)) => return Err(error.to_string()),
    };
    let Some(text) = api.document("application/yaml")? else { return Ok(ExitCode::FAILURE) };
    let current = config::parse(&text).map_err(|faults| {
        format!("the node's document is not valid for this version of tollgate:\n{faults}")
    })?;
    let differences = config::differences(&current.limits, &new.limits);
    super::print(&match api.output {
        Output::Text => differences_text(&differences, current.text == new.text),
        Output::Json => differences_json(&differences),
    })?;
    Ok(ExitCode::from(u8::from(!differences.is_empty())))
}

fn differences_text(differences: &[Difference], is_same_text: bool) -> String {
    match (differences, is_same_text) {
        ([], true) => "no difference\n".to_owned(),
        ([], false) => {
            "no difference but the layout of the text, comments or defaults\n".to_owned()
        }
        _ => differences.iter().map(|one| escaped_lines(&format!("{one}\n"))).collect(),
    }
}

fn differences_json(differences: &[Difference]) -> String {
    let list = differences.iter().map(|difference| {
        serde_json::json!({
            "path": difference.path,
            "before": difference.before,
            "after": difference.after,
        })
    });
    let json = serde_json::Value::from_iter(list);
    escaped_json(&json.to_string())
}
