//! Reads from a database, as fast as the limit allows:
//!
//! ```text
//! cargo run --release --bin tollgate -- serve --limits config/limits.yaml
//! cargo run -p tollgate-client --example acquire
//! ```

use std::time::{Duration, Instant};

use tollgate_client::{AcquireError, Client, Fallback, Request};

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let address = std::env::var("TOLLGATE_ADDRESS").unwrap_or("127.0.0.1:10990".to_owned());
    let client = Client::builder([address]).fallback(Fallback::rate(10.0, 20)).build()?;
    let start = Instant::now();
    for read in 1..=20 {
        let request = Request::new("Pinky_TheBrain", "UserService_getUser").tokens(20);
        match client.acquire(request.max_wait(Duration::from_secs(2))).await {
            Ok(grant) => {
                println!("{:6.2?}  read {read}: {:?}", start.elapsed(), grant.decided_by);
            }
            Err(AcquireError::Refused(refusal)) => {
                println!("{:6.2?}  no read {read}: {}", start.elapsed(), refusal.reason);
            }
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}
