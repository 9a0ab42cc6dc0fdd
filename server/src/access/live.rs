//! The access file in use: loaded whole or not at all, replaced while requests run.

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

/// Positions of callers. Nearly always there is one.
pub(super) type Places = SmallVec<[usize; 2]>;

/// The most names of a certificate that are held against the file: each costs time with each
/// caller, and no certificate in use has more than a few.
const MOST_NAMES: usize = 64;

/// Why an access file was not taken into use.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// It can't be read.
    #[error("{0}")]
    Unreadable(#[from] io::Error),
    /// It breaks rules.
    #[error("{path}:\n{faults}")]
    Faulty {
        /// The file.
        path: PathBuf,
        /// All of them.
        faults: Faults,
    },
}

/// Reads and checks an access file.
pub fn read(path: &Path) -> Result<Vec<Caller>, LoadError> {
    let text = files::read_text(path)?;
    parse(&text).map_err(|faults| LoadError::Faulty { path: path.to_owned(), faults })
}

/// The callers of one file.
pub(super) struct Callers {
    pub(super) all: Vec<Caller>,
    tokens: Tokens,
    anyone: Option<usize>,
}

impl Callers {
    fn new(all: Vec<Caller>) -> Self {
        let places = || all.iter().enumerate();
        let tokens = Tokens::new(
            places()
                .flat_map(|(place, caller)| caller.tokens.iter().map(move |&hash| (hash, place))),
        );
        let anyone = places().find(|(_, caller)| caller.anyone).map(|(place, _)| place);
        Self { tokens, anyone, all }
    }

    pub(super) fn by_token(&self, token: &[u8]) -> Option<usize> {
        self.tokens.find(token)
    }

    /// Everybody who is known by one of these names.
    pub(super) fn by_names(&self, names: &[String]) -> Places {
        let names = &names[..names.len().min(MOST_NAMES)];
        let known = |caller: &Caller| {
            caller.certificates.iter().any(|glob| names.iter().any(|name| glob.matches(name)))
        };
        let places = self.all.iter().enumerate();
        places.filter(|(_, caller)| known(caller)).map(|(place, _)| place).collect()
    }

    pub(super) fn anyone(&self) -> Option<usize> {
        self.anyone
    }
}

/// Who may ask, and the file that says so.
pub struct Access {
    path: PathBuf,
    current: ArcSwap<Callers>,
    watched: Watched,
    /// So that what was read last is in use, and not what was read slowly.
    reloading: Mutex<()>,
    counts: AccessMetrics,
    failures: Repeating,
    refused: Refused,
    pub(super) refusals: Repeating,
    /// Clusters that speak for more clients than they may.
    pub(super) beyond_lend: Repeating,
}

impl Access {
    /// Loads the file for the first time.
    pub fn load(path: &Path, metrics: &Metrics) -> Result<Self, LoadError> {
        let watched = Watched::new([path]);
        let callers = read(path)?;
        let counts = AccessMetrics::new(metrics);
        counts.loaded();
        report(path, &callers);
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

    /// Why the file is not in use as it is now; `None`: it is.
    pub fn refusal(&self) -> Option<Refusal> {
        self.refused.get()
    }

    pub(super) fn current(&self) -> Loaded<Arc<Callers>> {
        self.current.load()
    }

    pub(super) fn counts(&self) -> &AccessMetrics {
        &self.counts
    }

    /// Reads the file again. A bad one is refused, and callers stay who they are. Blocks.
    pub fn reload(&self) -> Result<(), LoadError> {
        let _alone = self.reloading.lock().unwrap_or_else(PoisonError::into_inner);
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
        // Only now: whoever sees the count or the log line relies on the new callers.
        self.counts.loaded();
        self.refused.clear();
        report(&self.path, &callers.all);
        Ok(())
    }

    /// The same, off the runtime's own threads. What comes of it is logged.
    pub async fn reload_aside(self: &Arc<Self>) {
        let access = Arc::clone(self);
        let _ = tokio::task::spawn_blocking(move || access.reload()).await;
    }

    /// Reloads whenever the file has changed, until the future is dropped.
    pub async fn watch(self: &Arc<Self>) {
        loop {
            tokio::time::sleep(LOOK).await;
            let access = Arc::clone(self);
            let look = move || access.watched.settled_on_a_change().then(|| access.reload());
            let _ = tokio::task::spawn_blocking(look).await;
        }
    }
}

fn report(path: &Path, callers: &[Caller]) {
    tracing::info!(path = %path.display(), callers = callers.len(), "access file in use");
    if callers.is_empty() {
        tracing::warn!(path = %path.display(), "the access file names nobody: nobody may ask");
    }
}

#[cfg(test)]
mod tests {
    use tracing_subscriber::layer::SubscriberExt as _;

    use super::*;

    /// Notes how many callers are in use at each event that is logged.
    struct InUse {
        access: Arc<Access>,
        noted: Arc<Mutex<Vec<usize>>>,
    }

    impl<S: tracing::Subscriber> tracing_subscriber::Layer<S> for InUse {
        fn on_event(&self, _: &tracing::Event<'_>, _: tracing_subscriber::layer::Context<'_, S>) {
            self.noted.lock().unwrap().push(self.access.current().all.len());
        }
    }

    #[test]
    fn a_file_is_in_use_before_it_is_said_to_be() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("access.yaml");
        let caller = "{ name: x, certificates: ['cn:x'], namespaces: [shop] }";
        std::fs::write(&path, format!("callers: [{caller}]")).unwrap();
        let access = Arc::new(Access::load(&path, &Metrics::new()).unwrap());
        std::fs::write(&path, "callers: []").unwrap();
        let noted = Arc::new(Mutex::new(Vec::new()));
        let layer = InUse { access: Arc::clone(&access), noted: Arc::clone(&noted) };
        let subscriber = tracing_subscriber::registry().with(layer);
        tracing::subscriber::with_default(subscriber, || access.reload()).unwrap();
        // That it is in use, and that nobody may ask.
        assert_eq!(*noted.lock().unwrap(), [0, 0]);
    }

    #[test]
    fn of_a_certificate_so_many_names_count() {
        let file = "callers: [{ name: x, certificates: ['cn:x'], namespaces: [shop] }]";
        let callers = Callers::new(parse(file).unwrap());
        let named = |others: usize| {
            let mut names = vec!["dns:other".to_owned(); others];
            names.push("cn:x".to_owned());
            callers.by_names(&names).len()
        };
        assert_eq!((named(0), named(MOST_NAMES - 1), named(MOST_NAMES)), (1, 1, 0));
    }
}
