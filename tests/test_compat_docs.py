"""docs/compatibility.md names every parameter of every mirrored function, and tests that exist."""

import ast
import inspect
import re
from pathlib import Path

import pytest

from mirrored import MIRRORED, OTHERS, TORCH

TESTS = Path(__file__).parent
TEXT = (TESTS.parent / "docs" / "compatibility.md").read_text(encoding="utf-8")
BODY, REFUSED = TEXT.split("## Refused names")
EVERY = {module: names | OTHERS.get(module, {}) for module, names in {**MIRRORED, **TORCH}.items()}
SECTIONS = {}  # (module, function) -> its table
for chunk in re.split(r"^## ", BODY, flags=re.M)[1:]:
    module, *functions = re.split(r"^### ", chunk, flags=re.M)
    for text in functions:
        SECTIONS[module.strip(), text.splitlines()[0].strip()] = text
ROW = re.compile(r"^\| (`.+?`) \| (\w+) \| (.*?) \| \[(\w+)\]\(\.\./tests/(\w+\.py)\) \|$", re.M)


def refused(module, name):
    line = re.search(rf"^- {re.escape(module)}: (.+)$", REFUSED, re.M)
    return line is not None and f"`{name.split('.')[0]}`" in line[1].split(", ")


@pytest.mark.parametrize("module", EVERY)
def test_every_parameter_has_its_row(module):
    for name, parameters in EVERY[module].items():
        if refused(module, name):
            assert (module, name) not in SECTIONS
            continue
        names = [
            p
            for p in inspect.signature(eval(f"lambda {neutral(parameters)}: None")).parameters
            if p != "self"
        ]
        rows = ROW.findall(SECTIONS[module, name])
        assert sorted(p for row in rows for p in re.findall(r"`(\w+)`", row[0])) == sorted(names), name
        for _, state, note, _, _ in rows:
            assert state in ("works", "differs", "refused")
            assert state != "differs" or note, f"{name}: what differs?"


def neutral(parameters):
    """Without default values, whose names need imports."""
    arguments = ast.parse(f"def f({parameters}): pass").body[0].args
    return ", ".join(a.arg for a in arguments.args + arguments.kwonlyargs)


def test_no_row_is_left_over():
    known = {(module, name) for module, names in EVERY.items() for name in names}
    assert SECTIONS.keys() <= known
    rows = re.findall(r"^\| `.*$", BODY, re.M)
    assert len(rows) == len(ROW.findall(BODY)), "a row that this test cannot read"


def sources(file):
    """The text of every test of a file, by name, with the module's tables that it names."""
    text = (TESTS / file).read_text(encoding="utf-8")
    tree, lines = ast.parse(text), text.splitlines()
    tables, found = {}, {}
    for node in tree.body:
        if isinstance(node, ast.Assign):
            tables[ast.unparse(node.targets[0])] = ast.unparse(node)
        if isinstance(node, ast.FunctionDef):
            first = min(part.lineno for part in (node, *node.decorator_list))
            found[node.name] = "\n".join(lines[first - 1 : node.end_lineno])
    return {
        name: source + "".join(table for key, table in tables.items() if re.search(rf"\b{key}\b", source))
        for name, source in found.items()
    }


def test_the_named_tests_exist():
    found = set(re.findall(r"\[(test_\w+)\]\(\.\./tests/(\w+\.py)\)", TEXT))
    assert found >= {(name, file) for *_, name, file in ROW.findall(BODY)}
    for name, file in found:
        assert name in sources(file), f"{file}::{name}"


@pytest.mark.parametrize("module", MIRRORED)
def test_the_named_tests_call_the_function(module):
    for name in MIRRORED[module]:
        if not refused(module, name):
            called = name.split(".")[0]
            for *_, test, file in ROW.findall(SECTIONS[module, name]):
                assert re.search(rf"\b{called}\b", sources(file)[test]), f"{module}.{name}: {file}::{test}"
