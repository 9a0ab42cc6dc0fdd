#!/usr/bin/env bash
# Generates the Go code for the protobuf files into internal/pb, or into the given directory. Needs
# protoc, of Debian's protobuf-compiler, and Go.
#
#   clients/go/scripts/generate.sh [DIRECTORY]
set -euo pipefail
cd "$(dirname "$0")/.."

out=$(realpath --canonicalize-missing "${1:-internal/pb}")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# The plugin of the same version as the runtime in go.mod.
GOBIN=$work go install google.golang.org/protobuf/cmd/protoc-gen-go
module=$(go list -m)

# Each message has a name of its own, and so has each file: a program may link other code that was
# generated from the same protobuf files, and a name can be registered only once.
for source in quotaservice.proto doorman.proto tollgate/v1/throttle.proto tollgate/v1/holds.proto; do
  name=$(basename "$source" .proto)
  mkdir -p "$work/tollgate_client_go" "$out/$name"
  sed "s/^package .*;/package tollgate_client_go.$name;/" "../../proto/$source" \
    >"$work/tollgate_client_go/$name.proto"
  file=tollgate_client_go/$name.proto
  protoc -I"$work" --plugin="$work/protoc-gen-go" --go_out="$out" \
    --go_opt="module=$module/internal/pb" --go_opt="M$file=$module/internal/pb/$name" "$file"
done
