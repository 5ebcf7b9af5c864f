"""Checks of the native CPU kernels that build something, for CI: python tests/native_checks.py wheel|isas|sanitize.

wheel     builds the wheel, installs it into a clean environment beside this one's packages, and runs a share of the
          contract on it from outside the tree
isas      runs a share of the contract for each instruction set of this machine, and for the tiled loop
sanitize  builds with AddressSanitizer and UndefinedBehaviorSanitizer, and runs a share of the contract on that

A share is drawn anew each time and printed; --share 3/40 repeats it, 0/1 runs all.
"""

import argparse
import os
import random
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
ISA = "ONCHIP_CPU_ISA"


def run(*command, **environment):
    print("+", *command, flush=True)
    subprocess.run(
        [str(c) for c in command], env={**os.environ, **environment}, cwd=tempfile.gettempdir(), check=True
    )


def contract(python, share, *paths, **environment):
    """A share of these tests, in a process of its own that finds onchip where PYTHONPATH or its environment has it."""
    tests = [ROOT / "tests" / path for path in paths]
    run(python, __file__, "contract", "--share", share, *tests, OMP_NUM_THREADS="2", **environment)


def run_contract(share, paths):
    import pytest

    part, parts = map(int, share.split("/"))

    class Share:
        def pytest_collection_modifyitems(self, items):
            items[:] = items[part::parts]

    options = ["-q", "-p", "no:cacheprovider", "-o", "pythonpath=", "--rootdir", str(ROOT)]
    return pytest.main([*options, *paths], plugins=[Share()])


def wheel(share):
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        run(sys.executable, "-m", "pip", "wheel", "--no-deps", "-w", folder, ROOT)
        (built,) = folder.glob("*.whl")
        print(built.name)
        assert built.name.split("-", 2)[2].startswith("py3-none-") and "any" not in built.name, built.name
        run(sys.executable, "-m", "venv", folder / "venv")
        python = folder / "venv" / "bin" / "python"
        # Torch and the rest are read from this environment; onchip comes from the wheel, which stands before it.
        run(python, "-m", "pip", "install", "--quiet", "--no-deps", built)
        site = next((folder / "venv" / "lib").glob("python*/site-packages"))
        (site / "outside.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
        where = f"import onchip; assert onchip.__file__.startswith({str(folder)!r}), onchip.__file__"
        run(python, "-c", f"{where}; print(onchip.backends.cpu.status())", PYTHONPATH="")
        contract(python, share, "test_contract_native.py", PYTHONPATH="")


def isas(share):
    sys.path.insert(0, str(ROOT / "src"))
    from onchip.backends.cpu import isa as library

    built = [isa for isa in library.supported() if library.find(isa)]
    assert built, library.status()
    for isa in built:
        contract(
            sys.executable,
            share,
            "test_contract_native.py",
            "test_native.py",
            **{ISA: isa, "PYTHONPATH": str(ROOT / "src")},
        )
    contract(sys.executable, share, "test_contract_cpu.py", **{ISA: "none", "PYTHONPATH": str(ROOT / "src")})


def sanitize(share):
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        shutil.copytree(ROOT / "src", folder / "src", ignore=shutil.ignore_patterns("lib", "__pycache__"))
        build = folder / "build"
        run("cmake", "-S", ROOT, "-B", build, "-DONCHIP_SANITIZE=address,undefined")
        run("cmake", "--build", build, "--parallel", os.cpu_count() or 1)
        run("cmake", "--install", build, "--prefix", folder / "src")
        libraries = [
            subprocess.run(
                ["g++", f"-print-file-name=lib{name}.so"], capture_output=True, text=True, check=True
            ).stdout.strip()
            for name in ("asan", "ubsan")
        ]
        options = {
            "LD_PRELOAD": " ".join(libraries),
            "ASAN_OPTIONS": "detect_leaks=0",
            "UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1",
            "PYTHONPATH": str(folder / "src"),
        }
        for isa in ("avx2", "avx512", "amx"):
            if (
                folder / "src" / "onchip" / "backends" / "cpu" / "lib" / f"onchip_{isa}.so"
            ).exists() and _runs(isa):
                contract(sys.executable, share, "test_contract_native.py", **{**options, ISA: isa})


def _runs(isa):
    sys.path.insert(0, str(ROOT / "src"))
    from onchip.backends.cpu import isa as library

    return isa in library.supported()


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("check", choices=("wheel", "isas", "sanitize", "contract"))
    parser.add_argument("--share", help="i/n: every n-th test from the i-th on")
    parser.add_argument("paths", nargs="*", help=argparse.SUPPRESS)
    args = parser.parse_intermixed_args()
    parts = {"wheel": 40, "isas": 40, "sanitize": 60}.get(args.check, 1)
    share = args.share or f"{random.SystemRandom().randrange(parts)}/{parts}"
    print(f"{args.check} --share {share}", flush=True)
    if args.check == "contract":
        sys.exit(run_contract(share, args.paths))
    {"wheel": wheel, "isas": isas, "sanitize": sanitize}[args.check](share)


if __name__ == "__main__":
    main()
