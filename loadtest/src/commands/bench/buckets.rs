//! The buckets of all nodes: their names and limits, and filling them.

use std::cell::Cell;
use std::rc::Rc;
use std::time::{Duration, Instant};

use tokio::runtime::Builder;
use tokio::task::{JoinSet, LocalSet};
use tollgate_proto::quotaservice::AllowRequest;

use crate::commands::bench::error::Error;
use crate::commands::bench::process::Server;
use crate::load::driver::Caller;
use crate::load::keys::{Keys, Pattern};
use crate::load::protocol::Allow;

/// Namespace of all buckets; 20 characters, like the bucket names.
pub const NAMESPACE: &str = "TheBrain_userLogins_";

/// Bucket that grants every request.
pub const HOT: &str = "bench-user-hot-00000";

/// Bucket that refuses nearly every request.
pub const REFUSED: &str = "bench-user-refused-0";

/// Tokens taken from each bucket before it is measured. At the configured fill rate the bucket
/// stays below full for hours.
const FILL_TOKENS: i64 = 100_000;

/// Concurrent requests while filling.
const FILL_CONCURRENCY: usize = 128;

/// Attempts per bucket while filling: on a busy machine a store may time out.
const FILL_ATTEMPTS: u32 = 5;

/// Delay between two attempts.
const FILL_RETRY_DELAY: Duration = Duration::from_millis(300);

/// Limits of all nodes. Only the refused bucket runs out of tokens.
pub const LIMITS: &str = "\
namespaces:
  TheBrain_userLogins_:
    buckets:
      bench-user-hot-00000: { size: 1000000000, fill_rate: 10, max_tokens_per_request: -1 }
      bench-user-refused-0: { size: 1, fill_rate: 1/d, wait_timeout_millis: 0 }
    dynamic_bucket_template: { size: 1000000, fill_rate: 10, max_tokens_per_request: -1 }
";

/// Name prefix of `buckets` buckets, such that prefix and number have 20 characters.
pub fn bucket_prefix(buckets: u64) -> String {
    let digits = (buckets.max(1) - 1).to_string().len();
    format!("bench-user-{:0<1$}", "key", 20_usize.saturating_sub(11 + digits))
}

/// Takes tokens from every bucket of `server`.
pub fn fill(server: &Server, buckets: u64) -> Result<(), Error> {
    let target = server.target()?;
    let keys = Keys::new(Pattern::Uniform(buckets), "", &bucket_prefix(buckets));
    let runtime = Builder::new_current_thread().enable_all().build().map_err(Error::Io)?;
    let next = Rc::new(Cell::new(0));
    let failed = LocalSet::new().block_on(&runtime, async {
        let caller = Caller::<Allow>::dial(&target, Duration::from_secs(30)).await;
        let mut tasks = JoinSet::new();
        for _ in 0..FILL_CONCURRENCY {
            let (next, keys, mut caller) = (Rc::clone(&next), keys.clone(), caller.sibling());
            tasks.spawn_local(async move {
                let mut request = AllowRequest {
                    namespace: NAMESPACE.to_owned(),
                    tokens_requested: FILL_TOKENS,
                    ..AllowRequest::default()
                };
                let mut failed = 0_u64;
                while next.get() < buckets {
                    keys.write(next.replace(next.get() + 1), &mut request.bucket_name);
                    failed += u64::from(!fill_bucket(&mut caller, &request).await);
                }
                failed
            });
        }
        tasks.join_all().await.iter().sum::<u64>()
    });
    match failed {
        0 => Ok(()),
        _ => Err(Error::Other(format!("{failed} of {buckets} buckets could not be filled"))),
    }
}

/// Takes tokens from one bucket. Returns whether the shared store granted them.
async fn fill_bucket(caller: &mut Caller<Allow>, request: &AllowRequest) -> bool {
    for _ in 0..FILL_ATTEMPTS {
        let answer = caller.ask(request, Instant::now()).await;
        if answer.is_ok_and(|answer| answer.tokens_granted == FILL_TOKENS && !answer.degraded) {
            return true;
        }
        tokio::time::sleep(FILL_RETRY_DELAY).await;
    }
    false
}
