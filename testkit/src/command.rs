//! Runs the `tollgate` command: to completion, or in the background.

use std::fs::{self, File};
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use tempfile::TempDir;

use super::{TEST_TIMEOUT, eventually, program, signal};

/// All environment variables that the command reads.
pub const VARIABLES: [&str; 45] = [
    "TOLLGATE_LIMITS",
    "TOLLGATE_ENVOY_LIMITS",
    "TOLLGATE_ENVOY_HEADERS",
    "TOLLGATE_STORE",
    "TOLLGATE_GRPC_LISTEN",
    "TOLLGATE_HTTP_LISTEN",
    "TOLLGATE_ADVERTISE",
    "TOLLGATE_PARENT",
    "TOLLGATE_CLUSTER_ID",
    "TOLLGATE_NODE_ID",
    "TOLLGATE_EXPECTED_NODES",
    "TOLLGATE_STORE_TIMEOUT",
    "TOLLGATE_THREADS",
    "TOLLGATE_DRAIN_DELAY",
    "TOLLGATE_DRAIN_TIMEOUT",
    "TOLLGATE_MAX_IN_FLIGHT",
    "TOLLGATE_MAX_BUFFERED_BYTES",
    "TOLLGATE_MAX_CONNECTIONS",
    "TOLLGATE_KEEPALIVE",
    "TOLLGATE_KEEPALIVE_TIMEOUT",
    "TOLLGATE_HTTP_IDLE",
    "TOLLGATE_MAX_CONNECTION_AGE",
    "TOLLGATE_LOG_FORMAT",
    "TOLLGATE_LOG_LEVEL",
    "TOLLGATE_ADDR",
    "TOLLGATE_TLS_CERT_FILE",
    "TOLLGATE_TLS_KEY_FILE",
    "TOLLGATE_TLS_CLIENT_CA_FILE",
    "TOLLGATE_TLS_CLIENT_OPTIONAL",
    "TOLLGATE_HTTP_HOST",
    "TOLLGATE_ACCESS",
    "TOLLGATE_STORE_USER_FILE",
    "TOLLGATE_STORE_PASSWORD_FILE",
    "TOLLGATE_STORE_CA_FILE",
    "TOLLGATE_STORE_CERT_FILE",
    "TOLLGATE_STORE_KEY_FILE",
    "TOLLGATE_PARENT_CA_FILE",
    "TOLLGATE_PARENT_CERT_FILE",
    "TOLLGATE_PARENT_KEY_FILE",
    "TOLLGATE_PARENT_TOKEN_FILE",
    "TOLLGATE_CA_FILE",
    "TOLLGATE_SERVER_NAME",
    "TOLLGATE_CERT_FILE",
    "TOLLGATE_KEY_FILE",
    "TOLLGATE_TOKEN_FILE",
];

/// Result of a command.
#[derive(Debug)]
pub struct CommandOutput {
    /// Exit code.
    pub code: i32,
    /// Standard output.
    pub stdout: String,
    /// Standard error.
    pub stderr: String,
}

/// The command with a clean environment.
pub fn command() -> Command {
    let mut command = Command::new(program("tollgate"));
    for name in VARIABLES {
        command.env_remove(name);
    }
    command
}

/// Runs the command with arguments.
pub fn tollgate(args: &[&str]) -> CommandOutput {
    run(command().args(args))
}

/// Runs the command with arguments and environment variables.
pub fn tollgate_with(args: &[&str], variables: &[(&str, &str)]) -> CommandOutput {
    run(command().args(args).envs(variables.iter().copied()))
}

