//! The Redis user of `docs/operating.md`, with the least privileges that nodes need.

use redis::{Connection, Value};

const PRIVILEGES: &str = "reset on >secret ~* +@read +@write +@connection -@dangerous -@scripting \
                      +eval +evalsha +script|load +time +unwatch";

/// A server or sentinel with the user `tollgate` and the password `secret`.
pub struct RestrictedUser(Connection);

impl RestrictedUser {
    /// Creates the user with the documented rights and `more`.
    pub fn with_documented_rights(connection: Connection, more: &str) -> Self {
        Self::with_rights(connection, &format!("{PRIVILEGES}{more}"))
    }

    /// Creates the user with exactly these rights.
    pub fn with_rights(mut connection: Connection, rights: &str) -> Self {
        let mut user = redis::cmd("ACL");
        user.arg("SETUSER").arg("tollgate").arg(rights.split_whitespace().collect::<Vec<_>>());
        user.exec(&mut connection).unwrap();
        Self(connection)
    }

    /// Asserts that no command was denied.
    pub fn assert_nothing_was_denied(&mut self) {
        let refused: Vec<Value> = redis::cmd("ACL").arg("LOG").query(&mut self.0).unwrap();
        assert!(refused.is_empty(), "{refused:?}");
    }
}
