"""The generated code."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import tollgate_client

ROOT = Path(__file__).parents[2]


def test_it_is_of_the_present_protobuf_files(tmp_path):
    for program in ("protoc", "grpc_python_plugin"):
        assert shutil.which(program), f"{program} is not installed"
    version = subprocess.run(["protoc", "--version"], capture_output=True, text=True).stdout
    if not version.startswith("libprotoc 3.21."):
        pytest.skip(f"the code was generated with protoc 3.21, and here is {version}")
    subprocess.run([ROOT / "scripts/generate.sh", tmp_path], check=True)
    committed = Path(tollgate_client.__file__).parent / "_proto"
    for fresh in tmp_path.iterdir():
        text = (committed / fresh.name).read_text()
        assert fresh.read_text() == text, f"{fresh.name} is stale: run scripts/generate.sh"


def test_an_application_may_have_another_version_of_it(tmp_path):
    (tmp_path / "quotaservice.proto").write_text(
        'syntax = "proto3"; package quotaservice; message AllowRequest { string other = 1; }'
    )
    subprocess.run(
        ["protoc", f"-I{tmp_path}", f"--python_out={tmp_path}", "quotaservice.proto"], check=True
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(tollgate_client.__file__).parents[1])}
    program = "import quotaservice_pb2, tollgate_client; quotaservice_pb2.AllowRequest(other='a')"
    subprocess.run([sys.executable, "-c", program], check=True, cwd=tmp_path, env=environment)
