"""Compile the Triton kernels for a GPU that is not here, and report each as a line of JSON.

    python tests/gpu/compile_kernels.py cuda:90      # or cuda:80, cuda:100, hip:gfx942

The launches of the backend itself are recorded, so what is compiled is what runs.
"""

import io
import json
import os
import re
import sys
from contextlib import redirect_stdout

import torch
from sass import disassembly, unset
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.runtime import driver

import onchip
from onchip import problem as problems
from onchip.backends.compiled import launch
from onchip.backends.triton import arguments, backward_pass, forward_pass
from onchip.backends.triton.table import Facts
from onchip.problem import Operands, Saved

CASES = {
    "causal d64": (64, onchip.causal(), onchip.Score(), 0.0),
    "causal d128": (128, onchip.causal(), onchip.Score(), 0.0),
    "full d256": (256, onchip.Mask(), onchip.Score(), 0.0),
    "window d128": (128, onchip.window(300, 5), onchip.Score(), 0.0),
    "blocks d128": (
        128,
        onchip.block_sparse(torch.ones(8, 8, dtype=torch.bool), tile=(128, 128)),
        onchip.Score(),
        0.0,
    ),
    "where d128": (128, onchip.where(lambda b, h, q, k: (k <= q) | (k % 64 == 0)), onchip.Score(), 0.0),
    "dropout d64": (64, onchip.causal(), onchip.Score(), 0.1),
    "dropout d64, its seed in memory": (64, onchip.causal(), onchip.Score(), 0.1),
    "score d64": (
        64,
        onchip.causal(),
        onchip.Score(
            softcap=20.0, alibi=torch.ones(4), sink=torch.ones(4), mod=lambda s, b, h, q, k: s - 0.1 * (q - k)
        ),
        0.0,
    ),
    "bias d64": (64, onchip.causal(), onchip.Score(bias=torch.zeros(4, 1024, 1024)), 0.0),
    # Not for the bulk copy engine; values narrower than keys, and the other way round.
    "window d100, dim_v 3": ((100, 3), onchip.window(300, 5), onchip.Score(), 0.0),
    "full d17, dim_v 63": ((17, 63), onchip.Mask(), onchip.Score(), 0.0),
    "full d512": (512, onchip.Mask(), onchip.Score(), 0.0),
    # Rows of the table alone: as every call in float32, on the units that multiply and add.
    **{f"float32 d{dim}": (dim, onchip.Mask(), onchip.Score(), 0.0) for dim in (64, 128, 256, 512)},
}
# What they are there for, descriptors of matrix products, no other chip has.
HOPPER_ONLY = ("window d100, dim_v 3", "full d17, dim_v 63")


class Offline(DriverBase):
    """Answers what compiling asks of a driver; launches nothing."""

    target: GPUTarget

    def __init__(self):
        pass

    @classmethod
    def is_active(cls):
        return False

    def get_current_target(self):
        return self.target

    def get_active_torch_device(self):
        return torch.device("cpu")

    def get_current_device(self):
        return 0

    def get_current_stream(self, device=0):
        return 0

    def get_benchmarker(self):
        raise NotImplementedError

    def map_python_to_cpp_type(self, ty):
        raise NotImplementedError


def offline(target: str) -> tuple[str, str]:
    """Compile for this chip, and let the assembler's report be printed; its maker and name."""
    backend, arch = target.split(":")
    cuda = backend == "cuda"
    Offline.target = GPUTarget(backend, int(arch) if cuda else arch, 32 if cuda else 64)
    driver.set_active(Offline())
    knobs.compilation.always_compile = knobs.nvidia.dump_ptxas_log = True
    return backend, arch


def record(found: list):
    """In place of `Step.run`: compiles where the step would launch, and notes what the assembler said of the kernel."""
    reports: dict[str, str] = {}

    def compile_only(step, changing: tuple, steady: bool) -> None:
        said = io.StringIO()
        with redirect_stdout(said):
            compiled = step.kernel.warmup(*changing, *step.rest, grid=(1,), **step.meta)
        # Of a kernel that two cases have in common it speaks once.
        report = reports.setdefault(compiled.hash, said.getvalue())
        found.append((step.kernel.fn.__name__, compiled, report))

    return compile_only


def registers(report: str) -> tuple[int, int]:
    """(registers, bytes of spill stores), as ptxas reports them."""
    (spills,) = re.findall(r"(\d+) bytes spill stores", report)
    (used,) = re.findall(r"Used (\d+) registers", report)
    return int(used), int(spills)


def main(spec: str) -> None:
    backend, arch = offline(spec)
    major = int(arch) // 10 if backend == "cuda" else 0
    for module in (arguments, forward_pass, backward_pass):
        module.device_facts = lambda index: Facts(major, 132, "")
    found: list = []
    launch.Step.run = record(found)
    wanted = sys.argv[2:] or [name for name in CASES if spec == "cuda:90" or name not in HOPPER_ONLY]
    for case in wanted:
        dims, mask, score, dropout = CASES[case]
        dim, dim_v = dims if isinstance(dims, tuple) else (dims, dims)
        dtype = torch.float32 if case.startswith("float32") else torch.bfloat16
        q, v = (torch.empty(1, 1024, 4, n, dtype=dtype) for n in (dim, dim_v))
        place = problems.dense_layout(q, q, v)
        problem = problems.state(q, q, v, place, "dense", mask, score, dropout=dropout)
        seed = torch.zeros(1, dtype=torch.int64) if case.endswith("in memory") else 0
        operands = Operands(q, q, v, place, mask, score, seed)
        found.clear()
        output = forward_pass.forward(problem, operands)
        needs = frozenset({"q", "k", "v"} | {n for n in ("bias", "alibi") if getattr(score, n) is not None})
        backward_pass.backward(
            problem, operands, Saved(output.out, output.lse, None, needs), torch.empty_like(output.out), None
        )
        for kernel, compiled, report in found:
            line = {"case": case, "kernel": kernel, "shared": compiled.metadata.shared}
            if backend == "cuda":
                ptx = compiled.asm["ptx"]
                line["registers"], line["spills"] = registers(report)
                line["unset"] = unset(disassembly(compiled.asm["cubin"])) if arch == "90" else []
                line["fused"] = "fma.rn" in ptx
                line["tensor_core"] = bool(re.search(r"wgmma\.mma_async|mma\.sync|tcgen05\.mma", ptx))
            else:
                line["tensor_core"] = "mfma" in compiled.asm["amdgcn"]
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    os.environ.pop("TRITON_INTERPRET", None)
    main(sys.argv[1])
