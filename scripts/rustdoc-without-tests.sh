#!/usr/bin/env bash
# Checks the documentation of a crate, where `cargo test --doc` would run its examples. `cargo doc`
# would compile all dependencies once more, while this uses those that the tests use.
set -euo pipefail
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT
arguments=(-D warnings --out-dir "$out")
while [ $# -gt 0 ]; do
  case $1 in
  --test) ;;
  --test-run-directory | --test-args | --test-runtool) shift ;;
  *) arguments+=("$1") ;;
  esac
  shift
done
rustdoc "${arguments[@]}"
