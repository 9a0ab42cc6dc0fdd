//! `tollgate request`: asks for hits of a domain on a resource, and prints the answer.

use std::hash::{BuildHasher as _, RandomState};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use tollgate_proto::tollgate::v1::throttle_client::ThrottleClient;
use tollgate_proto::tollgate::v1::throttle_response::Status;
use tollgate_proto::tollgate::v1::{ThrottleRequest, ThrottleResponse};
use tonic::Code;

use super::node::{Node, NodeArgs};
use crate::settings::duration;
use tollgate_client::connection::answer_within;

/// Hits or copies to ask for.
#[derive(clap::Args)]
pub(super) struct CopiesArgs {
    /// The resource
    pub(super) resource: String,
    /// The domain that uses it: a user or a tenant
    pub(super) domain: String,
    /// The most to ask for; 0 means 1
    #[arg(long, value_name = "N", default_value_t = 1, allow_negative_numbers = true)]
    pub(super) copies: i64,
    /// The least to accept; 0 means 1
    #[arg(long, value_name = "N", default_value_t = 1, allow_negative_numbers = true)]
    pub(super) min: i64,
}

impl From<CopiesArgs> for ThrottleRequest {
    fn from(args: CopiesArgs) -> Self {
        let CopiesArgs { resource, domain, copies, min } = args;
        Self { resource, domain, copies, min_copies: min }
    }
}

#[derive(clap::Args)]
pub(super) struct Args {
    #[command(flatten)]
    asked: CopiesArgs,
    /// How long to wait for hits: asks again when they may be granted
    #[arg(long, value_name = "TIME", value_parser = duration, default_value = "0s")]
    max_wait: Duration,
    #[command(flatten)]
    node: NodeArgs,
    /// Print the answer as one JSON object
    #[arg(long)]
    json: bool,
}

pub(super) fn run(args: Args) -> Result<ExitCode, String> {
    let node = args.node.node()?;
    let request = ThrottleRequest::from(args.asked);
    let response = super::block_on(ask(&node, &request, args.max_wait))??;
    if args.json {
        let text = serde_json::to_string(&response).map_err(|error| error.to_string())?;
        super::print(&(text + "\n"))?;
    } else {
        super::print(&text(&response))?;
    }
    Ok(ExitCode::from(u8::from(response.status() != Status::Ok)))
}

/// How long to wait before asking again if nobody knows when it can help.
const BUSY: Duration = Duration::from_secs(1);

/// Asks until hits are granted, or could not be within `max_wait`.
async fn ask(
    node: &Node,
    request: &ThrottleRequest,
    max_wait: Duration,
) -> Result<ThrottleResponse, String> {
    let began = Instant::now();
    let left = || max_wait.saturating_sub(began.elapsed());
    let mut client = ThrottleClient::new(node.connect().await?);
    loop {
        let response = match answer_within(node.timeout, client.request(request.clone())).await {
            Ok(response) => response,
            // The node is overloaded. It may not be so in a moment.
            Err(status) if status.code() == Code::ResourceExhausted && BUSY <= left() => {
                tokio::time::sleep(BUSY).await;
                continue;
            }
            Err(status) => return Err(node.error_text("decision", &status).await),
        };
        match pause(&response, left()) {
            // Up to a tenth longer, so that those who wait for the same hits do not all ask at once.
            Some(pause) => {
                let part = (RandomState::new().hash_one(()) % 1024) as u32;
                tokio::time::sleep((pause + pause * part / 10_240).min(left())).await;
            }
            None => return Ok(response),
        }
    }
}

/// How long to wait before asking again, if that is within `left`; `None`: not at all.
fn pause(response: &ThrottleResponse, left: Duration) -> Option<Duration> {
    let pause = match response.retry_after_millis {
        _ if response.status() == Status::Ok => return None,
        // The store is away: nobody knows when it is back.
        0 if response.degraded => BUSY,
        ms => Duration::from_millis(u64::try_from(ms).ok().filter(|ms| *ms > 0)?),
    };
    Some(pause).filter(|pause| *pause <= left)
}

fn text(response: &ThrottleResponse) -> String {
    let mut lines = vec![match response.status() {
        Status::Ok => format!("OK: {}", hits(response.granted)),
        Status::Rejected if response.retry_after_millis > 0 => {
            format!("REJECTED: try again in {} ms", response.retry_after_millis)
        }
        Status::Rejected if response.degraded => "REJECTED".to_owned(),
        Status::Rejected => "REJECTED: this request can never be granted".to_owned(),
    }];
    if response.tier_index > 0 {
        lines.push(format!(
            "tier {}, {} of {} in its window",
            response.tier_index,
            hits(response.tier_hits),
            response.tier_limit
        ));
    }
    for (is_limited, name, used, limit) in [
        (
            response.limited_by_hard,
            "hard_limit",
            response.domain_hits_last_second,
            response.hard_limit,
        ),
        (
            response.limited_by_global,
            "global_limit",
            response.all_hits_last_second,
            response.global_limit,
        ),
    ] {
        if is_limited {
            lines.push(format!("limited by {name}: {} of {limit} in the last second", hits(used)));
        }
    }
    if response.burst {
        lines.push("entered a tier".to_owned());
    }
    if response.shadow {
        lines.push("granted only because the limits are not enforced".to_owned());
    }
    if response.degraded {
        lines.push("decided without the shared store".to_owned());
    }
    lines.join("\n") + "\n"
}

fn hits(count: i64) -> String {
    if count == 1 { "1 hit".to_owned() } else { format!("{count} hits") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_only_if_it_helps_in_time() {
        let rejected = |retry_after_millis, degraded| ThrottleResponse {
            status: Status::Rejected.into(),
            retry_after_millis,
            degraded,
            ..ThrottleResponse::default()
        };
        let left = Duration::from_secs(5);
        assert_eq!(pause(&ThrottleResponse::default(), left), None);
        assert_eq!(pause(&rejected(5000, false), left), Some(left));
        assert_eq!(pause(&rejected(5001, false), left), None);
        assert_eq!(pause(&rejected(0, false), left), None);
        assert_eq!(pause(&rejected(-1, false), left), None);
        assert_eq!(pause(&rejected(0, true), left), Some(Duration::from_secs(1)));
    }
}
