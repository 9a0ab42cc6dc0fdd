//! One of the processes of `clients/conformance`.

use std::io;
use std::time::Duration;

use tokio::time::{Instant, timeout_at};
use tollgate_client::{Builder, DecidedBy, Decision, Request};

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let client = Builder::from_env()?.deadline(Duration::from_secs(20)).build()?;
    println!("ready");
    let mut line = String::new();
    io::stdin().read_line(&mut line)?;
    let end = Instant::now() + Duration::from_secs_f64(line.trim().parse()?);

    let mut granted = 0;
    for _ in 0..40 {
        match client.allow(Request::new("shared", "books")).await? {
            Decision::Granted(grant) if grant.decided_by == DecidedBy::Node => {
                granted += grant.tokens;
            }
            Decision::Granted(grant) => return Err(format!("{grant:?}").into()),
            Decision::Refused(_) => {}
        }
    }

    let rate = client.lease("shared").rate_limiter()?;
    let mut used = 0;
    while let Ok(waited) = timeout_at(end, rate.wait(1)).await {
        waited?;
        used += 1;
    }
    println!("{granted} {used}");
    client.close().await;
    Ok(())
}
