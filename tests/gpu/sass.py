"""Machine code of compiled kernels, and what can be seen in it."""

import re
import subprocess
import tempfile

from triton import knobs


def disassembly(cubin: bytes) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.nvdisasm.path, "-c", file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def unset(sass: str) -> list[str]:
    """Instructions of Hopper's code that read a uniform register which no line before them writes.

    ptxas 12.8 wrote such code: descriptors of matrix products, made of registers that held whatever was left there.
    """
    known: set[int] = set()
    found = []
    for line in sass.splitlines():
        match = re.match(r"\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ +)?(\S+)\s*(.*?)\s*;", line)
        if match is None:
            continue
        operation, operands = match.group(1), [x.strip() for x in match.group(2).split(",")]
        reads, writes = set(), set()
        for text in operands:
            written = (
                re.fullmatch(r"UR(\d+)", text) if not writes and re.match("U|R2UR|S2UR", operation) else None
            )
            if written:
                first = int(written.group(1))
                writes = {first, first + 1} if re.search(r"\.64|WIDE", operation) else {first}
            elif text.startswith("gdesc"):
                first = int(re.search(r"UR(\d+)", text).group(1))
                # The descriptors of A and B; A's place is unused where A lies in registers.
                reads |= set(range(first + 2 * operands[1].startswith("R"), first + 4))
            else:
                reads |= {int(n) for n in re.findall(r"\bUR(\d+)", text)}
        if reads - known:
            found.append(f"{operation} {', '.join(operands)}")
        known |= writes
    return found
