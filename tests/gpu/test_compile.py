"""The kernels, compiled for GPUs that are not here: tensor cores used, shared memory within the chip's, few spills."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

# Shared memory of a block, bytes (CUDA programming guide, table of compute capabilities; CDNA 3 instruction set guide).
SHARED = {"cuda:80": 166912, "cuda:90": 232448, "cuda:100": 232448, "hip:gfx942": 65536}
# Bytes of registers spilled that are known: dK and dV at once leave none free beside a bias, a mask function or a mod.
SPILLS = 150
MORE_SPILLS = {  # Ampere's products keep both operands in registers
    ("cuda:80", "where d128", "dkdv_kernel"): 400,
    ("cuda:80", "bias d64", "dbias_kernel"): 240,
    ("cuda:80", "dropout d64", "dq_kernel"): 160,
    ("cuda:80", "dropout d64, its seed in memory", "dq_kernel"): 160,
}
PRODUCTS = {"forward_kernel", "dkdv_kernel", "dq_kernel", "dbias_kernel"}
# The newest Triton beside the one that is installed: `make test` puts it there.
NEWEST = Path(sys.prefix) / "triton-newest"


def compiled(target: str, *more_path: Path) -> list[dict]:
    """What compile_kernels.py says of each kernel, under the Triton of `more_path` if given."""
    script = Path(__file__).with_name("compile_kernels.py")
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([*map(str, more_path), environment.get("PYTHONPATH", "")])
    run = subprocess.run([sys.executable, script, target], env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-2000:]
    kernels = [json.loads(line) for line in run.stdout.splitlines()]
    assert {k["kernel"] for k in kernels} >= PRODUCTS
    return kernels


def check(kernels: list[dict], target: str, spills: int) -> None:
    for kernel in kernels:
        assert kernel["shared"] <= SHARED[target], kernel
        known = MORE_SPILLS.get((target, kernel["case"], kernel["kernel"]), spills)
        assert kernel.get("spills", 0) <= known, kernel
        assert kernel["tensor_core"] == (kernel["kernel"] in PRODUCTS), kernel


@pytest.mark.parametrize("target", SHARED)
def test_kernels_compile(target):
    check(compiled(target), target, SPILLS)


if NEWEST.exists():

    def test_kernels_compile_with_the_newest_triton():
        check(compiled("cuda:90", NEWEST), "cuda:90", 3 * SPILLS)
