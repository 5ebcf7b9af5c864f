"""What stands at the head of every record of a GPU."""

import json
import platform
import subprocess
from datetime import date
from pathlib import Path

import torch
import triton


def write(out: Path, results: list[dict], regime: str, commit: str | None = None, **versions: str) -> None:
    """The results with date, device, versions (these besides torch's, Triton's and Python's) and commit."""
    git = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    known = {
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
    }
    about = {
        "date": date.today().isoformat(),
        "device": torch.cuda.get_device_name(),
        "versions": known | versions,
        "commit": commit or git.stdout.strip(),
        "regime": regime,
    }
    out.write_text(json.dumps({**about, "results": results}, indent=1) + "\n")
