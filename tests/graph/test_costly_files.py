"""What a stranger's file costs is a small multiple of its bytes, and it loads and is drawn, or is a typed error."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SECONDS, MULTIPLE, ROOM = 2.0, 20, 64 << 20  # of the processor; of the file's bytes, beside these


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="Linux says how much memory was taken")
def test_work_and_memory_are_bounded_by_the_bytes_of_a_file(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.graph.costly_files", str(tmp_path)], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(found) > 80
    assert [each for each in found if each["end"].startswith("raw")] == []
    assert [each for each in found if each["seconds"] > SECONDS] == []
    assert [each for each in found if each["bytes"] > MULTIPLE * each["size"] + ROOM] == []
