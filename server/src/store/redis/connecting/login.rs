//! User, password and certificates from files. If the files of the login have changed, the next
//! connection reads them again. Open connections stay logged in.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use redis::{ConnectionInfo, ErrorKind, RedisError, RedisResult};
use rustls::crypto::ring;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::{ClientConfig, RootCertStore};
use rustls_native_certs::load_native_certs;

use crate::files::{self, ReloadOnUse};

/// The user of a login that has only a password.
const DEFAULT_USER: &str = "default";

/// Files with the login and the certificates for connections to the store.
#[derive(Clone, Debug, Default)]
pub struct LoginFiles {
    /// The user; `None`: the one in the URL.
    pub user: Option<PathBuf>,
    /// The password; `None`: the one in the URL.
    pub password: Option<PathBuf>,
    /// The CA certificates that sign the servers' certificates; `None`: those of the system.
    pub ca: Option<PathBuf>,
    /// This node's client certificate, and its key.
    pub own: Option<(PathBuf, PathBuf)>,
}

impl LoginFiles {
    /// The TLS settings: the CA certificates, and this node's certificate. Fails if a file can't be
    /// used, or if the system's certificates are to be used and there are none.
    pub(crate) fn tls(&self) -> RedisResult<ClientConfig> {
        let mut roots = RootCertStore::empty();
        match &self.ca {
            None => {
                let system = load_native_certs();
                let (usable, _) = roots.add_parsable_certificates(system.certs);
                // Without a CA certificate, the handshake with every server would fail.
                if usable == 0 {
                    let cause = system.errors.first().map(|error| format!(" ({error})"));
                    let cause = cause.unwrap_or_default();
                    let text = format!("name one, as the system trusts no certificate{cause}");
                    return Err(unusable("--store-ca-file", text));
                }
            }
            Some(path) => {
                let setting = "--store-ca-file";
                for certificate in certificates(setting, path)? {
                    roots.add(certificate).map_err(|error| unusable(setting, error))?;
                }
            }
        }
        let builder = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
            .with_safe_default_protocol_versions()
            .map_err(|error| unusable("TLS", error))?
            .with_root_certificates(roots);
        let Some((cert, key)) = &self.own else { return Ok(builder.with_no_client_auth()) };
        let setting = "--store-cert-file";
        let chain = certificates(setting, cert)?;
        let key = private_key("--store-key-file", key)?;
        builder.with_client_auth_cert(chain, key).map_err(|error| unusable(setting, error))
    }

    /// The login at a server; `None` if there are no files, so that the login is that of the URL.
    /// If there is a file for only one of user and password, the other one is that of `server`.
    /// Fails if a file can't be read.
    pub(crate) fn login(&self, server: &ConnectionInfo) -> RedisResult<Option<Login>> {
        if self.user.is_none() && self.password.is_none() {
            return Ok(None);
        }
        let settings = server.redis_settings();
        let files = self.clone();
        let user = settings.username().unwrap_or(DEFAULT_USER).to_owned();
        let password = settings.password().unwrap_or_default().to_owned();
        let paths = self.user.iter().chain(&self.password).map(PathBuf::as_path);
        let read = ReloadOnUse::new(paths, move || files.read_login(&user, &password));
        Ok(Some(Login(Arc::new(read.map_err(file_error)?))))
    }

    /// Reads the user and the password. `user` and `password` are the values of those that have no
    /// file. An error text begins with the name of the setting.
    fn read_login(&self, user: &str, password: &str) -> Result<(String, String), String> {
        let read = |setting, file: &Option<PathBuf>, default: &str| match file {
            Some(path) => files::read_secret(path).map_err(|error| format!("{setting}: {error}")),
            None => Ok(default.to_owned()),
        };
        let user = read("--store-user-file", &self.user, user)?;
        let password = read("--store-password-file", &self.password, password)?;
        Ok((user, password))
    }
}

/// The beginning of the text of errors about files.
pub(crate) const UNUSABLE: &str = "a file can't be used";

/// The error that the file of a setting can't be used. `cause` must not contain secrets.
fn unusable(setting: &str, cause: impl std::fmt::Display) -> RedisError {
    file_error(format!("{setting}: {cause}"))
}

/// The error that a file can't be used. `detail` begins with the name of the setting.
fn file_error(detail: String) -> RedisError {
    RedisError::from((ErrorKind::InvalidClientConfig, UNUSABLE, detail))
}

/// The error text for invalid settings of the store. It begins with the setting: that of the file
/// if the error is about one, else `--store`.
pub fn wrong_setting(error: &RedisError) -> String {
    match error.detail() {
        Some(detail) if error.to_string().starts_with(UNUSABLE) => detail.to_owned(),
        _ => format!("--store: {error}"),
    }
}

/// Reads certificates from a file. Fails if it has none, because an empty list of CA certificates
/// would only show as failed handshakes.
fn certificates(setting: &str, path: &Path) -> RedisResult<Vec<CertificateDer<'static>>> {
    let pem = files::read(path).map_err(|error| unusable(setting, error))?;
    match CertificateDer::pem_slice_iter(&pem).collect::<Result<Vec<_>, _>>() {
        Ok(all) if !all.is_empty() => Ok(all),
        _ => Err(unusable(setting, format!("there is no certificate in {}", path.display()))),
    }
}

/// Reads the first private key in a file.
fn private_key(setting: &str, path: &Path) -> RedisResult<PrivateKeyDer<'static>> {
    let pem = files::read(path).map_err(|error| unusable(setting, error))?;
    PrivateKeyDer::from_pem_slice(&pem)
        .map_err(|_| unusable(setting, format!("there is no private key in {}", path.display())))
}

/// The login at the servers of the store, from files. Clones share the loaded files.
#[derive(Clone)]
pub(crate) struct Login(Arc<ReloadOnUse<(String, String)>>);

impl Login {
    /// Returns the user and the password. Reads the files again if they have changed. While the
    /// file system hangs, returns those read last.
    pub(crate) async fn read(&self) -> RedisResult<(String, String)> {
        self.0.refresh().await.map_err(file_error)?;
        Ok((*self.0.current()).clone())
    }
}

impl std::fmt::Debug for Login {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Login").finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::sync::mpsc;
    use std::time::Duration;

    use redis::IntoConnectionInfo as _;
    use rustix::fs::{CWD, Mode, mkfifoat};
    use tokio::task::spawn_blocking;

    use super::*;

    /// To open a FIFO for reading blocks until it is opened for writing.
    #[tokio::test]
    async fn hanging_file_keeps_the_last_login() {
        let dir = tempfile::tempdir().unwrap();
        let (path, fifo) = (dir.path().join("password"), dir.path().join("fifo"));
        fs::write(&path, "secret").unwrap();
        let files = LoginFiles { password: Some(path.clone()), ..LoginFiles::default() };
        let server = "redis://user@localhost".into_connection_info().unwrap();
        let login = files.login(&server).unwrap().unwrap();
        mkfifoat(CWD, &fifo, Mode::RWXU).unwrap();
        fs::rename(&fifo, &path).unwrap();
        // Unblocks the read in any case: a test that fails while a thread is blocked would hang.
        let (done, waiting) = mpsc::channel::<()>();
        let writer = spawn_blocking(move || {
            let _ = waiting.recv_timeout(Duration::from_secs(5));
            fs::write(path, "other")
        });
        let mut found = Vec::new();
        for _ in 0..3 {
            found.push(login.read().await.unwrap());
        }
        drop(done);
        writer.await.unwrap().unwrap();
        assert_eq!(found, vec![("user".to_owned(), "secret".to_owned()); 3]);
    }
}
