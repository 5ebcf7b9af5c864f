"""Tables of the benchmarks' pages are the recorded runs, figure by figure."""

import json
import re
import runpy
import shutil
from pathlib import Path

HERE = Path(__file__).parent.parent / "benchmarks"
KERNELS = {
    "onchip-triton": "onchip, Triton",
    "onchip-hopper": "onchip, Hopper",
    "sdpa-flash": "FlashAttention-2",
    "standard": "standard attention",
}


def test_the_benchmarks_page_is_made_of_the_records(tmp_path):
    copy = tmp_path / "benchmarks"
    shutil.copytree(HERE, copy, ignore=shutil.ignore_patterns("*.md", "__pycache__"))
    runpy.run_path(str(copy / "table.py"), run_name="__main__")
    assert (copy / "README.md").read_text() == (HERE / "README.md").read_text()


def test_what_ncu_counted_is_the_record():
    """Each row of the table by problem, kernels and pass, but for Hopper's backward pass, which is Triton's."""
    rows = [
        [cell.strip() for cell in line.strip("|\n").split("|")]
        for line in (HERE / "traffic.md").read_text().splitlines()
        if re.match(r"\|.*\| (forward|backward) \|", line)
    ]
    record = json.loads((HERE / "results" / "h200-traffic.json").read_text())["results"]
    found = {}
    for one in record:
        if (one["impl"], one["pass"]) == ("onchip-hopper", "backward"):
            continue
        bytes_ = (
            one["read"],
            one["written"],
            one["read"] + one["written"],
            one["model_least"],
            one["model_bytes"],
        )
        found[one["label"], KERNELS[one["impl"]], one["pass"]] = [f"{n / 1e9:.2f}" for n in bytes_]
    assert len(rows) == len(found)
    for label, *names, read, written, both, least, every in rows:
        assert found[(label.split(",")[0], *names)] == [read, written, both, least, every], (label, *names)
