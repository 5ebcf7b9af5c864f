"""Peak memory beyond inputs, outputs and gradients, measured in a process of its own."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import onchip

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads the peak from /proc")

MIB = 2**20
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(onchip.__file__).parents[1])}

# `extra(run)`: peak resident bytes while `run()` computes, above those before it and what it returns.
PREPARE = """
    import json
    import torch, onchip

    def status(name):
        with open("/proc/self/status") as file:
            return next(int(line.split()[1]) * 1024 for line in file if line.startswith(name))

    def extra(run):
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")  # the peak starts anew
        before = status("VmRSS")
        kept = run()
        found = status("VmHWM") - before - sum(x.numel() * x.element_size() for x in kept)
        print(json.dumps(found))

    def warm_up(**options):
        x = torch.randn(1, 600, 4, 64, requires_grad=True)
        onchip.attention(x, x, x, **options).sum().backward()
"""


def measure(body, timeout=600):
    """The number that the script prints last."""
    script = textwrap.dedent(PREPARE) + textwrap.dedent(body)
    options = {"env": ENVIRONMENT, "capture_output": True, "text": True, "timeout": timeout}
    run = subprocess.run([sys.executable, "-c", script], **options)
    if "clear_refs" in run.stderr:
        pytest.skip("the kernel does not let a process reset its peak")
    assert run.returncode == 0, run.stderr[-2000:]
    found = json.loads(run.stdout.splitlines()[-1])
    print(f"{found / MIB:.1f} MiB")
    return found


TRAIN = """
    options = {options}
    warm_up(**options)
    q, k, v, dout = (torch.randn(1, {n}, 4, 64).to({dtype}) for _ in range(4))
    for x in (q, k, v):
        x.requires_grad_()

    def run():
        out, lse = onchip.attention(q, k, v, return_lse=True, **options)
        out.backward(dout)
        return out, lse, q.grad, k.grad, v.grad

    extra(run)
"""


@pytest.mark.parametrize("options", ["{}", "{'mask': onchip.causal()}"], ids=["full", "causal"])
def test_forward_and_backward_of_16384(options):
    """The scores alone would take 4 GiB."""
    assert measure(TRAIN.format(options=options, n=16384, dtype="torch.float32")) < 256 * MIB


FEATURES = {
    "union": "{'mask': onchip.causal() & (onchip.window(511, 0) | onchip.sinks(4))}",
    "documents": "{'mask': onchip.documents(torch.arange(16384) // 512) & onchip.window(1023, 0)}",
    "score": "{'mask': onchip.window(511, 0), 'score': onchip.Score(softcap=20.0, alibi=torch.rand(4))}",
    "dropout": "{'mask': onchip.window(511, 0), 'dropout': 0.1}",
}


@pytest.mark.parametrize(
    "name, dtype", [*((n, "torch.float32") for n in FEATURES), ("score", "torch.bfloat16")]
)
def test_features_at_16384(name, dtype):
    body = TRAIN.replace("warm_up(**options)", "warm_up()")
    assert measure(body.format(options=FEATURES[name], n=16384, dtype=dtype)) < 256 * MIB


def test_memory_is_linear_in_the_length():
    """Four times the length takes at most four times the memory, and a few tiles."""
    window = "{'mask': onchip.window(255, 0)}"
    small, large = (measure(TRAIN.format(options=window, n=n, dtype="torch.float32")) for n in (8192, 32768))
    assert large < 4 * max(small, 16 * MIB) + 64 * MIB


DECODE = """
    cache = torch.randn({rows}, {capacity}, 4, 64, dtype={dtype})
    v_cache = cache.clone()
    q, new = torch.randn({rows}, 1, 8, 64, dtype={dtype}), torch.randn({rows}, 1, 4, 64, dtype={dtype})
    seqlens = torch.tensor({seqlens})
    small = cache[:, :512].clone()
    onchip.attention_with_cache(q, small, small.clone(), cache_seqlens=300, k=new, v=new)

    def run():
        return [onchip.attention_with_cache(q, cache, v_cache, cache_seqlens=seqlens, k=new, v=new)]

    extra(run)
"""


@pytest.mark.parametrize(
    "rows, capacity, seqlens, dtype",
    [
        (1, 131072, [131000], "torch.float32"),
        (4, 65536, [65000, 65000, 65000, 65000], "torch.float32"),
        (3, 65536, [65000, 1, 40000], "torch.float32"),
        (2, 131072, [131000, 131000], "torch.bfloat16"),
    ],
)
def test_decoding_makes_no_copy_of_a_long_cache(rows, capacity, seqlens, dtype):
    """K and V are 128 MiB a sequence of 131072 in float32; a half-precision one is widened head by head."""
    found = measure(DECODE.format(rows=rows, capacity=capacity, seqlens=seqlens, dtype=dtype))
    widened = 0 if dtype == "torch.float32" else 2 * capacity * 64 * 4
    assert found < widened + 48 * MIB


def test_paged_decoding_gathers_little_at_a_time():
    body = """
        pages = torch.randn(4096, 16, 4, 64)
        v_pages = pages.clone()
        table = torch.randperm(4096).view(2, 2048).to(torch.int32)
        q = torch.randn(2, 1, 8, 64)
        options = {"cache_seqlens": torch.tensor([32000, 32000]), "page_table": table}
        onchip.attention_with_cache(q, pages, v_pages, **(options | {"cache_seqlens": 40}))
        extra(lambda: [onchip.attention_with_cache(q, pages, v_pages, **options)])
    """
    assert measure(body) < 96 * MIB
