//! What only Redis can do to leases.
