#!/usr/bin/env bash
# Runs every attack of server/tests/abuse on nodes on loopback, in an optimised build, and prints the
# table of docs/overload.md:
#   scripts/abuse.sh [SECONDS]     how long each attack lasts; 10 by default
# The machine should be idle otherwise, because latencies are measured. Fails if an attack fails, or
# if a row of the table is missing.
set -euo pipefail
cd "$(dirname "$0")/.."

# shellcheck source=scripts/lib-install.sh
. scripts/lib-install.sh
install_missing redis-server:redis-server jq:jq

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

result=0
TOLLGATE_ABUSE_SECONDS="${1:-10}" TOLLGATE_REPORT="$folder" TOLLGATE_ALONE=1 \
  cargo test --release --locked --package tollgate-server --test abuse --no-fail-fast \
  -- --test-threads 1 --nocapture >&2 || result=$?

table() {
  printf '%s\n' "p50, p99 of decisions; p99 of new connections; failures. Times in ms." ""
  jq --slurp --raw-output '
    "| attack | before | during | after | beside a busy loop | CPUs used | memory |",
    "|---|---|---|---|---|---|---|",
    (sort_by(.attack)[]
     | "| \(.attack) | \(.before) | \(.during) | \(.after) | \(.busy) | \(.cpus) | \(.memory) |")
  ' "$folder"/abuse-*.json
}

table | tee "$folder/table.md"
while read -r attack; do
  grep --quiet --fixed-strings "| $attack |" "$folder/table.md" && continue
  echo "no row: $attack" >&2
  result=1
done < <(sed -n '/^| attack | before/,/^$/s/^| \([^|]*\) | [0-9].*/\1/p' docs/overload.md)
exit "$result"
