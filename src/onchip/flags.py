"""Reading the command line's flags: each mistake ends the command in one line."""

from __future__ import annotations

import importlib.util
import sys
from typing import Any, NoReturn

import typer

# What ends a command in one line: wrong values, files, and sizes that no memory holds.
WRONG = (ValueError, TypeError, NotImplementedError, OSError, RuntimeError, MemoryError, OverflowError)


def stop(message: str) -> NoReturn:
    """End the command: one line on stderr, exit status 2."""
    print(f"onchip: {message}", file=sys.stderr)
    sys.exit(2)


def need(packages: tuple[str, ...], what: str, install: str) -> None:
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        stop(f"{what} needs {', '.join(missing)}: {install}")


def make_case(kind: Any, **fields: Any) -> Any:
    try:
        return kind(**fields)
    except WRONG as error:
        stop(f"{line(error)}")


def lengths(text: str) -> tuple[int, ...]:
    return numbers("--lengths", text, "300,17,1000")


def names(flag: str, text: str) -> list[str]:
    """Names by commas, each once; none where nothing is given."""
    found = [name.strip() for name in text.split(",")]
    if text and not all(found):
        stop(f"{flag}: got {text!r}, expected names by commas")
    return list(dict.fromkeys(found)) if text else []


def numbers(flag: str, text: str, example: str) -> tuple[int, ...]:
    try:
        return tuple(int(n) for n in text.split(",")) if text else ()
    except ValueError:
        stop(f"{flag}: got {text!r}, expected numbers as {example}")


def cache(case: Any, page_size: int | None, append: int) -> tuple[Any, dict[str, Any]]:
    """The shapes of a cache, of rows as long as its longest or of no more pages than it fills, and `plan`'s options."""
    _, k, v = case.shapes
    if append > min(case.lengths_k):
        stop(f"--append: got {append}, expected at most the keys of each sequence in --cache")
    options: dict[str, Any] = {"cache_seqlens": [n - append for n in case.lengths_k], "new": append}
    if page_size is None:
        return (k, v), options
    import torch

    counts = [-(-n // page_size) for n in case.lengths_k]
    table, first = torch.zeros(case.batch, max(counts), dtype=torch.int32, device="cpu"), 0
    for row, count in zip(table, counts, strict=True):
        row[:count] = torch.arange(first, first + count, device="cpu")
        first += count
    options["page_table"] = table
    return [(first, page_size, *x[2:]) for x in (k, v)], options


def line(error: Exception) -> str:
    """In one line, without the C++ frames that torch may add."""
    return " ".join(str(error).split("Exception raised from")[0].split()) or type(error).__name__


def given(context: typer.Context) -> dict[str, str]:
    """The parameters that were stated, each as the flag that states it."""
    sources = ((p, context.get_parameter_source(p.name)) for p in context.command.params if p.name)
    return {p.name: p.opts[0] for p, source in sources if source is not None and source.name == "COMMANDLINE"}


def only(context: typer.Context, what: str, allowed: tuple[str, ...]) -> None:
    """End where flags are given that would not count beside `what`."""
    others = [flag for name, flag in given(context).items() if name not in allowed]
    if others:
        stop(f"{', '.join(others)}: given with {what}, which takes no such flag")


def packed(context: typer.Context) -> None:
    """--lengths stands in place of a batch and its lengths."""
    stated = given(context)
    others = [stated[name] for name in ("batch", "seqlen", "seqlen_k") if name in stated]
    if "lengths" in stated and others:
        stop(f"{', '.join(others)}: given with --lengths, expected one or the other")
