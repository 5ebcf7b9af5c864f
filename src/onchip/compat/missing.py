"""Names of flash_attn that onchip does not mirror: asking for one says so."""

from collections.abc import Callable
from typing import Any

REFUSED: dict[str, tuple[str, ...]] = {}


def refuse(module: str, *names: str) -> Callable[[str], Any]:
    """A module's `__getattr__` that raises NotImplementedError for these names."""
    REFUSED[module] = names

    def getattr_(name: str) -> Any:
        if name in names:
            raise NotImplementedError(
                f"{module}.{name} is internal to flash_attn's kernels; onchip has no such thing"
            )
        raise AttributeError(f"module {module!r} has no attribute {name!r}")

    return getattr_
