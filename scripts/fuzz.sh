#!/usr/bin/env bash
# Runs the random tests with fresh seeds:
#   scripts/fuzz.sh [SECONDS]             for this long; 600 by default
#   scripts/fuzz.sh --seed SEED [TEST…]   one round with this seed, of all tests or of these
#
# In CI the tests always draw the same cases. Here each round draws a new seed and runs every test
# below with it; the last round ends when the time is over. For a failed test the script prints the
# command that repeats it with the same cases, and keeps its output in target/fuzz/. The exit code is
# 1 if a test has failed, and 2 if the tests don't build.
#
# A test adds the failing case to server/tests/fixtures itself, or prints it in its smallest form so
# that you can add it to the test. Commit the case together with the fix.
set -euo pipefail
cd "$(dirname "$0")/.."

# Name (for --seed), number of cases in a round, and cargo arguments of each test. The numbers of
# cases are chosen so that no test takes much longer than the others.
tests=(
  "hostile:3000:-p tollgate-server --test fuzz hostile::"
  "replies:20000:-p tollgate-server --lib any_reply"
  "units:20000:-p tollgate-server --lib -- config:: domain:: store::redis::keys transport::messages"
  "limits_files:2000:-p tollgate-server --test fuzz limits_files::"
  "hpack:5000:-p tollgate-server --lib transport::inbound::"
  "corrupt:200:-p tollgate-server --test redis corrupt::"
  "allow_differential:2000:-p tollgate-server --test fuzz allow_differential::"
  "lease_differential:500:-p tollgate-server --test fuzz lease_differential::"
  "throttle_differential:1000:-p tollgate-server --test fuzz throttle_differential::"
  "holds_differential:500:-p tollgate-server --test fuzz holds_differential::"
  "lease_properties:300:-p tollgate-server --test fuzz lease_properties::they_hold"
  "lease_tree_model:1000:-p tollgate-server --test fuzz lease_tree_model::"
  "prefetch_model:500:-p tollgate-server --test fuzz prefetch_model::"
)

usage() {
  echo "usage: scripts/fuzz.sh [SECONDS] | --seed SEED [TEST…]" >&2
  exit 2
}

seconds=600 seed='' only=()
if [ "${1-}" = --seed ]; then
  seed=${2-}
  [[ $seed =~ ^[0-9]+$ ]] || usage
  shift 2
  only=("$@")
elif [ $# -gt 0 ]; then
  seconds=$1
  [[ $# = 1 && $seconds =~ ^[1-9][0-9]*$ ]] || usage
fi

for name in "${only[@]}"; do
  [[ " ${tests[*]%%:*} " == *" $name "* ]] || {
    echo "no test is called $name; there are: ${tests[*]%%:*}" >&2
    exit 2
  }
done

# shellcheck source=scripts/lib-install.sh
. scripts/lib-install.sh
install_missing redis-server:redis-server

out="${CARGO_TARGET_DIR:-target}/fuzz"
mkdir -p "$out"

printf '== building\n'
for entry in "${tests[@]}"; do
  # shellcheck disable=SC2086 # these are several words
  cargo test --locked --quiet --no-run ${entry#*:*:} || exit 2
done

started=$SECONDS failures=0 runs=0

# Whether the time is over. With --seed, a round is always completed.
over() { [ -z "$seed" ] && ((SECONDS - started >= seconds)); }

# run_one NAME CASES SEED CARGO-ARGUMENT…
run_one() {
  local name=$1 cases=$2 with=$3 log status=0 limit=()
  shift 3
  log="$out/$name-$with.log"
  # The last test ends when the time is over, which is not a failure.
  [ -n "$seed" ] || limit=(timeout $((seconds - (SECONDS - started) + 1)))
  PROPTEST_RNG_SEED=$with PROPTEST_CASES=$cases \
    "${limit[@]}" cargo test --locked --quiet "$@" >"$log" 2>&1 || status=$?
  runs=$((runs + 1))
  # cargo succeeds even if a filter matches no test.
  if [ "$status" = 0 ] && ! grep -q '^test result: ok\. [1-9]' "$log"; then
    echo "no test ran" >>"$log"
    status=1
  fi
  if [ "$status" = 0 ] || { [ "$status" = 124 ] && [ -z "$seed" ]; }; then
    rm "$log"
    return
  fi
  failures=$((failures + 1))
  printf '\nFAILED: %s, output in %s; again:\n  scripts/fuzz.sh --seed %s %s\n' \
    "$name" "$log" "$with" "$name"
}

round() {
  local with=$1 entry name cases arguments
  for entry in "${tests[@]}"; do
    over && return
    # The text after the second colon may contain colons.
    IFS=: read -r name cases arguments <<<"$entry"
    [ ${#only[@]} = 0 ] || [[ " ${only[*]} " == *" $name "* ]] || continue
    # shellcheck disable=SC2086 # these are several words
    run_one "$name" "$cases" "$with" $arguments
  done
}

if [ -n "$seed" ]; then
  round "$seed"
else
  printf '== %s seconds\n' "$seconds"
  until over; do
    round "$(od -An -N6 -tu8 /dev/urandom | tr -d ' ')"
  done
fi
printf '== %s runs of tests in %s seconds, %s failed\n' "$runs" $((SECONDS - started)) "$failures"
((failures == 0))
