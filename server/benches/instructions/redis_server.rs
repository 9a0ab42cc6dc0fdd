//! A Redis of one's own, on a Unix socket.

use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use tempfile::TempDir;

use super::Fallible;

/// How long a Redis under valgrind may take to start or to stop.
const PATIENCE: Duration = Duration::from_secs(60);

/// Gone when dropped.
pub struct RedisServer {
    url: String,
    child: Child,
    _dir: TempDir,
}

impl RedisServer {
    /// Starts one, by a command that starts the command that follows if there is one, and waits
    /// until it answers.
    pub fn start(within: Option<Command>) -> Fallible<Self> {
        let dir = tempfile::tempdir()?;
        let socket = dir.path().join("socket");
        let mut command = match within {
            Some(mut command) => {
                command.arg("redis-server");
                command
            }
            None => Command::new("redis-server"),
        };
        // What it does by the clock is not a decision's.
        command
            .args(["--port", "0", "--save", "", "--appendonly", "no"])
            .args(["--hz", "1", "--activerehashing", "no"])
            .arg("--unixsocket")
            .arg(&socket)
            .arg("--dir")
            .arg(dir.path());
        let child = command.stdout(Stdio::null()).spawn()?;
        let url = format!("redis+unix://{}", socket.display());
        let mut server = Self { url, child, _dir: dir };
        server.wait(|server| {
            let client = redis::Client::open(server.url.as_str())?;
            Ok(client.get_connection().is_ok())
        })?;
        Ok(server)
    }

    /// `redis+unix://…`
    pub fn url(&self) -> &str {
        &self.url
    }

    /// Lets it end by itself, as it must to be counted.
    pub fn stop(mut self) -> Fallible<()> {
        let client = redis::Client::open(self.url.as_str())?;
        let mut stop = redis::cmd("SHUTDOWN");
        stop.arg("NOSAVE");
        // Its last word is an end of the connection.
        let _ = stop.query::<()>(&mut client.get_connection()?);
        self.wait(|server| Ok(server.child.try_wait()?.is_some()))
    }

    #[expect(clippy::disallowed_methods, reason = "waits for another process")]
    fn wait(&mut self, holds: impl Fn(&mut Self) -> Fallible<bool>) -> Fallible<()> {
        let started = Instant::now();
        while !holds(self)? {
            if started.elapsed() > PATIENCE {
                return Err(format!("redis-server: nothing after {PATIENCE:?}").into());
            }
            thread::sleep(Duration::from_millis(10));
        }
        Ok(())
    }
}

impl Drop for RedisServer {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The version of the Redis that is installed.
pub fn version() -> Fallible<String> {
    let said = Command::new("redis-server").arg("--version").output()?.stdout;
    let said = String::from_utf8(said)?;
    let version = said.split_whitespace().find_map(|word| word.strip_prefix("v="));
    Ok(version.ok_or("redis-server tells no version")?.to_owned())
}
