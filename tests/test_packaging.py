"""What `pip install` makes of the tree: libraries of any Python; without a compiler a pure package that says so."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FILES = ("CMakeLists.txt", "pyproject.toml", "README.md", "LICENSE")
CPU = "onchip/backends/cpu"


def build(folder, environment, prepare=lambda kernels: None):
    """The wheel of a copy of the tree, which holds a library of an earlier build."""
    tree, out = folder / "tree", folder / "wheels"
    tree.mkdir()
    for name in FILES:  # a copy: a build leaves its files beside them
        shutil.copy(ROOT / name, tree / name)
    shutil.copytree(ROOT / "src", tree / "src", ignore=shutil.ignore_patterns("lib", "__pycache__"))
    (tree / "src" / CPU / "lib").mkdir()
    (tree / "src" / CPU / "lib" / "onchip_stale.so").touch()
    prepare(tree / "src" / CPU / "kernels")
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-w", out, tree]
    done = subprocess.run(
        list(map(str, command)), env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (found,) = out.iterdir()
    return found


@pytest.fixture(scope="module")
def pure(tmp_path_factory):
    return build(tmp_path_factory.mktemp("pure"), os.environ | {"CC": "/bin/false"})


def test_without_a_compiler_the_package_is_pure(pure):
    assert pure.name.endswith("-py3-none-any.whl")
    names = zipfile.ZipFile(pure).namelist()
    assert f"{CPU}/native.py" in names
    assert not [n for n in names if n.endswith((".so", ".cpp", ".h"))]


def test_the_pure_package_runs_and_says_why_it_is_slower(pure, tmp_path):
    zipfile.ZipFile(pure).extractall(tmp_path)
    code = """
import sys
# An editable install of the tree would answer before PYTHONPATH.
sys.meta_path[:] = [f for f in sys.meta_path if type(f).__name__ != "ScikitBuildRedirectingFinder"]
import torch, onchip
from onchip.cli import main
q = torch.randn(1, 9, 2, 8)
plan = onchip.plan(q, q, q)
print(onchip.__file__, plan.backend, onchip.attention(q, q, q).isfinite().all().item())
sys.argv = ["onchip", "doctor"]
main()
"""
    environment = {k: v for k, v in os.environ.items() if k != "ONCHIP_CPU_ISA"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment | {"PYTHONPATH": str(tmp_path)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    first, *doctor = done.stdout.splitlines()
    assert first == f"{tmp_path / 'onchip' / '__init__.py'} cpu True"
    (notice,) = [line for line in doctor if line.startswith("backend native")]
    assert "no: the package was installed without native kernels" in notice


@pytest.mark.skipif(shutil.which("c++") is None, reason="there is no C++ compiler")
def test_the_wheel_is_of_this_platform_and_any_python(tmp_path):
    """Empty kernels: compiling real ones would take long, and what they are does not matter here."""

    def empty(kernels):
        for file in kernels.glob("*.cpp"):
            file.write_text("")

    found = build(tmp_path, os.environ, empty)
    assert "-py3-none-" in found.name and not found.name.endswith("-any.whl")
    names = zipfile.ZipFile(found).namelist()
    libraries = {n for n in names if n.endswith(".so")}
    assert libraries and f"{CPU}/lib/onchip_stale.so" not in libraries
    assert all(n.startswith(f"{CPU}/lib/onchip_") for n in libraries)
    assert not [n for n in names if n.endswith((".cpp", ".h"))]
