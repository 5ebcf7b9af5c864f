"""The contract on the Triton backend."""

import torch

from contract import Contract, Target

ON_GPU = torch.cuda.is_available()


class TestTriton(Contract):
    target = Target(
        "triton",
        device="cuda" if ON_GPU else "cpu",
        dtypes=("float32", "float16", "bfloat16") if ON_GPU else ("float32", "float16"),
    )
