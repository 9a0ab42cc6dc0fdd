#!/usr/bin/env bash
# Runs what takes too long for CI; run it before you close an issue. Installs missing packages on Debian
# or Ubuntu (as root, or with sudo); needs Rust, and Go 1.26. By default it takes up to two hours:
#   scripts/full.sh [OPTION…]
#     --repeat N          runs of each test of order (20); those of time run a quarter as often
#     --fuzz-seconds N    duration of the random tests with fresh seeds (600)
#     --soak-minutes N    duration of the load on nodes (10)
#     --suite N           additional runs of the whole test suite (0)
#     --busy N            busy loops that compete for the CPUs meanwhile (0)
#     --only PART…        only these parts: slow instructions docs package libraries clock repeat fuzz
#                         refusals abuse clients h2spec soak reliability suite
#
#   slow          the tests that scripts/test.sh leaves out because they wait, or measure memory or
#                 a rate; and tests of several nodes, whose figures are judged here
#   instructions  scripts/instructions.sh
#   docs          the documentation, as `cargo doc` makes it, and the examples in it
#   package       the Rust client library as crates that can be published, each built alone
#   libraries     the Python and the Go client library: how late calls are while the network fails, and
#                 what a call costs
#   clock         the tests of scripts/clock-tests.txt, which judge durations, several times
#   repeat        the tests whose verdict depends on an order
#   fuzz          scripts/fuzz.sh
#   refusals      100,000 refusals of each kind on one connection
#   abuse         server/tests/abuse in an optimised build, with the cases that CI leaves out
#   clients       scripts/clients.sh: third-party clients
#   h2spec        scripts/h2spec.sh: conformance of both ports
#   soak          scripts/soak.sh
#   reliability   scripts/reliability.sh
#   suite         scripts/run-tests.py, the tests of scripts/test.sh
#
# A part that fails does not stop the others. Each part writes a log to target/full/. The output ends
# with a table, and the exit code is 1 if a part has failed.
set -euo pipefail
cd "$(dirname "$0")/.."

# Left in a shell that has sourced scripts/lib-build.sh, they would take the optimisation, and put debug
# assertions, into test crates that are built for measuring. scripts/run-tests.py sets its own.
unset RUSTC_WORKSPACE_WRAPPER CLIPPY_ARGS

repeat=20 fuzz_seconds=600 soak_minutes=10 suite=0 busy=0
parts=(slow instructions docs package libraries clock repeat fuzz refusals abuse clients h2spec soak reliability)
known=" ${parts[*]} suite "

usage() {
  sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0" >&2
  exit 2
}

number() { [[ ${1-} =~ ^[0-9]+$ ]] || usage; }

