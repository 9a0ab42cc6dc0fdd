//! `tollgate throttle`: shows what a domain's hits stand at, explains what a request would be answered, and
//! forgets hits.

use std::process::ExitCode;
use std::time::Duration;

use clap::Subcommand;
use http::Method;
use serde_json::Value;
use tollgate_proto::tollgate::v1::ThrottleRequest;

use super::api::{ApiArgs, ApiRequest, hits_path};
use super::explain::print_explanation;
use super::request::CopiesArgs;
use super::text::quoted;

#[derive(clap::Args)]
#[command(
    after_help = "`show` and `explain` need the right to ask for the hits, `reset` the role administer.

Examples:
  tollgate throttle show search acme
      The limits of the domain acme on the resource search, its tiers, and when it may have the next hit
  tollgate throttle explain search acme --copies 10
      Whether it would be granted ten hits now, and which limit refuses them
  tollgate throttle reset search acme
      Forget its hits, and end its cooldowns

Exit codes: 0 done, or would be granted; 1 the node refused, or would refuse the hits; 2 no answer."
)]
pub(super) struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Show the limits of a domain on a resource, and what it stands at; takes nothing
    Show(Names),
    /// Explain what a request for hits would be answered; takes nothing
    Explain(Explain),
    /// Forget the hits of a domain on a resource, and end its cooldowns
    Reset(Names),
}

#[derive(clap::Args)]
struct Explain {
    #[command(flatten)]
    asked: CopiesArgs,
    #[command(flatten)]
    api: ApiArgs,
}

#[derive(clap::Args)]
struct Names {
    /// The resource
    resource: String,
    /// The domain
    domain: String,
    #[command(flatten)]
    api: ApiArgs,
}

pub(super) fn run(args: Args) -> Result<ExitCode, String> {
    let (method, Names { resource, domain, api }) = match args.command {
        Command::Show(names) => (Method::GET, names),
        Command::Explain(Explain { asked, api }) => {
            let body = serde_json::to_string(&ThrottleRequest::from(asked));
            let body = body.map_err(|error| error.to_string())?;
            return print_explanation(&api, "/v1/throttle/explain", body);
        }
        Command::Reset(names) => (Method::DELETE, names),
    };
    let is_look = method == Method::GET;
    let request = ApiRequest { method, path: hits_path(&resource, &domain), body: String::new() };
    let text = |json: &Value| match is_look {
        true => shown(json),
        false => reset(json),
    };
    api.print_answer(request, text).map(|answered| answered.exit_code())
}

fn time(ms: &Value) -> String {
    humantime::format_duration(Duration::from_millis(ms.as_u64().unwrap_or_default())).to_string()
}

fn hits(number: &Value) -> String {
    format!("{number} {}", if number == 1 { "hit" } else { "hits" })
}

/// The limit of hits in a second, and how many there were.
fn in_a_second(limit: &Value, number: &Value) -> String {
    match limit.as_u64() {
        Some(limit) => format!("{number} of {limit}"),
        None => "no limit".to_owned(),
    }
}

/// What a tier stands at, under these limits.
fn tier(limits: &Value, now: &Value) -> String {
    let (limit, window) = (hits(&limits["limit"]), time(&limits["window_millis"]));
    let (ends, active) = (time(&now["ends_in_millis"]), time(&limits["active_millis"]));
    let cooldown = match &limits["cooldown_millis"] {
        none if none == 0 => String::new(),
        some => format!(", then {} of cooldown", time(some)),
    };
    let skippable = if limits["skippable"] == true { ", skippable" } else { "" };
    match now["state"].as_str() {
        Some("active") => {
            let hits = &now["hits"];
            format!("active for {ends}{skippable}: {hits} of {limit} in {window}")
        }
        Some("cooling_down") => {
            format!("cooling down for {ends}{skippable}: {limit} in {window}, for {active}")
        }
        _ if limits["limit"] == 0 && limits["skippable"] == false => {
            "never entered, and bars those above it: its limit is 0".to_owned()
        }
        _ => format!("inactive{skippable}: {limit} in {window}, for {active}{cooldown}"),
    }
}

fn items(value: &Value) -> &[Value] {
    value.as_array().map_or(&[], Vec::as_slice)
}

fn next_hit(now: &Value) -> String {
    let why = match now["too_many_domains"] == true {
        true => ", as there are max_domains already",
        false => "",
    };
    match now["next_hit_in_millis"].as_u64() {
        Some(0) => "now".to_owned(),
        Some(_) => format!("in {}{why}", time(&now["next_hit_in_millis"])),
        None => "never, by these limits".to_owned(),
    }
}

