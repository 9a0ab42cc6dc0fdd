//! The access rules in use, from the access file.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use arc_swap::Guard as Loaded;
use smallvec::SmallVec;

use super::token::Tokens;
use crate::config::LoadError;
use crate::config::access::{Caller, parse};
use crate::files::{self, Live, Source};
use crate::logging::LogThrottle;
use crate::metrics::{AccessMetrics, LoadMetrics, Metrics};

/// Indexes of callers in [`Callers::all`]. Usually there is one.
pub(super) type CallerIndexes = SmallVec<[usize; 2]>;

/// The maximum number of certificate names compared with the access file. Each name is matched
/// against every caller, and real certificates have only a few.
const MAX_CERTIFICATE_NAMES: usize = 64;

/// Reads and validates an access file.
pub fn read(path: &Path) -> Result<Vec<Caller>, LoadError> {
    let text = files::read_text(path)?;
    parse(&text).map_err(|faults| LoadError::Faulty { path: path.to_owned(), faults })
}

/// The callers of one version of the access file.
pub struct Callers {
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

/// The access file.
pub struct AccessFile(PathBuf);

impl Source for AccessFile {
    type Content = Vec<Caller>;
    type Value = Callers;
    type Error = LoadError;

    const REFUSED: &'static str = "new access file refused, the old one stays";
    const ADVICE: &'static str = "see what `tollgate check --access` says of the file";

    fn paths(&self) -> Vec<&Path> {
        vec![&self.0]
    }

    fn is_unreadable(error: &LoadError) -> bool {
        matches!(error, LoadError::Unreadable(_))
    }

    fn read(&self) -> Result<Vec<Caller>, LoadError> {
        read(&self.0)
    }

    fn prepare(&self, callers: Vec<Caller>, _previous: Option<&Callers>) -> Callers {
        Callers::new(callers)
    }

    fn report(&self, callers: &Callers) {
        let path = self.0.display();
        tracing::info!(%path, callers = callers.all.len(), "access file in use");
        if callers.all.is_empty() {
            tracing::warn!(%path, "the access file names nobody: nobody may ask");
        }
    }
}

/// The access rules in use.
pub struct Access {
    file: Arc<Live<AccessFile>>,
    pub(super) counts: AccessMetrics,
    pub(super) refusals: LogThrottle,
    /// Limits log lines about clusters that report more clients than their `lend` allows.
    pub(super) beyond_lend: LogThrottle,
}

impl Access {
    /// Loads the file for the first time.
    pub fn load(path: &Path, metrics: &Metrics) -> Result<Self, LoadError> {
        let file = Live::new(AccessFile(path.to_owned()), LoadMetrics::access(metrics))?;
        Ok(Self {
            file: Arc::new(file),
            counts: AccessMetrics::new(metrics),
            refusals: LogThrottle::default(),
            beyond_lend: LogThrottle::default(),
        })
    }

    /// The rules in use, and their file.
    pub fn file(&self) -> &Arc<Live<AccessFile>> {
        &self.file
    }

    pub(super) fn current(&self) -> Loaded<Arc<Callers>> {
        self.file.current()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

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
        tracing::subscriber::with_default(subscriber, || access.file.reload()).unwrap();
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