/// Runs a command to completion. Kills it and fails the test after [`TEST_TIMEOUT`].
pub fn run(command: &mut Command) -> CommandOutput {
    let mut child =
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let read_all = |mut pipe: Box<dyn Read + Send>| {
        thread::spawn(move || {
            let mut text = String::new();
            pipe.read_to_string(&mut text).unwrap();
            text
        })
    };
    let stdout = read_all(Box::new(child.stdout.take().unwrap()));
    let stderr = read_all(Box::new(child.stderr.take().unwrap()));
    let started = Instant::now();
    while child.try_wait().unwrap().is_none() && started.elapsed() < TEST_TIMEOUT {
        thread::sleep(Duration::from_millis(2));
    }
    // Fails harmlessly if the process has exited.
    let _ = child.kill();
    let status = child.wait().unwrap();
    let (stdout, stderr) = (stdout.join().unwrap(), stderr.join().unwrap());
    let Some(code) = status.code() else { panic!("{command:?} went on: {stdout}{stderr}") };
    CommandOutput { code, stdout, stderr }
}

/// A background command, killed when dropped. Its output goes to a file.
pub struct BackgroundCommand {
    child: Child,
    dir: TempDir,
}

impl BackgroundCommand {
    /// Starts the command.
    pub fn start(command: &mut Command) -> Self {
        let dir = TempDir::new().unwrap();
        let file = File::create(dir.path().join("output")).unwrap();
        command.stdin(Stdio::null()).stdout(file.try_clone().unwrap()).stderr(file);
        Self { child: command.spawn().unwrap(), dir }
    }

    /// Output so far, of stdout and stderr.
    pub fn output(&self) -> String {
        fs::read_to_string(self.dir.path().join("output")).unwrap()
    }

    /// Waits until the output contains `text`.
    pub fn wait_for_output(&self, text: &str) {
        let mut output = String::new();
        eventually(text, TEST_TIMEOUT, || {
            output = self.output();
            output.contains(text)
        });
    }

    /// Sends SIGTERM, expects exit code 0, and returns the output.
    pub fn stop(mut self) -> String {
        signal(self.child.id(), "TERM");
        let mut status = None;
        eventually("it ends", TEST_TIMEOUT, || {
            status = self.child.try_wait().unwrap();
            status.is_some()
        });
        assert_eq!(status.unwrap().code(), Some(0), "{}", self.output());
        self.output()
    }
}

impl Drop for BackgroundCommand {
    fn drop(&mut self) {
        // Fails if the process has exited already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Python with `module`: the system's, which has the system's packages, or else the first in PATH.
pub fn python(module: &str) -> Command {
    let has_module = |python: &&str| {
        let found = Command::new(python).args(["-c", &format!("import {module}")]).output();
        found.is_ok_and(|output| output.status.success())
    };
    let python = ["/usr/bin/python3", "python3"].into_iter().find(has_module);
    let python =
        python.unwrap_or_else(|| panic!("no Python with {module}; scripts/test.sh installs it"));
    let mut command = Command::new(python);
    // Without -B it leaves compiled files among the sources.
    command.arg("-B");
    command
}

/// The path of a program: protoc needs the full path of a plugin.
fn located(program: &str) -> PathBuf {
    let path = std::env::var_os("PATH").unwrap();
    let mut places = std::env::split_paths(&path).map(|folder| folder.join(program));
    let found = places.find(|place| place.is_file());
    found.unwrap_or_else(|| panic!("{program} is not installed; scripts/test.sh installs it"))
}

/// Generates a Python client of `file`, which is in `folder`, for `PYTHONPATH`.
pub fn python_stubs(folder: &Path, file: &str) -> TempDir {
    let stubs = TempDir::new().unwrap();
    let plugin = located("grpc_python_plugin");
    let mut protoc = Command::new(located("protoc"));
    protoc
        .arg(format!("--proto_path={}", folder.display()))
        .arg(format!("--python_out={}", stubs.path().display()))
        .arg(format!("--grpc_python_out={}", stubs.path().display()))
        .arg(format!("--plugin=protoc-gen-grpc_python={}", plugin.display()))
        .arg(file);
    let done = run(&mut protoc);
    assert_eq!(done.code, 0, "{protoc:?}\n{}{}", done.stdout, done.stderr);
    stubs
}
