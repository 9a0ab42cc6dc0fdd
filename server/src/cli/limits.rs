//! `tollgate limits`: the document that a node has in use, how a file differs from it, and a new one.

use std::io::IsTerminal as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::Subcommand;
use http::Request;
use http::header::IF_MATCH;
use url::form_urlencoded;

use super::api::{ApiArgs, Document, Output};
use super::http::escaped_json;
use super::text::{escaped, escaped_lines};
use crate::config::{self, Difference, LoadError, Parsed};
use crate::service::limits;

#[derive(clap::Args)]
#[command(after_help = "Examples:
  tollgate limits show > limits.yaml
      The document that the node has in use, as it was written
  tollgate limits diff limits.yaml
      What the file would change
  tollgate limits apply limits.yaml --message 'more for the cart'
      Make it the current version, on all nodes

Exit codes: 0 done, or nothing to do; 1 a file with faults, the node refused, or with diff a
difference; 2 no answer, so that it is unknown whether something was changed; 4 another version is
the current one.")]
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
    /// Make a file the current version, on all nodes, if the store owns the limits
    Apply(Apply),
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

#[derive(clap::Args)]
struct Apply {
    /// The limits file
    file: PathBuf,
    /// What the change is about, for the history
    #[arg(long, short, value_name = "TEXT", default_value = "")]
    message: String,
    /// Fail unless this is the current version
    #[arg(long, value_name = "N")]
    if_version: Option<u64>,
    /// Show what would change, and change nothing
    #[arg(long)]
    dry_run: bool,
    #[command(flatten)]
    api: ApiArgs,
}

/// Exit code if another version is the current one.
const CONFLICT: u8 = 4;

pub(super) fn run(args: &Args) -> Result<ExitCode, String> {
    match &args.command {
        Command::Show(Show { api }) => show(api),
        Command::Diff(Diff { file, api }) => diff(file, api),
        Command::Apply(args) => apply(args),
    }
}

fn show(api: &ApiArgs) -> Result<ExitCode, String> {
    let accept = match api.output {
        Output::Text => "application/yaml",
        Output::Json => "application/json",
    };
    let Some(Document { text, .. }) = api.document(accept)? else { return Ok(ExitCode::FAILURE) };
    let text = match api.output {
        Output::Json => escaped_json(&text),
        // A file gets the document as it was written.
        Output::Text if !std::io::stdout().is_terminal() => text,
        Output::Text => escaped_lines(&text),
    };
    super::print(&text).map(|()| ExitCode::SUCCESS)
}

fn diff(file: &Path, api: &ApiArgs) -> Result<ExitCode, String> {
    let Some(compared) = compare(file, api)? else { return Ok(ExitCode::FAILURE) };
    super::print(&compared.shown(api.output))?;
    Ok(ExitCode::from(u8::from(!compared.differences.is_empty())))
}

/// A file, compared with the document that a node has in use.
struct Compared {
    new: Parsed,
    /// The version in use, in quotes.
    etag: String,
    is_same_text: bool,
    differences: Vec<Difference>,
}

/// `None` if the file has faults, or the node refused, which was printed.
fn compare(file: &Path, api: &ApiArgs) -> Result<Option<Compared>, String> {
    let new = match limits::read(file) {
        Ok(new) => new,
        Err(LoadError::Faulty { faults, .. }) => {
            return super::print(&format!("{faults}\n")).map(|()| None);
        }
        Err(error @ LoadError::Unreadable(_)) => return Err(error.to_string()),
    };
    let Some(Document { text, etag }) = api.document("application/yaml")? else { return Ok(None) };
    let current = config::parse(&text).map_err(|faults| {
        format!("the node's document is not valid for this version of tollgate:\n{faults}")
    })?;
    let differences = config::differences(&current.limits, &new.limits);
    Ok(Some(Compared { is_same_text: current.text == new.text, new, etag, differences }))
}

impl Compared {
    fn shown(&self, output: Output) -> String {
        match output {
            Output::Text => differences_text(&self.differences, self.is_same_text),
            Output::Json => differences_json(&self.differences),
        }
    }
}

fn apply(args: &Apply) -> Result<ExitCode, String> {
    let Apply { file, message, if_version, dry_run, api } = args;
    let Some(compared) = compare(file, api)? else { return Ok(ExitCode::FAILURE) };
    let etag = if_version.map_or(compared.etag.clone(), |version| format!("\"{version}\""));
    if etag != compared.etag {
        eprintln!("tollgate: the current version is {}, not {etag}", compared.etag);
        return Ok(ExitCode::from(CONFLICT));
    }
    if *dry_run || compared.is_same_text {
        return super::print(&compared.shown(api.output)).map(|()| ExitCode::SUCCESS);
    }
    let query =
        form_urlencoded::Serializer::new(String::new()).append_pair("message", message).finish();
    let request = Request::put(format!("/v1/limits?{query}")).header(IF_MATCH, etag);
    let response = api.send(request, compared.new.text.to_string())?;
    match response.status {
        200..300 => {
            super::print(&match api.output {
                Output::Text => {
                    let version = response.etag.unwrap_or_default();
                    let version = escaped(version.trim_matches('"'));
                    format!("{}version {version}\n", compared.shown(api.output))
                }
                Output::Json => escaped_json(&response.body),
            })?;
            Ok(ExitCode::SUCCESS)
        }
        status => {
            api.print_refusal(&response);
            Ok(ExitCode::from(match status {
                409 => CONFLICT,
                400..500 => 1,
                _ => 2,
            }))
        }
    }
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
