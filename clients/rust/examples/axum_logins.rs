//! A server that limits how often each address may try to log in:
//!
//! ```text
//! cargo run --release --bin tollgate -- serve --limits config/limits.yaml
//! cargo run -p tollgate-client --features tower --example axum_logins
//! for i in 1 2 3 4 5 6 7; do curl -i -X POST http://127.0.0.1:8080/login; done
//! ```

use std::net::SocketAddr;

use axum::Router;
use axum::extract::ConnectInfo;
use axum::http::Request;
use axum::routing::{get, post};
use tollgate_client::{Bucket, Client, Fallback, QuotaLayer};

/// The bucket of the caller's address, which `axum::serve` adds to each request below. Behind a load
/// balancer that is the balancer's address: take the caller's from a header that the balancer sets,
/// and that callers can't.
///
/// Each address makes a bucket, of the namespace's `dynamic_bucket_template`. Where callers choose
/// the names of buckets, the limits need `max_dynamic_buckets`: else they make as many as they like.
fn logins_of_caller<B>(request: &Request<B>) -> Option<Bucket> {
    let ConnectInfo(caller) = request.extensions().get::<ConnectInfo<SocketAddr>>()?;
    Some(Bucket::new("TheBrain_userLogins", caller.ip().to_string()))
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let address = std::env::var("TOLLGATE_ADDRESS").unwrap_or("127.0.0.1:10990".to_owned());
    let client = Client::builder([address]).fallback(Fallback::rate(10.0, 20)).build()?;
    let app = Router::new()
        .route("/login", post(|| async { "welcome\n" }))
        .layer(QuotaLayer::new(client, logins_of_caller))
        // Added after the layer, so that it takes no tokens.
        .route("/", get(|| async { "log in with a POST to /login\n" }));
    let listener = tokio::net::TcpListener::bind("127.0.0.1:8080").await?;
    println!("http://{}/login", listener.local_addr()?);
    axum::serve(listener, app.into_make_service_with_connect_info::<SocketAddr>()).await?;
    Ok(())
}
