#!/usr/bin/env bash
# Checks the deployment files: the Compose file, the load balancer's configuration, the Prometheus
# rules, the dashboard and the shell scripts. Needs no container engine and no network, and starts
# no service.
#
#   scripts/check-deploy.sh
#
# On Debian and Ubuntu the tools come from:
#   apt-get install docker-compose haproxy openssl prometheus jq shellcheck yamllint
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."

readonly METRICS=server/src/metrics/names.rs
readonly RULES=config/prometheus/rules.yml
readonly DASHBOARDS=config/grafana/dashboards

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

failures=0
step() { printf '==> %s\n' "$*"; }
fail() {
  printf 'FAILED: %s\n' "$*" >&2
  failures=$((failures + 1))
}

# run WHAT COMMAND...: prints the output of the command only if it fails.
run() {
  local what=$1
  shift
  step "$what"
  if ! "$@" >"$scratch/out" 2>&1; then
    cat "$scratch/out" >&2
    fail "$what"
  fi
}

# --- tools ---------------------------------------------------------------------------

# need COMMAND PACKAGE
need() {
  command -v "$1" >/dev/null 2>&1 || fail "$1 is not installed (Debian package: $2)"
}
# haproxy is in a folder that is not on every user's PATH.
PATH=$PATH:/usr/local/sbin:/usr/sbin:/sbin
need haproxy haproxy
need openssl openssl
need promtool prometheus
need jq jq
need shellcheck shellcheck
need yamllint yamllint
if docker compose version >/dev/null 2>&1; then
  compose=(docker compose)
else
  need docker-compose docker-compose
  compose=(docker-compose)
fi
[[ -f $METRICS ]] || fail "$METRICS is missing: metric names can't be checked without it"
((failures == 0)) || exit 1

# --- Compose -------------------------------------------------------------------------

run "docker-compose.yml" "${compose[@]}" -f docker-compose.yml config -q

# --- load balancer -------------------------------------------------------------------

# The values of the Compose file, but with numeric addresses: its names resolve only in containers.
check_haproxy() {
  local n
  export TOLLGATE_LB_GRPC=127.0.0.1:10990 TOLLGATE_LB_HTTP=127.0.0.1:10991
  export TOLLGATE_LB_STATS=127.0.0.1:8404
  for n in 1 2 3; do
    export "NODE${n}_HOST=127.0.0.1" "NODE${n}_GRPC_PORT=1109$n" "NODE${n}_HTTP_PORT=1119$n"
  done
  haproxy -c -f config/haproxy.cfg >"$scratch/haproxy" 2>&1 || {
    cat "$scratch/haproxy"
    return 1
  }
  # A warning often becomes an error in a newer version.
  ! grep -F '[WARNING]' "$scratch/haproxy"
}
run "config/haproxy.cfg" check_haproxy

# The same with TLS on both sides.
check_haproxy_tls() (
  openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 1 -subj /CN=lb \
    -keyout "$scratch/lb.key" -out "$scratch/lb.crt" || return 1
  cat "$scratch/lb.crt" "$scratch/lb.key" >"$scratch/lb.pem"
  export TOLLGATE_LB_CERT=$scratch/lb.pem TOLLGATE_LB_NODES_CERT=$scratch/lb.pem
  export TOLLGATE_LB_NODES_CA=$scratch/lb.crt TOLLGATE_LB_NODES_NAME=nodes.example
  check_haproxy
)
run "config/haproxy.cfg with TLS" check_haproxy_tls

# Compose must set every variable that the file uses.
step "variables of config/haproxy.cfg in docker-compose.yml"
# shellcheck disable=SC2016 # the dollar is what is looked for
while read -r name; do
  grep -Eq "^ +$name:" docker-compose.yml || fail "docker-compose.yml does not set $name"
done < <(grep -v '^ *#' config/haproxy.cfg | grep -oE '\$\{[A-Z0-9_]+\}' | tr -d '${}' | sort -u)

# --- Prometheus ----------------------------------------------------------------------

run "config/prometheus.yml" promtool check config config/prometheus.yml
run "$RULES" promtool check rules "$RULES"
run "tests of $RULES" promtool test rules config/prometheus/rules_test.yml

# --- dashboards ----------------------------------------------------------------------

# queries FILE: prints every query of a dashboard on a line, with values for Grafana's variables.
# shellcheck disable=SC2016 # the dollar is what is looked for
queries() {
  jq -r '[.. | objects | .expr? | strings] | .[]' "$1" |
    sed -e 's/\$__rate_interval/5m/g' -e 's/\$__interval/1m/g' -e 's/\$__range/1h/g' \
      -e 's/\$[a-z_]*/x/g'
}

for dashboard in "$DASHBOARDS"/*.json; do
  run "$dashboard is JSON" jq -e '.uid and .title and (.panels | length > 0)' "$dashboard"
  run "$dashboard: panel ids differ" jq -e '[.panels[].id] | length == (unique | length)' "$dashboard"
  step "$dashboard: queries"
  queries "$dashboard" >"$scratch/queries" || fail "$dashboard: no queries could be read"
  [[ -s $scratch/queries ]] || fail "$dashboard has no query"
  jq -Rn '{groups: [{name: "dashboard", rules:
      [inputs | select(length > 0)] | to_entries | map({record: "q:\(.key)", expr: .value})}]}' \
    "$scratch/queries" >"$scratch/dashboard_rules.yml"
  run "$dashboard: queries parse" promtool check rules "$scratch/dashboard_rules.yml"
done

# --- metric names --------------------------------------------------------------------

# The program must export every metric that rules and dashboards use, and the rules must record every
# name with a colon.
step "metric names"
grep -ohE '[a-z_]*:?tollgate[a-z0-9_]*(:[a-z0-9_]+)*|tollgate:[a-z0-9_:]+' \
  <(sed 's/#.*//' "$RULES") "$DASHBOARDS"/*.json | sort -u >"$scratch/names"
checked=0
while read -r name; do
  case $name in
  *:*)
    grep -qF "record: $name" "$RULES" || fail "$name is recorded by no rule in $RULES"
    ;;
  tollgate_*)
    base=$name
    # A histogram has three exported names.
    [[ $name =~ ^(.*)_(bucket|sum|count)$ ]] && base=${BASH_REMATCH[1]}
    # Names of rule groups and of files match the same pattern.
    if grep -qE "^ *- name: $name\$" "$RULES"; then continue; fi
    grep -qwF -e "$name" -e "$base" "$METRICS" || fail "$name is not in $METRICS"
    checked=$((checked + 1))
    ;;
  esac
done <"$scratch/names"
((checked > 0)) || fail "found no metric names to check"

# --- scripts and YAML ----------------------------------------------------------------

scripts=(scripts/*.sh)
if [[ -f .ci/run ]]; then scripts+=(.ci/run); fi
run "shellcheck ${scripts[*]}" shellcheck "${scripts[@]}"

run "yamllint" yamllint --strict -c .yamllint.yml \
  .yamllint.yml docker-compose.yml config

if ((failures > 0)); then
  printf '%d checks failed\n' "$failures" >&2
  exit 1
fi
printf 'deployment files are sound\n'
