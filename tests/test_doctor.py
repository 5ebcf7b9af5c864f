"""`onchip doctor`: its reasons are the machine's, and it finds packages by what can be imported, importing none."""

import importlib.util
import subprocess
import sys

import pytest
import torch

from onchip import cli, doctor, select
from onchip.backends import hopper, triton
from onchip.bench import peers


@pytest.fixture
def machine(monkeypatch):
    """A machine as told: the GPU's compute capability, None for no GPU; with Triton or without."""
    find = importlib.util.find_spec

    def make(gpu, has_triton):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu is not None)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: gpu)
        monkeypatch.setattr(torch.version, "hip", None)
        triton_s = True if has_triton else None
        monkeypatch.setattr(
            importlib.util, "find_spec", lambda name, *_: triton_s if name == "triton" else find(name)
        )
        if not has_triton:
            monkeypatch.delitem(sys.modules, "triton", raising=False)
        for cached in (hopper._machine, triton._installed):
            cached.cache_clear()
        return {name: doctor._backend(name)["refused"] for name in select.BACKENDS}

    yield make
    for cached in (hopper._machine, triton._installed):
        cached.cache_clear()


@pytest.mark.parametrize(
    "gpu, has_triton, wanted",
    [
        (None, True, {"hopper": "no GPU found", "triton": "no GPU found"}),
        (None, False, dict.fromkeys(("hopper", "triton"), "no GPU found; triton is not installed")),
        ((8, 0), True, {"hopper": "the device is no Hopper GPU (compute capability 9.0)", "triton": None}),
        ((10, 0), True, {"hopper": "the device is no Hopper GPU (compute capability 9.0)", "triton": None}),
        ((9, 0), True, {"hopper": None, "triton": None}),
        ((9, 0), False, dict.fromkeys(("hopper", "triton"), "triton is not installed")),
    ],
)
def test_why_a_gpu_backend_is_not_usable(machine, gpu, has_triton, wanted):
    found = machine(gpu, has_triton)
    assert {name: found[name] for name in wanted} == wanted


@pytest.mark.parametrize("gpu", [None, (9, 0)])
@pytest.mark.parametrize("has_triton", [True, False])
@pytest.mark.parametrize("native", [True, False])
def test_no_reason_speaks_of_tensors(machine, monkeypatch, gpu, has_triton, native):
    """On a GPU's machine the CPU's backends give their own reasons too."""
    plain = select.load("native").refuse
    lacks = lambda problem: plain(problem) if problem.device != "cpu" or native else "there is no compiler"  # noqa: E731
    monkeypatch.setattr(select.load("native"), "refuse", lacks)
    found = machine(gpu, has_triton)
    assert not any("tensor" in (reason or "") for reason in found.values()), found
    assert native or found["native"] == "there is no compiler"
    assert found["cpu"] is None and found["reference"] is None


def package(folder, name, body="raise SystemExit('imported')", version=None):
    """A package that ends the process when it is imported, and its distribution's record."""
    place = folder / name
    place.mkdir(parents=True, exist_ok=True)
    (place / "__init__.py").write_text(body)
    if version is not None:
        about = folder / f"{version[0].replace('-', '_')}-{version[1]}.dist-info"
        about.mkdir()
        (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {version[0]}\nVersion: {version[1]}\n")


def test_packages_are_what_can_be_imported(tmp_path, monkeypatch):
    """Modules by their own names, whatever distribution brings them; none is imported."""
    monkeypatch.syspath_prepend(str(tmp_path))
    names = ("flash_attn", "flash_attn_interface", "flash_attn.cute", "xformers")
    assert not any(doctor.version(name) for name in names)
    about = tmp_path / "flash_attn_3-3.0.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: flash_attn_3\nVersion: 3.0.0\n")
    assert doctor.version("flash_attn_interface") is None  # a record alone imports nothing
    (tmp_path / "flash_attn_interface.py").write_text("raise SystemExit('imported')")
    package(tmp_path, "flash_attn", version=("flash_attn", "2.8.3"))
    assert doctor.version("flash_attn.cute") is None
    package(tmp_path / "flash_attn", "cute")
    package(tmp_path, "xformers")
    found = {name: doctor.version(name) for name in names}
    assert found == {
        "flash_attn": "2.8.3", "flash_attn_interface": "3.0.0", "flash_attn.cute": "installed", "xformers": "installed"
    }  # fmt: skip
    text = "\n".join(doctor.lines(doctor.examine()))
    assert "flash_attn_interface (FlashAttention-3) 3.0.0" in text
    missing = {name: peers.peer(name).missing("cuda") for name in ("fa2", "fa3", "fa4", "xformers")}
    assert not any(missing.values()), missing
    assert not {"flash_attn", "flash_attn_interface", "xformers"} & {*sys.modules}


def test_a_namespace_of_the_fourth_alone(tmp_path, monkeypatch):
    """Without an __init__ of flash_attn, as its wheel may come; a module that is no package has no parts."""
    monkeypatch.syspath_prepend(str(tmp_path))
    package(tmp_path / "flash_attn", "cute")
    assert doctor.version("flash_attn.cute") == "installed"
    assert peers.importable("flash_attn.cute") and not peers.importable("flash_attn.nothing")
    assert not peers.importable("json.nothing") and not peers.importable("this.that")


def test_the_screen(capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["doctor"])
    text = capsys.readouterr().out
    assert not ended.value.code and len(text.splitlines()) <= 24
    for name in (
        "flash_attn (FlashAttention-2)",
        "flash_attn_interface (FlashAttention-3)",
        "flash_attn.cute",
    ):
        assert name in text


def test_it_imports_nothing_heavy():
    """Neither Triton nor transformers nor a library to bench against."""
    code = (
        "import sys\n"
        "from onchip import doctor\n"
        "doctor.lines(doctor.examine())\n"
        "print({'triton', 'transformers', 'matplotlib', 'xformers', 'flash_attn'} & {*sys.modules})\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stdout.strip() == "set()", done.stdout + done.stderr
