//! A fake node with scripted answers, which records requests.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard};

use tokio::runtime::Runtime;
use tokio_stream::wrappers::TcpListenerStream;
use tollgate_proto::doorman::capacity_server::{Capacity, CapacityServer};
use tollgate_proto::doorman::{
    DiscoveryRequest, DiscoveryResponse, GetCapacityRequest, GetCapacityResponse,
    GetServerCapacityRequest, GetServerCapacityResponse, Lease, Mastership, ReleaseCapacityRequest,
    ReleaseCapacityResponse, ResourceResponse,
};
use tonic::{Request, Response, Status};

use testkit::command::{CommandOutput, tollgate};
use testkit::{TEST_TIMEOUT, eventually, now_s};

/// Scripted answers, and recorded requests.
#[derive(Default)]
pub(crate) struct Script {
    /// Answer to each lease request; an error without one.
    pub(crate) answer: Option<Answer>,
    pub(crate) error: Option<Status>,
    pub(crate) asked: Vec<GetCapacityRequest>,
    pub(crate) released: Vec<ReleaseCapacityRequest>,
}

#[derive(Clone, Copy, Default)]
pub(crate) struct Answer {
    pub(crate) capacity: f64,
    pub(crate) lasts_s: i64,
    pub(crate) refresh_s: i64,
    pub(crate) safe: Option<f64>,
    pub(crate) learning_until: Option<i64>,
    pub(crate) degraded: Option<bool>,
}

impl Answer {
    /// A lease for five minutes.
    pub(crate) fn of(capacity: f64) -> Self {
        Self { capacity, lasts_s: 300, refresh_s: 5, ..Self::default() }
    }
}

#[derive(Clone, Default)]
pub(crate) struct FakeService(Arc<Mutex<Script>>);

impl FakeService {
    pub(crate) fn script(&self) -> MutexGuard<'_, Script> {
        self.0.lock().unwrap()
    }
}

#[tonic::async_trait]
impl Capacity for FakeService {
    async fn discovery(
        &self,
        _: Request<DiscoveryRequest>,
    ) -> Result<Response<DiscoveryResponse>, Status> {
        let mastership = Mastership { master_address: Some("lb\u{7}:10990".to_owned()) };
        Ok(Response::new(DiscoveryResponse { mastership, is_master: true }))
    }

    async fn get_capacity(
        &self,
        request: Request<GetCapacityRequest>,
    ) -> Result<Response<GetCapacityResponse>, Status> {
        let mut script = self.script();
        let request = request.into_inner();
        let ids: Vec<_> = request.resource.iter().map(|r| r.resource_id.clone()).collect();
        script.asked.push(request);
        if let Some(error) = &script.error {
            return Err(error.clone());
        }
        let answer = script.answer.ok_or_else(|| Status::internal("no answer"))?;
        let response = ids.into_iter().map(|resource_id| ResourceResponse {
            resource_id,
            gets: Lease {
                expiry_time: now_s() + answer.lasts_s,
                refresh_interval: answer.refresh_s,
                capacity: answer.capacity,
            },
            safe_capacity: answer.safe,
            learning_until: answer.learning_until,
            degraded: answer.degraded,
        });
        Ok(Response::new(GetCapacityResponse { response: response.collect(), mastership: None }))
    }

    async fn get_server_capacity(
        &self,
        _: Request<GetServerCapacityRequest>,
    ) -> Result<Response<GetServerCapacityResponse>, Status> {
        Err(Status::unimplemented("not asked for here"))
    }

    async fn release_capacity(
        &self,
        request: Request<ReleaseCapacityRequest>,
    ) -> Result<Response<ReleaseCapacityResponse>, Status> {
        let mut script = self.script();
        script.released.push(request.into_inner());
        match &script.error {
            Some(error) => Err(error.clone()),
            None => Ok(Response::new(ReleaseCapacityResponse { mastership: None })),
        }
    }
}

/// A running fake node.
pub(crate) struct Fake {
    pub(crate) service: FakeService,
    pub(crate) address: SocketAddr,
    _runtime: Runtime,
}

impl Fake {
    pub(crate) fn start(answer: Answer) -> Self {
        let service = FakeService::default();
        service.script().answer = Some(answer);
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build();
        let runtime = runtime.unwrap();
        let listener = runtime.block_on(tokio::net::TcpListener::bind("127.0.0.1:0")).unwrap();
        let address = listener.local_addr().unwrap();
        let server = tonic::transport::Server::builder()
            .add_service(CapacityServer::new(service.clone()))
            .serve_with_incoming(TcpListenerStream::new(listener));
        runtime.spawn(server);
        Self { service, address, _runtime: runtime }
    }

    pub(crate) fn capacity(&self, args: &[&str]) -> CommandOutput {
        let address = self.address.to_string();
        tollgate(&[&["capacity"], args, &["--addr", &address]].concat())
    }

    /// Waits for this number of lease requests.
    pub(crate) fn asked(&self, times: usize) {
        eventually("requests arrive", TEST_TIMEOUT, || self.service.script().asked.len() >= times);
    }
}
