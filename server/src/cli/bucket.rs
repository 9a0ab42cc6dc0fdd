//! `tollgate bucket`: shows what a bucket stands at, and fills it up.

use std::fmt::Write as _;
use std::process::ExitCode;
use std::time::Duration;

use clap::Subcommand;
use http::Method;
use serde_json::Value;

use super::api::{ApiArgs, ApiRequest, bucket_path};
use super::text::{escaped, rounded};

#[derive(clap::Args)]
#[command(after_help = "Examples:
  tollgate bucket show shop cart
      The bucket that serves the name, its limit, and the tokens in it; takes none
  tollgate bucket reset shop cart
      Fill it up, and forgive its debt

Exit codes: 0 done; 1 the node refused; 2 no answer.")]
pub(super) struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Show which bucket serves a name, its limit, and what it stands at; takes nothing
    Show(Show),
    /// Fill a bucket up, and forgive its debt
    Reset(Reset),
}

#[derive(clap::Args)]
struct Show {
    /// The namespace
    namespace: String,
    /// The bucket
    bucket: String,
    #[command(flatten)]
    api: ApiArgs,
}

#[derive(clap::Args)]
struct Reset {
    /// The namespace
    namespace: String,
    /// The bucket
    bucket: String,
    /// Reset the default bucket that the name shares with others
    #[arg(long)]
    of_default: bool,
    #[command(flatten)]
    api: ApiArgs,
}

pub(super) fn run(args: Args) -> Result<ExitCode, String> {
    let request = |method, path| ApiRequest { method, path, body: String::new() };
    let answered = match args.command {
        Command::Show(Show { namespace, bucket, api }) => {
            let path = bucket_path(&namespace, &bucket);
            api.print_answer(request(Method::GET, path), shown)
        }
        Command::Reset(Reset { namespace, bucket, of_default, api }) => {
            let query = if of_default { "?of=default" } else { "" };
            let path = bucket_path(&namespace, &bucket) + query;
            api.print_answer(request(Method::DELETE, path), reset)
        }
    };
    answered.map(|answered| answered.exit_code())
}

fn text(value: &Value) -> String {
    escaped(value.as_str().unwrap_or_default())
}

fn time(ms: &Value) -> String {
    humantime::format_duration(Duration::from_millis(ms.as_u64().unwrap_or_default())).to_string()
}

fn number(value: &Value) -> String {
    rounded(value.as_f64().unwrap_or_default())
}

/// A balance in words.
fn balance(json: &Value) -> String {
    let full_in = time(&json["full_in_millis"]);
    if json["full_tokens"].as_f64() == Some(0.0) {
        return match json["full_in_millis"] == 0 {
            true => "nothing is ahead".to_owned(),
            false => format!("what is ahead takes {full_in} to leave"),
        };
    }
    if json["debt_millis"] != 0 {
        let (debt, paid_in) = (number(&json["debt_tokens"]), time(&json["debt_millis"]));
        return format!("{debt} tokens of debt, paid in {paid_in}; full in {full_in}");
    }
    if json["full_in_millis"] == 0 {
        return format!("full, with {} tokens", number(&json["tokens"]));
    }
    let (tokens, full) = (number(&json["tokens"]), number(&json["full_tokens"]));
    format!("{tokens} of {full} tokens; full in {full_in}")
}

fn limit(json: &Value) -> String {
    let (size, window) = (number(&json["size"]), time(&json["window_millis"]));
    let mut limit = match json["algorithm"].as_str() {
        Some("leaky_bucket") => {
            let (rate, queue) = (number(&json["fill_rate"]), number(&json["queue"]));
            format!("{rate} tokens a second leave, and up to {queue} wait")
        }
        Some("fixed_window") => format!("{size} tokens in each fixed window of {window}"),
        Some("sliding_window") => format!("{size} tokens in a sliding window of {window}"),
        Some("sliding_log") => format!("{size} tokens in any window of {window}"),
        _ => format!(
            "{size} tokens, {} a second; longest wait {}, longest debt {}",
            number(&json["fill_rate"]),
            time(&json["wait_timeout_millis"]),
            time(&json["max_debt_millis"])
        ),
    };
    // Writing to a string cannot fail.
    if json["reserve"].is_string() {
        let _ = write!(limit, "; {} of it for critical requests only", text(&json["reserve"]));
    }
    if let Some(ban) = json["ban"].as_object() {
        let (window, ban_for) = (time(&ban["window_millis"]), time(&ban["for_millis"]));
        let threshold = number(&ban["threshold"]);
        let _ = write!(
            limit,
            "; banned for {ban_for} if more than {threshold} are asked for in {window}"
        );
    }
    if let Some(most) = json["max_tokens_per_request"].as_u64() {
        let _ = write!(limit, "; at most {most} tokens a request");
    }
    if json["max_idle_millis"].as_u64().is_some() {
        let _ = write!(limit, "; removed when idle for {}", time(&json["max_idle_millis"]));
    }
    limit
}

