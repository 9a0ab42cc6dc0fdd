#!/usr/bin/env bash
# Generates the Python code for the protobuf files into tollgate_client/_proto, or into the given
# directory. Needs protoc and grpc_python_plugin, of Debian's protobuf-compiler and
# protobuf-compiler-grpc. The code works with protobuf's runtime 4.21 and newer if that protoc is
# no older than 3.20, and no newer than 3.21.
#
#   clients/python/scripts/generate.sh [DIRECTORY]
set -euo pipefail
cd "$(dirname "$0")/.."

out=${1:-tollgate_client/_proto}
plugin=$(command -v grpc_python_plugin)
mkdir -p "$out"

protoc -I../../proto -I../../proto/tollgate/v1 -Iproto \
  --python_out="$out" --pyi_out="$out" --grpc_out="$out" --plugin=protoc-gen-grpc="$plugin" \
  quotaservice.proto doorman.proto throttle.proto holds.proto health.proto
protoc -Iproto --python_out="$out" --pyi_out="$out" status.proto

# The modules import each other within their package. The messages are in a pool of their own, so
# that an application may have other versions of the same protobuf files.
sed -i 's/^import \(.*_pb2\) as /from . import \1 as /' "$out"/*_pb2_grpc.py
sed -i -e 's/_descriptor_pool\.Default()/_pool.POOL/' \
  -e 's/^# @@protoc_insertion_point(imports)/from . import _pool\n&/' "$out"/*_pb2.py
