"""The Hopper kernel, compiled without a GPU: its products are there, asynchronous, and leave no register in memory."""

import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

SHARED = 232448  # bytes of a block on compute capability 9.0 (CUDA programming guide)
# Bytes of registers in memory, and accesses to them in a loop. Outside the loops: arguments that are read once a tile;
# at dim 256 the accumulators take 176 of a thread's 240 registers. Triton 3.9 is less careful than 3.6.
SPILLS = (96, 0) if version("triton").startswith("3.6.") else (192, 32)
SHARES = 2


@pytest.mark.parametrize("share", range(SHARES))
def test_the_kernel_compiles(share):
    script = Path(__file__).with_name("compile_hopper.py")
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, script, str(share), str(SHARES)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-2000:]
    cases = [json.loads(line) for line in run.stdout.splitlines()]
    assert len(cases) >= 6
    for case in cases:
        assert case["shared"] <= SHARED, case
        assert not case["serialized"], case
        assert case["spills"] <= SPILLS[0] and case["spills_in_loops"] <= SPILLS[1], case
        # One loop over key blocks for each computing warpgroup, and its softmax beside the products of the values.
        assert case["loops"] == int(case["config"].split("warpgroups=")[1][0]), case
        assert case["overlap"], case
        assert max(case["named_barriers"]) < 5, f"Triton's own barriers reach into the kernel's: {case}"
