//! A server to test against, and the load tester as its users start it.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::process::{Command, Output};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc;
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

use tokio::sync::oneshot;
use tollgate_proto::quotaservice::allow_response::Status as Decided;
use tollgate_proto::quotaservice::quota_service_server::{QuotaService, QuotaServiceServer};
use tollgate_proto::quotaservice::{AllowRequest, AllowResponse};
use tollgate_server::domain::bucket::{self, BucketLimit, Change};
use tollgate_server::domain::time::Micros;
use tonic::transport::server::{Router, TcpIncoming};
use tonic::{Request, Response, Status};

/// Decides a request, given its number from 0.
pub(crate) type Decide =
    Box<dyn Fn(u64, &AllowRequest) -> Result<AllowResponse, Status> + Send + Sync + 'static>;

/// Request number `.0` holds up itself and all that come after it for `.1`.
pub(crate) type Stall = Option<(u64, Duration)>;

struct Service {
    decide: Decide,
    stall: Stall,
    /// Until when it holds up, once it does. It does so whether or not the request that began it
    /// is still waited for.
    shut_until: OnceLock<Instant>,
    seen: Arc<AtomicU64>,
}

#[tonic::async_trait]
impl QuotaService for Service {
    async fn allow(
        &self,
        request: Request<AllowRequest>,
    ) -> Result<Response<AllowResponse>, Status> {
        let number = self.seen.fetch_add(1, Ordering::SeqCst);
        if let Some((at, time)) = self.stall
            && number >= at
        {
            let until = self.shut_until.get_or_init(|| Instant::now() + time);
            tokio::time::sleep_until((*until).into()).await;
        }
        (self.decide)(number, request.get_ref()).map(Response::new)
    }
}

/// A running server; it stops when this is dropped.
pub(crate) struct Server {
    address: SocketAddr,
    seen: Arc<AtomicU64>,
    _stop: oneshot::Sender<()>,
}

impl Server {
    pub(crate) fn start(stall: Stall, decide: Decide) -> Self {
        let seen = Arc::<AtomicU64>::default();
        let shut_until = OnceLock::new();
        let service = Service { decide, stall, shut_until, seen: Arc::clone(&seen) };
        let (address, stop) =
            serve(|mut server| server.add_service(QuotaServiceServer::new(service)));
        Self { address, seen, _stop: stop }
    }

    pub(crate) fn address(&self) -> String {
        self.address.to_string()
    }

    /// Requests that arrived.
    pub(crate) fn seen(&self) -> u64 {
        self.seen.load(Ordering::SeqCst)
    }

    /// Runs `tollgate-loadtest allow` against this server with `args`, split at spaces.
    pub(crate) fn load(&self, args: &str) -> Run {
        run(&format!("allow --target {} {args}", self.address))
    }
}

/// Serves what `services` adds on a thread of its own, until the sender is dropped.
pub(crate) fn serve(
    services: impl FnOnce(tonic::transport::Server) -> Router + Send + 'static,
) -> (SocketAddr, oneshot::Sender<()>) {
    let (stop, stopped) = oneshot::channel();
    let (bound, address) = mpsc::channel();
    std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        runtime.unwrap().block_on(async {
            let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
            bound.send(listener.local_addr().unwrap()).unwrap();
            let incoming = TcpIncoming::from(listener).with_nodelay(Some(true));
            let router = services(tonic::transport::Server::builder());
            tokio::select! { _ = router.serve_with_incoming(incoming) => {}, _ = stopped => {} }
        });
    });
    (address.recv().unwrap(), stop)
}

/// What became of one run of the binary.
#[derive(Debug)]
pub(crate) struct Run {
    pub(crate) code: i32,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

impl Run {
    pub(crate) fn json(&self) -> serde_json::Value {
        serde_json::from_str(&self.stdout).unwrap_or_else(|error| panic!("{error}: {self:?}"))
    }
}

/// Runs the binary with `args`, split at spaces.
pub(crate) fn run(args: &str) -> Run {
    let binary = env!("CARGO_BIN_EXE_tollgate-loadtest");
    let Output { status, stdout, stderr } =
        Command::new(binary).args(args.split_whitespace()).output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    Run { code: status.code().unwrap(), stdout: text(stdout), stderr: text(stderr) }
}

/// Grants everything, whatever the limits.
pub(crate) fn generous() -> Decide {
    Box::new(|_, request| Ok(granted(request)))
}

/// A grant of what `request` asks for, by the bucket that it names.
pub(crate) fn granted(request: &AllowRequest) -> AllowResponse {
    AllowResponse {
        status: Decided::Ok as i32,
        tokens_granted: request.tokens_requested,
        bucket: format!("{}:{}", request.namespace, request.bucket_name),
        ..AllowResponse::default()
    }
}

/// Decides as a node does, each bucket under `limit`. With `shared`, every name is served by
/// one default bucket.
pub(crate) fn honest(limit: BucketLimit, shared: bool) -> Decide {
    let (start, terms) = (Instant::now(), limit.terms());
    let buckets = Mutex::new(HashMap::new());
    Box::new(move |_, request| {
        let name = if shared { "default" } else { request.bucket_name.as_str() };
        let max_wait_ms = match request.max_wait_time_override {
            true => limit.wait_timeout_ms.min(request.max_wait_millis_override as u64),
            false => limit.wait_timeout_ms,
        };
        let charge = bucket::Charge {
            cost_us: terms.cost_us(request.tokens_requested as u64),
            max_wait_us: max_wait_ms as f64 * 1000.0,
        };
        let mut buckets = buckets.lock().unwrap();
        let now = Micros(1_700_000_000_000_000 + start.elapsed().as_micros() as i64);
        let decision = bucket::decide(buckets.get(name), &terms, &charge, now);
        if let Change::Put(state) = decision.change {
            buckets.insert(name.to_owned(), state);
        }
        let mut response = AllowResponse {
            bucket: format!("{}:{name}", request.namespace),
            ..AllowResponse::default()
        };
        if decision.granted {
            response.tokens_granted = request.tokens_requested;
            response.wait_millis = bucket::wait_ms(decision.accrued_us);
        } else {
            response.status = Decided::RejectedTimeout as i32;
            response.retry_after_millis =
                bucket::retry_after_ms(decision.accrued_us, &terms, &charge);
        }
        Ok(response)
    })
}
