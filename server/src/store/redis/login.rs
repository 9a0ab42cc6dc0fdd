//! User and password from files. If the files have changed, they are read again for the next
//! connection; open connections stay logged in.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use redis::{ConnectionInfo, ErrorKind, RedisError, RedisResult};
use rustls::crypto::ring;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::{ClientConfig, RootCertStore};
use rustls_native_certs::load_native_certs;

use crate::files::{self, ReloadOnUse};

/// Whom Redis knows who has a password but no name.
const DEFAULT_USER: &str = "default";

/// Files that say more than a store's URL about how to connect to it.
#[derive(Clone, Debug, Default)]
pub struct LoginFiles {
    /// The user; `None`: the one in the URL.
    pub user: Option<PathBuf>,
    /// The password; `None`: the one in the URL.
    pub password: Option<PathBuf>,
    /// Who signs the servers' certificates; `None`: whom the system trusts.
    pub ca: Option<PathBuf>,
    /// The certificate to show, and its key.
    pub own: Option<(PathBuf, PathBuf)>,
}

impl LoginFiles {
    /// What connections over TLS begin with: whom to trust, and what to show.
    pub(super) fn tls(&self) -> RedisResult<ClientConfig> {
        let mut roots = RootCertStore::empty();
        match &self.ca {
            None => {
                let system = load_native_certs();
                let (usable, _) = roots.add_parsable_certificates(system.certs);
                // Without any, no server could ever be trusted.
                if usable == 0 {
                    let why = system.errors.first().map(|error| format!(" ({error})"));
                    let why = why.unwrap_or_default();
                    let text = format!("name one, as the system trusts no certificate{why}");
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

    /// Who logs in at a server that is connected to like this; `None`: as its URL says.
    pub(super) fn login(&self, like: &ConnectionInfo) -> RedisResult<Option<Login>> {
        if self.user.is_none() && self.password.is_none() {
            return Ok(None);
        }
        let settings = like.redis_settings();
        let files = self.clone();
        let user = settings.username().unwrap_or(DEFAULT_USER).to_owned();
        let password = settings.password().unwrap_or_default().to_owned();
        let paths = self.user.iter().chain(&self.password).map(PathBuf::as_path);
        let read = ReloadOnUse::new(paths, move || files.read_login(&user, &password));
        Ok(Some(Login(Arc::new(read.map_err(refused)?))))
    }

    /// The user and the password; these ones where there is no file. The error names the setting.
    fn read_login(&self, user: &str, password: &str) -> Result<(String, String), String> {
        let read = |setting, file: &Option<PathBuf>, otherwise: &str| match file {
            Some(path) => files::read_secret(path).map_err(|error| format!("{setting}: {error}")),
            None => Ok(otherwise.to_owned()),
        };
        let user = read("--store-user-file", &self.user, user)?;
        let password = read("--store-password-file", &self.password, password)?;
        Ok((user, password))
    }
}

/// What an error about a file begins with.
pub(super) const UNUSABLE: &str = "a file can't be used";

/// The file that a setting names can't be used. `why` says nothing of what is in it.
fn unusable(setting: &str, why: impl std::fmt::Display) -> RedisError {
    refused(format!("{setting}: {why}"))
}

/// The error about a file. `detail` names the setting.
fn refused(detail: String) -> RedisError {
    RedisError::from((ErrorKind::InvalidClientConfig, UNUSABLE, detail))
}

/// What is wrong with settings of the store: with one of the files, or else with `--store`.
pub fn wrong_setting(error: &RedisError) -> String {
    match error.detail() {
        Some(detail) if error.to_string().starts_with(UNUSABLE) => detail.to_owned(),
        _ => format!("--store: {error}"),
    }
}

fn certificates(setting: &str, path: &Path) -> RedisResult<Vec<CertificateDer<'static>>> {
    let pem = files::read(path).map_err(|error| unusable(setting, error))?;
    // Of a file without any, nobody would hear: nobody would be trusted.
    match CertificateDer::pem_slice_iter(&pem).collect::<Result<Vec<_>, _>>() {
        Ok(all) if !all.is_empty() => Ok(all),
        _ => Err(unusable(setting, format!("there is no certificate in {}", path.display()))),
    }
}

fn private_key(setting: &str, path: &Path) -> RedisResult<PrivateKeyDer<'static>> {
    let pem = files::read(path).map_err(|error| unusable(setting, error))?;
    PrivateKeyDer::from_pem_slice(&pem)
        .map_err(|_| unusable(setting, format!("there is no private key in {}", path.display())))
}

/// Who logs in. Clones share the loaded files.
#[derive(Clone)]
pub(super) struct Login(Arc<ReloadOnUse<(String, String)>>);

impl Login {
    /// The user and the password in the files. While the file system hangs, those read last.
    pub(super) async fn read(&self) -> RedisResult<(String, String)> {
        self.0.refresh().await.map_err(refused)?;
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

    /// A FIFO hangs on open until somebody opens it for writing.
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
        // Ends the read in any case: a test that fails while a thread is blocked would hang.
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
