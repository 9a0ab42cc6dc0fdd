//! User and password from files, read at each new connection: who rotates them replaces the
//! file, and connections that are there go on.

use std::path::PathBuf;
use std::pin::Pin;

use redis::{BasicAuth, ConnectionInfo, ErrorKind, RedisError, RedisResult};
use redis::{ClientTlsConfig, StreamingCredentialsProvider, TlsCertificates};
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
        let root_cert = self.ca.as_deref().map(files::read).transpose().map_err(unreadable)?;
        let client_tls = match &self.own {
            None => None,
            Some((cert, key)) => Some(ClientTlsConfig {
                client_cert: files::read(cert).map_err(unreadable)?,
                client_key: files::read(key).map_err(unreadable)?,
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

fn unreadable(error: std::io::Error) -> RedisError {
    // It names the file, and nothing that is in it.
    RedisError::from((ErrorKind::InvalidClientConfig, "a file of the store", error.to_string()))
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
        let read = |file: &Option<PathBuf>, otherwise: &String| match file {
            Some(path) => files::read_secret(path).map_err(unreadable),
            None => Ok(otherwise.clone()),
        };
        let user = read(&self.files.user, &self.user)?;
        Ok(BasicAuth::new(user, read(&self.files.password, &self.password)?))
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
