#!/usr/bin/env bash
# Runs all tests of server/tests/transport/clients, with the installed clients and with grpc-js and
# grpc-go, which it downloads and builds in a temporary folder. Prints the table of
# docs/compatibility.md. Installs missing packages on Debian or Ubuntu (as root, or with sudo);
# needs Rust, and Go 1.26.
set -euo pipefail
cd "$(dirname "$0")/.."

# shellcheck source=scripts/lib-install.sh
. scripts/lib-install.sh
install_missing redis-server:redis-server curl:curl jq:jq node:nodejs npm:npm \
  "import grpc:python3-grpcio" "import requests:python3-requests"
# Go's own installer leaves it here. Debian's is too old.
export PATH="$PATH:/usr/local/go/bin"
command -v go >/dev/null || {
  echo "go is missing: install Go 1.26 or newer" >&2
  exit 1
}

drivers=server/tests/fixtures/clients
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
mkdir "$folder/report"

cp -r "$drivers/grpc-js" "$folder"
(cd "$folder/grpc-js" && npm install --no-package-lock --no-audit --no-fund --loglevel=error >&2)
(cd "$drivers/grpc-go" && go build -o "$folder/grpc-go-driver" .)

result=0
TOLLGATE_GRPC_JS="$folder/grpc-js/driver.js" TOLLGATE_GRPC_GO="$folder/grpc-go-driver" \
  TOLLGATE_REPORT="$folder/report" \
  cargo test --locked --package tollgate-server --test transport --no-fail-fast "$@" -- clients:: || result=$?

# One row per scenario, one column per client.
jq --slurp --raw-output '
  (map(.client) | unique) as $clients
  | (["scenario"] + $clients | "| " + join(" | ") + " |"),
    ("|" + "---|" * (1 + ($clients | length))),
    (group_by(.scenario)[] | . as $rows
     | [$rows[0].scenario] + [$clients[] as $client
         | [$rows[] | select(.client == $client).statuses] | first // "–"]
     | "| " + join(" | ") + " |")
' "$folder"/report/*.json
exit "$result"
