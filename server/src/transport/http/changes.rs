//! Changes by an administrator: who may make them, and the log lines that each leaves.

use axum::response::Response;

use super::access_denied;
use super::connection_context::ConnectionContext;
use crate::access::Caller;
use crate::logging::LogThrottle;

/// Limits the log lines of refused changes, as anybody can cause them.
static REFUSALS: LogThrottle = LogThrottle::new();

/// A change that a request asks for, for the log.
pub(super) struct Change<'a> {
    pub(super) context: &'a ConnectionContext,
    pub(super) caller: &'a Caller,
    /// A verb, such as `fill`.
    pub(super) action: &'a str,
    /// The path of the request. Not called `target`: the log has the module under that name.
    pub(super) object: &'a str,
}

impl Change<'_> {
    /// Checks that the caller may make changes.
    #[expect(clippy::result_large_err, reason = "the error is the response, sent at once")]
    pub(super) fn authorize(&self) -> Result<(), Response> {
        self.caller.may_administer().map_err(|refusal| {
            self.refused(&refusal.to_string());
            access_denied(refusal)
        })
    }

    /// Logs that the change was made, with a sentence about it.
    pub(super) fn made(&self, what: &str) {
        let (caller, peer) = (self.caller.name(), self.context.peer());
        tracing::info!(action = self.action, object = self.object, caller, %peer, "{what}");
    }

    /// Logs that the change was refused, and why.
    pub(super) fn refused(&self, reason: &str) {
        if let Some(held_back) = REFUSALS.pass() {
            let (caller, peer) = (self.caller.name(), self.context.peer());
            tracing::warn!(
                action = self.action,
                object = self.object,
                caller,
                %peer,
                reason,
                held_back,
                "a change was refused"
            );
        }
    }
}
