"""Checks of the native CPU kernels that build or force something: native_checks.py wheel isas sanitize driver.

wheel     builds the wheel, installs it into a clean environment and runs a share of the contract there
isas      runs a share of the contract on what `make` built, for each instruction set but the best, which `make test`
          runs whole, and on the tiled loop; two instruction sets take different shares
sanitize  as wheel, built with AddressSanitizer and UndefinedBehaviorSanitizer: a smaller share of the contract for
          the best instruction set, another for the plainest
driver    holds the libraries to plain loops, without Python; NEON's too, where a cross compiler and qemu are

A share is drawn anew each time and printed; --share 3 repeats it, --share all runs all.
"""

import argparse
import os
import platform
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CPU = ROOT / "src" / "onchip" / "backends" / "cpu"
ISA, HOME, SHARE = "ONCHIP_CPU_ISA", "ONCHIP_CHECKS_HOME", "ONCHIP_CHECKS_SHARE"
CONTRACT = ("test_contract_native.py", "test_native.py")
THREADS = "test_threads_change_no_bit"  # in every share: the contract itself runs on one thread
SHARES = {"wheel": 8, "isas": 8, "sanitize": 16, "driver": 1}  # one of so many; 1 is all
ARM = "aarch64-linux-gnu"
# Enough for the kernels' headers; the libraries bring instructions of their own.
DRIVER_FLAGS = {"x86_64": ("-mavx2", "-mfma", "-mf16c"), "aarch64": (), "arm64": ()}


# Pytest loads this file as a plugin (`-p native_checks`) in each of its processes.


def pytest_configure():
    import onchip
    from onchip.backends.cpu import isa

    assert Path(onchip.__file__).is_relative_to(os.environ[HOME]), onchip.__file__
    expected = os.environ[ISA] or next(filter(isa.find, isa.supported()))
    assert isa.load().isa == (None if expected == "none" else expected), isa.status()


def pytest_collection_modifyitems(items):
    part, parts = map(int, os.environ[SHARE].split("/"))
    kept = set(items[part % parts :: parts])
    items[:] = [item for item in items if item in kept or item.originalname == THREADS]


def run(*command, **environment):
    print("+", *command, flush=True)
    # This environment's own cmake and ninja, where it has them.
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"} | environment
    subprocess.run(list(map(str, command)), env=environment, cwd=tempfile.gettempdir(), check=True)


def contract(python, home, tests, paths, isa, share, **environment):
    """A share of these tests, in processes whose onchip must lie under `home` and use `isa`, or the best one for ""."""
    print(f"{isa or 'best'}: share {share}", flush=True)
    told = {ISA: isa, HOME: str(home), SHARE: share, "PYTHONPATH": str(tests), "OMP_NUM_THREADS": "1"}
    # --capture: what a process prints of its own end is not to be held back.
    options = ("-q", "-n2", "--maxfail=3", "--capture=sys", "-pnative_checks", "-pno:cacheprovider")
    run(python, "-m", "pytest", *options, *(tests / path for path in paths), **told | environment)


def install(folder, *options):
    """The wheel, built and installed into a clean environment in `folder`; (its Python, a copy of the tests).

    Torch and the rest are read from this environment, whose own onchip, an editable install perhaps, stays hidden.
    """
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet")
    options = (*options, f"--config-settings=build-dir={folder / 'build'}")
    run(*pip, "wheel", "--no-deps", *options, "--wheel-dir", folder, ROOT)
    (built,) = folder.glob("*.whl")
    print(built.name)
    assert "-py3-none-" in built.name and "-any" not in built.name
    run(sys.executable, "-m", "venv", "--without-pip", folder / "venv")
    python = folder / "venv" / "bin" / "python"
    run(*pip, "--python", python, "install", "--no-deps", "--no-index", built)
    (site,) = (folder / "venv").glob("lib/python*/site-packages")
    (site / "outside.pth").write_text("".join(f"{p}\n" for p in sys.path if p.endswith("-packages")))
    shutil.copytree(ROOT / "tests", folder / "tests", ignore=shutil.ignore_patterns("__pycache__"))
    return python, folder / "tests"


