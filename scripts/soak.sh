#!/usr/bin/env bash
# Runs three nodes on one Redis under mixed load, and checks that their use of resources does not
# grow:
#   scripts/soak.sh [MINUTES]        10 by default; may be hours
#
# The load is some hundred requests a second: buckets of several kinds, leases whose holders come and
# go, invalid requests, new connections, a reload of the limits every half minute, and six restarts of
# Redis without data. Every five seconds the script samples the memory, open files, threads and metric
# series of each node, and the memory of Redis. It prints a table in Markdown with a verdict on each
# line, and exits with 1 if a verdict is FAILS. All samples and logs are kept in target/soak/.
#
# No request may fail, with one exception: leases can't be released while Redis is down, which may
# affect every holder of a round, once per restart. At least half of the intended decisions and lease
# requests must be answered: a node or a load that has stopped must not pass.
#
# A value passes if the last third of the run does not exceed the second third by more than a
# tolerance. The first third does not count, because tables and pools grow to their size in it.
#
#   memory of a node     median; 5 % plus 2 MiB. The allocator keeps freed memory, so that the median
#                        varies by this much between two equal thirds. In ten minutes a node gets
#                        some 29,000 requests per third, which reveals a leak of 130 bytes per
#                        request; an hour reveals one of 22 bytes, a day one of a byte. In runs of
#                        less than ten minutes 8 MiB instead of 2: the buckets in the nodes' own
#                        memory, one for each requested key, are not all created by then.
#   open files           median; 6, for connections that happen to be open. In runs of less than ten
#                        minutes 20, because a restart is then a large part of each third. After the
#                        load has ended, only the files from before it and the connections to Redis
#                        may be open.
#   threads              maximum; 0
#   series of metrics    maximum; 0, because no name that a caller invents may become a series
#   memory of Redis      maximum; 10 % plus 1 MiB. Each third has two restarts and the whole load
set -euo pipefail
cd "$(dirname "$0")/.."

minutes=${1:-10}
[[ $minutes =~ ^[1-9][0-9]*$ ]] || {
  echo "usage: scripts/soak.sh [MINUTES]" >&2
  exit 2
}
for tool in redis-server redis-cli jq curl cargo; do
  command -v "$tool" >/dev/null || {
    echo "$tool is missing (Debian: redis-server redis-tools jq curl)" >&2
    exit 2
  }
done

say() { printf '== %s\n' "$*" >&2; }

if [ -z "${SOAK_BUILT-}" ]; then
  say "building"
  cargo build --release --locked -p tollgate-server -p tollgate-loadtest
fi
bin="${CARGO_TARGET_DIR:-target}/release"
out="${CARGO_TARGET_DIR:-target}/soak"
rm -rf "$out"
mkdir -p "$out"

# --- what runs -----------------------------------------------------------------------

started=() redis_pid=
# shellcheck disable=SC2317 # the trap calls it
finish() {
  # Some processes have already ended.
  kill "${started[@]}" "$redis_pid" 2>/dev/null || true
  wait 2>/dev/null || true
}
trap finish EXIT

# Writes the limits file; some limits change each time.
limits() {
  cat >"$out/limits.new" <<YAML
global_default_bucket: { size: $((100 + $1 % 7)), fill_rate: 50 }
namespaces:
  users:
    max_dynamic_buckets: 5000
    dynamic_bucket_template: { size: $((5 + $1 % 3)), fill_rate: 1, max_idle_millis: 30000 }
  spread: { dynamic_bucket_template: { size: 20, fill_rate: 2 } }
  hot:
    buckets:
      hot: { size: 2000, fill_rate: 2000, prefetch: 100 }
  local:
    on_store_failure: local
    buckets: { hot: { size: 50, fill_rate: 40, wait_timeout_millis: 50 } }
  deny: { on_store_failure: deny, buckets: { hot: { size: 50, fill_rate: 40 } } }
resources:
  - identifier_glob: "load.*"
    capacity: $((500 + $1 % 5))
    algorithm:
      { kind: FAIR_SHARE, lease_length: 20, refresh_interval: 2, learning_mode_duration: 5 }
YAML
  mv "$out/limits.new" "$out/limits.yaml"
}

redis() {
  redis-server --port "$redis_port" --bind 127.0.0.1 --save '' --appendonly no \
    --maxmemory-policy noeviction --dir "$out" >>"$out/redis.log" 2>&1 &
  redis_pid=$!
  for _ in $(seq 100); do
    redis-cli -p "$redis_port" ping >/dev/null 2>&1 && return
    sleep 0.1
  done
  say "Redis does not start on port $redis_port"
  exit 2
}

redis_port=$((20000 + RANDOM % 10000))
redis
limits 0

