//! `tollgate serve`: runs a node until SIGTERM or SIGINT; SIGHUP reloads its files.

use std::process::ExitCode;

use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::mpsc;

use crate::app::{self, Listeners};
use crate::logging::{self, LogFormat};
use crate::settings::Settings;

/// Exit code after a second SIGTERM or SIGINT, which skips the rest of the drain.
const FORCED_EXIT: i32 = 130;

#[derive(clap::Args)]
pub(super) struct Args {
    #[command(flatten)]
    settings: Settings,

    /// The format of log lines
    #[arg(long, env = "TOLLGATE_LOG_FORMAT", value_enum, default_value_t)]
    log_format: LogFormat,

    /// What is logged: error, warn, info, debug, trace, or a filter like info,tollgate_server=debug
    #[arg(long, env = "TOLLGATE_LOG_LEVEL", value_name = "LEVEL", default_value = "info")]
    log_level: String,
}

pub(super) fn run(args: Args) -> Result<ExitCode, String> {
    logging::init(args.log_format, &args.log_level)?;
    super::block_on(async {
        let watch = |kind| signal(kind).map_err(|error| format!("can't handle signals: {error}"));
        let mut terminate = watch(SignalKind::terminate())?;
        let mut interrupt = watch(SignalKind::interrupt())?;
        let mut hangup = watch(SignalKind::hangup())?;
        let (reload, reloads) = mpsc::channel(1);
        tokio::spawn(async move {
            while hangup.recv().await.is_some() && reload.send(()).await.is_ok() {}
        });
        let mut signalled = async move || {
            tokio::select! {
                _ = terminate.recv() => {}
                _ = interrupt.recv() => {}
            }
        };
        let shutdown = async move {
            signalled().await;
            tokio::spawn(async move {
                signalled().await;
                tracing::warn!("stopped at once, by a second signal");
                std::process::exit(FORCED_EXIT);
            });
        };
        let settings = args.settings;
        let listeners = Listeners::bind(&settings).map_err(|error| error.to_string())?;
        app::run(settings, listeners, shutdown, reloads)
            .await
            .map_err(|error| error.to_string())?;
        Ok(ExitCode::SUCCESS)
    })?
}
