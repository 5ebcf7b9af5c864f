"""The distributions in shims/: they forward to onchip, and do not replace the real packages."""

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

import onchip

SHIMS = Path(__file__).parent.parent / "shims"
SRC = Path(onchip.__file__).parents[1]
MODULES = {"flash-attn": "flash_attn", "flash-attn-3": "flash_attn_interface"}


@pytest.fixture
def sources(tmp_path):
    """A copy to build in: builds leave files behind."""
    return Path(
        shutil.copytree(SHIMS, tmp_path / "shims", ignore=shutil.ignore_patterns("build", "*.egg-info"))
    )


def run(*args, python=sys.executable, paths=(), **options):
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))}
    return subprocess.run(
        [str(python), *map(str, args)], env=env, capture_output=True, text=True, timeout=120, **options
    )


def test_installed_shims_forward_to_onchip(sources, tmp_path):
    site = tmp_path / "site"
    install = ("-m", "pip", "install", "--no-build-isolation", "--no-deps", "--no-index", "--target", site)
    done = run(*install, *(sources / name for name in MODULES))
    assert done.returncode == 0, done.stderr
    code = """
import importlib.metadata
from flash_attn.bert_padding import unpad_input
from flash_attn.cute import flash_attn_func as four
import flash_attn, flash_attn_interface, onchip.compat.flash_attn, onchip.compat.flash_attn_interface
assert flash_attn is onchip.compat.flash_attn
assert unpad_input is onchip.compat.flash_attn.bert_padding.unpad_input
assert flash_attn_interface is onchip.compat.flash_attn_interface
assert importlib.metadata.version("flash-attn") == flash_attn.__version__ + "+onchip"
print(importlib.metadata.version("flash_attn_3"))
"""
    done = run("-c", code, paths=(SRC, site))
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("3.")
    found = {p.relative_to(site).as_posix() for p in site.rglob("*.py")}
    assert found == {"flash_attn/__init__.py", "flash_attn_interface.py"}


def place(site, name, version):
    """A distribution of that name and version, as far as its metadata goes."""
    info = site / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {name.replace('-', '_')}\nVersion: {version}\n"
    )


BUILD = "from setuptools import build_meta; print(build_meta.build_wheel('.'))"


def test_building_beside_the_user_s_own_real_package_is_refused(sources, tmp_path):
    """In the site-packages of `pip install --user`."""
    ask = "import site; print(site.getusersitepackages())"
    user = {**os.environ, "PYTHONUSERBASE": str(tmp_path / "user"), "PYTHONPATH": ""}
    site = subprocess.run(
        [sys.executable, "-c", ask], env=user, capture_output=True, text=True, check=True
    ).stdout
    place(Path(site.strip()), "flash-attn", "2.8.1")
    for shim, code in (("flash-attn", 1), ("flash-attn-3", 0)):
        done = subprocess.run(
            [sys.executable, "-c", BUILD],
            env=user,
            cwd=sources / shim,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == code, done.stderr
        assert ("flash-attn 2.8.1 is installed" in done.stderr) == bool(code)


@pytest.mark.parametrize(
    "shim, name, version, refused",
    [
        ("flash-attn", "flash-attn", "2.8.1.post1", True),
        ("flash-attn", "flash-attn-4", "4.0.0b1", True),  # which has flash_attn.cute
        ("flash-attn", "flash-attn", "2.8.3+onchip", False),
        ("flash-attn-3", "flash-attn-3", "3.0.0b1", True),
        ("flash-attn-3", "flashattn-hopper", "3.0.0b1", True),
        ("flash-attn-3", "flash-attn", "2.8.1", False),
    ],
)
def test_building_over_the_real_package_is_refused(shim, name, version, refused, sources, tmp_path):
    """The build runs with another environment's interpreter, which holds a package of that name."""
    venv.create(tmp_path / "env", symlinks=True)
    python = next((tmp_path / "env").glob("*/python"))
    site = Path(
        run("-c", "import sysconfig; print(sysconfig.get_path('purelib'))", python=python).stdout.strip()
    )
    place(site, name, version)
    done = run("-c", BUILD, python=python, paths=(sysconfig.get_path("purelib"),), cwd=sources / shim)
    if refused:
        assert done.returncode != 0
        assert (
            f"error: {name} {version} is installed" in done.stderr and f"pip uninstall {name}" in done.stderr
        )
        assert not list((sources / shim).glob("*.whl"))
    else:
        assert done.returncode == 0, done.stderr
