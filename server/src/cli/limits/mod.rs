//! `tollgate limits`: the document in use, its history, and changes of it.

use std::io::IsTerminal as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::Subcommand;
use http::Method;
use serde_json::Value;

use super::api::{ApiArgs, ApiRequest, Document, Output};
use super::http::escaped_json;
use super::text::{Table, date, escaped, escaped_lines};
use compare::{Compared, Source};

mod change;
mod compare;

#[derive(clap::Args)]
#[command(after_help = "Examples:
  tollgate limits show > limits.yaml
      The document that the node has in use, as it was written
  tollgate limits diff limits.yaml
      What the file would change
  tollgate limits apply limits.yaml --message 'more for the cart'
      Make it the current version, on all nodes
  tollgate limits history
      Who changed what, and when
  tollgate limits rollback 7
      Make a new version with the text of version 7

Exit codes: 0 done, or nothing to do; 1 a document with faults, the node refused, or with diff a
difference; 2 no answer, so that it is unknown whether something was changed; 4 another version is
the current one.")]
pub(super) struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Print the document that the node has in use, or an older version: YAML as it was written, or
    /// JSON with defaults
    Show(Show),
    /// Show what a file or an older version would change: each value that differs, with all defaults
    /// filled in
    Diff(Diff),
    /// Make a file the current version, on all nodes, if the store owns the limits
    Apply(change::Apply),
    /// Edit the document in $VISUAL or $EDITOR, and make it the current version
    Edit(change::Edit),
    /// List the versions that the store keeps, the newest first
    History(History),
    /// Make a new version with the text of an older one
    Rollback(change::Rollback),
}

#[derive(clap::Args)]
struct Show {
    /// The number of a version; without it, the one in use
    version: Option<u64>,
    #[command(flatten)]
    api: ApiArgs,
}

#[derive(clap::Args)]
struct Diff {
    /// A limits file, or the number of a version
    #[arg(value_name = "FILE|VERSION")]
    source: PathBuf,
    #[command(flatten)]
    api: ApiArgs,
}

#[derive(clap::Args)]
struct History {
    #[command(flatten)]
    api: ApiArgs,
}

pub(super) fn run(args: &Args) -> Result<ExitCode, String> {
    match &args.command {
        Command::Show(Show { version, api }) => show(*version, api),
        Command::Diff(Diff { source, api }) => diff(source, api),
        Command::Apply(args) => change::apply(args),
        Command::Edit(args) => change::edit(args),
        Command::History(History { api }) => history(api),
        Command::Rollback(args) => change::roll_back(args),
    }
}

fn show(version: Option<u64>, api: &ApiArgs) -> Result<ExitCode, String> {
    let accept = match api.output {
        Output::Text => "application/yaml",
        Output::Json => "application/json",
    };
    let Some(Document { text, etag }) = api.document(version, accept)? else {
        return Ok(ExitCode::FAILURE);
    };
    if etag == "\"0\"" {
        eprintln!("tollgate: the node has no limits yet");
        return Ok(ExitCode::FAILURE);
    }
    let text = match api.output {
        Output::Json => escaped_json(&text),
        // A file gets the document as it was written.
        Output::Text if !std::io::stdout().is_terminal() => text,
        Output::Text => escaped_lines(&text),
    };
    super::print(&text).map(|()| ExitCode::SUCCESS)
}

fn diff(source: &Path, api: &ApiArgs) -> Result<ExitCode, String> {
    let number = source.to_str().and_then(|text| text.parse().ok());
    let source = number.map_or_else(|| Source::File(source), Source::Version);
    let Some(compared) = Compared::of(&source, api)? else { return Ok(ExitCode::FAILURE) };
    super::print(&compared.shown(api.output))?;
    Ok(ExitCode::from(u8::from(compared.differs())))
}

fn history(api: &ApiArgs) -> Result<ExitCode, String> {
    let path = "/v1/limits/versions".to_owned();
    let request = ApiRequest { method: Method::GET, path, body: String::new() };
    Ok(api.print_answer(request, history_text)?.exit_code())
}

fn history_text(history: &Value) -> String {
    let text = |value: &Value| escaped(value.as_str().unwrap_or_default());
    let mut table = Table::new(&[("version", true), ("when", false), ("who", false), ("", false)]);
    for version in history["versions"].as_array().into_iter().flatten() {
        let rollback = version["copy_of"].as_u64().map(|of| format!("rollback to {of}"));
        let message = Some(text(&version["message"])).filter(|message| !message.is_empty());
        let about: Vec<String> = rollback.into_iter().chain(message).collect();
        table.row(vec![
            version["number"].to_string(),
            date(&version["at_ms"]),
            text(&version["by"]),
            about.join(": "),
        ]);
    }
    table.to_string()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_history_for_people() {
        let history = json!({ "in_use": 12, "versions": [
            { "number": 12, "at_ms": 1_771_077_500_000_u64, "by": "ana", "message": "", "copy_of": 10 },
            { "number": 11, "at_ms": 1_771_077_499_999_u64, "by": "x\u{1b}", "message": "more" },
        ] });
        assert_eq!(
            history_text(&history),
            "version  when                  who\n\
             \x20    12  2026-02-14T13:58:20Z  ana      rollback to 10\n\
             \x20    11  2026-02-14T13:58:19Z  x\\u{1b}  more\n"
        );
    }
}
