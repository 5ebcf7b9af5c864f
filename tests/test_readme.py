"""The README's Python blocks run as written, in order, in one namespace."""

import re
from pathlib import Path

import pytest
import torch

README = Path(__file__).parent.parent / "README.md"


def blocks(text):
    """Yield (line number, code) of every ```python block."""
    for found in re.finditer(r"^```python\n(.*?)^```", text, re.M | re.S):
        yield text.count("\n", 0, found.start(1)), found[1]


def test_snippets_run():
    snippets = list(blocks(README.read_text(encoding="utf-8")))
    assert snippets, "README.md has no python blocks"
    torch.manual_seed(0)
    namespace = {"__name__": "readme"}
    for line, code in snippets:
        try:
            # Leading newlines make a traceback point at the README's own line.
            exec(compile("\n" * line + code, str(README), "exec"), namespace)
        except Exception as error:
            pytest.fail(f"README.md block at line {line + 1}: {type(error).__name__}: {error}\n{code}")


def test_the_two_commands_exist():
    targets = (README.parent / "Makefile").read_text(encoding="utf-8")
    for command in ("demo", "test"):
        assert f"make {command}" in README.read_text(encoding="utf-8")
        assert re.search(rf"^{command}:", targets, re.M)
