# shellcheck shell=bash
# Sourced by scripts that run tests: clippy runs on each crate of the workspace as it is compiled.
# Warnings are errors. The crates are kept apart from those of a plain `cargo test`.
RUSTC_WORKSPACE_WRAPPER=$PWD/scripts/rustc-with-lints.sh
CLIPPY_ARGS=-Dwarnings__CLIPPY_HACKERY__
export RUSTC_WORKSPACE_WRAPPER CLIPPY_ARGS
