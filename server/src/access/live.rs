//! The access file in use: loaded as a whole, and replaced atomically on reload.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use arc_swap::{ArcSwap, Guard as Loaded};
use smallvec::SmallVec;

use super::token::Tokens;
use crate::config::Faults;
use crate::config::access::{Caller, parse};
use crate::files::{self, LOOK, Refusal, Refused, Watched};
use crate::logging::Repeating;
use crate::metrics::{AccessMetrics, Metrics};

/// Indexes of callers in [`Callers::all`]. Usually there is one.
pub(super) type CallerIndexes = SmallVec<[usize; 2]>;

/// The maximum number of certificate names compared with the access file. Each name is matched
/// against every caller, and real certificates have only a few.
const MAX_CERTIFICATE_NAMES: usize = 64;

/// Why an access file was rejected.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// The file can't be read.
    #[error("{0}")]
    Unreadable(#[from] io::Error),
    /// The file's content is invalid.
    #[error("{path}:\n{faults}")]
    Faulty {
        /// The file.
        path: PathBuf,
        /// Every fault found.
        faults: Faults,
    },
}

/// Reads and validates an access file.
pub fn read(path: &Path) -> Result<Vec<Caller>, LoadError> {
    let text = files::read_text(path)?;
    parse(&text).map_err(|faults| LoadError::Faulty { path: path.to_owned(), faults })
}

/// The callers of one version of the access file.
pub(super) struct Callers {
    pub(super) all: Vec<Caller>,
    tokens: Tokens,
    anyone: Option<usize>,
}

impl Callers {
    fn new(all: Vec<Caller>) -> Self {
        let indexed = || all.iter().enumerate();
        let tokens = Tokens::new(
            indexed()
                .flat_map(|(index, caller)| caller.tokens.iter().map(move |&hash| (hash, index))),
        );
        let anyone = indexed().find(|(_, caller)| caller.anyone).map(|(index, _)| index);
        Self { tokens, anyone, all }
    }

    pub(super) fn by_token(&self, token: &[u8]) -> Option<usize> {
        self.tokens.find(token)
    }

    /// All callers with a certificate glob that matches one of these certificate names.
    pub(super) fn by_names(&self, names: &[String]) -> CallerIndexes {
        let names = &names[..names.len().min(MAX_CERTIFICATE_NAMES)];
        let matches = |caller: &Caller| {
            caller.certificates.iter().any(|glob| names.iter().any(|name| glob.matches(name)))
        };
        let indexed = self.all.iter().enumerate();
        indexed.filter(|(_, caller)| matches(caller)).map(|(index, _)| index).collect()
    }

    /// The caller entry with `anyone: true`, if the file has one.
    pub(super) fn anyone(&self) -> Option<usize> {
        self.anyone
    }
}

/// The access rules in use, and the file they are loaded from.
pub struct Access {
    path: PathBuf,
    current: ArcSwap<Callers>,
    watched: Watched,
    /// Held during a reload, so that a slow reload can't replace a newer one.
    reloading: Mutex<()>,
    counts: AccessMetrics,
    failures: Repeating,
    refused: Refused,
    pub(super) refusals: Repeating,
    /// Limits log lines about clusters that report more clients than their `lend` allows.
    pub(super) beyond_lend: Repeating,
}

impl Access {
    /// Loads the file for the first time.
    pub fn load(path: &Path, metrics: &Metrics) -> Result<Self, LoadError> {
        let watched = Watched::new([path]);
        let callers = read(path)?;
        let counts = AccessMetrics::new(metrics);
        counts.loaded();
        log_loaded(path, &callers);
        let current = ArcSwap::from_pointee(Callers::new(callers));
        let (path, failures) = (path.to_owned(), Repeating::default());
        let (reloading, refusals) = (Mutex::default(), Repeating::default());
        let (refused, beyond_lend) = (Refused::default(), Repeating::default());
        Ok(Self {
            path,
            current,
            watched,
            reloading,
            counts,
            failures,
            refused,
            refusals,
            beyond_lend,
        })
    }

    /// Why the file's current version is not in use; `None` if it is.
    pub fn refusal(&self) -> Option<Refusal> {
        self.refused.get()
    }

