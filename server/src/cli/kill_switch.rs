//! `tollgate kill-switch`: turns off the enforcement of all limits, for a time.

use std::fmt::Write as _;
use std::process::ExitCode;
use std::time::Duration;

use clap::Subcommand;
use http::Method;
use serde_json::Value;
use url::form_urlencoded;

use super::api::{ApiArgs, ApiRequest};
use super::text::{date, escaped};

const PATH: &str = "/v1/kill-switch";

#[derive(clap::Args)]
#[command(after_help = "Examples:
  tollgate kill-switch on --for 1h --message 'the checkout is refused'
      For an hour, no node enforces the limit of a bucket
  tollgate kill-switch off
      Enforce the limits again

While it is on, requests are decided and counted as ever, and all are granted at once, as with
enforce: false. Leases are not affected.

Exit codes: 0 done; 1 the node refused; 2 no answer, so that it is unknown whether it was done.")]
pub(super) struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Enforce no limit of a bucket, throttle or hold, on all nodes, for a time
    On(On),
    /// Enforce the limits again
    Off(ApiArgs),
    /// Show whether it is on, who turned it on, and when it ends
    Status(ApiArgs),
}

#[derive(clap::Args)]
struct On {
    /// For how long, up to a day, like 30m or 1h
    #[arg(long = "for", value_name = "TIME")]
    length: String,
    /// Why, for the log and for those who ask for the status
    #[arg(long, short, value_name = "TEXT", default_value = "")]
    message: String,
    #[command(flatten)]
    api: ApiArgs,
}

pub(super) fn run(args: &Args) -> Result<ExitCode, String> {
    let request = |method, path| ApiRequest { method, path, body: String::new() };
    let answered = match &args.command {
        Command::On(On { length, message, api }) => {
            let mut query = form_urlencoded::Serializer::new(String::new());
            query.append_pair("for", length).append_pair("message", message);
            let path = format!("{PATH}?{}", query.finish());
            api.print_answer(request(Method::PUT, path), shown)
        }
        Command::Off(api) => api.print_answer(request(Method::DELETE, PATH.to_owned()), shown),
        Command::Status(api) => api.print_answer(request(Method::GET, PATH.to_owned()), shown),
    };
    answered.map(|answered| answered.exit_code())
}

fn shown(json: &Value) -> String {
    if json["on"] != true {
        return "off: limits are enforced\n".to_owned();
    }
    let ms = |key: &str| Duration::from_millis(json[key].as_u64().unwrap_or_default());
    let text = |key: &str| escaped(json[key].as_str().unwrap_or_default());
    let left = humantime::format_duration(Duration::from_secs(ms("left_millis").as_secs()));
    let mut shown = format!(
        "on: no limit of a bucket, throttle or hold is enforced\nends      in {left}, at {}\nby        {}, at {}\n",
        date(&json["ends_at_ms"]),
        text("by"),
        date(&json["at_ms"]),
    );
    if json["message"] != "" {
        // Writing to a string cannot fail.
        let _ = writeln!(shown, "message   {}", text("message"));
    }
    shown
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn for_people() {
        assert_eq!(shown(&json!({ "on": false })), "off: limits are enforced\n");
        let mut on = json!({
            "on": true, "left_millis": 3_540_999, "at_ms": 1_771_077_500_000_u64,
            "ends_at_ms": 1_771_081_100_000_u64, "by": "ana\u{1b}", "message": "",
        });
        let expected = "on: no limit of a bucket, throttle or hold is enforced\n\
                        ends      in 59m, at 2026-02-14T14:58:20Z\n\
                        by        ana\\u{1b}, at 2026-02-14T13:58:20Z\n";
        assert_eq!(shown(&on), expected);
        on["message"] = json!("the checkout\nis refused");
        assert_eq!(shown(&on), format!("{expected}message   the checkout\\nis refused\n"));
    }
}
