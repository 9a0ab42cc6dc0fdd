# shellcheck shell=bash
# Sourced by scripts that run the tests of a client library, which set `target`.

# keep_flaky LOG TEST...: says that tests are flaky, and keeps the output of their failures beside
# those of scripts/run-tests.py. scripts/test.sh prints the lines again at its end.
keep_flaky() {
  # shellcheck disable=SC2154 # see above
  mkdir -p "$target/flaky"
  cp "$1" "$target/flaky"
  printf 'FLAKY %s\n' "${@:2}" | tee -a "$target/flaky/clients.txt"
}
