#!/usr/bin/env bash
# What each fault does to tollgate, as a table: scripts/reliability.sh [--write] [--from DIR | TEST…]
#
# Runs the tests that write rows of the table (all, or those in the given files of server/tests), and
# prints it; with --write, also puts it into docs/reliability.md, which takes all of them. Each
# test starts its own Redis and its own nodes. Takes some minutes, in which the machine should
# have nothing else to do: the figures are of this machine, in an unoptimised build. With --from, no
# test is run: the rows are those that tests have written to DIR, as in
# TOLLGATE_REPORT=DIR scripts/test.sh.
set -euo pipefail
cd "$(dirname "$0")/.."

write=
if [ "${1-}" = --write ]; then
  write=yes
  shift
fi

rows=
if [ "${1-}" = --from ]; then
  rows=${2:?a directory with rows}
  shift 2
fi

[ -z "$write" ] || [ $# = 0 ] || {
  echo "the table in docs/reliability.md has the rows of all tests: --write takes no names" >&2
  exit 2
}

# shellcheck source=scripts/lib-install.sh
. scripts/lib-install.sh
install_missing redis-server:redis-server jq:jq

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

failed=
if [ -z "$rows" ]; then
  # A test is a file, or a directory.
  tests=("$@")
  if [ ${#tests[@]} = 0 ]; then
    mapfile -t tests < <(grep -rlE 'report::Row|faults::trial' server/tests --include='*.rs' |
      grep -v '/support/' | cut -d/ -f3 | sed 's/\.rs$//' | sort -u)
  fi
  only=()
  for test in "${tests[@]}"; do only+=(--test "$test"); done

  rows=$work/rows
  mkdir "$rows"
  # One at a time: they would measure one another. All of them, also where one fails.
  TOLLGATE_STRICT=1 TOLLGATE_REPORT=$rows cargo test --locked --no-fail-fast -p tollgate-server "${only[@]}" -- \
    --nocapture --test-threads 1 >&2 || failed=yes
fi

table=$(
  printf '%s\n' \
    '| Fault | Meanwhile | Slowest decision | Recovery | Tokens | Test |' \
    '|---|---|---|---|---|---|'
  for row in "$rows"/*.json; do
    jq -r '"| \(.fault) | \(.meanwhile) | \(.worst) | \(.recovery) | \(.tokens) | `\(.test)` |"' "$row"
  done
)
printf '%s\n' "$table"

[ -z "$failed" ] || {
  echo "a test failed: the table is not written" >&2
  exit 1
}
[ -n "$write" ] || exit 0
{
  sed '/<!-- faults: begin -->/q' docs/reliability.md
  printf '%s\n' "$table"
  sed -n '/<!-- faults: end -->/,$p' docs/reliability.md
} >"$work/reliability.md"
cp "$work/reliability.md" docs/reliability.md
