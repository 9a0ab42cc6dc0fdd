//! A driver: a program that makes calls with one client library. It reads orders in JSON, one a
//! line, and answers each with a line.
//!
//! | `do` | effect |
//! |---|---|
//! | `open` | opens a channel (gRPC only) |
//! | `start` | starts callers, each of which makes its calls sequentially; answers at once |
//! | `stop` | these callers make no further calls |
//! | `wait` | waits for these callers; answers with the count and the last text of each status |
//! | `stream` | sends messages on a stream; answers with the replies, and whether the stream is open |

use std::io::{BufRead as _, BufReader, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use serde::Deserialize;
use serde_json::{Value, json};

use super::report::Statuses;

/// Time limit of an order.
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

/// Results of a group.
#[derive(Debug, Deserialize)]
pub struct GroupResult {
    /// Count of each status.
    pub statuses: Statuses,
    /// Last text of each status (gRPC only).
    #[serde(default)]
    pub texts: std::collections::BTreeMap<String, Option<String>>,
}

/// Result of a stream.
#[derive(Debug, Deserialize)]
pub struct Streamed {
    /// Replies, in hexadecimal.
    pub answers: Vec<String>,
    /// Its final status; `None` if it stayed open.
    pub status: Option<String>,
}

impl Driver {
    /// Starts a driver.
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

    /// Sends an order, and waits for its answer.
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

    /// Stops callers after their current calls.
    pub fn stop(&mut self, group: Group) {
        self.order(&json!({ "do": "stop", "id": group.0.to_string() }));
    }

    /// Waits for callers to finish.
    pub fn wait(&mut self, group: Group) -> GroupResult {
        let answer = self.order(&json!({ "do": "wait", "id": group.0.to_string() }));
        serde_json::from_value(answer).unwrap()
    }

    /// Starts callers and waits for them.
    pub fn run(&mut self, order: Value) -> GroupResult {
        let group = self.begin(order);
        self.wait(group)
    }
}

impl Drop for Driver {
    fn drop(&mut self) {
        // Fails if the process has exited already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Directory of the drivers.
fn directory() -> PathBuf {
    testkit::fixture("clients")
}

/// A Python that has `module`.
pub fn python(module: &str, driver: &str) -> Command {
    let mut command = testkit::command::python(module);
    command.arg(directory().join(driver));
    command
}

/// Node.
pub fn node_js(driver: &Path) -> Command {
    let mut command = Command::new("node");
    command.arg(directory().join(driver));
    command
}
