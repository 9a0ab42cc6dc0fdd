#!/usr/bin/env bash
# Runs all checks, here and in CI: formatting, lints, documentation, dependencies (with cargo-deny),
# deployment files, the instructions of a decision, the Python and the Go library, the clients of all
# three languages side by side, and tests. Installs missing packages on
# Debian or Ubuntu (as root, or with sudo).
#   scripts/test.sh           all
#   scripts/test.sh --quick   before each commit: formatting, lints, documentation, unit tests, the
#                             scenarios of token buckets on each store, the modules' dependencies
#   scripts/test.sh --write-counts   writes counts-of-tests.json of server/benches/instructions
set -euo pipefail
cd "$(dirname "$0")/.."

quick='' write=''
case "$*" in
'') ;;
--quick) quick=yes ;;
--write-counts) write=yes ;;
*)
  echo "usage: scripts/test.sh [--quick | --write-counts]" >&2
  exit 2
  ;;
esac

say() { printf '\n== %(%T)T %s\n' -1 "$*"; }

# haproxy is in /usr/sbin, which is not on every user's PATH.
export PATH="$PATH:/usr/sbin"

# shellcheck source=scripts/lib-install.sh
. scripts/lib-install.sh
install_missing redis-server:redis-server haproxy:haproxy promtool:prometheus \
  docker-compose:docker-compose jq:jq shellcheck:shellcheck yamllint:yamllint cc:build-essential curl:curl \
  valgrind:valgrind protoc:protobuf-compiler grpc_python_plugin:protobuf-compiler-grpc \
  "import grpc, google.protobuf:python3-grpcio" "import grpc, google.protobuf:python3-protobuf" \
  "import requests:python3-requests" node:nodejs

command -v cargo >/dev/null || {
  echo "cargo is missing: install Rust 1.88 or newer, with rustfmt and clippy" >&2
  exit 1
}
[ -n "$quick$write" ] || PATH="$PATH:/usr/local/go/bin" command -v go >/dev/null || {
  echo "go is missing: install Go 1.25 or newer" >&2
  exit 1
}

# The tests that failed, and passed when they ran again.
flaky="${CARGO_TARGET_DIR:-target}/flaky"
rm -rf "$flaky"

say "formatting"
cargo fmt --all --check

say "lints and builds"
# shellcheck source=scripts/lib-build.sh
. scripts/lib-build.sh
cargo test --workspace --all-targets --locked --no-run --quiet

count() {
  cargo test --workspace --bench instructions --locked --quiet -- "embedded store, hot" "$@"
}

if [ -n "$write" ]; then
  count --write
  exit
fi

say "documentation"
RUSTDOC=$PWD/scripts/rustdoc-without-tests.sh cargo test --workspace --doc --locked --quiet

if [ -n "$quick" ]; then
  say "tests"
  exec scripts/run-tests.py --quick --slowest 5
fi

say "dependencies"
if command -v cargo-deny >/dev/null; then
  cargo deny --locked check bans licenses sources
else
  echo "not checked: there is no cargo-deny (cargo install cargo-deny --locked)"
fi

say "deployment files"
scripts/check-deploy.sh

say "instructions of a decision"
count

# They begin each of their parts with a headline.
scripts/test-python.sh
scripts/test-go.sh
scripts/test-clients.sh

say "tests"
scripts/run-tests.py
[ ! -e "$flaky/clients.txt" ] || cat "$flaky/clients.txt"
