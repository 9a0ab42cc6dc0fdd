#!/usr/bin/env bash
# Measures the cost of a decision, compared with an empty RPC:
#   scripts/bench.sh [--write] [OPTION…]
#
# Installs missing packages on Debian or Ubuntu (as root, or with sudo), builds tollgate, and starts
# Redis, the nodes, and the servers that they are compared with. Takes about a quarter of an hour;
# the machine should be idle otherwise. Writes a table in Markdown, all figures as JSON, and a plot
# to target/bench/; with --write, to docs/ (performance.md, performance.json, performance.svg).
# The options are those of `tollgate-loadtest bench`, such as --rounds 1 or --only redis/.
set -euo pipefail
cd "$(dirname "$0")/.."

say() { printf '\n== %s\n' "$*" >&2; }

write=
if [ "${1-}" = --write ]; then
  write=yes
  shift
fi

# shellcheck source=scripts/lib-install.sh
. scripts/lib-install.sh
install_missing redis-server:redis-server h2load:nghttp2-client cc:build-essential

command -v cargo >/dev/null || {
  echo "cargo is missing: install Rust 1.88 or newer" >&2
  exit 1
}

say "building"
cargo build --release --locked -p tollgate-server -p tollgate-loadtest

target="${CARGO_TARGET_DIR:-target}"
out="$target/bench"
mkdir -p "$out"

say "measuring"
"$target/release/tollgate-loadtest" bench --json-out "$out/performance.json" \
  --svg-out "$out/performance.svg" "$@" >"$out/performance.md"
cat "$out/performance.md"

if [ -z "$write" ]; then
  say "written to $out/; with --write as the first argument, into docs/"
  exit 0
fi

say "writing docs/performance.md, .json and .svg"
cp "$out/performance.json" "$out/performance.svg" docs/
# Replaces only the text between the two markers.
awk -v table="$out/performance.md" '
  /^<!-- bench: end -->$/ { inside = 0 }
  !inside { print }
  /^<!-- bench: begin -->$/ {
    inside = 1
    print ""
    while ((getline line < table) > 0) print line
    print ""
  }
' docs/performance.md >"$out/docs.md"
mv "$out/docs.md" docs/performance.md
