//! Cost of a lease decision, by the number of clients of the resource.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::{Duration, Instant};

use rand::RngExt as _;
use tokio::runtime::Builder;
use tokio::task::{JoinSet, LocalSet};
use tollgate_proto::doorman::{GetCapacityRequest, Lease, ResourceRequest};

use crate::bench::measure::CpuUsage;
use crate::bench::plan::Backend;
use crate::bench::rig::{MEAN_WANTS, Rig, resource};
use crate::bench::stats::Round;
use crate::bench::{BenchArgs, Error};
use crate::driver::{Failure, LeaseClient, lease_client};
use crate::keys;

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
    let next = Rc::new(Cell::new(0));
    let refresh_tasks = |stop: Rc<Cell<bool>>, fill: bool| {
        let tasks = (0..CONCURRENCY).zip(connections.iter().cycle()).map(|(number, connection)| {
            let (pool, next, stop) = (Rc::clone(&pool), Rc::clone(&next), Rc::clone(&stop));
            let mut connection = connection.clone();
            let mut rng = keys::rng(clients as u64, number);
            async move {
                while !stop.get() {
                    let client = match fill {
                        true => next.replace(next.get() + 1),
                        false => rng.random_range(0..clients),
                    };
                    if client >= clients {
                        break;
                    }
                    let wants = rng.random_range(1.0..2.0 * MEAN_WANTS - 1.0);
                    pool.refresh(&mut connection, client, wants).await?;
                }
                Ok::<_, Failure>(())
            }
        });
        tasks.collect::<Vec<_>>()
    };
    let local = LocalSet::new();
    let stop = Rc::new(Cell::new(false));
    let (usage, time) = local.block_on(&runtime, async {
        let mut tasks = JoinSet::new();
        refresh_tasks(Rc::clone(&stop), true).into_iter().for_each(|task| {
            tasks.spawn_local(task);
        });
        join_all(&mut tasks).await?;
        refresh_tasks(Rc::clone(&stop), false).into_iter().for_each(|task| {
            tasks.spawn_local(task);
        });
        tokio::time::sleep(args.warmup()).await;
        let mut read_usage = || {
            CpuUsage::read(&servers, &mut rig.store(Backend::Redis).into_iter().collect::<Vec<_>>())
        };
        let (before, decided, started) = (read_usage()?, pool.decided.get(), Instant::now());
        tokio::time::sleep(args.measured()).await;
        let (after, decided) = (read_usage()?, pool.decided.get() - decided);
        let elapsed = started.elapsed();
        stop.set(true);
        join_all(&mut tasks).await?;
        Ok::<_, Error>(((before, after), (decided as f64, elapsed.as_secs_f64())))
    })?;
    let ((before, after), (decided, elapsed_s)) = (usage, time);
    let name = format!("leases/{clients}");
    after.record(before, decided, &name, round);
    round.insert(format!("{name}.rate"), decided / elapsed_s);
    Ok(())
}

async fn join_all(tasks: &mut JoinSet<Result<(), Failure>>) -> Result<(), Error> {
    while let Some(ended) = tasks.join_next().await {
        let ended = ended.map_err(|error| Error::Other(error.to_string()))?;
        ended.map_err(|failure| Error::Other(Failure::name(failure.code()).to_owned()))?;
    }
    Ok(())
}
