"""The Triton backend's tests: on a GPU where there is one, else under Triton's interpreter on the CPU.

They run in a process of their own (`make test` starts it), because the interpreter is chosen once for a process. It is
slow, so each run without a GPU takes one share of the contract and the cases in SHARES, another one each time;
ONCHIP_INTERPRETER_SHARE=0/10, 1/10, ... repeats it, =3/20 is a smaller one, and =all runs the whole.
"""

import os
import random
import sys
from pathlib import Path

import torch

SHARES = 10

collect_ignore = []
if not torch.cuda.is_available():
    collect_ignore += ["test_device.py", "test_graphs.py"]  # sizes and tools that only a GPU has
    os.environ["TRITON_INTERPRET"] = "1"
    # Set before the workers start, which inherit it.
    os.environ.setdefault("ONCHIP_INTERPRETER_SHARE", f"{random.SystemRandom().randrange(SHARES)}/{SHARES}")
sys.path.insert(0, str(Path(__file__).parent.parent))


def pytest_report_header():
    share = os.environ.get("ONCHIP_INTERPRETER_SHARE")
    return None if share is None else f"ONCHIP_INTERPRETER_SHARE={share}"


def pytest_collection_modifyitems(items):
    # What compiles for minutes comes first, and one test at a time goes to a worker (the Makefile's --maxschedchunk):
    # in chunks one worker would get all of it.
    items.sort(key=lambda item: not item.path.name.startswith("test_compile"))
    share = os.environ.get("ONCHIP_INTERPRETER_SHARE", "all")
    if share == "all":
        return
    part, parts = map(int, share.split("/"))
    large = ("test_contract_triton.py", "test_cases_triton.py")
    contract = [item for item in items if item.path.name in large]
    kept = set(contract[part::parts])
    items[:] = [item for item in items if item not in contract or item in kept]
