"""The Triton backend's tests: on a GPU where there is one, else under Triton's interpreter on the CPU.

They run in a process of their own (`make test` starts it), because the interpreter is chosen once for a process.
"""

import os
import sys
from pathlib import Path

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
sys.path.insert(0, str(Path(__file__).parent.parent))
