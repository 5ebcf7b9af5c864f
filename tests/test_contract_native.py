"""The contract on the native CPU kernels: of the best instruction set here, or of the one that ONCHIP_CPU_ISA names."""

from contract import Contract, Target
from contract_run import Case


class TestNative(Contract):
    target = Target(
        "native",
        dtypes=("float32", "float16", "bfloat16"),
        tile=(64, 256),
        refusals={
            "a score mod is a Python function": Case(score="mod_clip"),
            "no kernels for float64": Case(dtype="float64"),
        },
    )


class TestNativeShort(Contract):
    """Lengths below a tile: several heads share one, and few rows take dot products."""

    target = Target(
        "native",
        dtypes=("float32", "bfloat16"),
        tile=(4, 32),
        refusals={"a score mod is a Python function": Case(score="mod_clip")},
    )