/// What it means that the store does not answer.
fn outage(json: &Value) -> String {
    let meanwhile = match (json["share_of_nodes"].as_u64(), json["on_store_failure"].as_str()) {
        (Some(nodes), _) => format!("shown is this node's share, one of {nodes}"),
        (None, Some("allow")) => "every request is granted".to_owned(),
        (None, _) => "every request is refused".to_owned(),
    };
    format!("{}: {meanwhile}", text(&json["store_error"]))
}

fn shown(json: &Value) -> String {
    let mut lines = vec![
        ("bucket", text(&json["served_by"]["bucket"])),
        ("because", text(&json["served_by"]["why"])),
        ("limit", limit(&json["limit"])),
        ("now", if json["tokens"].is_null() { "unknown".to_owned() } else { balance(json) }),
    ];
    if json["degraded"] == true {
        lines.push(("store", outage(json)));
    }
    if json["ban"].is_object() {
        lines.push(("ban", ban(&json["ban"])));
    }
    let (places, prefetch) = (&json["dynamic_buckets"], &json["prefetch"]);
    if places.is_object() {
        let text = format!("{} of {} in use", places["taken"], places["most"]);
        lines.push(("dynamic", text));
    }
    if prefetch.is_object() {
        let (here, most) = (&prefetch["held_by_this_node"], &prefetch["most_each_node"]);
        lines
            .push(("prefetch", format!("{here} more tokens here; each node holds {most} at most")));
    }
    let enforced = match (json["enforced"] == true, json["kill_switch"] == true) {
        (_, true) => "no, the kill switch is on",
        (true, false) => "yes",
        (false, false) => "no, in shadow (enforce: false)",
    };
    lines.push(("enforced", enforced.to_owned()));
    lines.iter().map(|(title, content)| format!("{title:<9} {content}\n")).collect()
}

/// What was asked for of a bucket that may be banned, in words.
fn ban(json: &Value) -> String {
    match json["banned"] == true {
        true => format!("banned for another {}", time(&json["left_millis"])),
        false => {
            let (asked, threshold) = (number(&json["asked"]), number(&json["threshold"]));
            format!("none; {asked} of {threshold} tokens were asked for in its window")
        }
    }
}

fn reset(json: &Value) -> String {
    let name = text(&json["served_by"]["bucket"]);
    let full = number(&json["before"]["full_tokens"]);
    let mut text =
        format!("{name} is full, with {full} tokens\nbefore    {}\n", balance(&json["before"]));
    if json["ban_before"]["banned"] == true {
        let left = time(&json["ban_before"]["left_millis"]);
        let _ = writeln!(text, "ban       lifted; it would have lasted for another {left}");
    }
    text
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn bucket() -> Value {
        json!({
            "served_by": { "bucket": "shop:ca\u{1b}rt", "why": "it is configured for cart in shop" },
            "limit": {
                "size": 100, "fill_rate": 50.0, "wait_timeout_millis": 1000, "max_idle_millis": -1,
                "max_debt_millis": 10_000, "max_tokens_per_request": 50,
            },
            "on_store_failure": "local", "enforced": true, "degraded": false,
            "store_error": null, "share_of_nodes": null,
            "tokens": 41.5, "full_tokens": 100.0, "debt_tokens": 0.0, "debt_millis": 0,
            "full_in_millis": 1170, "dynamic_buckets": null, "prefetch": null,
        })
    }

    #[test]
    fn a_bucket_for_people() {
        assert_eq!(
            shown(&bucket()),
            "bucket    shop:ca\\u{1b}rt\n\
             because   it is configured for cart in shop\n\
             limit     100 tokens, 50 a second; longest wait 1s, longest debt 10s; at most 50 tokens a \
             request\n\
             now       41.5 of 100 tokens; full in 1s 170ms\n\
             enforced  yes\n"
        );
    }

    #[test]
    fn a_reserve_for_people() {
        let mut kept = bucket();
        kept["limit"]["reserve"] = json!("20%");
        let text = shown(&kept);
        let expected = "longest debt 10s; 20% of it for critical requests only; at most 50 tokens";
        assert!(text.contains(expected), "{text}");
    }

    #[test]
    fn without_the_store() {
        let mut alone = bucket();
        alone["degraded"] = json!(true);
        alone["store_error"] = json!("the store did not answer in time");
        alone["share_of_nodes"] = json!(3);
        let text = shown(&alone);
        let expected =
            "store     the store did not answer in time: shown is this node's share, one of 3\n";
        assert!(text.contains(expected), "{text}");
        alone["share_of_nodes"] = Value::Null;
        alone["tokens"] = Value::Null;
        alone["on_store_failure"] = json!("deny");
        let text = shown(&alone);
        assert!(text.contains("now       unknown\n"), "{text}");
        assert!(text.contains(" in time: every request is refused\n"), "{text}");
    }

    #[test]
    fn before_and_after_a_reset() {
        let answer = json!({
            "served_by": { "bucket": "shop:cart" },
            "before": {
                "tokens": -12.0, "full_tokens": 100.0, "debt_tokens": 12.0, "debt_millis": 240,
                "full_in_millis": 2240,
            },
        });
        assert_eq!(
            reset(&answer),
            "shop:cart is full, with 100 tokens\n\
             before    12 tokens of debt, paid in 240ms; full in 2s 240ms\n"
        );
    }
}
