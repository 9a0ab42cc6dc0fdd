//! The user that `docs/operating.md` describes, which may do what nodes need and no more.

use redis::{Connection, Value};

const RIGHTS: &str = "reset on >secret ~* +@read +@write +@connection -@dangerous -@scripting \
                      +eval +evalsha +script|load +time +unwatch";

/// A server, or a sentinel, that has such a user: `tollgate`, with the password `secret`.
pub struct FewRights(Connection);

impl FewRights {
    /// Gives it the rights, and `more` of them.
    pub fn given(connection: Connection, more: &str) -> Self {
        Self::exactly(connection, &format!("{RIGHTS}{more}"))
    }

    /// Gives it these alone.
    pub fn exactly(mut connection: Connection, rights: &str) -> Self {
        let mut user = redis::cmd("ACL");
        user.arg("SETUSER").arg("tollgate").arg(rights.split_whitespace().collect::<Vec<_>>());
        user.exec(&mut connection).unwrap();
        Self(connection)
    }

    /// Nothing has been refused.
    pub fn were_enough(&mut self) {
        let refused: Vec<Value> = redis::cmd("ACL").arg("LOG").query(&mut self.0).unwrap();
        assert!(refused.is_empty(), "{refused:?}");
    }
}
