//! The same load by h2load, an independent generator, as a cross-check.

use std::fs;
use std::process::Command;

use prost::Message as _;
use tollgate_proto::quotaservice::AllowRequest;

use crate::commands::bench::args::BenchArgs;
use crate::commands::bench::buckets::{HOT, NAMESPACE};
use crate::commands::bench::error::Error;
use crate::commands::bench::plan::Backend;
use crate::commands::bench::rig::Rig;
use crate::commands::bench::stats::Round;

/// Records the request rate of h2load on the hot bucket of the node with Redis. Records nothing if
/// h2load is not installed.
pub fn measure(rig: &mut Rig, args: &BenchArgs, round: &mut Round) -> Result<(), Error> {
    rig.start(Backend::Redis)?;
    let request = AllowRequest {
        namespace: NAMESPACE.to_owned(),
        bucket_name: HOT.to_owned(),
        tokens_requested: 1,
        ..AllowRequest::default()
    };
    let mut body = vec![0];
    body.extend((request.encoded_len() as u32).to_be_bytes());
    body.extend(request.encode_to_vec());
    let file = rig.dir().join("allow.grpc");
    fs::write(&file, body).map_err(Error::Io)?;

    let address = &rig.server(Backend::Redis)?.address;
    let output = Command::new("h2load")
        .args(["--clients=4", "--max-concurrent-streams=32", "--threads=1"])
        // h2load accepts only whole seconds.
        .arg(format!("--duration={:.0}", args.seconds.max(1.0)))
        .arg(format!("--warm-up-time={:.0}", args.warmup.max(1.0)))
        .args(["--header=content-type: application/grpc", "--header=te: trailers"])
        .arg("--data")
        .arg(file)
        .arg(format!("http://{address}/quotaservice.QuotaService/Allow"))
        .output();
    let text = match output {
        Ok(output) => String::from_utf8_lossy(&output.stdout).into_owned(),
        Err(_) => return Ok(()),
    };
    let rate = rate(&text).ok_or_else(|| Error::Other(format!("h2load says: {text}")))?;
    round.insert("h2load/hot/128.rate".to_owned(), rate);
    Ok(())
}

/// Requests/s; `None` unless all were answered with 2xx.
fn rate(text: &str) -> Option<f64> {
    let status_line = text.lines().find(|line| line.starts_with("status codes:"))?;
    if !status_line.contains(" 0 3xx, 0 4xx, 0 5xx") {
        return None;
    }
    let line = text.lines().find(|line| line.starts_with("finished in "))?;
    line.split(", ").find_map(|part| part.strip_suffix(" req/s"))?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rate_is_read_unless_something_failed() {
        let text = "finished in 3.00s, 61234.56 req/s, 5.43MB/s\n\
                    status codes: 183704 2xx, 0 3xx, 0 4xx, 0 5xx\n";
        assert_eq!(rate(text), Some(61234.56));
        assert_eq!(rate(&text.replace("0 5xx", "9 5xx")), None);
        assert_eq!(rate("nothing"), None);
    }
}
