//! `tollgate holds`: shows what is held of a resource, explains what a request for a hold would be answered,
//! and ends a session.

use std::fmt::Write as _;
use std::process::ExitCode;

use clap::Subcommand;
use http::Method;
use serde_json::Value;
use tollgate_proto::tollgate::v1::ReserveRequest;

use super::api::{Answered, ApiArgs, ApiRequest, held_path};
use super::explain::print_explanation;
use super::request::CopiesArgs;
use super::text::{date, quoted};

#[derive(clap::Args)]
#[command(
    after_help = "`show` and `end` need the role administer, `explain` the right to ask for the copies.

Examples:
  tollgate holds show sandbox
      The limits of the resource, what its groups hold, and who holds copies until when. The hold of
      `tollgate hold` has the name of its machine and its process id
  tollgate holds explain sandbox acme --copies 10
      Whether the domain acme would be granted ten copies now, and which limit refuses them
  tollgate holds end sandbox 6f1c22ab
      End a session, and free what it holds at once: its client learns it with its next KeepAlive, and
      may use the copies until then, and reserve new ones. First stop a client that does not renew

Exit codes: 0 done, or would be granted; 1 the node refused, or would refuse the copies, or the
session held nothing; 2 no answer."
)]
pub(super) struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Show the limits of a resource, and what is held of it
    Show(Show),
    /// Explain what a request for a new hold would be answered; holds nothing
    Explain(Explain),
    /// End a session, and free what it holds
    End(End),
}

#[derive(clap::Args)]
struct Show {
    /// The resource
    resource: String,
    #[command(flatten)]
    api: ApiArgs,
}

#[derive(clap::Args)]
struct Explain {
    #[command(flatten)]
    asked: CopiesArgs,
    #[command(flatten)]
    api: ApiArgs,
}

#[derive(clap::Args)]
struct End {
    /// The resource
    resource: String,
    /// The session
    session: String,
    #[command(flatten)]
    api: ApiArgs,
}

pub(super) fn run(args: Args) -> Result<ExitCode, String> {
    let request = |method, path| ApiRequest { method, path, body: String::new() };
    let answered = match args.command {
        Command::Show(Show { resource, api }) => {
            api.print_answer(request(Method::GET, held_path(&resource, None)), shown)
        }
        Command::Explain(Explain { asked, api }) => {
            let CopiesArgs { resource, domain, copies, min } = asked;
            let asked =
                ReserveRequest { resource, domain, copies, min_copies: min, ..Default::default() };
            let body = serde_json::to_string(&asked).map_err(|error| error.to_string())?;
            return print_explanation(&api, "/v1/holds/explain", body);
        }
        Command::End(End { resource, session, api }) => {
            let path = held_path(&resource, Some(&session));
            api.print_answer(request(Method::DELETE, path), ended)
        }
    };
    answered.map(|answered| match answered {
        Answered::Yes(json) if json["released"] == 0 => ExitCode::from(1),
        answered => answered.exit_code(),
    })
}

/// So many of something.
fn count(number: &Value, one: &str, many: &str) -> String {
    format!("{number} {}", if number == 1 { one } else { many })
}

/// How many there may be.
fn most(limit: &Value, what: &str) -> String {
    match limit.as_u64() {
        Some(limit) => format!("at most {limit} {what}"),
        None => format!("no limit {what}"),
    }
}

fn items(value: &Value) -> impl Iterator<Item = &Value> {
    value.as_array().into_iter().flatten()
}

fn shown(json: &Value) -> String {
    let limits = &json["limits"];
    let mut lines = vec![("resource", quoted(&json["resource"]))];
    if limits.is_null() {
        lines.push(("limits", "none".to_owned()));
    } else {
        let domain = most(&limits["domain_limit"], "a domain");
        let all = most(&limits["global_limit"], "in all");
        let shadow = if limits["enforced"] == false { "; not enforced" } else { "" };
        let glob = quoted(&limits["resource"]);
        let own = match &limits["domains_with_own_limit"] {
            number if number == 0 => String::new(),
            number => format!(" ({number} have their own)"),
        };
        lines.push(("limits", format!("{domain}{own}, {all}, as configured for {glob}{shadow}")));
    }
    let (copies, holds) =
        (count(&json["held"], "copy", "copies"), count(&json["holds"], "hold", "holds"));
    let bound = limits["max_holds"].as_u64().map(|most| format!(" of at most {most}"));
    lines.push(("held", format!("{copies}, in {holds}{}", bound.unwrap_or_default())));
    for group in items(&json["groups"]) {
        let held = count(&group["held"], "copy", "copies");
        let most = most(&group["limit"], "in the group");
        lines.push(("group", format!("{}: {held}, {most}", quoted(&group["name"]))));
    }
    for session in items(&json["sessions"]) {
        let until = date(&session["expires_at_unix_millis"]);
        lines.push(("session", format!("{}, until {until}", quoted(&session["session"]))));
        for hold in items(&session["holds"]) {
            let copies = count(&hold["copies"], "copy", "copies");
            let (hold, domain) = (quoted(&hold["hold"]), quoted(&hold["domain"]));
            lines.push(("", format!("{copies} for {domain}, hold {hold}")));
        }
    }
    let mut all = String::new();
    for (title, content) in lines {
        // Writing to a string cannot fail.
        let _ = writeln!(all, "{title:<9} {content}");
    }
    if json["has_more_sessions"] == true {
        all.push_str("There are more sessions: shown are those that end first without a call.\n");
    }
    all
}

fn ended(json: &Value) -> String {
    if json["released"] == 0 {
        return "nothing was held: there is no such session, or it had no holds\n".to_owned();
    }
    let copies = count(&json["released"], "copy", "copies");
    format!("the session is over, and {copies} free; its client may use them until it notices\n")
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn holds_for_people() {
        let mut view = json!({
            "resource": "sand\u{1b}box",
            "limits": {
                "resource": "sand*", "domain_limit": 5, "global_limit": -1, "max_holds": 100,
                "domains_with_own_limit": 2, "enforced": false,
            },
            "held": 3, "holds": 2,
            "groups": [{ "name": "trial", "limit": 10, "held": 1 }],
            "sessions": [{
                "session": "a", "expires_at_unix_millis": 1_800_000_000_000_u64,
                "holds": [
                    { "hold": "h", "domain": "ac\"me", "copies": 2 },
                    { "hold": "i", "domain": "t-1", "copies": 1 },
                ],
            }],
            "has_more_sessions": true,
        });
        assert_eq!(
            shown(&view),
            "resource  \"sand\\u{1b}box\"\n\
             limits    at most 5 a domain (2 have their own), no limit in all, as configured for \"sand*\"; not \
             enforced\n\
             held      3 copies, in 2 holds of at most 100\n\
             group     \"trial\": 1 copy, at most 10 in the group\n\
             session   \"a\", until 2027-01-15T08:00:00Z\n\
             \u{20}         2 copies for \"ac\\\"me\", hold \"h\"\n\
             \u{20}         1 copy for \"t-1\", hold \"i\"\n\
             There are more sessions: shown are those that end first without a call.\n"
        );
        view["limits"] = Value::Null;
        assert!(shown(&view).contains("\nlimits    none\n"));
    }

    #[test]
    fn an_ended_session() {
        let text = |released| ended(&json!({ "released": released }));
        assert_eq!(
            text(1),
            "the session is over, and 1 copy free; its client may use them until it notices\n"
        );
        assert_eq!(text(0), "nothing was held: there is no such session, or it had no holds\n");
    }
}