def instruction_sets():
    """Those of this machine that a library is built for, best first."""
    sys.path.insert(0, str(ROOT / "src"))
    from onchip.backends.cpu import isa

    found = [name for name in isa.supported() if isa.find(name)]
    assert found, isa.status()
    return found


def wheel(folder, part, parts):
    python, tests = install(folder)
    contract(python, folder, tests, CONTRACT, "", f"{part}/{parts}")


def isas(folder, part, parts):
    tree = sys.executable, ROOT / "src", ROOT / "tests"
    for i, isa in enumerate(instruction_sets()[1:]):  # each takes another share
        contract(*tree, CONTRACT, isa, f"{part + i}/{parts}")
    contract(*tree, ("test_contract_cpu.py::TestCpu",), "none", f"{part}/{parts}")


def sanitize(folder, part, parts):
    told = ("cmake.define.ONCHIP_SANITIZE=address,undefined", "install.strip=false")
    python, tests = install(folder, "--no-build-isolation", *(f"--config-settings={x}" for x in told))
    runtimes = [
        subprocess.run(["c++", f"-print-file-name=lib{name}.so"], capture_output=True, text=True, check=True)
        for name in ("asan", "ubsan")
    ]
    environment = {
        "LD_PRELOAD": " ".join(found.stdout.strip() for found in runtimes),
        "ASAN_OPTIONS": "detect_leaks=0",  # Python leaks by design
        "UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1",
    }
    found = instruction_sets()
    for i, isa in enumerate((found[0], found[-1])):  # those between are mixtures of both
        contract(python, folder, tests, CONTRACT, isa, f"{part + i}/{parts}", **environment)


def driver(folder, part, parts):
    build_driver(folder / "native", "c++", platform.machine().lower())
    run(folder / "native", *(CPU / "lib" / f"onchip_{isa}.so" for isa in instruction_sets()))
    cross, emulator = (shutil.which(name) for name in (f"{ARM}-g++", "qemu-aarch64"))
    if cross is None:
        return print(f"NEON is not checked: there is no {ARM}-g++")
    told = [f"C_COMPILER={ARM}-gcc", f"CXX_COMPILER={cross}", "SYSTEM_NAME=Linux", "SYSTEM_PROCESSOR=aarch64"]
    run("cmake", "-S", ROOT, "-B", folder / "build", *(f"-DCMAKE_{each}" for each in told))
    run("cmake", "--build", folder / "build", "--parallel", "2")
    if emulator is None:
        return print("NEON is compiled, but not run: there is no qemu-aarch64")
    build_driver(folder / "arm", cross, "aarch64")
    run(emulator, "-L", f"/usr/{ARM}", folder / "arm", folder / "build" / "onchip_neon.so")


def build_driver(to, compiler, machine):
    flags = ("-std=c++17", "-O1", *DRIVER_FLAGS[machine], "-I", CPU / "kernels")
    run(compiler, *flags, ROOT / "tests" / "native_driver.cpp", "-o", to, "-ldl")


def main():
    checks = {"wheel": wheel, "isas": isas, "sanitize": sanitize, "driver": driver}
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checks", nargs="+", choices=checks, metavar="|".join(checks))
    parser.add_argument("--share", help="which share of the contract to run, 0, 1, ..., or all")
    args = parser.parse_args()
    for name in args.checks:
        share = args.share or str(random.SystemRandom().randrange(SHARES[name]))
        part, parts = (0, 1) if share == "all" else (int(share), SHARES[name])
        start = time.monotonic()
        print(f"{name} --share {share}", flush=True)
        with tempfile.TemporaryDirectory() as folder:
            checks[name](Path(folder), part, parts)
        print(f"{name} took {time.monotonic() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main()
