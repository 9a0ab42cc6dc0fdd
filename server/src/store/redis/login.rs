//! User and password from files, read at each new connection: who rotates them replaces the
//! file, and connections that are there go on.

use std::path::{Path, PathBuf};
use std::pin::Pin;

use redis::{BasicAuth, ConnectionInfo, ErrorKind, RedisError, RedisResult};
use redis::{ClientTlsConfig, StreamingCredentialsProvider, TlsCertificates};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio_stream::Stream;

use crate::files;

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
    /// What is to be trusted and shown, if it is not as usual.
    pub(super) fn certificates(&self) -> RedisResult<Option<TlsCertificates>> {
        if self.ca.is_none() && self.own.is_none() {
            return Ok(None);
        }
        let root_cert = match &self.ca {
            None => None,
            Some(path) => Some(certificate("--store-ca-file", path)?),
        };
        let client_tls = match &self.own {
            None => None,
            Some((cert, key)) => Some(ClientTlsConfig {
                client_cert: certificate("--store-cert-file", cert)?,
                client_key: private_key("--store-key-file", key)?,
            }),
        };
        Ok(Some(TlsCertificates { client_tls, root_cert }))
    }

    /// Who logs in at a server that is connected to like this; `None`: as its URL says.
    pub(super) fn login(&self, like: &ConnectionInfo) -> RedisResult<Option<Login>> {
        if self.user.is_none() && self.password.is_none() {
            return Ok(None);
        }
        let settings = like.redis_settings();
        let login = Login {
            files: self.clone(),
            user: settings.username().unwrap_or(DEFAULT_USER).to_owned(),
            password: settings.password().unwrap_or_default().to_owned(),
        };
        login.read()?;
        Ok(Some(login))
    }
}

/// What an error about a file begins with.
pub(super) const UNUSABLE: &str = "a file can't be used";

/// The file that a setting names can't be used. `why` says nothing of what is in it.
fn unusable(setting: &str, why: impl std::fmt::Display) -> RedisError {
    RedisError::from((ErrorKind::InvalidClientConfig, UNUSABLE, format!("{setting}: {why}")))
}

/// What is wrong with settings of the store: with one of the files, or else with `--store`.
pub fn wrong_setting(error: &RedisError) -> String {
    match error.detail() {
        Some(detail) if error.to_string().starts_with(UNUSABLE) => detail.to_owned(),
        _ => format!("--store: {error}"),
    }
}

fn certificate(setting: &str, path: &Path) -> RedisResult<Vec<u8>> {
    let pem = files::read(path).map_err(|error| unusable(setting, error))?;
    // Of a file without any, nobody would hear: nobody would be trusted.
    match CertificateDer::pem_slice_iter(&pem).next() {
        Some(Ok(_)) => Ok(pem),
        _ => Err(unusable(setting, format!("there is no certificate in {}", path.display()))),
    }
}

fn private_key(setting: &str, path: &Path) -> RedisResult<Vec<u8>> {
    let pem = files::read(path).map_err(|error| unusable(setting, error))?;
    match PrivateKeyDer::from_pem_slice(&pem) {
        Ok(_) => Ok(pem),
        Err(_) => Err(unusable(setting, format!("there is no private key in {}", path.display()))),
    }
}

/// Who logs in.
#[derive(Clone)]
pub(super) struct Login {
    files: LoginFiles,
    /// Where there is no file.
    user: String,
    password: String,
}

impl Login {
    fn read(&self) -> RedisResult<BasicAuth> {
        let read = |setting, file: &Option<PathBuf>, otherwise: &String| match file {
            Some(path) => files::read_secret(path).map_err(|error| unusable(setting, error)),
            None => Ok(otherwise.clone()),
        };
        let user = read("--store-user-file", &self.files.user, &self.user)?;
        let password = read("--store-password-file", &self.files.password, &self.password)?;
        Ok(BasicAuth::new(user, password))
    }
}

impl std::fmt::Debug for Login {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Login").field("files", &self.files).finish_non_exhaustive()
    }
}

impl StreamingCredentialsProvider for Login {
    /// What the files say now, once: a connection that has logged in stays logged in.
    fn subscribe(&self) -> Pin<Box<dyn Stream<Item = RedisResult<BasicAuth>> + Send + 'static>> {
        Box::pin(tokio_stream::once(self.read()))
    }
}
