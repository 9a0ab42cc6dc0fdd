//! The wire: messages, client and server stubs, and the JSON form of the messages
//! (protobuf's JSON names), all generated from the `.proto` files of this folder.

/// Token buckets: the `quotaservice` package.
#[allow(missing_docs, clippy::all, unreachable_pub)]
pub mod quotaservice {
    tonic::include_proto!("quotaservice");
    include!(concat!(env!("OUT_DIR"), "/quotaservice.serde.rs"));
}

/// Capacity leases: the `doorman` package.
#[allow(missing_docs, clippy::all, unreachable_pub)]
pub mod doorman {
    tonic::include_proto!("doorman");
    include!(concat!(env!("OUT_DIR"), "/doorman.serde.rs"));
}

/// What is tollgate's own: limits per tenant.
pub mod tollgate {
    /// Hits of domains on resources, and copies that they hold: the `tollgate.v1` package.
    #[allow(missing_docs, clippy::all, unreachable_pub)]
    pub mod v1 {
        tonic::include_proto!("tollgate.v1");
        include!(concat!(env!("OUT_DIR"), "/tollgate.v1.serde.rs"));
    }
}

/// Every file descriptor, encoded: what gRPC reflection serves.
pub const FILE_DESCRIPTOR_SET: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/descriptors.bin"));
