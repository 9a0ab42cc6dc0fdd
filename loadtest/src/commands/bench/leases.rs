//! Cost of a lease decision, by the number of clients of the resource.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::{Duration, Instant};

use rand::RngExt as _;
use rand::rngs::SmallRng;
use tokio::runtime::Builder;
use tokio::task::{JoinSet, LocalSet};
use tollgate_proto::doorman::{GetCapacityRequest, Lease, ResourceRequest};

use crate::commands::bench::args::BenchArgs;
use crate::commands::bench::error::Error;
use crate::commands::bench::plan::Backend;
use crate::commands::bench::rig::{MEAN_WANTS, Rig, resource};
use crate::commands::bench::run::CpuUsage;
use crate::commands::bench::stats::Round;
use crate::load::driver::{Failure, LeaseClient, lease_client};
use crate::load::keys;

/// Concurrent requests.
const CONCURRENCY: u64 = 32;

/// Connections shared by all requests.
const CONNECTIONS: u64 = 4;

/// All clients of a resource, with their leases.
struct ClientPool {
    resource: String,
    has: RefCell<Vec<Option<Lease>>>,
    decided: Cell<u64>,
}

impl ClientPool {
    /// Number of clients.
    fn clients(&self) -> usize {
        self.has.borrow().len()
    }

    /// The random numbers of task `number`.
    fn rng(&self, number: u64) -> SmallRng {
        keys::rng(self.clients() as u64, number)
    }

    /// Refreshes the lease of one client with new wants.
    async fn refresh(
        &self,
        connection: &mut LeaseClient,
        client: usize,
        wants: f64,
    ) -> Result<(), Failure> {
        let has = self.has.borrow()[client];
        let (resource_id, priority) = (self.resource.clone(), 0);
        let request = GetCapacityRequest {
            client_id: format!("client-{client}"),
            resource: vec![ResourceRequest { resource_id, priority, has, wants }],
        };
        let response = connection.get(request).await?;
        if let Some(answer) = response.response.first() {
            self.has.borrow_mut()[client] = Some(answer.gets);
            self.decided.set(self.decided.get() + 1);
        }
        Ok(())
    }
}

/// Requests a lease for each of the `clients` clients of a resource, then measures refreshes by
/// random clients in a closed loop.
pub fn measure(
    rig: &mut Rig,
    args: &BenchArgs,
    clients: usize,
    round: &mut Round,
) -> Result<(), Error> {
    rig.start(Backend::Redis)?;
    let server = rig.server(Backend::Redis)?;
    let servers = [server.process.id()];
    let target = server.target()?;
    let runtime = Builder::new_current_thread().enable_all().build().map_err(Error::Io)?;
    let pool = Rc::new(ClientPool {
        resource: resource(clients),
        has: RefCell::new(vec![None; clients]),
        decided: Cell::new(0),
    });
    let connections = runtime.block_on(async {
        let mut connections = Vec::new();
        for _ in 0..CONNECTIONS {
            connections.push(lease_client(&target, Duration::from_secs(30)).await);
        }
        connections
    });
    let stop = Rc::new(Cell::new(false));
    let (before, after, decided, elapsed_s) = LocalSet::new().block_on(&runtime, async {
        fill(&pool, &connections).await?;
        let mut tasks = refresh_at_random(&pool, &connections, &stop);
        tokio::time::sleep(args.warmup()).await;
        let mut read_usage = || {
            CpuUsage::read(&servers, &mut rig.store(Backend::Redis).into_iter().collect::<Vec<_>>())
        };
        let (before, decided, started) = (read_usage()?, pool.decided.get(), Instant::now());
        tokio::time::sleep(args.measured()).await;
        let (after, decided) = (read_usage()?, pool.decided.get() - decided);
        let elapsed_s = started.elapsed().as_secs_f64();
        stop.set(true);
        join_all(&mut tasks).await?;
        Ok::<_, Error>((before, after, decided as f64, elapsed_s))
    })?;
    let name = format!("leases/{clients}");
    after.record(before, decided, &name, round);
    round.insert(format!("{name}.rate"), decided / elapsed_s);
    Ok(())
}

/// Requests a lease for each client, [`CONCURRENCY`] at a time.
async fn fill(pool: &Rc<ClientPool>, connections: &[LeaseClient]) -> Result<(), Error> {
    let next = Rc::new(Cell::new(0));
    let mut tasks = JoinSet::new();
    for (number, connection) in (0..CONCURRENCY).zip(connections.iter().cycle()) {
        let (pool, next, mut connection) = (Rc::clone(pool), Rc::clone(&next), connection.clone());
        let mut rng = pool.rng(number);
        tasks.spawn_local(async move {
            loop {
                let client = next.replace(next.get() + 1);
                if client >= pool.clients() {
                    return Ok(());
                }
                pool.refresh(&mut connection, client, random_wants(&mut rng)).await?;
            }
        });
    }
    join_all(&mut tasks).await
}

/// Starts [`CONCURRENCY`] tasks that refresh the leases of random clients until `stop` is set.
fn refresh_at_random(
    pool: &Rc<ClientPool>,
    connections: &[LeaseClient],
    stop: &Rc<Cell<bool>>,
) -> JoinSet<Result<(), Failure>> {
    let mut tasks = JoinSet::new();
    for (number, connection) in (0..CONCURRENCY).zip(connections.iter().cycle()) {
        let (pool, stop, mut connection) = (Rc::clone(pool), Rc::clone(stop), connection.clone());
        let mut rng = pool.rng(number);
        tasks.spawn_local(async move {
            while !stop.get() {
                let client = rng.random_range(0..pool.clients());
                pool.refresh(&mut connection, client, random_wants(&mut rng)).await?;
            }
            Ok(())
        });
    }
    tasks
}

fn random_wants(rng: &mut SmallRng) -> f64 {
    rng.random_range(1.0..2.0 * MEAN_WANTS - 1.0)
}

async fn join_all(tasks: &mut JoinSet<Result<(), Failure>>) -> Result<(), Error> {
    while let Some(ended) = tasks.join_next().await {
        let ended = ended.map_err(|error| Error::Other(error.to_string()))?;
        ended.map_err(|failure| Error::Other(Failure::name(failure.code()).to_owned()))?;
    }
    Ok(())
}