    pub(super) fn current(&self) -> Loaded<Arc<Callers>> {
        self.current.load()
    }

    pub(super) fn counts(&self) -> &AccessMetrics {
        &self.counts
    }

    /// Loads the file again. If it is invalid, the current rules stay in use. Blocks.
    pub fn reload(&self) -> Result<(), LoadError> {
        let _reloading = self.reloading.lock().unwrap_or_else(PoisonError::into_inner);
        self.watched.take();
        let callers = read(&self.path).inspect_err(|error| {
            self.counts.failed();
            self.refused.set(error);
            if let Some(held_back) = self.failures.pass() {
                tracing::error!(
                    %error, held_back, advice = "see what `tollgate check --access` says of the file",
                    "new access file refused, the old one stays"
                );
            }
        })?;
        let callers = Arc::new(Callers::new(callers));
        self.current.store(Arc::clone(&callers));
        // Count and log only after the swap: an observer may then rely on the new callers.
        self.counts.loaded();
        self.refused.clear();
        log_loaded(&self.path, &callers.all);
        Ok(())
    }

    /// Calls [`reload`](Self::reload) on a blocking thread. The result is only logged.
    pub async fn reload_aside(self: &Arc<Self>) {
        let access = Arc::clone(self);
        let _ = tokio::task::spawn_blocking(move || access.reload()).await;
    }

    /// Reloads the file whenever it has changed, until the future is dropped.
    pub async fn watch(self: &Arc<Self>) {
        loop {
            tokio::time::sleep(LOOK).await;
            let access = Arc::clone(self);
            let poll = move || access.watched.settled_on_a_change().then(|| access.reload());
            let _ = tokio::task::spawn_blocking(poll).await;
        }
    }
}

fn log_loaded(path: &Path, callers: &[Caller]) {
    tracing::info!(path = %path.display(), callers = callers.len(), "access file in use");
    if callers.is_empty() {
        tracing::warn!(path = %path.display(), "the access file names nobody: nobody may ask");
    }
}

#[cfg(test)]
mod tests {
    use tracing_subscriber::layer::SubscriberExt as _;

    use super::*;

    /// Records the number of callers in use at each log event.
    struct CallersAtEvent {
        access: Arc<Access>,
        counts: Arc<Mutex<Vec<usize>>>,
    }

    impl<S: tracing::Subscriber> tracing_subscriber::Layer<S> for CallersAtEvent {
        fn on_event(&self, _: &tracing::Event<'_>, _: tracing_subscriber::layer::Context<'_, S>) {
            self.counts.lock().unwrap().push(self.access.current().all.len());
        }
    }

    #[test]
    fn new_file_is_in_use_before_it_is_logged() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("access.yaml");
        let caller = "{ name: x, certificates: ['cn:x'], namespaces: [shop] }";
        std::fs::write(&path, format!("callers: [{caller}]")).unwrap();
        let access = Arc::new(Access::load(&path, &Metrics::new()).unwrap());
        std::fs::write(&path, "callers: []").unwrap();
        let counts = Arc::new(Mutex::new(Vec::new()));
        let layer = CallersAtEvent { access: Arc::clone(&access), counts: Arc::clone(&counts) };
        let subscriber = tracing_subscriber::registry().with(layer);
        tracing::subscriber::with_default(subscriber, || access.reload()).unwrap();
        // Two events: the file is in use, and it has no callers.
        assert_eq!(*counts.lock().unwrap(), [0, 0]);
    }

    #[test]
    fn only_the_first_certificate_names_count() {
        let file = "callers: [{ name: x, certificates: ['cn:x'], namespaces: [shop] }]";
        let callers = Callers::new(parse(file).unwrap());
        let matches_after = |others: usize| {
            let mut names = vec!["dns:other".to_owned(); others];
            names.push("cn:x".to_owned());
            callers.by_names(&names).len()
        };
        assert_eq!(matches_after(0), 1);
        assert_eq!(matches_after(MAX_CERTIFICATE_NAMES - 1), 1);
        assert_eq!(matches_after(MAX_CERTIFICATE_NAMES), 0);
    }
}
