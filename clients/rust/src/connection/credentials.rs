//! The credentials of a client, and the certificates that it verifies servers with.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use http::HeaderValue;
use tollgate_common::LogThrottle;
use tollgate_common::files::{self, ReloadOnUse};
use tollgate_common::pem;

use super::tls::{ClientFiles, Dialer};

/// Least time between two checks of a token file, each of which occupies a thread.
const CHECK_INTERVAL: Duration = Duration::from_millis(500);

/// TLS and the bearer token of a client. The default is cleartext without a token. Clones share
/// the loaded files.
#[derive(Clone, Default)]
pub struct Credentials {
    dialer: Option<Dialer>,
    token: Option<Arc<Token>>,
}

/// Why the files of a client can't be used.
#[derive(Debug, thiserror::Error)]
pub enum CredentialsError {
    /// A certificate or key.
    #[error(transparent)]
    Tls(#[from] pem::Error),
    /// The token file.
    #[error("{0}")]
    Token(String),
}

impl Credentials {
    /// Loads the files: certificates for TLS, or cleartext without them; and a file whose only
    /// line is the bearer token. Blocks. Changed files are loaded again later, on other threads.
    pub fn load(
        tls: Option<ClientFiles>,
        token: Option<PathBuf>,
    ) -> Result<Self, CredentialsError> {
        let dialer = tls.map(Dialer::new).transpose()?;
        let token = token.map(Token::load).transpose().map_err(CredentialsError::Token)?;
        Ok(Self { dialer, token: token.map(Arc::new) })
    }

    /// The TLS connector; `None` for cleartext.
    pub fn dialer(&self) -> Option<&Dialer> {
        self.dialer.as_ref()
    }

    /// Whether there is a token.
    pub fn has_token(&self) -> bool {
        self.token.is_some()
    }

    /// The value of the `authorization` header; `None` without a token.
    pub async fn authorization(&self) -> Option<HeaderValue> {
        match &self.token {
            None => None,
            Some(token) => Some(token.header().await),
        }
    }
}

impl From<Dialer> for Credentials {
    fn from(dialer: Dialer) -> Self {
        Self { dialer: Some(dialer), token: None }
    }
}

impl fmt::Debug for Credentials {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Credentials")
            .field("tls", &self.dialer.is_some())
            .field("token", &self.token.is_some())
            .finish()
    }
}

/// The `authorization` header with the token in a file.
struct Token {
    file: ReloadOnUse<HeaderValue>,
    /// When the file was last checked for a change.
    last_check: Mutex<Instant>,
    failures: LogThrottle,
}

impl Token {
    fn load(path: PathBuf) -> Result<Self, String> {
        let read_path = path.clone();
        let file = ReloadOnUse::new::<String>([&*path], move || read(&read_path))?;
        Ok(Self { file, last_check: Mutex::new(Instant::now()), failures: LogThrottle::default() })
    }

    /// The header with the token in the file, or with the last valid one if the file became
    /// unusable. Checks the file once per [`CHECK_INTERVAL`] at most.
    async fn header(&self) -> HeaderValue {
        if self.is_due()
            && let Err(error) = self.file.refresh().await
            && let Some(held_back) = self.failures.pass()
        {
            tracing::error!(%error, held_back, "new token refused, the old one stays");
        }
        HeaderValue::clone(&self.file.current())
    }

    fn is_due(&self) -> bool {
        let mut last_check = self.last_check.lock().unwrap_or_else(PoisonError::into_inner);
        let due = last_check.elapsed() >= CHECK_INTERVAL;
        if due {
            *last_check = Instant::now();
        }
        due
    }
}

fn read(path: &Path) -> Result<HeaderValue, String> {
    let token = files::read_secret(path).map_err(|error| error.to_string())?;
    let value = HeaderValue::try_from(format!("Bearer {token}"));
    match value {
        Ok(mut value) if token.bytes().all(|byte| byte.is_ascii_graphic()) => {
            value.set_sensitive(true);
            Ok(value)
        }
        _ => {
            let path = path.display();
            Err(format!("{path}: a token consists of ASCII characters, without spaces"))
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[tokio::test]
    async fn changed_token_is_read_again() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("token");
        fs::write(&path, "one\n").unwrap();
        let credentials = Credentials::load(None, Some(path.clone())).unwrap();
        let shown = async || credentials.authorization().await.unwrap();
        assert_eq!(shown().await, "Bearer one");
        fs::write(&path, "second\n").unwrap();
        // Until the next check is due. A read that takes too long on a busy machine is shown by a
        // later one.
        for _ in 0..20 {
            tokio::time::sleep(CHECK_INTERVAL).await;
            if shown().await == "Bearer second" {
                break;
            }
        }
        assert_eq!(shown().await, "Bearer second");
        fs::write(&path, "not a token\n").unwrap();
        tokio::time::sleep(CHECK_INTERVAL).await;
        assert_eq!(shown().await, "Bearer second");
        assert!(shown().await.is_sensitive());
        assert_eq!(Credentials::default().authorization().await, None);
    }

    #[test]
    fn unusable_token_files() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("token");
        let load = || Credentials::load(None, Some(path.clone())).unwrap_err().to_string();
        assert!(load().starts_with("can't read "));
        for content in ["hunter 2", "hunterä", "hunter2\nhunter3"] {
            fs::write(&path, content).unwrap();
            let error = load();
            assert!(error.contains("token: ") && !error.contains("hunter"), "{error}");
        }
    }
}
