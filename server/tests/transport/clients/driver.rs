//! A program that makes calls with one client library. It reads an order a line, in JSON, and
//! answers each with a line.
//!
//! | `do` | then |
//! |---|---|
//! | `open` | makes a channel (gRPC only) |
//! | `start` | starts callers, each of which makes its calls one after the other; answers at once |
//! | `stop` | these callers make no further calls |
//! | `wait` | when these callers have ended: how often they saw which status, and its last text |
//! | `stream` | sends messages on a stream, reads answers, and tells whether the stream stays open |

use std::io::{BufRead as _, BufReader, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use serde::Deserialize;
use serde_json::{Value, json};

use super::report::Statuses;

/// No order takes longer than this.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(120);

/// A running driver, killed when dropped.
pub struct Driver {
    child: Child,
    orders: ChildStdin,
    answers: mpsc::Receiver<String>,
    next: u64,
}

/// Callers of a driver.
#[derive(Clone, Copy)]
pub struct Group(u64);

/// What a group saw.
#[derive(Debug, Deserialize)]
pub struct Seen {
    /// How often each status came.
    pub statuses: Statuses,
    /// The last text of each (gRPC only).
    #[serde(default)]
    pub texts: std::collections::BTreeMap<String, Option<String>>,
}

/// What came of a stream.
#[derive(Debug, Deserialize)]
pub struct Streamed {
    /// The messages, in hexadecimal.
    pub answers: Vec<String>,
    /// With what it ended; `None` if it was still open at last.
    pub status: Option<String>,
}

impl Driver {
    /// Starts one.
    pub fn start(command: &mut Command) -> Self {
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let (sender, answers) = mpsc::channel();
        let stdout = BufReader::new(child.stdout.take().unwrap());
        thread::spawn(move || {
            for line in stdout.lines().map_while(Result::ok) {
                if sender.send(line).is_err() {
                    break;
                }
            }
        });
        Self { orders: child.stdin.take().unwrap(), child, answers, next: 0 }
    }

    /// Gives an order, and waits for its answer.
    pub fn order(&mut self, order: &Value) -> Value {
        writeln!(self.orders, "{order}").unwrap();
        let answer = self.answers.recv_timeout(ANSWER_TIMEOUT);
        serde_json::from_str(&answer.unwrap_or_else(|_| panic!("no answer to {order}"))).unwrap()
    }

    /// Starts callers.
    pub fn begin(&mut self, mut order: Value) -> Group {
        let id = self.next;
        self.next += 1;
        order["do"] = json!("start");
        order["id"] = json!(id.to_string());
        self.order(&order);
        Group(id)
    }

    /// Has callers make no further calls.
    pub fn stop(&mut self, group: Group) {
        self.order(&json!({ "do": "stop", "id": group.0.to_string() }));
    }

    /// Waits for callers to end.
    pub fn wait(&mut self, group: Group) -> Seen {
        let answer = self.order(&json!({ "do": "wait", "id": group.0.to_string() }));
        serde_json::from_value(answer).unwrap()
    }

    /// Starts callers and waits for them.
    pub fn run(&mut self, order: Value) -> Seen {
        let group = self.begin(order);
        self.wait(group)
    }
}

impl Drop for Driver {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The room of the drivers.
fn room() -> PathBuf {
    testkit::fixture("clients")
}

/// A Python that has `module`.
pub fn python(module: &str, driver: &str) -> Command {
    let mut command = testkit::command::python(module);
    command.arg(room().join(driver));
    command
}

/// Node.
pub fn node_js(driver: &Path) -> Command {
    let mut command = Command::new("node");
    command.arg(room().join(driver));
    command
}
