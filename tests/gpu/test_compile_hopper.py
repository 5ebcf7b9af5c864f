"""The Hopper kernel, compiled without a GPU: its products are there, asynchronous, and leave no register in memory."""

import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from onchip.backends.hopper.table import NEVER

SHARED = 232448  # bytes of a block on compute capability 9.0 (CUDA programming guide)
# The newest Triton beside the one that is installed: `make test` puts it there.
NEWEST = Path(sys.prefix) / "triton-newest"
MEASURED = (
    "3.6."  # the Triton that the table was measured with, whose assembler is more careful than later ones
)
SPILLS_LATER, IN_LOOPS_LATER = 160, 2  # bytes in all, accesses in loops
SHARES = 2


def compiled(share: int, shares: int, *more_path: Path) -> list[dict]:
    """What compile_hopper.py says of each case of a share, under the Triton of `more_path` if given."""
    script = Path(__file__).with_name("compile_hopper.py")
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([*map(str, more_path), environment.get("PYTHONPATH", "")])
    command = [sys.executable, script, str(share), str(shares)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-2000:]
    return [json.loads(line) for line in run.stdout.splitlines()]


def check(case: dict, measured: bool) -> None:
    assert case["shared"] <= SHARED, case
    assert not case["serialized"] and not case["unset"], case
    assert case["spills"] <= (0 if measured else SPILLS_LATER), case
    assert case["spills_in_loops"] <= (0 if measured else IN_LOOPS_LATER), case
    # One loop over key blocks for each computing warpgroup.
    assert case["loops"] == int(case["config"].split("warpgroups=")[1][0]), case
    assert max({*case["named_barriers"]} - {NEVER}) < 5, f"Triton's barriers reach into the kernel's: {case}"
    for counts, asked in case["rescaled"]:
        # Half of a thread's outputs are of either row, each with a factor of its own, and both are asked about.
        assert set(counts) == set(asked) and [*counts.values()] == [case["outputs"] // 2] * 2, case
    if measured:
        for order in case["order"]:
            check_order(order, case["ahead"], case["exponentials"])


def check_order(order: list[str], ahead: bool, exponentials: int) -> None:
    """Slots are released where their products are done, and the softmax stands beside the products of the values."""
    waits = [n for n, word in enumerate(order) if word == "wait"]
    assert "arrive" in order[waits[0] : waits[1]] and "arrive" in order[waits[-2] : waits[-1]], order
    if ahead:
        _, _, values, values_again = waits
        assert "never" in order[:values] and "maxima" not in order[values:], order
        assert order[:values].count("exp") >= exponentials // 4 + 2, order  # and the factors of two rows
        assert order[values_again:].count("exp") >= exponentials // 2, order
    # A warp votes once whether its output is rescaled; more often, and it is taken apart.
    assert order.count("vote") == 1, order


@pytest.mark.parametrize("share", range(SHARES))
def test_the_kernel_compiles(share):
    cases = compiled(share, SHARES)
    assert len(cases) >= 6
    for case in cases:
        check(case, version("triton").startswith(MEASURED))


if NEWEST.exists():

    def test_the_kernel_compiles_with_the_newest_triton():
        cases = compiled(2, 4, NEWEST)
        assert {case["case"] for case in cases} >= {"d64 causal", "d128 where"}
        for case in cases:
            check(case, measured=False)
