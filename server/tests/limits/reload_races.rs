//! Concurrent reloads: afterwards the newest file is in use, however the reads overlap.

use std::fmt::Write as _;
use std::fs;
use std::sync::{Arc, Barrier};
use std::thread;
use std::time::Duration;

use testkit::LimitsFile;
use testkit::certs::Ca;
use testkit::metrics::Scrape;
use tollgate_server::metrics::Metrics;
use tollgate_server::service::limits::LiveLimits;
use tollgate_server::tls::{Acceptor, ServerFiles};

const DAY: Duration = Duration::from_secs(24 * 60 * 60);

/// Number of tries: without a lock at least one fails.
const TIMES: usize = 60;

/// Limits with this number of namespaces, large enough that a read takes some time.
fn limits(namespaces: usize) -> String {
    let mut text = "namespaces:\n".to_owned();
    for number in 0..namespaces {
        writeln!(text, "  ns{number}:\n    buckets:").unwrap();
        for bucket in 0..100 {
            writeln!(text, "      b{bucket}: {{ size: 5 }}").unwrap();
        }
    }
    text
}

/// Reloads in other threads while this one makes a change and then reloads, too.
fn at_once(reload: impl Fn() + Sync, change: impl Fn()) {
    const OTHERS: usize = 4;
    let together = Barrier::new(OTHERS + 1);
    thread::scope(|scope| {
        for _ in 0..OTHERS {
            scope.spawn(|| {
                together.wait();
                reload();
            });
        }
        together.wait();
        change();
        reload();
    });
}

#[test]
fn the_newest_limits_are_in_use() {
    let file = LimitsFile::new(&limits(1));
    let live = LiveLimits::load(file.path().into(), Arc::new(Metrics::new())).unwrap();
    let in_use = || live.current().limits.namespaces.len();
    for time in 0..TIMES {
        let newest = 1 + (time + 1) % 4;
        // An incomplete file may be refused; the last reload is not.
        at_once(|| drop(live.reload()), || file.write(&limits(newest)));
        assert_eq!(in_use(), newest, "the {time}th time");
    }
}

#[test]
fn the_newest_certificate_is_in_use() {
    let ca = Ca::new();
    let [soon, later] = [("soon", 10), ("later", 20)].map(|(name, days)| {
        let pair = ca.expiring(name, days * DAY, false);
        // A long chain, which takes some time to read.
        let chain = fs::read_to_string(&pair.cert).unwrap().repeat(500);
        fs::write(&pair.cert, chain).unwrap();
        let files = ServerFiles { cert: pair.cert.clone(), key: pair.key.clone(), client_ca: None };
        (pair, expiry(&files))
    });
    assert!(soon.1 < later.1);
    let shown = ca.expiring("shown", 15 * DAY, false);
    let files = ServerFiles { cert: shown.cert.clone(), key: shown.key.clone(), client_ca: None };
    let metrics = Metrics::new();
    let acceptor = Acceptor::load(files, &metrics).unwrap();
    for time in 0..TIMES {
        let (newest, expires) = if time % 2 == 0 { &soon } else { &later };
        // One that is read between certificate and key is refused; the reload after it is not.
        at_once(|| drop(acceptor.certificates().reload()), || newest.replace(&shown));
        assert_eq!(expiry_metric(&metrics), *expires, "the {time}th time");
    }
}

/// Expiry of the certificate in these files.
fn expiry(files: &ServerFiles) -> f64 {
    let metrics = Metrics::new();
    Acceptor::load(files.clone(), &metrics).unwrap();
    expiry_metric(&metrics)
}

fn expiry_metric(metrics: &Metrics) -> f64 {
    let name = "tollgate_tls_certificate_expiry_timestamp_seconds";
    Scrape::parse(&metrics.render()).sum(name, &[])
}
