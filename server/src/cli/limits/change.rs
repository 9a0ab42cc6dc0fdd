//! Changes of the document: from a file, in an editor, back to an older version.

use std::io::{BufRead as _, IsTerminal as _, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use http::Request;
use http::header::IF_MATCH;
use url::form_urlencoded;

use super::compare::{Compared, Source};
use crate::cli::api::{ApiArgs, Document, Output};
use crate::cli::http::escaped_json;
use crate::cli::print;
use crate::cli::text::escaped;
use crate::client::HttpResponse;
use crate::config::LoadError;
use crate::service::limits;

/// Exit code if another version is the current one.
const CONFLICT: u8 = 4;

/// Flags of every change.
#[derive(clap::Args)]
pub(super) struct ChangeArgs {
    /// What the change is about, for the history
    #[arg(long, short, value_name = "TEXT", default_value = "")]
    message: String,
    #[command(flatten)]
    api: ApiArgs,
}

#[derive(clap::Args)]
pub(super) struct Apply {
    /// The limits file
    file: PathBuf,
    /// Fail unless this is the current version
    #[arg(long, value_name = "N")]
    if_version: Option<u64>,
    /// Show what would change, and change nothing
    #[arg(long)]
    dry_run: bool,
    #[command(flatten)]
    change: ChangeArgs,
}

#[derive(clap::Args)]
pub(super) struct Edit {
    #[command(flatten)]
    change: ChangeArgs,
}

#[derive(clap::Args)]
pub(super) struct Rollback {
    /// The number of the version whose text comes back
    version: u64,
    /// Fail unless this is the current version
    #[arg(long, value_name = "N")]
    if_version: Option<u64>,
    #[command(flatten)]
    change: ChangeArgs,
}

pub(super) fn apply(args: &Apply) -> Result<ExitCode, String> {
    let Apply { file, if_version, dry_run, change } = args;
    let api = &change.api;
    let Some(compared) = Compared::of(&Source::File(file), api)? else {
        return Ok(ExitCode::FAILURE);
    };
    if let Some(conflict) = conflict(*if_version, &compared) {
        return Ok(conflict);
    }
    if *dry_run {
        return print(&compared.shown(api.output)).map(|()| ExitCode::SUCCESS);
    }
    // Also for the same text: the node may not have the current version yet.
    print_difference(api, &compared)?;
    put(change, &compared)
}

/// Before a change, for people. JSON has it in the answer.
fn print_difference(api: &ApiArgs, compared: &Compared) -> Result<(), String> {
    match api.output {
        Output::Text => print(&compared.shown(Output::Text)),
        Output::Json => Ok(()),
    }
}

/// The exit code if the current version is not the one that was named.
fn conflict(if_version: Option<u64>, compared: &Compared) -> Option<ExitCode> {
    let named = if_version.map(|version| format!("\"{version}\""))?;
    (named != compared.etag).then(|| {
        eprintln!("tollgate: the current version is {}, not {named}", compared.etag);
        ExitCode::from(CONFLICT)
    })
}

/// Makes the new document the current version.
fn put(change: &ChangeArgs, compared: &Compared) -> Result<ExitCode, String> {
    let query = query(&[("message", &change.message)]);
    let request = Request::put(format!("/v1/limits?{query}")).header(IF_MATCH, &*compared.etag);
    let response = change.api.send(request, compared.new.text.to_string())?;
    done(&change.api, &response)
}

pub(super) fn roll_back(args: &Rollback) -> Result<ExitCode, String> {
    let Rollback { version, if_version, change } = args;
    let api = &change.api;
    let Some(compared) = Compared::of(&Source::Version(*version), api)? else {
        return Ok(ExitCode::FAILURE);
    };
    if let Some(conflict) = conflict(*if_version, &compared) {
        return Ok(conflict);
    }
    let query = query(&[("to", &version.to_string()), ("message", &change.message)]);
    let request = Request::post(format!("/v1/limits/rollback?{query}"));
    let request = request.header(IF_MATCH, &*compared.etag);
    print_difference(api, &compared)?;
    done(api, &api.send(request, String::new())?)
}

fn query(pairs: &[(&str, &str)]) -> String {
    form_urlencoded::Serializer::new(String::new()).extend_pairs(pairs).finish()
}

/// Prints what came of a change.
fn done(api: &ApiArgs, response: &HttpResponse) -> Result<ExitCode, String> {
    match response.status {
        200..300 => {
            let version = response.etag.as_deref().unwrap_or_default().trim_matches('"');
            print(&match api.output {
                Output::Text => format!("version {}\n", escaped(version)),
                Output::Json => escaped_json(&response.body),
            })?;
            Ok(ExitCode::SUCCESS)
        }
        409 => {
            api.print_refusal(response);
            Ok(ExitCode::from(CONFLICT))
        }
        status => {
            api.print_refusal(response);
            Ok(ExitCode::from(if status < 500 { 1 } else { 2 }))
        }
    }
}

pub(super) fn edit(args: &Edit) -> Result<ExitCode, String> {
    let change = &args.change;
    let Some(current) = change.api.document(None, "application/yaml")? else {
        return Ok(ExitCode::FAILURE);
    };
    let draft = Draft::new(&current)?;
    let Some(compared) = draft.edited(&current)? else {
        return Ok(draft.kept(ExitCode::FAILURE));
    };
    if compared.is_same_text {
        return print("no difference\n").map(|()| ExitCode::SUCCESS);
    }
    print_difference(&change.api, &compared)?;
    if !is_confirmed("make it the current version?")? {
        return Ok(draft.kept(ExitCode::FAILURE));
    }
    match put(change, &compared) {
        Ok(ExitCode::SUCCESS) => Ok(ExitCode::SUCCESS),
        Ok(code) => Ok(draft.kept(code)),
        Err(error) => {
            draft.kept(ExitCode::FAILURE);
            Err(error)
        }
    }
}

/// The file that is edited.
struct Draft(tempfile::NamedTempFile);

impl Draft {
    fn new(current: &Document) -> Result<Self, String> {
        let failed = |error| format!("can't write a temporary file: {error}");
        let file = tempfile::Builder::new().prefix("limits-").suffix(".yaml").tempfile();
        let mut file = file.map_err(failed)?;
        file.write_all(current.text.as_bytes()).map_err(failed)?;
        Ok(Self(file))
    }

    /// The edited document; `None` if it still has faults.
    fn edited(&self, current: &Document) -> Result<Option<Compared>, String> {
        loop {
            open_editor(self.0.path())?;
            match limits::read(self.0.path()) {
                Ok(new) => return Compared::with(new, current).map(Some),
                Err(LoadError::Faulty { faults, .. }) => print(&format!("{faults}\n"))?,
                Err(error @ LoadError::Unreadable(_)) => return Err(error.to_string()),
            }
            if !std::io::stdin().is_terminal() || !is_confirmed("edit it again?")? {
                return Ok(None);
            }
        }
    }

    /// Keeps the file, and says where it is.
    fn kept(self, code: ExitCode) -> ExitCode {
        match self.0.keep() {
            Ok((_, path)) => eprintln!("tollgate: the edited document is in {}", path.display()),
            Err(error) => eprintln!("tollgate: the edited document is lost: {error}"),
        }
        code
    }
}

/// Runs the editor until it is closed.
fn open_editor(path: &Path) -> Result<(), String> {
    let set = |name| std::env::var(name).ok().filter(|editor: &String| !editor.trim().is_empty());
    let editor = set("VISUAL").or_else(|| set("EDITOR")).unwrap_or_else(|| "vi".to_owned());
    // By a shell, as the variable may have arguments.
    let script = format!("{editor} \"$1\"");
    let status = Command::new("sh").args(["-c", &script, "sh"]).arg(path).status();
    match status {
        Ok(status) if status.success() => Ok(()),
        Ok(status) => Err(format!("the editor ({editor}) failed: {status}")),
        Err(error) => Err(format!("can't run the editor ({editor}): {error}")),
    }
}

/// Asks a person; without one, the answer is yes.
fn is_confirmed(question: &str) -> Result<bool, String> {
    let stdin = std::io::stdin();
    if !stdin.is_terminal() {
        return Ok(true);
    }
    print(&format!("{question} [y/N] "))?;
    std::io::stdout().flush().map_err(|error| error.to_string())?;
    let mut answer = String::new();
    stdin.lock().read_line(&mut answer).map_err(|error| error.to_string())?;
    Ok(matches!(answer.trim(), "y" | "Y" | "yes"))
}
