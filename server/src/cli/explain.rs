//! `tollgate explain`: what a request would be answered, and why.

use std::process::ExitCode;
use std::time::Duration;

use http::Method;
use serde_json::{Value, json};

use super::api::{Answered, ApiArgs, ApiRequest};
use super::text::{Table, escaped};
use crate::settings::duration;

#[derive(clap::Args)]
#[command(after_help = "Nothing is taken. Example:
  tollgate explain shop cart --tokens 6
      Whether six tokens of shop:cart would be granted now, and which rule refuses them

Exit codes: 0 would be granted; 1 would be refused, or the node does not say; 2 no answer.")]
pub(super) struct Args {
    /// The namespace
    namespace: String,
    /// The bucket
    bucket: String,
    /// Number of tokens; 0 means 1
    #[arg(long, value_name = "N", default_value_t = 1, allow_negative_numbers = true)]
    tokens: i64,
    /// The longest wait to accept, if it is shorter than the bucket's own limit
    #[arg(long, value_name = "TIME", value_parser = duration)]
    max_wait: Option<Duration>,
    #[command(flatten)]
    api: ApiArgs,
}

pub(super) fn run(args: &Args) -> Result<ExitCode, String> {
    let mut body = json!({
        "namespace": args.namespace,
        "bucketName": args.bucket,
        "tokensRequested": args.tokens,
    });
    if let Some(wait) = args.max_wait {
        let ms = i64::try_from(wait.as_millis()).map_err(|_| "--max-wait is too long")?;
        body["maxWaitMillisOverride"] = json!(ms);
        body["maxWaitTimeOverride"] = json!(true);
    }
    let request =
        ApiRequest { method: Method::POST, path: "/v1/explain".to_owned(), body: body.to_string() };
    Ok(match args.api.print_answer(request, text)? {
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
