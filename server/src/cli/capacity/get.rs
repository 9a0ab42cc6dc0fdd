//! `tollgate capacity get`: one lease request, and its answer explained.

use std::process::ExitCode;

use tollgate_proto::doorman::{GetCapacityResponse, Lease, ResourceRequest, ResourceResponse};

use super::{ask, covers, epoch_s};
use crate::cli;
use crate::cli::node::NodeArgs;
use crate::cli::text::{escaped, number, time_and_distance};
use crate::service::capacity::NO_BOUND;

#[derive(clap::Args)]
pub(super) struct Args {
    /// The id of the client, unique among all clients
    client: String,
    /// The resource
    resource: String,
    /// The capacity that the client wants, in the units of the resource
    #[arg(allow_negative_numbers = true)]
    wants: f64,
    /// The priority that is sent to the node; shares do not depend on it
    #[arg(long, value_name = "N", default_value_t = 0, allow_negative_numbers = true)]
    priority: i64,
    /// The capacity that the client holds, from an earlier answer
    #[arg(long, value_name = "CAPACITY", requires = "expires", allow_negative_numbers = true)]
    has: Option<f64>,
    /// When the lease that it holds expires, in seconds since 1970
    #[arg(long, value_name = "EPOCH_SECONDS", requires = "has", allow_negative_numbers = true)]
    expires: Option<i64>,
    #[command(flatten)]
    node: NodeArgs,
    /// Print the answer as one JSON object
    #[arg(long)]
    json: bool,
}

pub(super) fn run(args: Args) -> Result<ExitCode, String> {
    // Nodes do not use the refresh interval of a held lease.
    let has = args.has.zip(args.expires).map(|(capacity, expiry_time)| Lease {
        expiry_time,
        refresh_interval: 0,
        capacity,
    });
    let request = ResourceRequest {
        resource_id: args.resource,
        priority: args.priority,
        has,
        wants: args.wants,
    };
    let node = args.node.node()?;
    let response = cli::block_on(async {
        let mut client = super::connect(&node).await?;
        match ask(&mut client, &args.client, vec![request]).await {
            Ok(response) => Ok(response),
            Err(status) => Err(node.error_text("lease", &status).await),
        }
    })??;
    let gets: f64 = response.iter().map(|answer| answer.gets.capacity).sum();
    if args.json {
        let response = GetCapacityResponse { response, mastership: None };
        let json = serde_json::to_string(&response).map_err(|error| error.to_string())?;
        cli::print(&(json + "\n"))?;
    } else {
        let now_s = epoch_s();
        let texts: Vec<_> = response.iter().map(|answer| text(args.wants, answer, now_s)).collect();
        cli::print(&texts.concat())?;
    }
    Ok(ExitCode::from(u8::from(gets <= 0.0 && args.wants > 0.0)))
}

/// Explains an answer to a client that asked for `wants`.
fn text(wants: f64, answer: &ResourceResponse, now_s: i64) -> String {
    let Lease { expiry_time, refresh_interval, capacity: gets } = answer.gets;
    let has = number(gets);
    let (word, sentence) = verdict(gets, wants);
    let mut lines = vec![format!("{word}: {sentence}")];
    if gets > 0.0 {
        lines.push(format!(
            "expires   {}; the lease is gone then",
            time_and_distance(expiry_time, now_s)
        ));
        lines.push(format!(
            "refresh   every {refresh_interval} s: ask again that often, adding --has {has} \
             --expires {expiry_time}"
        ));
    } else {
        lines.push(format!("refresh   ask again in {refresh_interval} s"));
    }
    if let Some(safe) = answer.safe_capacity {
        lines.push(format!(
            "safe      {} may be used without a lease while no node answers",
            if safe == NO_BOUND { "any amount".to_owned() } else { number(safe) }
        ));
    }
    lines.extend(answer.learning_until.map(|until| learning_text(&has, until, now_s)));
    let degraded = answer.degraded();
    if degraded {
        lines.push(DEGRADED.to_owned());
    }
    if !covers(gets, wants) && answer.learning_until.is_none() && !degraded {
        let resource = escaped(&answer.resource_id);
        lines.push(format!("others    `tollgate capacity show {resource}` shows the holders"));
    }
    lines.join("\n") + "\n"
}