fn shown(json: &Value) -> String {
    let (limits, now) = (&json["limits"], &json["now"]);
    let whose = match limits["of_the_domain"] == true {
        true => "the domain's own",
        false => "those of all domains without their own",
    };
    let mut lines = vec![
        ("resource".to_owned(), quoted(&json["resource"])),
        ("domain".to_owned(), quoted(&json["domain"])),
        ("limits".to_owned(), format!("{whose}, for {}", quoted(&limits["resource"]))),
    ];
    let domain = in_a_second(&limits["hard_limit"], &now["domain_hits_last_second"]);
    let all = in_a_second(&limits["global_limit"], &now["all_hits_last_second"]);
    lines.push(("second".to_owned(), format!("{domain} for the domain, {all} for all domains")));
    let tiers = items(&limits["tiers"]).iter().zip(items(&now["tiers"]));
    for (number, (limits, now)) in (1..).zip(tiers) {
        lines.push((format!("tier {number}"), tier(limits, now)));
    }
    lines.push(("next hit".to_owned(), next_hit(now)));
    if limits["enforced"] == false {
        let text = "no: hits are granted all the same, and counted where these limits have room";
        lines.push(("enforced".to_owned(), text.to_owned()));
    }
    lines.iter().map(|(title, content)| format!("{title:<9} {content}\n")).collect()
}

fn reset(json: &Value) -> String {
    let before = &json["before"];
    let tier = match before["tier_index"].as_u64() {
        Some(0) | None => "no tier was active".to_owned(),
        Some(tier) => format!("tier {tier} was the current one"),
    };
    format!("the hits are forgotten\nbefore    {tier}; next hit {}\n", next_hit(before))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn view() -> Value {
        json!({
            "resource": "sea\u{1b}rch", "domain": "acme",
            "limits": {
                "resource": "sea*", "of_the_domain": true, "hard_limit": 50, "global_limit": -1,
                "max_domains": 100, "enforced": false,
                "tiers": [
                    { "limit": 100, "window_millis": 60_000, "active_millis": 300_000, "cooldown_millis": 0,
                      "skippable": false },
                    { "limit": 1, "window_millis": 1000, "active_millis": 2000, "cooldown_millis": 9000,
                      "skippable": true },
                    { "limit": 1000, "window_millis": 1000, "active_millis": 2000, "cooldown_millis": 9000,
                      "skippable": false },
                    { "limit": 0, "window_millis": 1000, "active_millis": 2000, "cooldown_millis": 0,
                      "skippable": false },
                ],
            },
            "now": {
                "tier_index": 1, "domain_hits_last_second": 3, "all_hits_last_second": -1,
                "tiers": [
                    { "state": "active", "ends_in_millis": 61_001, "hits": 37 },
                    { "state": "cooling_down", "ends_in_millis": 5000, "hits": 0 },
                    { "state": "inactive", "ends_in_millis": null, "hits": 0 },
                    { "state": "inactive", "ends_in_millis": null, "hits": 0 },
                ],
                "next_hit_in_millis": 0, "too_many_domains": false,
            },
        })
    }

    #[test]
    fn hits_for_people() {
        assert_eq!(
            shown(&view()),
            "resource  \"sea\\u{1b}rch\"\n\
             domain    \"acme\"\n\
             limits    the domain's own, for \"sea*\"\n\
             second    3 of 50 for the domain, no limit for all domains\n\
             tier 1    active for 1m 1s 1ms: 37 of 100 hits in 1m\n\
             tier 2    cooling down for 5s, skippable: 1 hit in 1s, for 2s\n\
             tier 3    inactive: 1000 hits in 1s, for 2s, then 9s of cooldown\n\
             tier 4    never entered, and bars those above it: its limit is 0\n\
             next hit  now\n\
             enforced  no: hits are granted all the same, and counted where these limits have room\n"
        );
    }

    #[test]
    fn when_the_next_hit_may_be() {
        let next = |ms: Value, too_many: bool| {
            next_hit(&json!({ "next_hit_in_millis": ms, "too_many_domains": too_many }))
        };
        assert_eq!(next(json!(1500), false), "in 1s 500ms");
        assert_eq!(next(json!(1000), true), "in 1s, as there are max_domains already");
        assert_eq!(next(Value::Null, false), "never, by these limits");
        let before = json!({ "tier_index": 2, "next_hit_in_millis": 1000 });
        assert_eq!(
            reset(&json!({ "before": before })),
            "the hits are forgotten\nbefore    tier 2 was the current one; next hit in 1s\n"
        );
    }
}
