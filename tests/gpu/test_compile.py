"""The kernels, compiled for GPUs that are not here: tensor cores used, shared memory within the chip's, few spills."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

# Shared memory of a block (CUDA programming guide, table of compute capabilities), bytes.
SHARED = {"cuda:80": 166912, "cuda:90": 232448}
# Bytes of registers spilled that are known: the two products of dK and dV leave no registers at dim 256 or beside
# dropout's random bits and a mod.
SPILLS = 800


@pytest.mark.parametrize("target", SHARED)
def test_kernels_compile(target):
    script = Path(__file__).with_name("compile_kernels.py")
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    run = subprocess.run([sys.executable, script, target], env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-2000:]
    kernels = [json.loads(line) for line in run.stdout.splitlines()]
    assert {k["kernel"] for k in kernels} >= {"forward_kernel", "dkdv_kernel", "dq_kernel", "dbias_kernel"}
    for kernel in kernels:
        assert kernel["shared"] <= SHARED[target], kernel
        assert kernel["spills"] <= SPILLS, kernel
        products = kernel["kernel"] in ("forward_kernel", "dkdv_kernel", "dq_kernel", "dbias_kernel")
        assert kernel["tensor_core"] == products, kernel
