//! `tollgate capacity shell`: its output, and its requests to the node.

use std::fs::{self, File};
use std::io::Write;
use std::net::SocketAddr;
use std::process::{Child, Stdio};

use tempfile::TempDir;
use tonic::Status;

use super::fake::{Answer, Fake};
use testkit::command::{CommandOutput, command};
use testkit::{TEST_TIMEOUT, eventually, now_s, signal};

/// A shell process with piped input, killed when dropped.
pub(crate) struct Shell {
    child: Child,
    dir: TempDir,
}

impl Shell {
    pub(crate) fn start(address: SocketAddr, args: &[&str]) -> Self {
        let dir = TempDir::new().unwrap();
        let file = |name| File::create(dir.path().join(name)).unwrap();
        let child = command()
            .args(["capacity", "shell", "--addr", &address.to_string(), "--timeout", "1s"])
            .args(args)
            .stdin(Stdio::piped())
            .stdout(file("stdout"))
            .stderr(file("stderr"))
            .spawn()
            .unwrap();
        Self { child, dir }
    }

    pub(crate) fn type_lines(&mut self, lines: &str) {
        self.child.stdin.as_mut().unwrap().write_all(lines.as_bytes()).unwrap();
    }

    pub(crate) fn output(&self, stream: &str) -> String {
        fs::read_to_string(self.dir.path().join(stream)).unwrap()
    }

    pub(crate) fn wait_for(&self, stream: &str, text: &str) {
        eventually(text, TEST_TIMEOUT, || self.output(stream).contains(text));
    }

    /// Waits until it exits.
    fn wait_for_exit(&mut self) -> CommandOutput {
        let mut status = None;
        eventually("the shell ends", TEST_TIMEOUT, || {
            status = self.child.try_wait().unwrap();
            status.is_some()
        });
        let code = status.unwrap().code().unwrap();
        CommandOutput { code, stdout: self.output("stdout"), stderr: self.output("stderr") }
    }

    /// Closes its input, and waits until it exits.
    pub(crate) fn close_input(&mut self) -> CommandOutput {
        drop(self.child.stdin.take());
        self.wait_for_exit()
    }
}

