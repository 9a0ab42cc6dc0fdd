#!/usr/bin/env bash
# Everything that is checked of tollgate: formatting, lints, all tests, the deployment files, and
# what a decision costs. Installs what is missing on Debian or Ubuntu (as root, or through sudo).
# CI runs this, and so can you: scripts/test.sh
set -euo pipefail
cd "$(dirname "$0")/.."

say() { printf '\n== %s\n' "$*"; }

# haproxy is in /usr/sbin, which is not on everyone's path.
export PATH="$PATH:/usr/sbin"

# What must be there, a command or a module of Python, and the package that has it.
needed=(redis-server:redis-server haproxy:haproxy promtool:prometheus
  docker-compose:docker-compose jq:jq shellcheck:shellcheck yamllint:yamllint cc:gcc curl:curl
  valgrind:valgrind protoc:protobuf-compiler grpc_python_plugin:protobuf-compiler-grpc
  "import grpc, google.protobuf:python3-grpcio" "import grpc, google.protobuf:python3-protobuf")

# Of modules, the system's Python is asked first: the packages are for that one, and another may
# come before it on the path. server/tests/capacity_wire.rs takes the same one.
there() {
  case "$1" in
    import\ *) /usr/bin/python3 -c "$1" 2>/dev/null || python3 -c "$1" 2>/dev/null ;;
    *) command -v "$1" >/dev/null ;;
  esac
}

missing=()
for pair in "${needed[@]}"; do
  there "${pair%%:*}" || missing+=("${pair##*:}")
done

if [ ${#missing[@]} -gt 0 ]; then
  say "installing ${missing[*]}"
  command -v apt-get >/dev/null || {
    echo "these packages are missing, and there is no apt-get to install them: ${missing[*]}" >&2
    exit 1
  }
  as_root=()
  [ "$(id -u)" = 0 ] || as_root=(sudo)
  # RUNLEVEL=1 keeps the packages from starting their services: the tests start their own.
  "${as_root[@]}" apt-get update -qq
  "${as_root[@]}" env RUNLEVEL=1 DEBIAN_FRONTEND=noninteractive \
    apt-get install -y -qq --no-install-recommends "${missing[@]}"
  for pair in "${needed[@]}"; do
    there "${pair%%:*}" || {
      echo "${pair##*:} is installed, and yet this fails: ${pair%%:*}" >&2
      exit 1
    }
  done
fi

command -v cargo >/dev/null || {
  echo "cargo is missing: install Rust 1.88 or newer, with rustfmt and clippy" >&2
  exit 1
}

say "formatting"
cargo fmt --all --check

say "lints"
cargo clippy --workspace --all-targets --locked -- -D warnings

say "dependencies"
if command -v cargo-deny >/dev/null; then
  cargo deny --locked check bans licenses sources
else
  echo "not checked: there is no cargo-deny (cargo install cargo-deny --locked)"
fi

say "documentation"
RUSTDOCFLAGS="-D warnings" cargo doc --workspace --no-deps --locked --quiet

say "deployment files"
scripts/check-deploy.sh

say "tests"
cargo test --workspace --locked --no-fail-fast

say "instructions of a decision"
scripts/instructions.sh
