//! `tollgate-loadtest holds`: a run from connecting to the report.
//!
//! [`args`] has the arguments. A `client` holds copies, the `books` have what all hold, and [`report`]
//! formats the result.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::Instant;

use tokio::runtime::Builder;
use tokio::task::{JoinSet, LocalSet};
use tollgate_client::connection::{AuthChannel, Target};
use tollgate_proto::tollgate::v1::holds_client::HoldsClient;

use crate::commands::holds::args::HoldsArgs;
use crate::commands::holds::books::HoldBooks;
use crate::commands::holds::client::{Client, SessionCounts, Shared};
use crate::commands::holds::report::Report;
use crate::error::RunError;
use crate::load::driver::channel;
use crate::load::keys::rng;
use crate::load::tally::{LiveCounts, Tally, Window};
use crate::measurement::progress::{self, Style};

pub mod args;
mod books;
mod client;
pub mod report;

/// Runs the load and reports.
pub fn run(args: &HoldsArgs) -> Result<Report, RunError> {
    args.check()?;
    let template = args.template()?;
    let targets = args.run.credentials.targets(&args.run.target)?;
    let runtime = Builder::new_current_thread().enable_all().build()?;
    let nodes = runtime.block_on(connect(args, &targets));

    let reserve = args.reserve();
    let window = Window::new(Instant::now(), args.run.warmup, args.run.duration);
    let live = Arc::<LiveCounts>::default();
    let shared = Rc::new(Shared {
        window,
        timeout: args.run.timeout,
        ttl: args.ttl,
        hold_for: args.hold_for,
        run: rand::random(),
        live: Arc::clone(&live),
        tally: RefCell::new(Tally::new(window)?),
        books: RefCell::new(HoldBooks::new(template, reserve.keys.clone())),
        sessions: RefCell::new(SessionCounts::default()),
        reserve,
    });
    thread::scope(|scope| {
        let (running, finished) = mpsc::channel::<()>();
        scope.spawn(move || {
            let style = Style::choose(args.run.progress);
            progress::watch(&finished, &[live], window, style, "granted");
        });
        LocalSet::new().block_on(&runtime, run_clients(args, &shared, &nodes));
        drop(running);
    });
    Ok(Report::new(args, &shared))
}

async fn connect(args: &HoldsArgs, targets: &[Target]) -> Vec<HoldsClient<AuthChannel>> {
    let mut nodes = Vec::new();
    for number in 0..args.run.connections as usize {
        nodes.push(HoldsClient::new(channel(&targets[number % targets.len()]).await));
    }
    nodes
}

/// Runs all clients until the run has ended and their copies are released.
async fn run_clients(args: &HoldsArgs, shared: &Rc<Shared>, nodes: &[HoldsClient<AuthChannel>]) {
    let mut clients = JoinSet::new();
    for (number, node) in (0..args.clients).zip(nodes.iter().cycle()) {
        let client = Client {
            shared: Rc::clone(shared),
            node: node.clone(),
            domains: shared.reserve.keys.draw(args.run.seed, number),
            rng: rng(args.run.seed, !number),
            next_session: number,
            step: args.clients,
        };
        clients.spawn_local(client.run());
    }
    // Propagates a panic of a client instead of reporting a partial run.
    clients.join_all().await;
}
