#!/usr/bin/env bash
# Starts a node and runs h2spec against both of its ports, in plaintext and over TLS. Fails if a test
# fails that docs/compatibility.md does not explain. Builds the node, unless $TOLLGATE names one. Installs
# missing packages on Debian or Ubuntu (as root, or with sudo); needs Go and Python.
set -euo pipefail
cd "$(dirname "$0")/.."

# shellcheck source=scripts/lib-install.sh
. scripts/lib-install.sh
install_missing openssl:openssl
# Go's own installer leaves it here.
export PATH="$PATH:/usr/local/go/bin"
command -v go >/dev/null || {
  echo "go is missing: install Go 1.25 or newer" >&2
  exit 1
}

version=v2.2.1+incompatible
target=$(realpath --canonicalize-missing "${CARGO_TARGET_DIR:-target}")
h2spec="$target/h2spec/h2spec"
node="${TOLLGATE:-$target/debug/tollgate}"

# The tests that may fail on each port, as section of h2spec and number in it. Some of them fail only
# occasionally.
declare -A explained=(
  [grpc]="generic/2/2 generic/2/3 http2/3.5/2 http2/5.1/2 http2/5.1.2/1 http2/6.4/2 http2/6.9.1/3 http2/8.1/1 http2/8.1.2.6/1 http2/8.1.2.6/2"
  [http]="http2/3.5/2 http2/5.1/2 http2/6.4/2 http2/8.1/1 http2/8.1.2.6/1 http2/8.1.2.6/2"
)

[ -n "${TOLLGATE-}" ] || cargo build --locked --package tollgate-server
[ -x "$h2spec" ] || GOBIN="$target/h2spec" go install "github.com/summerwind/h2spec/cmd/h2spec@$version"

work=$(mktemp -d)
pid=
trap '[ -z "$pid" ] || kill "$pid" 2>/dev/null; rm -rf "$work"' EXIT

openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 1 -subj /CN=localhost \
  -keyout "$work/key.pem" -out "$work/cert.pem" 2>/dev/null
cat >"$work/limits.yaml" <<'LIMITS'
namespaces:
  ns:
    buckets:
      b: { size: 1000, fill_rate: 1000 }
LIMITS

# The port that the node has logged.
port() { sed -n "s/.*\"$1\":\"127\.0\.0\.1:\([0-9]*\)\".*\"message\":\"serving\".*/\1/p; s/.*\"message\":\"serving\".*\"$1\":\"127\.0\.0\.1:\([0-9]*\)\".*/\1/p" "$work/log" | head -1; }

start() {
  "$node" serve --limits "$work/limits.yaml" --grpc-listen 127.0.0.1:0 --http-listen 127.0.0.1:0 \
    --log-format json "$@" 2>"$work/log" &
  pid=$!
  for _ in $(seq 200); do
    [ -n "$(port grpc)" ] && return
    sleep 0.1
  done
  echo "the node does not start:" >&2
  cat "$work/log" >&2
  exit 1
}

# Prints the failed tests, one per line, from h2spec's report in JUnit format.
failed() {
  python3 - "$1" <<'PYTHON'
import sys
import xml.etree.ElementTree as tree

for suite in tree.parse(sys.argv[1]).getroot().iter("testsuite"):
    for number, case in enumerate(suite.iter("testcase"), 1):
        if case.find("failure") is not None or case.find("error") is not None:
            print(f"{suite.get('package') or suite.get('id')}/{number} {case.get('classname')}")
PYTHON
}

bad=0
check() {
  local name=$1 report="$work/report.xml" test title
  shift
  "$h2spec" -h 127.0.0.1 -p "$(port "$name")" -o 3 -j "$report" "$@" >"$work/out" 2>&1 || true
  tail -1 "$work/out"
  while read -r test title; do
    if [[ " ${explained[$name]} " == *" $test "* ]]; then
      echo "  explained: $test $title"
    else
      echo "  FAILED: $test $title"
      bad=1
    fi
  done < <(failed "$report")
}

for how in plaintext TLS; do
  if [ "$how" = TLS ]; then
    start --tls-cert-file "$work/cert.pem" --tls-key-file "$work/key.pem"
    tls=(-t -k)
  else
    start
    tls=()
  fi
  for name in grpc http; do
    echo "== $name, $how"
    check "$name" -P /healthz "${tls[@]}"
  done
  kill "$pid"
  wait "$pid" || true
  pid=
done
exit "$bad"
