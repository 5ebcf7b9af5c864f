"""The teaching API of online softmax, and the roofline of single operations."""

import math

import pytest
import torch

import onchip
from onchip import devices
from onchip.backends import hopper
from onchip.intensity import OPS, roofline
from onchip.online_softmax import merge, summary


def test_the_example():
    m, total = merge(summary([1.0, 3.0]), summary([2.0, 0.0]))
    assert float(m) == 3.0
    assert float(total) == pytest.approx(1.553, abs=5e-4)


def test_pairs_of_plain_numbers():
    """As on paper; a pair of tensors beside one of numbers keeps its dtype."""
    whole = summary([1.0, 3.0, 2.0, 0.0])
    m, total = merge((3.0, 1 + math.exp(-2.0)), (2, 1 + math.exp(-2.0)))
    assert (float(m), float(total)) == (3.0, pytest.approx(float(whole.l))) and m.dtype is torch.float64
    assert round(float(total), 3) == 1.553
    for dtype in (torch.float32, torch.float64):
        a = summary(torch.tensor([1.0, 3.0], dtype=dtype))
        for found in (merge(a, (2.0, 1.0)), merge((2.0, 1.0), a)):
            assert found.l.dtype is dtype and float(found.l) == pytest.approx(1 + math.exp(-2) + math.exp(-1))
    assert merge((-math.inf, 0.0), (2.0, 1.0)) == (2.0, 1.0)


@pytest.mark.parametrize("scores", [[math.inf, 1.0], [math.inf] * 2, [math.inf, -math.inf], [math.nan, 1.0]])
def test_what_has_no_softmax_is_nan_as_in_attention(scores):
    """The reference's lse is m + log(l); NaN stays NaN in every merge."""
    k = torch.tensor(scores, dtype=torch.float64).view(1, len(scores), 1, 1)
    _, lse = onchip.attention(
        torch.ones_like(k[:, :1]), k, torch.ones_like(k), score=onchip.Score(), return_lse=True, backend="reference"
    )  # fmt: skip
    assert lse.isnan().all()
    whole = summary(scores)
    parts = merge(summary(scores[:1]), summary(scores[1:]))
    for m, total in (whole, parts, merge(whole, (0.0, 1.0)), merge(summary([]), whole)):
        assert math.isnan(float(m + total.log())) and math.isnan(float(total))
        assert math.isnan(scores[0]) or float(m) == math.inf


def test_any_cut_gives_the_whole_row_s_summary():
    scores = 30 * torch.randn(4, 3, 50, dtype=torch.float64)
    scores[0, 0, :20] = -torch.inf
    whole = summary(scores)
    for cut in (0, 1, 20, 49, 50):
        m, total = merge(summary(scores[..., :cut]), summary(scores[..., cut:]))
        torch.testing.assert_close(m, whole.m, rtol=0, atol=0)
        torch.testing.assert_close(total, whole.l)
    p = (scores - whole.m[..., None]).exp() / whole.l[..., None]
    torch.testing.assert_close(p, scores.softmax(-1))
    torch.testing.assert_close(whole.m + whole.l.log(), scores.logsumexp(-1))


def test_order_and_grouping_do_not_matter():
    a, b, c = (summary(torch.randn(5, dtype=torch.float64)) for _ in range(3))
    torch.testing.assert_close(merge(merge(a, b), c), merge(a, merge(b, c)))
    torch.testing.assert_close(merge(a, b), merge(b, a))


def test_nothing_is_the_identity():
    a = summary([2.0, 1.0])
    for nothing in (summary([]), summary([float("-inf")])):
        assert (float(nothing.m), float(nothing.l)) == (-float("inf"), 0.0)
        assert merge(nothing, a) == a
        assert merge(nothing, nothing) == nothing


def test_huge_scores_neither_overflow_nor_vanish():
    m, total = merge(summary([1e300, -1e300]), summary([1e300]))
    assert (float(m), float(total)) == (1e300, 2.0)


def test_wrong_input():
    ragged, words, nothing = [[1.0], [1.0, 2.0]], ["a"], [None]
    for scores in (
        "abc",
        3,
        ragged,
        words,
        nothing,
        [10**400],
        torch.ones(3, dtype=torch.int64),
        torch.tensor(1.0),
    ):
        with pytest.raises(TypeError, match="scores"):
            summary(scores)
    for pair in (3, (1.0,), (1.0, "2"), (True, 1.0), [1.0, 2.0], (torch.ones((), dtype=torch.int64), 1.0)):
        with pytest.raises(TypeError, match="b: got.*pair"):
            merge(summary([1.0]), pair)
        with pytest.raises(TypeError, match="a: got.*pair"):
            merge(pair, (1.0, 1.0))


# Rooflines.


@pytest.mark.parametrize("name", ["A100", "H100", "H200", "B200", "RTX 4090", "MI300X"])
def test_what_bounds_each_operation(name):
    """A large product and fused attention are bound by arithmetic, the operations on single numbers by memory."""
    for op in OPS:
        shape = {"matmul": (8192, 8192, 8192), "attention": (1, 16384, 16, 128)}.get(op, (4096, 4096))
        found = roofline(op, shape, name)
        assert found.bound == ("compute" if op in ("matmul", "attention") else "memory"), op
        assert found.attainable <= found.peak
        assert found.seconds * found.attainable == pytest.approx(found.flops)
    assert roofline("matmul", (1, 4096, 4096), name).bound == "memory"  # a vector times a matrix
    assert roofline("attention", (1, 32, 16, 64), name).bound == "memory"


