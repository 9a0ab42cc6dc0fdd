//! The honest load during an attack: 200 gRPC and 50 HTTP requests/s in an open loop, and 20 new
//! connections/s.

use std::io::{self, ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tollgate_proto::quotaservice::allow_response::Status;
use tollgate_proto::quotaservice::quota_service_client::QuotaServiceClient;
use tonic::transport::{Channel, Endpoint};

use super::raw;
use testkit::callers::with_token;
use testkit::grpc::request;
use testkit::load::percentile;
use testkit::{Node, runtime};

/// Time limit of an answer.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);

/// Kind of a request.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// A decision over gRPC.
    Grpc,
    /// A decision over HTTP.
    Http,
    /// A new connection, until the node's first byte.
    Connection,
}

/// One request.
pub struct Sample {
    kind: Kind,
    due: Instant,
    took: Duration,
    failure: Option<String>,
}

/// Results of one phase.
pub struct Phase {
    /// Median latency of decisions.
    pub p50: Duration,
    /// Their p99.
    pub p99: Duration,
    /// p99 of new connections.
    pub connected_p99: Duration,
    /// Number of requests.
    pub asked: usize,
    /// Texts of failures.
    pub failures: Vec<String>,
}

/// Running honest load.
pub struct Honest {
    stop: Arc<AtomicBool>,
    samples: Arc<Mutex<Vec<Sample>>>,
    threads: Vec<JoinHandle<()>>,
}

impl Honest {
    /// Starts the load; callers send `token`.
    pub fn start(node: &Node, token: Option<&str>) -> Self {
        let honest =
            Self { stop: Arc::default(), samples: Arc::default(), threads: Vec::default() };
        let (grpc, http) = (node.grpc, node.http);
        let (to_grpc, to_http) = (token.map(str::to_owned), token.map(str::to_owned));
        honest
            .spawn(move |it| ask_grpc(it, grpc, to_grpc.as_deref()))
            .spawn(move |it| ask_http(it, http, to_http.as_deref()))
            .spawn(move |it| connect(it, grpc, raw::PREFACE))
            .spawn(move |it| connect(it, http, b"GET /healthz HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n"))
    }

    fn spawn(mut self, run: impl FnOnce(&Recorder) + Send + 'static) -> Self {
        let it = Recorder { stop: Arc::clone(&self.stop), samples: Arc::clone(&self.samples) };
        self.threads.push(thread::spawn(move || run(&it)));
        self
    }

    /// Waits until decisions take about as long as `alone` again, at most 30 s. Returns the time.
    pub fn recover(&self, alone: Duration) -> Duration {
        const LAST: usize = 100;
        const LIMIT: Duration = Duration::from_secs(30);
        let started = Instant::now();
        let recovered = || {
            let samples = self.samples.lock().unwrap();
            let since = samples.iter().filter(|sample| sample.due > started);
            let mut took: Vec<Duration> =
                since.filter(|one| one.kind == Kind::Grpc).map(|one| one.took).collect();
            took.len() >= LAST && {
                let last = took.len() - LAST;
                percentile(&mut took[last..], 0.5) <= alone.max(Duration::from_millis(2)) * 5
            }
        };
        while !recovered() && started.elapsed() < LIMIT {
            thread::sleep(Duration::from_millis(50));
        }
        started.elapsed()
    }

    /// Median latency of the decisions so far.
    pub fn median(&self) -> Duration {
        let samples = self.samples.lock().unwrap();
        let decisions = samples.iter().filter(|sample| sample.kind == Kind::Grpc);
        percentile(&mut decisions.map(|sample| sample.took).collect::<Vec<_>>(), 0.5)
    }

    /// Stops the load, and waits for the last answers.
    pub fn finish(mut self) -> Vec<Sample> {
        self.stop.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            thread.join().unwrap();
        }
        std::mem::take(&mut self.samples.lock().unwrap())
    }
}

impl Phase {
    /// Evaluates requests that were due within an interval.
    pub fn of(samples: &[Sample], from: Instant, to: Instant) -> Self {
        let within: Vec<&Sample> =
            samples.iter().filter(|sample| (from..to).contains(&sample.due)).collect();
        let took = |connections: bool| -> Vec<Duration> {
            let those =
                within.iter().filter(|sample| (sample.kind == Kind::Connection) == connections);
            those.map(|sample| sample.took).collect()
        };
        let (mut decisions, mut connections) = (took(false), took(true));
        Self {
            p50: percentile(&mut decisions, 0.5),
            p99: percentile(&mut decisions, 0.99),
            connected_p99: percentile(&mut connections, 0.99),
            asked: within.len(),
            failures: within.iter().filter_map(|sample| sample.failure.clone()).collect(),
        }
    }
}

#[derive(Clone)]
struct Recorder {
    stop: Arc<AtomicBool>,
    samples: Arc<Mutex<Vec<Sample>>>,
}

impl Recorder {
    fn runs(&self) -> bool {
        !self.stop.load(Ordering::Relaxed)
    }

    fn record(&self, kind: Kind, due: Instant, result: Result<(), String>) {
        let sample = Sample { kind, due, took: due.elapsed(), failure: result.err() };
        self.samples.lock().unwrap().push(sample);
    }
}

