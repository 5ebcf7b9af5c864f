"""The kernels, compiled for GPUs that are not here: tensor cores used, shared memory within the chip's, few spills."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from sass import unset

from onchip.backends.triton.table import TABLE

# Shared memory of a block, bytes (CUDA programming guide, table of compute capabilities; CDNA 3 instruction set guide).
SHARED = {"cuda:80": 166912, "cuda:90": 232448, "cuda:100": 232448, "hip:gfx942": 65536}
# Bytes of registers spilled that are known: dK and dV at once leave none free beside a bias, a mask function or a mod.
SPILLS = 150
ODD, ODD_V = "window d100, dim_v 3", "full d17, dim_v 63"
MORE_SPILLS = {  # Ampere's products keep both operands in registers
    ("cuda:80", "where d128", "dkdv_kernel"): 400,
    ("cuda:80", "bias d64", "dbias_kernel"): 260,
    ("cuda:80", "dropout d64", "dq_kernel"): 160,
    ("cuda:80", "dropout d64, its seed in memory", "dq_kernel"): 160,
    # Float32 multiplies in registers. On the H200 these tiles are faster than any that were tried without spills.
    **{
        ("cuda:90", f"float32 d{dim}", step): known
        for dim, forward, dkdv, dq in (
            (64, 620, 0, 870),
            (128, 340, 0, 690),
            (256, 5300, 0, 3500),
            (512, 0, 0, 0),
        )
        for step, known in (("forward_kernel", forward), ("dkdv_kernel", dkdv), ("dq_kernel", dq))
    },
    ("cuda:90", "full d512", "dq_kernel"): 2900,  # 2.9 ms; 3.6 in smaller tiles
    ("cuda:100", "full d512", "forward_kernel"): 180,
    **{("cuda:100", "float32 d256", f"{step}_kernel"): 900 for step in ("forward", "dkdv", "dq")},
    # Two programs a multiprocessor all the same: faster than smaller tiles without spills (backends/triton/table.py).
    ("cuda:90", "causal d128", "dkdv_kernel"): 190,
    ("cuda:90", "window d128", "dkdv_kernel"): 340,
    # Loads of one number at a time, each with an address and a mask.
    **{("cuda:90", ODD, step): 470 for step in ("dkdv_kernel", "dq_kernel")},
    **{("cuda:90", ODD_V, step): 520 for step in ("forward_kernel", "dkdv_kernel")},
}
# What takes each row of the table.
ROWS: tuple[str, ...] = (
    "causal d64",
    "causal d128",
    "full d256",
    "full d512",
    *(f"float32 d{dim}" for dim in (64, 128, 256, 512)),
)
# And of other chips what adds to its registers and shared memory.
MORE = ("where d128", "bias d64")
PRODUCTS = {"forward_kernel", "dkdv_kernel", "dq_kernel", "dbias_kernel"}
# The newest Triton beside the one that is installed: `make test` puts it there.
NEWEST = Path(sys.prefix) / "triton-newest"


def lines_of(script: str, *arguments: str, more_path: tuple[Path, ...] = (), given: str = "") -> list:
    """What a script of this folder prints as lines of JSON, compiling; under the Triton of `more_path` if given."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([*map(str, more_path), environment.get("PYTHONPATH", "")])
    command = [sys.executable, Path(__file__).with_name(script), *arguments]
    run = subprocess.run(command, input=given, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-2000:]
    return [json.loads(line) for line in run.stdout.splitlines()]


def compiled(target: str, *more_path: Path, cases: tuple[str, ...] = ()) -> list[dict]:
    """What compile_kernels.py says of each kernel, of all its cases or of these; under the Triton of `more_path` if
    given."""
    kernels = lines_of("compile_kernels.py", target, *cases, more_path=more_path)
    assert {k["kernel"] for k in kernels} >= (PRODUCTS - {"dbias_kernel"} if cases else PRODUCTS)
    assert not cases or {k["case"] for k in kernels} == {*cases}
    return kernels


def check(kernels: list[dict], target: str, spills: int = 1) -> None:
    """spills: how much more than is known of the Triton that is measured."""
    for kernel in kernels:
        assert kernel["shared"] <= SHARED[target], kernel
        known = MORE_SPILLS.get((target, kernel["case"], kernel["kernel"]), SPILLS)
        assert kernel.get("spills", 0) <= spills * known, kernel
        assert not kernel.get("unset"), kernel
        assert not (kernel.get("fused") and kernel["kernel"] == "delta_kernel"), (
            "its sum differs between lanes"
        )
        # NVIDIA's round what they multiply to 10 bits, AMD's have products of float32.
        units = kernel["kernel"] in PRODUCTS and ("hip" in target or "float32" not in kernel["case"])
        assert kernel["tensor_core"] == units, kernel


@pytest.mark.parametrize("target", SHARED)
def test_kernels_compile(target):
    cases = () if target in ("cuda:80", "cuda:90") else (*ROWS, *MORE)
    check(compiled(target, cases=cases), target)


def test_every_row_of_the_table_has_a_case():
    """Which row serves what is compiled: a row that no case takes would be compiled by nobody."""
    taken = {(int(case.rsplit("d", 1)[1]), 4 if "float32" in case else 2) for case in ROWS}
    assert taken == {(dim, itemsize) for _, dim, itemsize in TABLE}


def test_a_register_that_nothing_sets_is_seen():
    """As ptxas 12.8 left it where K and V of two widths shared an address."""
    code = """
        /*0000*/                   USHF.R.U32.HI UR4, URZ, 0x4, UR9 ;
        /*0010*/                   UIADD3.64 UR6, UR4, 0x2, URZ ;
        /*0020*/              @!P0 UMOV UR9, 0x40000040 ;
        /*0030*/                   HGMMA.64x16x16.F32 R88, R24, gdesc[UR4].tnspB, R88, gsb0 ;
        /*0040*/                   HGMMA.64x16x16.F32 R88, gdesc[UR4], R88, gsb0 ;
    """
    assert unset(code) == [
        "USHF.R.U32.HI UR4, URZ, 0x4, UR9",
        "HGMMA.64x16x16.F32 R88, gdesc[UR4], R88, gsb0",  # UR5: half of A's descriptor
    ]


if NEWEST.exists():

    @pytest.mark.parametrize("target", SHARED)
    def test_kernels_compile_with_the_newest_triton(target):
        cases = (*ROWS, *MORE, ODD, ODD_V) if target == "cuda:90" else ROWS
        check(compiled(target, NEWEST, cases=cases), target, spills=3)
