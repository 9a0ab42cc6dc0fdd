#!/usr/bin/env bash
# Compiles a crate of the workspace and runs clippy on it in the same pass: cargo calls it in place of
# rustc, as scripts/test.sh asks it to. So the dependencies are compiled once for lints and tests.
#
# Test crates are not optimised, which halves the time that their compilation takes. `fuzz` is, as its
# own code takes most of its time.
set -euo pipefail
if [ "${CARGO_CRATE_NAME-}" != fuzz ] && [[ " $* " == *" --test "* ]]; then
  set -- "$@" -C opt-level=0
fi
exec clippy-driver "$@"