impl Drop for Shell {
    fn drop(&mut self) {
        // Fails if the process has exited already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn a_shell_runs_a_script() {
    let node = Fake::start(Answer { lasts_s: 3_000_000, ..Answer::of(60.0) });
    let mut shell = Shell::start(node.address, &[]);
    shell.type_lines(
        "# two clients\n\nshow\nget app-1 db.users 100\nget app-2 db.users 60\nget app-2 api 1\n\
         wait 0.01\nrelease app-2 api\nrelease app-2 api\nfly\nget app-1 db.users\nmaster\n\
         show",
    );
    let done = shell.close_input();
    let lines: Vec<_> = done.stdout.lines().collect();
    assert_eq!(lines.len(), 9, "{lines:#?}");
    assert_eq!(lines[0], "nobody has asked for anything here yet");
    assert_eq!(lines[6], "client  resource  wants  has  expires in  state");
    assert!(lines[1].starts_with("app-1 db.users: gets 60 of the 100 that it wants; "));
    assert!(lines[2].starts_with("app-2 db.users: gets all of the 60 that it wants; "));
    assert_eq!(lines[4], "OK: app-2 holds nothing of api now");
    let address = node.address;
    assert_eq!(
        lines[5],
        format!("dial lb\\u{{7}}:10990; who answers there decides, as {address} does")
    );
    assert!(lines[7].starts_with("app-1   db.users    100   60  "), "{}", lines[7]);
    assert!(lines[8].starts_with("app-2   db.users     60   60  "), "{}", lines[8]);
    let errors = "error: app-2 has not requested that in this shell\n\
                  error: no command \"fly\"; `help` lists them\n\
                  error: write: get CLIENT RESOURCE WANTS\n";
    assert_eq!((done.code, done.stderr.as_str()), (0, errors));
    // The end of the input releases everything.
    let script = node.service.script();
    let mut released: Vec<_> =
        script.released.iter().map(|r| (r.client_id.as_str(), r.resource_id.concat())).collect();
    released.sort_unstable();
    let held = |client, resource: &str| (client, resource.to_owned());
    assert_eq!(
        released,
        [held("app-1", "db.users"), held("app-2", "api"), held("app-2", "db.users")]
    );
}

#[test]
fn a_shell_refreshes_what_it_holds() {
    let node = Fake::start(Answer { refresh_s: 1, ..Answer::of(60.0) });
    let mut shell = Shell::start(node.address, &["--follow"]);
    shell.type_lines("get app-1 db.users 100\n");
    node.asked(3);
    {
        let script = node.service.script();
        let has = |asked: usize| script.asked[asked].resource[0].has.map(|lease| lease.capacity);
        assert_eq!((has(0), has(1), has(2)), (None, Some(60.0), Some(60.0)));
    }
    // Only changes are printed.
    shell.wait_for("stdout", "gets 60 of the 100");
    assert_eq!(shell.output("stdout").lines().count(), 1);
    node.service.script().answer = Some(Answer { refresh_s: 1, ..Answer::of(100.0) });
    shell.wait_for("stdout", "\napp-1 db.users: gets all of the 100 that it wants; expires in ");

    // New wants apply at once, and to refreshes.
    shell.type_lines("get app-1 db.users 200\n");
    shell.wait_for("stdout", "gets 100 of the 200 that it wants");
    let last = || node.service.script().asked.last().map(|asked| asked.resource[0].wants);
    assert_eq!(last(), Some(200.0));
    let times = node.service.script().asked.len();
    node.asked(times + 1);
    assert_eq!(last(), Some(200.0));

    // Leases are refreshed during a wait.
    shell.type_lines("wait 80000\n");
    node.asked(times + 3);
    assert!(node.service.script().released.is_empty());
    signal(shell.child.id(), "TERM");
    let done = shell.wait_for_exit();
    assert_eq!((done.code, done.stderr.as_str()), (0, ""));
    assert_eq!(node.service.script().released.len(), 1);
}

#[test]
fn a_shell_outlives_a_node_that_fails() {
    let node = Fake::start(Answer {
        refresh_s: 1,
        lasts_s: 3,
        safe: Some(2.5),
        learning_until: Some(now_s() + 1000),
        ..Answer::of(60.0)
    });
    let mut shell = Shell::start(node.address, &["--follow"]);
    shell.type_lines("get app-1 db.users 100\n");
    shell.wait_for("stdout", "; the store is learning for ");
    node.service.script().error = Some(Status::unavailable("stopping"));
    let address = node.address;
    let unavailable =
        format!("no lease from {address}: Unavailable: stopping; asking again every second");
    shell.wait_for("stdout", &format!("app-1: {unavailable}\n"));
    shell.wait_for(
        "stdout",
        "app-1 db.users: the lease has expired, and 2.5 may be used without one\n",
    );
    // An expired lease is no longer claimed.
    let times = node.service.script().asked.len();
    node.asked(times + 1);
    assert_eq!(node.service.script().asked.last().unwrap().resource[0].has, None);
    // A new client retries after an outage, but not after an invalid request.
    shell.type_lines("get app-2 db.users 7\n");
    shell.wait_for("stderr", &format!("error: {unavailable}\n"));
    shell.type_lines("release app-1\n");
    shell.wait_for("stderr", &format!("error: no release from {address}: Unavailable: stopping\n"));
    node.service.script().error = Some(Status::invalid_argument("no"));
    shell.type_lines("get app-3 db.users 7\n");
    shell.wait_for("stderr", &format!("error: no lease from {address}: InvalidArgument: no\n"));

    node.service.script().error = None;
    node.service.script().answer = Some(Answer { refresh_s: 1, ..Answer::of(7.0) });
    shell.wait_for("stdout", "app-1 db.users: gets 7 of the 100 that it wants; expires in ");
    shell.wait_for("stdout", "app-2 db.users: gets all of the 7 that it wants; expires in ");
    shell.type_lines("release app-1\nrelease app-2 db.users\nshow\n");
    shell.wait_for("stdout", "OK: app-2 holds nothing of db.users now\nnobody has asked for ");
    let done = shell.close_input();
    assert_eq!(done.code, 0);
    // A failed release is reported.
    let mut shell = Shell::start(node.address, &[]);
    shell.type_lines("get app-1 db.users 100\n");
    shell.wait_for("stdout", "gets 7");
    node.service.script().error = Some(Status::unavailable("stopping"));
    shell.type_lines("quit\n");
    let done = shell.wait_for_exit();
    let expected = format!(
        "tollgate: no release from {address}: Unavailable: stopping; what was not given back \
         ends when it expires\n"
    );
    assert_eq!((done.code, done.stderr), (2, expected));
}
