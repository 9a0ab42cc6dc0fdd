//! Parser for the commands of `tollgate capacity shell`.

use std::time::Duration;

/// Output of `help`. Usage errors quote lines of it.
pub(super) const HELP: &str = "\
get CLIENT RESOURCE WANTS   request a lease as that client, and keep it refreshed
release CLIENT [RESOURCE]   release that resource, or all that the client holds
show                        show the clients of this shell, and what they hold
master                      show the address that clients should dial
wait SECONDS                read no commands for that long; leases are refreshed
help                        show this list
quit                        release all leases and exit, as at the end of the input
";

/// Longest `wait`, in seconds.
const WAIT_LIMIT_S: f64 = 86_400.0;

/// A parsed command line.
#[derive(Debug, PartialEq)]
pub(super) enum Command {
    /// Request a lease and keep it refreshed.
    Get { client: String, resource: String, wants: f64 },
    /// Release one resource, or all of the client's.
    Release { client: String, resource: Option<String> },
    /// Print the leases of this shell.
    Show,
    /// Print the address that clients should dial.
    Master,
    /// Only refresh leases, for this long.
    Wait(Duration),
    /// Print the list of commands.
    Help,
    /// Release everything and exit.
    Quit,
    /// An empty line or a comment.
    Nothing,
}

/// Parses one line of input.
pub(super) fn parse(line: &str) -> Result<Command, String> {
    let words: Vec<&str> = line.split_whitespace().collect();
    let owned = |word: &&str| (*word).to_owned();
    Ok(match words.as_slice() {
        [] => Command::Nothing,
        [first, ..] if first.starts_with('#') => Command::Nothing,
        ["get", client, resource, wants] => Command::Get {
            client: owned(client),
            resource: owned(resource),
            wants: wants.parse().map_err(|_| format!("WANTS is a number, not {wants:?}"))?,
        },
        ["release", client] => Command::Release { client: owned(client), resource: None },
        ["release", client, resource] => {
            Command::Release { client: owned(client), resource: Some(owned(resource)) }
        }
        ["show"] => Command::Show,
        ["master"] => Command::Master,
        ["wait", seconds] => {
            let seconds = seconds.parse().ok().filter(|s| (0.0..=WAIT_LIMIT_S).contains(s));
            Command::Wait(Duration::from_secs_f64(
                seconds.ok_or(format!("SECONDS is a number from 0 to {WAIT_LIMIT_S}"))?,
            ))
        }
        ["help"] => Command::Help,
        ["quit" | "exit"] => Command::Quit,
        [first, ..] => {
            let start = format!("{first} ");
            let usage = HELP.lines().find(|line| line.starts_with(&start));
            let usage = usage.and_then(|line| line.split_once("  "));
            return Err(match usage {
                Some((usage, _)) => format!("write: {usage}"),
                None => format!("no command {first:?}; `help` lists them"),
            });
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parses_commands() {
        let text = str::to_owned;
        for (line, expected) in [
            ("", Command::Nothing),
            (" \t\r\n", Command::Nothing),
            ("# get a b 1", Command::Nothing),
            (
                "  get app-1\tdb.users 2.5\r\n",
                Command::Get { client: text("app-1"), resource: text("db.users"), wants: 2.5 },
            ),
            ("release a", Command::Release { client: text("a"), resource: None }),
            ("release a b", Command::Release { client: text("a"), resource: Some(text("b")) }),
            ("show", Command::Show),
            ("master", Command::Master),
            ("wait 0.25", Command::Wait(Duration::from_millis(250))),
            ("help", Command::Help),
            ("quit", Command::Quit),
            ("exit", Command::Quit),
        ] {
            assert_eq!(parse(line), Ok(expected), "{line:?}");
        }
    }

    #[test]
    fn rejects_invalid_commands() {
        for (line, error) in [
            ("get a b", "write: get CLIENT RESOURCE WANTS"),
            ("get a b 1 2", "write: get CLIENT RESOURCE WANTS"),
            ("get a b lots", "WANTS is a number, not \"lots\""),
            ("release", "write: release CLIENT [RESOURCE]"),
            ("show all", "write: show"),
            ("quit now", "write: quit"),
            ("wait", "write: wait SECONDS"),
            ("wait -1", "SECONDS is a number from 0 to 86400"),
            ("wait NaN", "SECONDS is a number from 0 to 86400"),
            ("wait 86401", "SECONDS is a number from 0 to 86400"),
            ("GET a b 1", "no command \"GET\"; `help` lists them"),
            ("g\u{1b}t", "no command \"g\\u{1b}t\"; `help` lists them"),
        ] {
            assert_eq!(parse(line), Err(error.to_owned()), "{line:?}");
        }
    }
}
