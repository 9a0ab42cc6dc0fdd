#!/usr/bin/env bash
# Prints the table of the effects of each fault on tollgate:
#   scripts/reliability.sh [--write] [--from DIR | MODULE…]
#
# Runs the tests that write rows of the table: all, or those of modules such as redis::sentinel. With
# --write, it also puts the table into docs/reliability.md, which needs all rows. Each test starts its
# own Redis and nodes. Takes some minutes; the machine should be idle otherwise, because the figures
# are measured on it, in an unoptimised build. With --from, it runs no tests, and uses the rows that
# tests have written to DIR, the value of TOLLGATE_REPORT.
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
  modules=("$@")
  if [ ${#modules[@]} = 0 ]; then
    mapfile -t modules < <(grep -rlE 'report::Row|trial::.*Trial' server/tests --include='*.rs' |
      sed -E 's,^server/tests/(.*)\.rs$,\1,; s,/,::,' | sort)
  fi

  rows=$work/rows
  mkdir "$rows"
  # One test at a time, so that none disturbs the figures of another. A failure does not stop the rest.
  for module in "${modules[@]}"; do
    TOLLGATE_ALONE=1 TOLLGATE_STRICT=1 TOLLGATE_REPORT=$rows \
      cargo test --locked -p tollgate-server --test "${module%%::*}" -- "${module#*::}::" \
      --include-ignored --nocapture --test-threads 1 >&2 || failed=yes
  done
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
