//! Test certificates and their certificate authority.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, IsCa, Issuer, KeyPair, SanType,
};
use tempfile::TempDir;
use tollgate_client::connection::{ClientFiles, Dialer};

/// A certificate and its key, as PEM files.
#[derive(Clone, Debug)]
pub struct Pair {
    /// Certificate file.
    pub cert: PathBuf,
    /// Key file.
    pub key: PathBuf,
}

impl Pair {
    /// Writes both to one file, the format of HAProxy.
    pub fn in_one_file(&self) -> PathBuf {
        let path = self.cert.with_extension("pem");
        let both = [&self.cert, &self.key].map(|file| fs::read_to_string(file).unwrap());
        fs::write(&path, both.concat()).unwrap();
        path
    }

    /// Replaces the files of `others` atomically, the key first.
    pub fn replace(&self, others: &Self) {
        for (from, to) in [(&self.key, &others.key), (&self.cert, &others.cert)] {
            let next = to.with_extension("next");
            fs::copy(from, &next).unwrap();
            fs::rename(next, to).unwrap();
        }
    }
}

/// A certificate authority with a directory for its files.
pub struct Ca {
    issuer: Issuer<'static, KeyPair>,
    dir: TempDir,
}

impl Ca {
    /// Creates a CA with a new key.
    pub fn new() -> Self {
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.distinguished_name.push(DnType::CommonName, "a test's own");
        let key = KeyPair::generate().unwrap();
        let dir = TempDir::new().unwrap();
        fs::write(dir.path().join("ca.pem"), params.self_signed(&key).unwrap().pem()).unwrap();
        Self { issuer: Issuer::new(params, key), dir }
    }

    /// File of the CA certificate.
    pub fn file(&self) -> PathBuf {
        self.path("ca.pem")
    }

    /// Path of a file in the CA's directory.
    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// The CA's directory.
    pub fn dir(&self) -> &Path {
        self.dir.path()
    }

    /// Issues a server certificate for 127.0.0.1.
    pub fn server(&self, name: &str) -> Pair {
        self.issue(name, |_| {})
    }

    /// Issues a server certificate for 127.0.0.1 and a DNS name.
    pub fn named_server(&self, name: &str, dns: &str) -> Pair {
        self.issue(name, |params| {
            params.subject_alt_names.push(SanType::DnsName(dns.try_into().unwrap()));
        })
    }

    /// Issues a client certificate with `names`, which have the prefix `dns:`, `uri:` or `cn:`.
    pub fn client(&self, file: &str, names: &[&str]) -> Pair {
        self.issue(file, |params| {
            params.subject_alt_names.clear();
            for name in names {
                let (kind, name) = name.split_once(':').unwrap();
                let alternatives = &mut params.subject_alt_names;
                match kind {
                    "dns" => alternatives.push(SanType::DnsName(name.try_into().unwrap())),
                    "uri" => alternatives.push(SanType::URI(name.try_into().unwrap())),
                    _ => params.distinguished_name.push(DnType::CommonName, name),
                }
            }
        })
    }

    /// Issues a certificate that expires `after` from now, or that expired that long ago if `past`.
    pub fn expiring(&self, name: &str, after: Duration, past: bool) -> Pair {
        let now = SystemTime::now();
        let (first, last) = match past {
            true => (now - 2 * after, now - after),
            false => (now - after, now + after),
        };
        self.issue(name, |params| {
            params.not_before = first.into();
            params.not_after = last.into();
        })
    }

    fn issue(&self, name: &str, change: impl FnOnce(&mut CertificateParams)) -> Pair {
        let mut params = CertificateParams::new(vec!["127.0.0.1".to_owned()]).unwrap();
        params.distinguished_name = DistinguishedName::new();
        change(&mut params);
        let key = KeyPair::generate().unwrap();
        let made = params.signed_by(&key, &self.issuer).unwrap();
        let pair = Pair {
            cert: self.path(&format!("{name}.crt")),
            key: self.path(&format!("{name}.key")),
        };
        fs::write(&pair.cert, made.pem()).unwrap();
        fs::write(&pair.key, key.serialize_pem()).unwrap();
        pair
    }

    /// A TLS connector that trusts this CA and presents the certificate `own`.
    pub fn dialer(&self, own: Option<&Pair>) -> Dialer {
        let own = own.map(|pair| (pair.cert.clone(), pair.key.clone()));
        Dialer::new(ClientFiles { ca: self.file(), own, server_name: None }).unwrap()
    }
}

/// A path as a command-line argument.
pub fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}
