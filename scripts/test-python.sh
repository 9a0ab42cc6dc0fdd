#!/usr/bin/env bash
# Tests the Python client library: types, unit tests, the scenarios of clients/README.md against
# real nodes, and the built wheel and sdist in an environment of its own. Installs missing packages on Debian
# or Ubuntu (as root, or with sudo), and Python packages with pip.
#
#   scripts/test-python.sh [PYTEST ARGUMENT...]
#
# The server is $TOLLGATE_BINARY, or the debug build of the workspace.
set -euo pipefail
cd "$(dirname "$0")/.."

# shellcheck source=scripts/lib-install.sh
. scripts/lib-install.sh
install_missing redis-server:redis-server openssl:openssl jq:jq protoc:protobuf-compiler \
  grpc_python_plugin:protobuf-compiler-grpc "import venv, ensurepip:python3-venv"

target=$(realpath --canonicalize-missing "${CARGO_TARGET_DIR:-target}")
export TOLLGATE_BINARY=${TOLLGATE_BINARY:-$target/debug/tollgate}
[ -x "$TOLLGATE_BINARY" ] || {
  echo "$TOLLGATE_BINARY is missing: build the server, or set TOLLGATE_BINARY" >&2
  exit 1
}

# Another Python on the PATH may have no venv, where Debian's has.
python=python3
"$python" -c "import venv, ensurepip" 2>/dev/null || python=/usr/bin/python3
"$python" -c "import sys; sys.exit(sys.version_info < (3, 9))" || {
  echo "$("$python" --version) is too old: the library needs 3.9 or newer" >&2
  exit 1
}

# shellcheck source=scripts/lib-flaky.sh
. scripts/lib-flaky.sh

say() { printf '\n== %(%T)T %s\n' -1 "$*"; }

# new_environment NAME: a clean virtual environment.
new_environment() {
  "$python" -m venv --clear "$target/python/$1"
}

pip_install() {
  "$target/python/$1/bin/python" -m pip install --quiet --disable-pip-version-check \
    --constraint clients/python/tests/constraints.txt "${@:2}"
}

say "Python client library: types and tests ($("$python" --version))"
# A copy, as builds leave files behind.
source=$target/python/source
rm -rf "$source"
mkdir -p "$source/clients"
cp -r proto "$source"
cp -r clients/python "$source/clients"
new_environment test
pip_install test "$source/clients/python[test]"
run_tests() {
  "$target/python/test/bin/python" -B -m pytest -q -o "cache_dir=$target/python/pytest" "$@"
}

# As in scripts/run-tests.py: those that have failed run again, and are red unless they pass twice.
# Not if pytest ended for another reason than failed tests.
run_failed_again() {
  local failed
  [ "$1" = 1 ] || return "$1"
  mapfile -t failed < <(jq -r 'keys[]' "$target/python/pytest/v/cache/lastfailed")
  [ ${#failed[@]} -gt 0 ] || return 1
  printf '\nrun again: %s\n' "${failed[*]}"
  run_tests "${failed[@]}" && run_tests "${failed[@]}" && keep_flaky "$log" "${failed[@]}"
}

rm -rf "$target/python/pytest"
log=$target/python/python.log
(
  cd clients/python
  "$target/python/test/bin/python" -m mypy --cache-dir "$target/python/mypy"
  # Most of the time, a test waits.
  run_tests -n 4 "$@" 2>&1 | tee "$log" || run_failed_again $?
)

say "Python client library: wheel and sdist"
rm -rf "$target/python/dist"
"$target/python/test/bin/python" -m build --outdir "$target/python/dist" "$source/clients/python" \
  >"$target/python/build.log" 2>&1 || {
  cat "$target/python/build.log" >&2
  exit 1
}
for package in "$target"/python/dist/*; do
  new_environment package
  pip_install package "$package"
  (cd "$target/python" && package/bin/python -I "$source/clients/python/tests/try_wheel.py")
done
