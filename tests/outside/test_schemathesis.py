"""schemathesis on the OpenAPI document and what the server does, through the script that runs it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from place import run, tool, version_of

SCRIPT = Path(__file__).with_name("schemathesis_run.py")


@pytest.mark.timeout(1900)
def test_the_server_does_what_its_openapi_document_says(note: Callable[[str], None]) -> None:
    program = tool("schemathesis", "st")
    if program is None:
        pytest.skip("schemathesis is not installed")
    command = [sys.executable, str(SCRIPT), "--st", str(program), "--max-examples", "10"]
    out = run(command, 1800)
    note(f"schemathesis {version_of('schemathesis', 'schemathesis')}: {out.strip().splitlines()[-1]}")
