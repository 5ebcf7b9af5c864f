"""What the kernels of Triton and of Gluon share: rules, masks, scores, and users' functions.

What of it runs on a GPU is `triton.jit`: a `gluon.jit` kernel calls such functions as they are, as long as they make
no tensors of their own (`arange`, `zeros`), whose layout Gluon would ask for. Seen with Triton 3.6 and 3.9.
"""

import importlib
from functools import cache
from typing import Any


@cache
def needing_triton(name: str) -> Any:
    """A module of a backend that imports triton. Kept: an import statement in each call takes half a microsecond."""
    return importlib.import_module(f"onchip.backends.{name}")
