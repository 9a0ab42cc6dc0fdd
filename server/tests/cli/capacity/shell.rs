//! `tollgate capacity shell`: what it says to whom types, and what it asks of the node.

use std::fs::{self, File};
use std::io::Write;
use std::net::SocketAddr;
use std::process::{Child, Stdio};

use tempfile::TempDir;
use tonic::Status;

use super::fake::{Answer, Fake};
use testkit::command::{Done, command};
use testkit::wire::{PATIENCE, now_s};
use testkit::{eventually, signal};

/// A shell whose commands are typed by the test, killed when dropped.
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

    pub(crate) fn types(&mut self, lines: &str) {
        self.child.stdin.as_mut().unwrap().write_all(lines.as_bytes()).unwrap();
    }

    pub(crate) fn said(&self, output: &str) -> String {
        fs::read_to_string(self.dir.path().join(output)).unwrap()
    }

    pub(crate) fn says(&self, output: &str, text: &str) {
        eventually(text, PATIENCE, || self.said(output).contains(text));
    }

    /// Waits for its end.
    fn ends(&mut self) -> Done {
        let mut status = None;
        eventually("the shell ends", PATIENCE, || {
            status = self.child.try_wait().unwrap();
            status.is_some()
        });
        let code = status.unwrap().code().unwrap();
        Done { code, stdout: self.said("stdout"), stderr: self.said("stderr") }
    }

    /// Ends its input, and waits for its end.
    pub(crate) fn hangs_up(&mut self) -> Done {
        drop(self.child.stdin.take());
        self.ends()
    }
}

impl Drop for Shell {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn a_shell_runs_a_script() {
    let node = Fake::start(Answer { lasts_s: 3_000_000, ..Answer::of(60.0) });
    let mut shell = Shell::start(node.address, &[]);
    shell.types(
        "# two clients\n\nshow\nget app-1 db.users 100\nget app-2 db.users 60\nget app-2 api 1\n\
         wait 0.01\nrelease app-2 api\nrelease app-2 api\nfly\nget app-1 db.users\nmaster\n\
         show",
    );
    let done = shell.hangs_up();
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
    // The end of the input gives everything back.
    let script = node.told.script();
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
    shell.types("get app-1 db.users 100\n");
    node.asked(3);
    {
        let script = node.told.script();
        let has = |asked: usize| script.asked[asked].resource[0].has.map(|lease| lease.capacity);
        assert_eq!((has(0), has(1), has(2)), (None, Some(60.0), Some(60.0)));
    }
    // Nothing has changed, so nothing is said of it; what does change is.
    shell.says("stdout", "gets 60 of the 100");
    assert_eq!(shell.said("stdout").lines().count(), 1);
    node.told.script().answer = Some(Answer { refresh_s: 1, ..Answer::of(100.0) });
    shell.says("stdout", "\napp-1 db.users: gets all of the 100 that it wants; expires in ");

    // What it wants changes at once, and for the refreshes.
    shell.types("get app-1 db.users 200\n");
    shell.says("stdout", "gets 100 of the 200 that it wants");
    let last = || node.told.script().asked.last().map(|asked| asked.resource[0].wants);
    assert_eq!(last(), Some(200.0));
    let times = node.told.script().asked.len();
    node.asked(times + 1);
    assert_eq!(last(), Some(200.0));

    // A wait is no pause: it is refreshed meanwhile.
    shell.types("wait 80000\n");
    node.asked(times + 3);
    assert!(node.told.script().released.is_empty());
    signal(shell.child.id(), "TERM");
    let done = shell.ends();
    assert_eq!((done.code, done.stderr.as_str()), (0, ""));
    assert_eq!(node.told.script().released.len(), 1);
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
    shell.types("get app-1 db.users 100\n");
    shell.says("stdout", "; the store is learning for ");
    node.told.script().error = Some(Status::unavailable("stopping"));
    let address = node.address;
    let unavailable =
        format!("no lease from {address}: Unavailable: stopping; asking again every second");
    shell.says("stdout", &format!("app-1: {unavailable}\n"));
    shell
        .says("stdout", "app-1 db.users: the lease has expired, and 2.5 may be used without one\n");
    // Gone is gone: no more is said to be held.
    let times = node.told.script().asked.len();
    node.asked(times + 1);
    assert_eq!(node.told.script().asked.last().unwrap().resource[0].has, None);
    // A client that asks now goes on asking; one whose question is wrong does not.
    shell.types("get app-2 db.users 7\n");
    shell.says("stderr", &format!("error: {unavailable}\n"));
    shell.types("release app-1\n");
    shell.says("stderr", &format!("error: no release from {address}: Unavailable: stopping\n"));
    node.told.script().error = Some(Status::invalid_argument("no"));
    shell.types("get app-3 db.users 7\n");
    shell.says("stderr", &format!("error: no lease from {address}: InvalidArgument: no\n"));

    node.told.script().error = None;
    node.told.script().answer = Some(Answer { refresh_s: 1, ..Answer::of(7.0) });
    shell.says("stdout", "app-1 db.users: gets 7 of the 100 that it wants; expires in ");
    shell.says("stdout", "app-2 db.users: gets all of the 7 that it wants; expires in ");
    shell.types("release app-1\nrelease app-2 db.users\nshow\n");
    shell.says("stdout", "OK: app-2 holds nothing of db.users now\nnobody has asked for ");
    let done = shell.hangs_up();
    assert_eq!(done.code, 0);
    // What could not be given back is told.
    let mut shell = Shell::start(node.address, &[]);
    shell.types("get app-1 db.users 100\n");
    shell.says("stdout", "gets 7");
    node.told.script().error = Some(Status::unavailable("stopping"));
    shell.types("quit\n");
    let done = shell.ends();
    let expected = format!(
        "tollgate: no release from {address}: Unavailable: stopping; leases that were not \
         released end when they expire\n"
    );
    assert_eq!((done.code, done.stderr), (2, expected));
}