const DEGRADED: &str = "\
degraded  decided without the shared store, which does not answer: until it
          does, a client keeps what it says it has (--has, --expires) and gets no more";

/// Explains a grant of `has` by a store that learns until `until`.
fn learning_text(has: &str, until: i64, now_s: i64) -> String {
    let until = time_and_distance(until, now_s);
    format!(
        "\
learning  until {until}: the store is new, or has lost
          its leases, and learns them from the clients; until then each gets
          what it says it has (--has, --expires), here {has}; ask again after that
          for a share"
    )
}

/// Compares a grant with what was wanted: a one-word verdict and a sentence.
pub(super) fn verdict(gets: f64, wants: f64) -> (&'static str, String) {
    let (has, asked) = (number(gets), number(wants));
    if wants <= 0.0 && gets <= 0.0 {
        ("OK", "wants nothing, and gets nothing".to_owned())
    } else if gets <= 0.0 {
        ("NOTHING", format!("gets 0 of the {asked} that it wants"))
    } else if !covers(gets, wants) {
        ("LESS", format!("gets {has} of the {asked} that it wants"))
    } else if covers(wants, gets) {
        ("OK", format!("gets all of the {asked} that it wants"))
    } else {
        ("OK", format!("gets {has}, which is more than the {asked} that it wants"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// 2026-02-14T13:58:20Z
    const NOW: i64 = 1_771_077_500;

    fn answer(capacity: f64) -> ResourceResponse {
        ResourceResponse {
            resource_id: "db.users".to_owned(),
            gets: Lease { expiry_time: NOW + 300, refresh_interval: 5, capacity },
            ..ResourceResponse::default()
        }
    }

    #[test]
    fn verdicts() {
        for (gets, wants, expected) in [
            (10.0, 10.0, ("OK", "gets all of the 10 that it wants")),
            (9.999_999_999_999_998, 10.0, ("OK", "gets all of the 10 that it wants")),
            (30.0, 10.0, ("OK", "gets 30, which is more than the 10 that it wants")),
            (5.0, 0.0, ("OK", "gets 5, which is more than the 0 that it wants")),
            (0.0, 0.0, ("OK", "wants nothing, and gets nothing")),
            (60.5, 100.0, ("LESS", "gets 60.5 of the 100 that it wants")),
            (0.0, 1e20, ("NOTHING", "gets 0 of the 1e20 that it wants")),
        ] {
            let (word, sentence) = verdict(gets, wants);
            assert_eq!((word, sentence.as_str()), expected);
        }
    }

    #[test]
    fn a_share() {
        let answer = ResourceResponse { safe_capacity: Some(12.5), ..answer(60.0) };
        let expected = "LESS: gets 60 of the 100 that it wants
expires   14:03:20 UTC, in 300 s; the lease is gone then
refresh   every 5 s: ask again that often, adding --has 60 --expires 1771077800
safe      12.5 may be used without a lease while no node answers
others    `tollgate capacity show db.users` shows the holders
";
        assert_eq!(text(100.0, &answer, NOW), expected);
    }

    #[test]
    fn learning_and_degraded() {
        let learning = ResourceResponse { learning_until: Some(NOW + 60), ..answer(0.0) };
        let expected = "NOTHING: gets 0 of the 100 that it wants
refresh   ask again in 5 s
learning  until 13:59:20 UTC, in 60 s: the store is new, or has lost
          its leases, and learns them from the clients; until then each gets
          what it says it has (--has, --expires), here 0; ask again after that
          for a share
";
        assert_eq!(text(100.0, &learning, NOW), expected);
        let degraded = ResourceResponse { degraded: Some(true), ..answer(10.0) };
        let expected = "OK: gets all of the 10 that it wants
expires   14:03:20 UTC, in 300 s; the lease is gone then
refresh   every 5 s: ask again that often, adding --has 10 --expires 1771077800
degraded  decided without the shared store, which does not answer: until it
          does, a client keeps what it says it has (--has, --expires) and gets no more
";
        assert_eq!(text(10.0, &degraded, NOW), expected);
    }
}
