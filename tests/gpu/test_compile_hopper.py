"""The Hopper kernel, compiled without a GPU: its products are there, asynchronous, and leave no register in memory."""

import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

SHARED = 232448  # bytes of a block on compute capability 9.0 (CUDA programming guide)
# Bytes of registers in memory: outside the loops, values that are read once a tile beside 64 to 128 accumulators.
# Triton 3.9 is less careful than 3.6.
OLD = version("triton").startswith("3.6.")
SPILLS = 160 if OLD else 352
# Accesses to them in a loop, where there may be any: three warpgroups leave 160 registers a thread.
IN_LOOPS = {"d64 window long": 2 if OLD else 14}
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
        assert not case["serialized"] and not case["unset"], case
        assert case["spills"] <= SPILLS, case
        assert case["spills_in_loops"] <= IN_LOOPS.get(case["case"], 0 if OLD else 2), case
        # One loop over key blocks for each computing warpgroup, and its softmax beside the products of the values.
        assert case["loops"] == int(case["config"].split("warpgroups=")[1][0]), case
        # But for three warpgroups without a mask, which cover for one another.
        assert case["overlap"] or case["case"] == "d64 full long", case
        assert max(case["named_barriers"]) < 5, f"Triton's own barriers reach into the kernel's: {case}"
