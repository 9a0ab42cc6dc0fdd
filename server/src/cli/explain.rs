//! `tollgate explain`: what a request would be answered, and why.

use std::process::ExitCode;

use http::Method;
use serde_json::Value;

use super::allow::RequestArgs;
use super::api::{Answered, ApiArgs, ApiRequest};
use super::text::{Table, escaped};

#[derive(clap::Args)]
#[command(after_help = "Nothing is taken. Example:
  tollgate explain shop cart --tokens 6
      Whether six tokens of shop:cart would be granted now, and which rule refuses them

Exit codes: 0 would be granted; 1 would be refused, or the node does not say; 2 no answer.")]
pub(super) struct Args {
    #[command(flatten)]
    request: RequestArgs,
    #[command(flatten)]
    api: ApiArgs,
}

pub(super) fn run(args: &Args) -> Result<ExitCode, String> {
    let body =
        serde_json::to_string(&args.request.request()?).map_err(|error| error.to_string())?;
    print_explanation(&args.api, "/v1/explain", body)
}

/// Prints what a node explains at this path. The exit code is 0 if the request would be granted.
pub(super) fn print_explanation(
    api: &ApiArgs,
    path: &str,
    body: String,
) -> Result<ExitCode, String> {
    let request = ApiRequest { method: Method::POST, path: path.to_owned(), body };
    Ok(match api.print_answer(request, text)? {
        Answered::Yes(answer) => ExitCode::from(u8::from(answer["answer"]["status"] != "OK")),
        refused @ Answered::Refused => refused.exit_code(),
    })
}

fn text(explained: &Value) -> String {
    let shown = |value: &Value| escaped(value.as_str().unwrap_or_default());
    let mut steps = Table::new(&[("step", false), ("effect", false), ("", false)]);
    for step in explained["steps"].as_array().into_iter().flatten() {
        steps.row(vec![shown(&step["step"]), shown(&step["effect"]), shown(&step["text"])]);
    }
    let status = shown(&explained["answer"]["status"]);
    format!("{status}: {}\n\n{steps}", shown(&explained["summary"]))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn steps_for_people() {
        let step = |step: &str, effect: &str, text: &str| json!({ "step": step, "effect": effect, "text": text });
        let explained = json!({
            "answer": { "status": "REJECTED_TIMEOUT" },
            "summary": "would be refused",
            "steps": [step("request", "notes", "asks for a\u{1b}"), step("debt", "refuses", "too long")],
        });
        assert_eq!(
            text(&explained),
            "REJECTED_TIMEOUT: would be refused\n\n\
             step     effect\n\
             request  notes    asks for a\\u{1b}\n\
             debt     refuses  too long\n"
        );
    }
}
