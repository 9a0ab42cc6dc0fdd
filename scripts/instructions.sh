#!/usr/bin/env bash
# Counts the instructions of a decision under valgrind, prints them beside the expected counts
# (server/benches/instructions/counts.json), and fails if they differ too much. With another version
# of rustc or Redis the counts may change: then update the expected counts.
#   scripts/instructions.sh              counts and compares
#   scripts/instructions.sh --write      writes the counts as the expected ones
#   scripts/instructions.sh --keep DIR   keeps the files of callgrind, for callgrind_annotate
#   scripts/instructions.sh embedded     only the counts whose name contains "embedded"
set -euo pipefail
cd "$(dirname "$0")/.."

# shellcheck source=scripts/lib-install.sh
. scripts/lib-install.sh
install_missing valgrind:valgrind redis-server:redis-server

# Uses the dependencies as built for the tests, so that they are not built again. The server crate is
# optimised as in a release.
built=()
for setting in opt-level=3 codegen-units=16 debug-assertions=false overflow-checks=false; do
  built+=(--config "profile.dev.package.tollgate-server.$setting")
done
# An incremental build changes the counts by a tenth.
export CARGO_INCREMENTAL=0
exec cargo bench --quiet --locked --profile dev "${built[@]}" \
  --workspace --bench instructions -- "$@"
