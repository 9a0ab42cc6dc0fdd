"""What the documentation says of the code."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

import tollgate_client

ROOT = Path(__file__).parents[2]


def test_the_scenarios_of_the_table_are_tested():
    table = (ROOT.parent / "README.md").read_text()
    named = re.findall(r"`(test_\w+\.py)::(test_\w+)`", table)
    assert len(named) > 20
    for file, test in named:
        found = (ROOT / "tests").glob(f"*/{file}")
        assert any(f"def {test}(" in path.read_text() for path in found), test


@pytest.mark.parametrize(
    "program", re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
)
def test_the_examples_name_what_there_is(program):
    compile(program, "README.md", "exec")
    imported = {"DatabaseStub", "ThreadPoolExecutor"}
    for module, names in re.findall(r"^from (tollgate_client\S*) import (.+)$", program, re.M):
        there = vars(importlib.import_module(module))
        assert set(names.split(", ")) <= set(there)
        imported.update(names.split(", "))
    names = re.findall(r"\b(?:[A-Z]\w+|aio)(?=[.(])", program)
    assert {name for name in names if not hasattr(tollgate_client, name)} <= imported
