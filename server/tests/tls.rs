//! Redis over TLS: trusted are the system's certificates, or those that SSL_CERT_FILE names.
#![allow(clippy::unwrap_used, reason = "a test that can't go on fails")]

mod support;

use std::fs;
use std::net::{SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use support::command::{Running, command};
use support::wire::{PATIENCE, Page, http};
use support::{LimitsFile, eventually, free_port};
use tempfile::TempDir;

const LIMITS: &str = "on_store_failure: local
namespaces: { ns: { buckets: { b: { size: 10, fill_rate: 1/d } } } }";

/// Makes a certificate for 127.0.0.1 and its key, signed by itself.
fn certificate(dir: &Path, name: &str) -> (PathBuf, PathBuf) {
    let made = rcgen::generate_simple_self_signed(["127.0.0.1".to_owned()]).unwrap();
    let (cert, key) = (dir.join(format!("{name}.crt")), dir.join(format!("{name}.key")));
    fs::write(&cert, made.cert.pem()).unwrap();
    fs::write(&key, made.signing_key.serialize_pem()).unwrap();
    (cert, key)
}

/// A Redis that speaks nothing but TLS.
struct TlsRedis {
    child: Child,
    port: u16,
}

impl TlsRedis {
    fn start(dir: &Path, (cert, key): &(PathBuf, PathBuf)) -> Self {
        for _ in 0..5 {
            let port = free_port();
            let child = Command::new("redis-server")
                .args(["--port", "0", "--tls-port", &port.to_string(), "--bind", "127.0.0.1"])
                .args(["--save", "", "--appendonly", "no", "--tls-auth-clients", "no"])
                .args(["--tls-cert-file".as_ref(), cert.as_os_str()])
                .args(["--tls-key-file".as_ref(), key.as_os_str()])
                .args(["--dir".as_ref(), dir.as_os_str()])
                .stdout(Stdio::null())
                .spawn()
                .unwrap();
            let mut redis = Self { child, port };
            let mut ended = false;
            eventually("redis-server listens", PATIENCE, || {
                ended = redis.child.try_wait().unwrap().is_some();
                ended || TcpStream::connect(("127.0.0.1", port)).is_ok()
            });
            // Another process may have taken the port.
            if !ended {
                return redis;
            }
        }
        panic!("redis-server does not start; can it do TLS?");
    }
}

impl Drop for TlsRedis {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A node on that Redis that trusts that certificate, and its HTTP port.
fn node(limits: &LimitsFile, redis: &TlsRedis, trusted: &Path) -> (Running, SocketAddr) {
    let http = SocketAddr::from(([127, 0, 0, 1], free_port()));
    let node = Running::start(
        command()
            .args(["serve", "--grpc-listen", "127.0.0.1:0", "--http-listen", &http.to_string()])
            .args(["--store", &format!("rediss://127.0.0.1:{}", redis.port)])
            .args(["--store-timeout", "5s", "--limits"])
            .arg(limits.path())
            .env_remove("SSL_CERT_DIR")
            .env("SSL_CERT_FILE", trusted),
    );
    node.says("serving");
    (node, http)
}

fn ask(address: SocketAddr) -> Page {
    http(address, "POST", "/v1/allow", br#"{"namespace":"ns","bucketName":"b"}"#)
}

#[test]
fn a_trusted_certificate_serves() {
    let dir = TempDir::new().unwrap();
    let limits = LimitsFile::new(LIMITS);
    let trusted = certificate(dir.path(), "redis");
    let redis = TlsRedis::start(dir.path(), &trusted);
    let (node, http) = node(&limits, &redis, &trusted.0);
    node.says("the store answers");
    let answer = ask(http).json();
    assert_eq!((&answer["status"], &answer["degraded"]), (&"OK".into(), &false.into()));
    node.stop();
}

#[test]
fn any_other_certificate_is_an_outage() {
    let dir = TempDir::new().unwrap();
    let limits = LimitsFile::new(LIMITS);
    let redis = TlsRedis::start(dir.path(), &certificate(dir.path(), "redis"));
    let (other, _) = certificate(dir.path(), "other");
    let (node, http) = node(&limits, &redis, &other);
    node.says("no answer from the store");
    node.says("invalid peer certificate");
    let answer = ask(http).json();
    assert_eq!((&answer["status"], &answer["degraded"]), (&"OK".into(), &true.into()));
    let said = node.stop();
    assert!(!said.contains("the store answers") && !said.contains("panicked"), "{said}");
}