only=()
while [ $# -gt 0 ]; do
  case $1 in
  --repeat) number "${2-}" && repeat=$2 && shift 2 ;;
  --fuzz-seconds) number "${2-}" && fuzz_seconds=$2 && shift 2 ;;
  --soak-minutes) number "${2-}" && soak_minutes=$2 && shift 2 ;;
  --suite) number "${2-}" && suite=$2 && shift 2 ;;
  --busy) number "${2-}" && busy=$2 && shift 2 ;;
  --only)
    shift
    while [ $# -gt 0 ] && [[ $1 != --* ]]; do
      [[ $known == *" $1 "* ]] || usage
      only+=("$1")
      shift
    done
    [ ${#only[@]} -gt 0 ] || usage
    ;;
  *) usage ;;
  esac
done
((suite == 0)) || parts+=(suite)
[ ${#only[@]} = 0 ] || parts=("${only[@]}")

# Not on every user's PATH: haproxy is in the first folder, and Go in the second, if its own installer
# put it there.
export PATH="$PATH:/usr/sbin:/usr/local/go/bin"

# shellcheck source=scripts/lib-install.sh
. scripts/lib-install.sh
install_missing redis-server:redis-server haproxy:haproxy jq:jq curl:curl valgrind:valgrind \
  cc:build-essential openssl:openssl protoc:protobuf-compiler \
  grpc_python_plugin:protobuf-compiler-grpc node:nodejs \
  "import grpc, google.protobuf:python3-grpcio" "import grpc, google.protobuf:python3-protobuf" \
  "import requests:python3-requests"
for program in cargo go; do
  command -v "$program" >/dev/null || {
    echo "$program is missing" >&2
    exit 1
  }
done

out="${CARGO_TARGET_DIR:-target}/full"
mkdir -p "$out"

# --- parts -----------------------------------------------------------------------

# A test binary, and the names of its tests to run; without names, all of them.
ordered=(
  "security node::a_changed_file_counts_at_once"
  "redis corrupt::servers::"
  "transport overload::"
  "cli warnings::"
  "fuzz hostile::"
  "allow exactness::"
  "allow fairness::"
  "transport drain::"
  "limits reload::"
  "security tls_server::"
  "transport http::"
  "redis faults::"
  "faults outage::"
  "leases outage::"
  "redis topology::"
  "cluster balancer::"
)

# Whether at least one test ran: cargo succeeds even if a filter matches no test.
any_ran() { grep -q '^test result: ok\. [1-9]' "$1"; }

# Fails if any run has failed, and prints how many.
repeat() {
  local entry name filters run failed total=0
  for entry in "${ordered[@]}"; do
    read -r name filters <<<"$entry"
    failed=0
    for run in $(seq "$repeat"); do
      # shellcheck disable=SC2086 # several names
      cargo test --locked --quiet -p tollgate-server --test "$name" -- $filters \
        >"$out/run.log" 2>&1 && any_ran "$out/run.log" && continue
      failed=$((failed + 1))
      mv "$out/run.log" "$out/repeat-${entry//[^a-z_]/-}-$run.log"
    done
    echo "$entry: $failed of $repeat failed"
    total=$((total + failed))
  done
  ((total == 0))
}

refusals() {
  TOLLGATE_REFUSALS=100000 cargo test --release --locked -p tollgate-server --lib \
    refusals_do_not_close_the_connection 2>&1 | tee "$out/refusals-run.log"
  any_ran "$out/refusals-run.log"
}

suite() {
  local run
  for run in $(seq "$suite"); do
    echo "run $run of $suite"
    scripts/run-tests.py --no-rerun || return 1
  done
}

# The test with a flood needs an optimised build.
slow() {
  local failed=0
  scripts/run-tests.py --no-rerun --ignored --except a_flood_of || failed=1
  scripts/run-tests.py --no-rerun --alone --only "tollgate-server allow " || failed=1
  scripts/run-tests.py --no-rerun --alone --only "tollgate-server cluster " || failed=1
  scripts/run-tests.py --no-rerun --alone --only "tollgate-server redis " || failed=1
  scripts/run-tests.py --no-rerun --alone --only "tollgate-server leases tree" || failed=1
  cargo test --release --locked -p tollgate-server --test allow a_flood_of -- --ignored \
    2>&1 | tee "$out/flood-run.log" || failed=1
  any_ran "$out/flood-run.log" || failed=1
  return "$failed"
}

docs() {
  RUSTDOCFLAGS="-D warnings" cargo doc --workspace --no-deps --locked --all-features
  cargo test --workspace --doc --locked
}

package() {
  cargo package --locked --allow-dirty -p tollgate-common -p tollgate-proto -p tollgate-client
}

libraries() {
  local target node address
  target=$(realpath "${CARGO_TARGET_DIR:-target}")
  cargo build --locked -p tollgate-server
  TOLLGATE_ALONE=1 scripts/test-python.sh -n 0 tests/scenarios/test_storm.py \
    tests/scenarios/test_faults.py::test_a_slow_node_delays_no_call_beyond_its_deadline
  TOLLGATE_ALONE=1 scripts/test-go.sh -run "FaultAfterFault|DemandBeyond|RatesOfSeveral"
  TOLLGATE_BINARY=$target/debug/tollgate go -C clients/go test -run '^$' -bench . -count 5 ./internal/scenarios
  echo 'global_default_bucket: { size: 1000000, fill_rate: 1000000 }' >"$out/open.yaml"
  rm -f "$out/node.log"
  "$target/debug/tollgate" serve --limits "$out/open.yaml" --log-format json \
    --grpc-listen 127.0.0.1:0 --http-listen 127.0.0.1:0 2>"$out/node.log" &
  node=$!
  until address=$(jq -re 'select(.message == "serving") | .grpc' "$out/node.log"); do
    kill -0 "$node" || { cat "$out/node.log" && return 1; }
    sleep 0.1
  done
  PYTHONPATH=clients/python "$target/python/test/bin/python" -B clients/python/tests/measure_cost.py "$address" ||
    { kill "$node" && return 1; }
  # What follows must not run beside a node that ends.
  kill "$node" && wait "$node"
}

run_part() {
  case $1 in
  slow) slow ;;
  instructions) scripts/instructions.sh ;;
  docs) docs ;;
  package) package ;;
  libraries) libraries ;;
  clock) scripts/run-tests.py --no-rerun --clock --repeat $(((repeat + 3) / 4)) ;;
  repeat) repeat ;;
  fuzz) scripts/fuzz.sh "$fuzz_seconds" ;;
  refusals) refusals ;;
  abuse) scripts/abuse.sh 4 ;;
  clients) scripts/clients.sh ;;
  h2spec) scripts/h2spec.sh ;;
  soak) scripts/soak.sh "$soak_minutes" ;;
  reliability) scripts/reliability.sh ;;
  suite) suite ;;
  esac
}

# --- run -------------------------------------------------------------------------

loops=()
# shellcheck disable=SC2317 # the trap calls it
finish() { [ ${#loops[@]} = 0 ] || kill "${loops[@]}" 2>/dev/null || true; }
trap finish EXIT
for _ in $(seq "$busy"); do
  while :; do :; done &
  loops+=($!)
done

table=() failed=0 begun=$SECONDS
for part in "${parts[@]}"; do
  log="$out/$part.log" started=$SECONDS
  printf '== %s, log in %s\n' "$part" "$log"
  # Not in a condition: `set -e` would have no effect inside the part.
  set +e
  (
    set -e
    run_part "$part"
  ) >"$log" 2>&1
  status=$?
  set -e
  verdict=ok
  if [ "$status" != 0 ]; then
    verdict=FAILED failed=1
    tail -n 20 "$log"
  fi
  printf '== %s: %s after %s s\n' "$part" "$verdict" $((SECONDS - started))
  table+=("| $part | $verdict | $((SECONDS - started)) | $log |")
done

printf '\n| part | verdict | seconds | log |\n|---|---|---:|---|\n'
printf '%s\n' "${table[@]}"
printf '\n%s minutes in all\n' $(((SECONDS - begun + 59) / 60))
exit "$failed"
