#!/usr/bin/env bash
# Tests the Go client library: formatting, lints, unit tests, the scenarios of clients/README.md
# against real nodes, all with the race detector, and the library's use from another module. Installs
# missing packages on Debian or Ubuntu (as root, or with sudo), and Go modules.
#
#   scripts/test-go.sh [GO TEST ARGUMENT...]
#
# The server is $TOLLGATE_BINARY, or the debug build of the workspace.
set -euo pipefail
cd "$(dirname "$0")/.."

# shellcheck source=scripts/lib-install.sh
. scripts/lib-install.sh
install_missing redis-server:redis-server jq:jq protoc:protobuf-compiler cc:build-essential curl:curl

target=$(realpath --canonicalize-missing "${CARGO_TARGET_DIR:-target}")
export TOLLGATE_BINARY=${TOLLGATE_BINARY:-$target/debug/tollgate}
[ -x "$TOLLGATE_BINARY" ] || {
  echo "$TOLLGATE_BINARY is missing: build the server, or set TOLLGATE_BINARY" >&2
  exit 1
}

# Go's own installer leaves it here.
export PATH="$PATH:/usr/local/go/bin"
command -v go >/dev/null || {
  echo "go is missing: install Go 1.25 or newer" >&2
  exit 1
}
# The race detector needs it.
export CGO_ENABLED=1

# shellcheck source=scripts/lib-flaky.sh
. scripts/lib-flaky.sh

say() { printf '\n== %(%T)T %s\n' -1 "$*"; }

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

say "Go client library: lints ($(go env GOVERSION))"
(
  cd clients/go
  unformatted=$(gofmt -l .)
  [ -z "$unformatted" ] || {
    echo "not formatted, run gofmt -w: $unformatted" >&2
    exit 1
  }
  go mod tidy -diff
  go vet ./...
  go run honnef.co/go/tools/cmd/staticcheck@v0.8.2 ./...
)

say "Go client library: generated code"
# Other versions of protoc generate other comments.
case "$(protoc --version)" in
'libprotoc 3.21.'*)
  clients/go/scripts/generate.sh "$work/pb"
  diff -r "$work/pb" clients/go/internal/pb || {
    echo "the generated code is stale: run clients/go/scripts/generate.sh" >&2
    exit 1
  }
  ;;
*) echo "not checked: it was generated with protoc 3.21, and here is $(protoc --version)" ;;
esac

say "Go client library: tests"
# A line for each failed test, and for each package that failed outside of its tests.
failed_tests() {
  jq -r 'select(.Action == "fail" and (.Test // "" | contains("/") | not)) | [.Package, .Test // "-"] | @tsv' "$1" |
    sort -u
}

# As in scripts/run-tests.py: those that have failed run again, and are red unless they pass twice. Not
# if a data race was found, or a program has ended before all of its tests.
run_failed_again() {
  local package test crashed failed flaky=()
  ! jq -r 'select(.Action == "output") | .Output' "$work/log" |
    grep -E '^(WARNING: DATA RACE|panic: |fatal error: |signal: )' || return 1
  # The race detector itself may crash in the bubbles of testing/synctest: golang/go#78156. The package
  # has to pass as a whole then.
  crashed=$(jq -r 'select(.Action == "output" and (.Output | startswith("ThreadSanitizer: CHECK failed"))) | .Package' \
    "$work/log" | sort -u)
  for package in $crashed; do
    printf '\nrun again, as the race detector has crashed: %s\n' "$package"
    go test -race -count=1 "$package" || go test -race -count=1 "$package" || go test -race -count=1 "$package" ||
      return 1
    flaky+=("$package (a crash of the race detector)")
  done
  failed=$(failed_tests "$work/log")
  while IFS=$'\t' read -r package test; do
    ! grep -qxF "$package" <<<"$crashed" || continue
    if [ "$test" = - ]; then
      # If none of its tests has failed, the package itself has.
      [ "$(cut -f1 <<<"$failed" | grep -cxF "$package")" -gt 1 ] || return 1
      continue
    fi
    printf '\nrun again: %s %s\n' "$package" "$test"
    go test -race -count=2 -run "^$test\$" "$package" </dev/null || return 1
    flaky+=("$package $test")
  done <<<"$failed"
  [ ${#flaky[@]} -gt 0 ] || return 1
  jq -rj 'select(.Action == "output") | .Output' "$work/log" >"$work/go.log"
  keep_flaky "$work/go.log" "${flaky[@]}"
}

(
  cd clients/go
  # -count=1: Go remembers results, and doesn't know that they depend on the node's binary.
  go test -race -parallel 4 -timeout 5m -count=1 -json "$@" ./... >"$work/log" || {
    jq -rj 'select(.Action == "output") | .Output' "$work/log"
    run_failed_again
  }
  jq -r 'select(.Action == "pass" and .Test == null) | "ok  \t\(.Package)\t\(.Elapsed)s"' "$work/log"
  jq -rs 'map(select(.Action == "pass" and .Test != null)) | "\(length) tests passed"' "$work/log"
)

say "Go client library: from another module"
# The program with which the README begins, which also links code that was generated from the same
# protobuf files by somebody else.
mkdir "$work/service" "$work/service/other"
awk '/^```/ { if (inside) exit; inside = $0 == "```go"; next } inside' clients/go/README.md |
  sed 's#^import (#&\n\t_ "service/other"\n#' >"$work/service/main.go"
GOBIN=$work go -C clients/go install google.golang.org/protobuf/cmd/protoc-gen-go
protoc -Iproto --plugin="$work/protoc-gen-go" --go_out="$work/service/other" \
  --go_opt=paths=source_relative --go_opt=Mquotaservice.proto=service/other quotaservice.proto
"$TOLLGATE_BINARY" serve --limits config/limits.yaml --log-format json --grpc-listen 127.0.0.1:0 \
  --http-listen 127.0.0.1:0 2>"$work/node.log" &
node=$!
trap 'kill $node; rm -rf "$work"' EXIT
for _ in $(seq 100); do
  read -r address http < <(jq -r 'select(.message == "serving") | "\(.grpc) \(.http)"' "$work/node.log") && break
  sleep 0.1
done
sed -i "s/127.0.0.1:10990/$address/" "$work/service/main.go"
(
  cd "$work/service"
  go mod init service
  go mod edit -require=github.com/tollgate/tollgate/clients/go@v0.0.0 \
    -replace="github.com/tollgate/tollgate/clients/go=$OLDPWD/clients/go"
  # The versions that the library was tested with, rather than the newest ones.
  cp "$OLDPWD/clients/go/go.sum" .
  go mod tidy
  go run . | tee output
  grep -q 'now read from the database' output
)
# The node has decided, not the fallback.
curl -fsS "http://$http/metrics" | grep 'tollgate_decisions_total{.*bucket="users".*outcome="granted"} 1$'