nodes=() grpc=() http=()
for n in 0 1 2; do
  "$bin/tollgate" serve --store "redis://127.0.0.1:$redis_port" --limits "$out/limits.yaml" \
    --grpc-listen 127.0.0.1:0 --http-listen 127.0.0.1:0 --node-id "soak-$n" \
    --log-format json 2>"$out/node$n.log" &
  nodes+=($!)
  started+=($!)
  for _ in $(seq 100); do
    serving=$(grep -m1 '"message":"serving"' "$out/node$n.log") && break
    sleep 0.1
  done
  grpc+=("$(jq -r .grpc <<<"$serving")")
  http+=("$(jq -r .http <<<"$serving")")
done
sleep 3

files() { find "/proc/$1/fd" -mindepth 1 2>/dev/null | wc -l; }

before=()
for pid in "${nodes[@]}"; do before+=("$(files "$pid")"); done

# --- load ----------------------------------------------------------------------------

seconds=$((minutes * 60))
end=$((SECONDS + seconds))
targets=()
for address in "${grpc[@]}"; do targets+=(--target "$address"); done

# Redis restarts without data, so the grants are not audited.
asked=0
steady() { # RATE OPTION...
  asked=$((asked + $1 * seconds))
  "$bin/tollgate-loadtest" allow "${targets[@]}" --duration "${seconds}s" --json --rate "$@" \
    >>"$out/allow.json" 2>>"$out/load.log" &
  started+=($!)
}
steady 100 --namespace users --keys zipf:20000 --arrivals poisson
steady 100 --namespace spread --keys uniform:5000
steady 100 --namespace hot
steady 60 --namespace local --arrivals poisson
steady 40 --namespace deny
steady 20 --namespace nobody --keys uniform:100000

# Clients that release their leases at the end, and others that do not. Each refreshes every two
# seconds.
holders=60
leases_asked=$(((seconds - 20) * holders / 2))
churn() {
  local round=0 keep
  while ((SECONDS < end - 20)); do
    round=$((round + 1))
    keep=()
    ((round % 2)) || keep=(--keep-leases)
    "$bin/tollgate-loadtest" capacity "${targets[@]}" --clients "$holders" --resources 20 \
      --resources-per-client 2 --client-prefix "c$round-" --warmup 1s --duration 15s "${keep[@]}" \
      --json >>"$out/capacity.json" 2>>"$out/load.log" || true
  done
}
churn &
started+=($!)

post() { curl -s -m 5 --data-binary "$2" "$1/v1/allow"; }

# Twenty new connections in each round, and invalid requests on both ports.
coming_and_going() {
  local round=0 node url
  while ((SECONDS < end - 5)); do
    round=$((round + 1))
    "$bin/tollgate-loadtest" allow "${targets[@]}" --namespace hot --connections 20 --rate 20 \
      --warmup 0s --duration 1s --json >>"$out/brief.json" 2>>"$out/load.log" || true
    node=$((round % 3))
    url="http://${http[node]}"
    {
      post "$url" '{'
      post "$url" "{\"namespace\":\"made-up-$round\",\"bucketName\":\"b-$round\"}"
      post "$url" '{"namespace":"users","bucketName":"u","tokensRequested":"1000000"}'
      post "$url" "{\"namespace\":\"\",\"bucketName\":\"$(printf 'x%.0s' {1..2000})\"}"
      head -c 300000 /dev/zero | post "$url" @-
      curl -s -m 5 "$url/no/such/page/$round"
      # Neither HTTP nor gRPC, and a connection that closes without a request.
      printf 'no protocol at all\r\n\r\n' >"/dev/tcp/${grpc[node]/://}"
      : >"/dev/tcp/${grpc[node]/://}"
    } >>"$out/wrong.log" 2>&1 || true
  done
}
coming_and_going &
started+=($!)

# --- samples -------------------------------------------------------------------------

say "$minutes minutes"
samples="$out/samples.csv"
echo "second,what,of,value" >"$samples"
begun=$SECONDS
sixth=$((seconds / 6))
restarts=0 reloads=0 gone=
while ((SECONDS < end)); do
  now=$((SECONDS - begun))
  for n in 0 1 2; do
    pid=${nodes[n]}
    kill -0 "$pid" 2>/dev/null || {
      gone="node $n ended"
      break 2
    }
    {
      awk -v s="$now" -v n="$n" '/^VmRSS/ { print s ",rss," n "," $2 }
        /^Threads/ { print s ",threads," n "," $2 }' "/proc/$pid/status"
      echo "$now,files,$n,$(files "$pid")"
      echo "$now,series,$n,$(curl -s -m 5 "http://${http[n]}/metrics" | grep -vc '^#')"
    } >>"$samples"
  done
  memory=$(redis-cli -p "$redis_port" info memory 2>/dev/null | tr -d '\r' |
    sed -n 's/^used_memory://p')
  [ -z "$memory" ] || echo "$now,redis,0,$((memory / 1024))" >>"$samples"
  if ((now / 30 > reloads)); then
    reloads=$((now / 30))
    limits "$reloads"
  fi
  # In the middle of each sixth of the run, so that each third has two restarts.
  if ((now >= sixth * restarts + sixth / 2)); then
    restarts=$((restarts + 1))
    kill -9 "$redis_pid"
    wait "$redis_pid" 2>/dev/null || true
    sleep 3
    redis
  fi
  sleep 5
