//! A real node to test against.

use std::ffi::OsString;
use std::net::SocketAddr;
use std::sync::mpsc as threads;

use clap::{Args as _, Command, FromArgMatches as _};
use tokio::sync::{mpsc, oneshot};
use tollgate_server::app::{self, Listeners};
use tollgate_server::settings::Settings;

/// A running node with its state in memory; it stops when this is dropped.
pub(crate) struct Node {
    pub(crate) grpc: SocketAddr,
    _stop: oneshot::Sender<()>,
}

impl Node {
    pub(crate) fn start(options: Vec<(&str, OsString)>) -> Self {
        let mut line: Vec<OsString> = vec!["node".into()];
        for (flag, value) in [
            ("--store", "memory:".into()),
            ("--grpc-listen", "127.0.0.1:0".into()),
            ("--http-listen", "127.0.0.1:0".into()),
            ("--threads", "1".into()),
        ]
        .into_iter()
        .chain(options)
        {
            line.extend([flag.into(), value]);
        }
        let matches = Settings::augment_args(Command::new("node")).get_matches_from(line);
        let settings = Settings::from_arg_matches(&matches).unwrap();
        let (stop, stopped) = oneshot::channel::<()>();
        let (bound, address) = threads::channel();
        std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
            runtime.unwrap().block_on(async {
                let listeners = Listeners::bind(&settings).unwrap();
                bound.send(listeners.grpc.local_addr().unwrap()).unwrap();
                let (_reload, reloads) = mpsc::channel(1);
                let shutdown = async {
                    let _ = stopped.await;
                };
                app::run(settings, listeners, shutdown, reloads).await.unwrap();
            });
        });
        Self { grpc: address.recv().unwrap(), _stop: stop }
    }
}