def test_numbers_of_a_roofline():
    found = roofline("matmul", (4, 5, 6), "A100")
    assert (found.flops, found.bytes) == (240, 2 * (24 + 30 + 20))
    assert found.ridge == pytest.approx(312e12 / 2.039e12)
    found = roofline("attention", (2, 128, 4, 64), "H200", dtype=torch.bfloat16, mask=onchip.causal())
    assert found.flops == 4 * 2 * 4 * 64 * 128 * 129 // 2
    assert "memory-bound" in str(roofline("softmax", (10, 10), "H200"))


@pytest.mark.parametrize("op", OPS)
def test_names_of_operations_and_of_this_cpu(op):
    """Spaces, lines and capitals do not count; the CPU goes by what tables call it, too."""
    shape = {"matmul": (8, 8, 8), "attention": (1, 8, 2, 8)}.get(op, (8, 8))
    plain = roofline(op, shape, "cpu", dtype=torch.float32)
    words = op.split("_")
    for name in (" ".join(words), "-".join(words), "".join(words), op.upper(), f" {op.title()} "):
        assert roofline(name, shape, "this CPU", dtype=torch.float32) == plain
    assert roofline(op, shape, "This cpu", dtype=torch.float32).device == "cpu"
    if op == "attention":
        for name in ("fused attention", "fused_attention", "Fused-Attention", "flash attention"):
            assert roofline(name, shape, "CPU", dtype=torch.float32) == plain
    if op == "matmul":
        assert roofline("matrix product", shape, "cpu", dtype=torch.float32) == plain


def test_wrong_rooflines():
    for op in ("conv", "", "layer", "attentio n!", 3):
        with pytest.raises(ValueError, match="op: got.*" + ".*".join(OPS)):
            roofline(op, (3, 3), "H200")
    with pytest.raises(ValueError, match="device: got 'that CPU'.*A100.*cpu"):
        roofline("softmax", (3,), "that CPU")
    for op, shape, match in (
        ("conv", (1, 2), "op.*conv"),
        ("matmul", (1, 2), "shape.*m, n, k"),
        ("attention", (1, 2, 3), "batch"),
        ("softmax", (0, 3), "shape"),
        ("softmax", "ab", "shape"),
    ):
        with pytest.raises(ValueError, match=match):
            roofline(op, shape, "H200")
    with pytest.raises(ValueError, match="device.*H900.*A100"):
        roofline("softmax", (3,), "H900")
    with pytest.raises(ValueError, match="mask"):
        roofline("softmax", (3,), "H200", mask=onchip.causal())


# Devices.


@pytest.mark.parametrize("name", devices.NAMES)
def test_a_device_is_whole(name):
    found = devices.device(name)
    names = [level.name for level in found.levels]
    assert names[:3] == ["SRAM", "L2", "HBM"]
    assert all(level.source and level.bytes > 0 for level in found.levels)
    assert set(found.sources) == {"units", "unit_sram", "peak"} and all(found.sources.values())
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        assert found.rate(dtype) > 0
    assert found.bandwidth > 0
    if name != "cpu":  # the fast ones are small
        sizes = [level.bytes for level in found.levels]
        rates = [level.bandwidth for level in found.levels if level.bandwidth is not None]
        assert sizes == sorted(sizes) and rates == sorted(rates, reverse=True)
        assert found.level("SRAM").bytes == found.units * found.unit_sram


def test_names_of_devices():
    assert devices.device("rtx4090") is devices.device("RTX 4090")
    assert devices.device() is devices.current()
    assert devices.device("CPU") is devices.this_cpu()  # measured once
    with pytest.raises(ValueError, match="float8"):
        devices.device("A100").rate(torch.float8_e4m3fn)
    with pytest.raises(TypeError, match="device"):
        devices.device(3)
    assert devices.cpu_name()


def test_gpus_by_their_own_names():
    for name, known in (
        ("NVIDIA H200", "H200"),
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("AMD Instinct MI300X", "MI300X"),
    ):
        assert devices.recognized(name) is devices.device(known)
    for name in (
        "NVIDIA GH200 480GB",
        "NVIDIA H100 PCIe",
        "NVIDIA A100-SXM4-40GB",
        "RTX 4090 Laptop GPU",
        "Tesla T4",
    ):
        assert devices.recognized(name) is None


def test_a_gpu_that_is_not_known(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index=0: "Tesla T4")
    # What the Hopper backend found of this machine is kept; it must neither be asked of the stand-in nor kept from it.
    monkeypatch.setattr(hopper, "_machine", lambda: "the device is no Hopper GPU")
    with pytest.raises(ValueError, match="Tesla T4.*A100"):
        devices.device()
    shape = (1, 64, 2, 8)
    plan = onchip.plan(shape, shape, shape, device="cuda", backend="reference")
    assert plan.report().splitlines()[-1].startswith("floor      device: this GPU is 'Tesla T4'")


def test_figures_of_the_papers():
    a100 = devices.device("A100")
    assert a100.level("SRAM").bandwidth == 19e12 and a100.unit_sram == 192 * 2**10 and a100.units == 108
    assert devices.device("H200").bandwidth == 4.8e12
