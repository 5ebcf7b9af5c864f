"""Builds the shim, unless the package that it stands in for is installed: pip would then replace that one."""

import site
import sys
import sysconfig
from importlib.metadata import distributions

from setuptools import setup

REAL = ("flash-attn", "flash-attn-4")  # both own the package flash_attn


def refuse_over_the_real_one() -> None:
    """End the build with a message where a distribution of such a name, but not a shim, is installed.

    pip builds in an environment of its own, which knows the interpreter's site-packages but does not import from them.
    """
    own = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), site.getusersitepackages()}
    places = sorted(own.union(sys.path))
    for found in distributions(path=places):
        name = (found.metadata["Name"] or "").lower().replace("_", "-").replace(".", "-")
        if name in REAL and "onchip" not in found.version:
            sys.exit(
                f"error: {name} {found.version} is installed, and this shim would replace it. Keep it and use "
                f"onchip.compat by its own name, or run `pip uninstall {name}` first."
            )


refuse_over_the_real_one()
setup()
