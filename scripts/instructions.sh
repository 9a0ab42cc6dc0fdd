#!/usr/bin/env bash
# Counts the instructions of a decision under valgrind, prints them beside what is expected
# (server/benches/instructions/counts.json), and fails where they are too far off. Another rustc or
# Redis may count otherwise: then renew what is expected.
#   scripts/instructions.sh              counts, and compares
#   scripts/instructions.sh --write      takes what is counted for what is expected
#   scripts/instructions.sh --keep DIR   keeps callgrind's files, for callgrind_annotate
#   scripts/instructions.sh embedded     only those whose name has that in it
set -euo pipefail
cd "$(dirname "$0")/.."

# shellcheck source=scripts/lib-install.sh
. scripts/lib-install.sh
install_missing valgrind:valgrind redis-server:redis-server

# The libraries are those of the tests, so that they need not be built once more; the server is
# optimised as in a release.
built=()
for setting in opt-level=3 codegen-units=16 debug-assertions=false overflow-checks=false; do
  built+=(--config "profile.dev.package.tollgate-server.$setting")
done
# Built in pieces or as a whole, the same source counts otherwise by a tenth.
export CARGO_INCREMENTAL=0
exec cargo bench --quiet --locked --profile dev "${built[@]}" \
  --workspace --bench instructions -- "$@"