/// 200 requests/s on two connections.
fn ask_grpc(it: &Recorder, node: SocketAddr, token: Option<&str>) {
    const EVERY: Duration = Duration::from_millis(5);
    runtime().block_on(async {
        let endpoint = || Endpoint::from_shared(format!("http://{node}")).unwrap();
        let channels: Vec<Channel> =
            [endpoint(), endpoint()].into_iter().map(|one| one.connect_lazy()).collect();
        let (mut due, mut asked) = (Instant::now(), Vec::new());
        while it.runs() {
            tokio::time::sleep_until(due.into()).await;
            let mut client = QuotaServiceClient::new(channels[asked.len() % 2].clone());
            let request = with_token(token, request("quiet", "b", 1));
            let it = it.clone();
            asked.push(tokio::spawn(async move {
                let result = match tokio::time::timeout(ANSWER_TIMEOUT, client.allow(request)).await
                {
                    Err(_) => Err("gRPC: no answer".to_owned()),
                    Ok(Err(status)) => Err(format!("gRPC: {:?}", status.code())),
                    Ok(Ok(answer)) => match answer.get_ref() {
                        answer if answer.degraded => Err("gRPC: degraded".to_owned()),
                        answer if answer.status() == Status::Ok => Ok(()),
                        answer => Err(format!("gRPC: {:?}", answer.status())),
                    },
                };
                it.record(Kind::Grpc, due, result);
            }));
            due += EVERY;
        }
        for one in asked {
            one.await.unwrap();
        }
    });
}

/// 50 requests/s, by threads with a connection each.
fn ask_http(it: &Recorder, node: SocketAddr, token: Option<&str>) {
    const THREADS: u32 = 5;
    const EVERY: Duration = Duration::from_millis(100);
    thread::scope(|scope| {
        for number in 0..THREADS {
            scope.spawn(move || {
                let (mut stream, mut due) = (None, Instant::now() + EVERY * number / THREADS);
                while it.runs() {
                    thread::sleep(due.saturating_duration_since(Instant::now()));
                    let result = decide(&mut stream, node, token);
                    if result.is_err() {
                        stream = None;
                    }
                    it.record(Kind::Http, due, result.map_err(|error| format!("HTTP: {error}")));
                    due += EVERY;
                }
            });
        }
    });
}

/// One decision over HTTP, on an existing or a new connection.
fn decide(
    stream: &mut Option<TcpStream>,
    node: SocketAddr,
    token: Option<&str>,
) -> Result<(), String> {
    const BODY: &str = r#"{"namespace":"quiet","bucketName":"b"}"#;
    let mut at = match stream.take() {
        Some(stream) => stream,
        None => open(node).map_err(|error| describe(&error))?,
    };
    let token = token.map(|token| format!("authorization: Bearer {token}\r\n"));
    let head = format!(
        "POST /v1/allow HTTP/1.1\r\nhost: 127.0.0.1\r\n{}content-length: {}\r\n\r\n{BODY}",
        token.unwrap_or_default(),
        BODY.len()
    );
    at.write_all(head.as_bytes()).map_err(|error| describe(&error))?;
    let answer = read_response(&mut at).map_err(|error| describe(&error))?;
    *stream = Some(at);
    if answer.contains(r#""degraded":true"#) {
        return Err("degraded".to_owned());
    }
    match answer.lines().next() {
        Some("HTTP/1.1 200 OK") => Ok(()),
        other => Err(other.unwrap_or_default().to_owned()),
    }
}

fn describe(error: &io::Error) -> String {
    match error.kind() {
        ErrorKind::WouldBlock | ErrorKind::TimedOut => "no answer".to_owned(),
        _ => error.to_string(),
    }
}

fn open(node: SocketAddr) -> io::Result<TcpStream> {
    let stream = TcpStream::connect_timeout(&node, ANSWER_TIMEOUT)?;
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(ANSWER_TIMEOUT))?;
    Ok(stream)
}

/// Reads a whole response with a content-length.
fn read_response(stream: &mut TcpStream) -> io::Result<String> {
    let (mut answer, mut piece) = (Vec::new(), [0; 4096]);
    loop {
        let text = String::from_utf8_lossy(&answer).to_ascii_lowercase();
        if let Some((head, body)) = text.split_once("\r\n\r\n") {
            let length = head.lines().find_map(|line| line.strip_prefix("content-length: "));
            if length.is_none_or(|length| body.len() >= length.parse().unwrap()) {
                return Ok(String::from_utf8_lossy(&answer).into_owned());
            }
        }
        match stream.read(&mut piece)? {
            0 => return Err(ErrorKind::UnexpectedEof.into()),
            count => answer.extend(&piece[..count]),
        }
    }
}

/// Ten new connections/s, each until the node's first byte.
fn connect(it: &Recorder, node: SocketAddr, hello: &'static [u8]) {
    const EVERY: Duration = Duration::from_millis(100);
    runtime().block_on(async {
        let (mut due, mut probes) = (Instant::now(), Vec::new());
        while it.runs() {
            tokio::time::sleep_until(due.into()).await;
            let it = it.clone();
            probes.push(tokio::spawn(async move {
                let result =
                    match tokio::time::timeout(ANSWER_TIMEOUT, handshake(node, hello)).await {
                        Err(_) => Err("new connection: no answer".to_owned()),
                        Ok(result) => result.map_err(|error| format!("new connection: {error}")),
                    };
                it.record(Kind::Connection, due, result);
            }));
            due += EVERY;
        }
        for probe in probes {
            probe.await.unwrap();
        }
    });
}

async fn handshake(node: SocketAddr, hello: &[u8]) -> io::Result<()> {
    let mut stream = tokio::net::TcpStream::connect(node).await?;
    stream.write_all(hello).await?;
    stream.read_exact(&mut [0]).await?;
    Ok(())
}
