"""What `pip install` makes of the tree where no compiler is: a pure package that says so."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FILES = ("CMakeLists.txt", "pyproject.toml", "README.md", "LICENSE")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    tree, out = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("wheels")
    for name in FILES:  # a copy: a build leaves its files beside them
        shutil.copy(ROOT / name, tree / name)
    shutil.copytree(ROOT / "src", tree / "src", ignore=shutil.ignore_patterns("lib", "__pycache__"))
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        str(out),
        str(tree),
    ]
    environment = {**os.environ, "CC": "/bin/false", "CXX": "/bin/false"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    (found,) = out.iterdir()
    return found


def test_without_a_compiler_the_package_is_pure(wheel):
    assert wheel.name.endswith("-py3-none-any.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert "onchip/backends/cpu/native.py" in names
    assert not [n for n in names if n.endswith((".so", ".cpp", ".h"))]


def test_the_pure_package_runs_and_says_why_it_is_slower(wheel, tmp_path):
    zipfile.ZipFile(wheel).extractall(tmp_path)
    code = """
import sys
# An editable install of the tree would answer before PYTHONPATH.
sys.meta_path[:] = [f for f in sys.meta_path if type(f).__name__ != "ScikitBuildRedirectingFinder"]
import torch, onchip
from onchip.backends.cpu import native
q = torch.randn(1, 9, 2, 8)
plan = onchip.plan(q, q, q)
print(onchip.__file__, plan.backend, onchip.attention(q, q, q).isfinite().all().item())
print(onchip.backends.cpu.status())
"""
    environment = {k: v for k, v in os.environ.items() if k != "ONCHIP_CPU_ISA"} | {
        "PYTHONPATH": str(tmp_path)
    }
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    first, second = done.stdout.splitlines() or [done.stderr, ""]
    assert first == f"{tmp_path / 'onchip' / '__init__.py'} cpu True"
    assert second.startswith("no native kernels: the package was installed without native kernels")
