//! Generates the gRPC services, the messages, and their JSON form. protox parses the
//! .proto files in Rust, so no installed protoc is needed.

use std::{env, error::Error, fs, path::PathBuf};

use prost::Message as _;

const FILES: [&str; 9] = [
    "quotaservice.proto",
    "doorman.proto",
    "envoy/config/core/v3/base.proto",
    "envoy/extensions/common/ratelimit/v3/ratelimit.proto",
    "envoy/service/ratelimit/v3/rls.proto",
    "envoy/type/v3/ratelimit_unit.proto",
    "tollgate/v1/buckets.proto",
    "tollgate/v1/holds.proto",
    "tollgate/v1/throttle.proto",
];

fn main() -> Result<(), Box<dyn Error>> {
    let descriptors = protox::compile(FILES, ["."])?;
    let encoded = descriptors.encode_to_vec();
    let out = PathBuf::from(env::var("OUT_DIR")?);
    fs::write(out.join("descriptors.bin"), &encoded)?;

    tonic_prost_build::configure()
        // Those have a JSON form.
        .compile_well_known_types(true)
        .extern_path(".google.protobuf", "::pbjson_types")
        .compile_fds(descriptors)?;
    pbjson_build::Builder::new().register_descriptors(&encoded)?.emit_fields().build(&[
        ".quotaservice",
        ".doorman",
        ".tollgate.v1",
    ])?;
    // As in Envoy's rate limit service, defaults are left out.
    pbjson_build::Builder::new().register_descriptors(&encoded)?.build(&[".envoy"])?;

    for file in FILES {
        println!("cargo:rerun-if-changed={file}");
    }
    Ok(())
}