done
# --- verdict -------------------------------------------------------------------------

say "the load ends"
sleep 15
after=()
for pid in "${nodes[@]}"; do after+=("$(files "$pid" || true)"); done

third() { # WHAT OF FROM TO FUNCTION: median or most of the samples of a time
  awk -F, -v what="$1" -v of="$2" -v from="$3" -v to="$4" \
    '$2 == what && $3 == of && $1 >= from && $1 < to { print $4 }' "$samples" | sort -n |
    awk -v wanted="$5" '{ v[NR] = $1 }
      END { print NR == 0 ? "-" : wanted == "most" ? v[NR] : v[int((NR + 1) / 2)] }'
}

failed=0 verdicts=()
judge() { # HOLDS SAYS: HOLDS is 1 or 0
  if (($1)); then
    verdicts+=("ok: $2")
  else
    verdicts+=("FAILS: $2")
    failed=1
  fi
}
row() { # TITLE WHAT OF FUNCTION PERCENT PLUS
  local second last most verdict=flat
  second=$(third "$2" "$3" $((seconds / 3)) $((seconds * 2 / 3)) "$4")
  last=$(third "$2" "$3" $((seconds * 2 / 3)) "$seconds" "$4")
  if [ "$second" = - ] || [ "$last" = - ]; then
    verdict="no samples"
    judge 0 "$1: no samples"
  else
    most=$((second + second * $5 / 100 + $6))
    ((last <= most)) || verdict="**grows**"
    judge $((last <= most)) "$1: $last, at most $most"
  fi
  printf '| %s | %s | %s | %s | %s |\n' "$1" \
    "$(third "$2" "$3" 0 $((seconds / 3)) "$4")" "$second" "$last" "$verdict"
}

# A load that has been ended has written nothing.
touch "$out"/{allow,brief,capacity}.json
sum() { jq -s "map($1) | add // 0" "$out/allow.json" "$out/brief.json"; }
of_leases() { jq -s "map($1) | add // 0" "$out/capacity.json"; }
decided=$(jq -s 'map(.granted + .refused) | add // 0' "$out/allow.json")
errors=$(sum .errors) leases=$(of_leases .requests)
lease_errors=$(of_leases .errors) release_errors=$(of_leases .release_errors)
judge $((decided * 2 >= asked)) "$decided decisions of $asked that were asked for"
judge $((errors == 0)) "$errors requests for a decision failed"
judge $((leases * 2 >= leases_asked)) "$leases lease requests of some $leases_asked"
judge $((lease_errors == 0)) "$lease_errors lease requests failed"
judge $((release_errors <= restarts * holders)) \
  "$release_errors leases were not given back, in $restarts restarts of Redis"

# Of short runs more is asked than they can tell.
rss_plus=2048 files_plus=6
((minutes >= 10)) || rss_plus=8192 files_plus=20
{
  printf '%s minutes, %s restarts of Redis, %s reloads; ' "$minutes" "$restarts" "$reloads"
  printf '%s decisions, %s of them without the store, ' \
    "$(sum '.granted + .refused')" "$(sum .degraded)"
  printf '%s errors; %s lease requests. Per third of the run:\n\n' "$errors" "$leases"
  echo "| what | first | second | last | verdict |"
  echo "|---|---:|---:|---:|---|"
  for n in 0 1 2; do
    row "node $((n + 1)): memory, KiB (median)" rss $n median 5 "$rss_plus"
    row "node $((n + 1)): open files (median)" files $n median 0 "$files_plus"
    row "node $((n + 1)): threads (most)" threads $n most 0 0
    row "node $((n + 1)): series of metrics (most)" series $n most 0 0
  done
  row "Redis: memory, KiB (most)" redis 0 most 10 1024
  echo
  for n in 0 1 2; do
    printf 'Node %s: %s open files before the load, %s fifteen seconds after it.\n' \
      $((n + 1)) "${before[n]}" "${after[n]}"
  done
} >"$out/soak.md"
# A pool keeps what it once needed: two connections a lane and thread, and some for the rest.
for n in 0 1 2; do
  judge $((after[n] <= before[n] + 24)) "node $((n + 1)): ${after[n]} open files after the load"
  panics=$(grep -c panicked "$out/node$n.log" || true)
  judge $((panics == 0)) "node $((n + 1)) panicked $panics times"
done
judge "$([ -z "$gone" ] && echo 1 || echo 0)" "${gone:-all nodes ran to the end}"
{
  echo
  printf '%s\n' "${verdicts[@]}"
} >>"$out/soak.md"
cat "$out/soak.md"
if ((failed)); then say "FAILED"; else say "flat"; fi
exit "$failed"
