#!/usr/bin/env bash
# Runs all checks, here and in CI: formatting, lints, documentation, deployment files, all tests, and
# the instructions of a decision. Installs missing packages on Debian or Ubuntu (as root, or with
# sudo).
set -euo pipefail
cd "$(dirname "$0")/.."

say() { printf '\n== %s\n' "$*"; }

# haproxy is in /usr/sbin, which is not on every user's PATH.
export PATH="$PATH:/usr/sbin"

# shellcheck source=scripts/lib-install.sh
. scripts/lib-install.sh
install_missing redis-server:redis-server haproxy:haproxy promtool:prometheus \
  docker-compose:docker-compose jq:jq shellcheck:shellcheck yamllint:yamllint cc:gcc curl:curl \
  valgrind:valgrind protoc:protobuf-compiler grpc_python_plugin:protobuf-compiler-grpc \
  "import grpc, google.protobuf:python3-grpcio" "import grpc, google.protobuf:python3-protobuf" \
  "import requests:python3-requests" node:nodejs

command -v cargo >/dev/null || {
  echo "cargo is missing: install Rust 1.88 or newer, with rustfmt and clippy" >&2
  exit 1
}

say "formatting"
cargo fmt --all --check

say "lints"
cargo clippy --workspace --all-targets --locked -- -D warnings

say "dependencies"
if command -v cargo-deny >/dev/null; then
  cargo deny --locked check bans licenses sources
else
  echo "not checked: there is no cargo-deny (cargo install cargo-deny --locked)"
fi

say "documentation"
RUSTDOCFLAGS="-D warnings" cargo doc --workspace --no-deps --locked --quiet

say "deployment files"
scripts/check-deploy.sh

say "tests"
cargo test --workspace --locked --no-fail-fast

say "instructions of a decision"
scripts/instructions.sh
