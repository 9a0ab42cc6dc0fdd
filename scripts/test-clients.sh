#!/usr/bin/env bash
# Has many processes of the Rust, Python and Go libraries use one bucket and one resource: see
# clients/conformance. Needs the Python environment of scripts/test-python.sh.
set -euo pipefail
cd "$(dirname "$0")/.."

target=$(realpath --canonicalize-missing "${CARGO_TARGET_DIR:-target}")
python=$target/python/test/bin/python
[ -x "$python" ] || {
  echo "$python is missing: run scripts/test-python.sh" >&2
  exit 1
}

printf '\n== %(%T)T client libraries: many processes in three languages\n' -1
# shellcheck source=scripts/lib-build.sh
. scripts/lib-build.sh
cargo build --workspace --locked --quiet --bin tollgate --example worker
PATH="$PATH:/usr/local/go/bin" go -C clients/go build -o "$target/go-worker" ./internal/worker
# The library that was installed may be an older one.
PYTHONPATH=$PWD/clients/python PYTHONDONTWRITEBYTECODE=1 clients/conformance/run.py "$target/debug/tollgate" \
  "$(command -v redis-server)" "$target/debug/examples/worker" "$python" "$target/go-worker"
