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
    /// Hits of domains on resources, copies that they hold, and settlements of grants: the `tollgate.v1` package.
    #[allow(missing_docs, clippy::all, unreachable_pub)]
    pub mod v1 {
        tonic::include_proto!("tollgate.v1");
        include!(concat!(env!("OUT_DIR"), "/tollgate.v1.serde.rs"));
    }
}

/// Envoy's rate limit service, version 3, and the messages that it uses, in the modules of their packages.
#[allow(missing_docs, clippy::all, unreachable_pub)]
pub mod envoy {
    pub mod config {
        pub mod core {
            pub mod v3 {
                tonic::include_proto!("envoy.config.core.v3");
                include!(concat!(env!("OUT_DIR"), "/envoy.config.core.v3.serde.rs"));
            }
        }
    }
    pub mod extensions {
        pub mod common {
            pub mod ratelimit {
                pub mod v3 {
                    tonic::include_proto!("envoy.extensions.common.ratelimit.v3");
                    include!(concat!(
                        env!("OUT_DIR"),
                        "/envoy.extensions.common.ratelimit.v3.serde.rs"
                    ));
                }
            }
        }
    }
    pub mod r#type {
        pub mod v3 {
            tonic::include_proto!("envoy.r#type.v3");
            include!(concat!(env!("OUT_DIR"), "/envoy.r#type.v3.serde.rs"));
        }
    }
    pub mod service {
        pub mod ratelimit {
            pub mod v3 {
                tonic::include_proto!("envoy.service.ratelimit.v3");
                include!(concat!(env!("OUT_DIR"), "/envoy.service.ratelimit.v3.serde.rs"));
            }
        }
    }
}

/// Every file descriptor, encoded: what gRPC reflection serves.
pub const FILE_DESCRIPTOR_SET: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/descriptors.bin"));
