"""Every input error names the argument, what came and what is expected; no call changes its inputs."""

import re

import pytest
import torch

import onchip
from checks import qkv
from onchip import problem as problems, select


def ints(*values, dtype=torch.int32):
    return torch.tensor(values, dtype=dtype)


def refuse(error, parts, fn, *args, **options):
    """`fn` raises exactly `error`, and its text holds every one of `parts` (regular expressions)."""
    with pytest.raises(error) as caught:
        fn(*args, **options)
    text = str(caught.value)
    assert caught.type is error, f"{caught.type.__name__}: {text}"
    for wanted in parts:
        assert re.search(wanted, text), f"{wanted!r} is not in {text!r}"


def attend(mask=None, score=None, shapes=((2, 4, 6, 8), (2, 10, 3, 8), (2, 10, 3, 8)), **options):
    """attention on random inputs of the given shapes."""
    q, k, v = (torch.randn(shape) for shape in shapes)
    return onchip.attention(q, k, v, mask=mask, score=score, **options)


def shapes(**changed):
    """The shapes of `attend`, some of them replaced."""
    return tuple({"q": (2, 4, 6, 8), "k": (2, 10, 3, 8), "v": (2, 10, 3, 8), **changed}.values())


@pytest.mark.parametrize(
    "changed, parts",
    [
        ({"q": (4, 6, 8)}, ["^q", r"\(4, 6, 8\)", "4 dims"]),
        ({"k": (1, 2, 10, 3, 8)}, ["^k", r"\(1, 2, 10, 3, 8\)", "4 dims"]),
        ({"v": (10, 8)}, ["^v", r"\(10, 8\)", "4 dims"]),
        ({"q": (2, 4, 0, 8), "k": (2, 10, 0, 8)}, ["^v", "3", "0"]),
        ({"k": (2, 10, 0, 8), "v": (2, 10, 0, 8)}, ["heads", r"\b6\b", r"\b0\b"]),
        ({"k": (2, 10, 4, 8), "v": (2, 10, 4, 8)}, ["heads", r"\b6\b", r"\b4\b"]),
        ({"k": (2, 10, 12, 8), "v": (2, 10, 12, 8)}, ["heads", r"\b6\b", r"\b12\b"]),
        ({"v": (2, 10, 6, 8)}, ["^v", "heads", r"\b6\b", r"\b3\b"]),
        ({"k": (2, 10, 3, 16)}, ["^k", "dim", r"\b16\b", r"\b8\b"]),
        ({"q": (2, 4, 6, 0), "k": (2, 10, 3, 0)}, ["^q", "dim", r"\b0\b"]),
        ({"k": (3, 10, 3, 8), "v": (3, 10, 3, 8)}, ["^k", "batch", r"\b3\b", r"\b2\b"]),
        ({"v": (1, 10, 3, 8)}, ["^v", "batch", r"\b1\b", r"\b2\b"]),
        ({"v": (2, 9, 3, 8)}, ["^v", "seqlen_k", r"\b9\b", r"\b10\b"]),
    ],
)
def test_shapes_of_q_k_v(changed, parts):
    refuse(ValueError, parts, attend, shapes=shapes(**changed))
    given = shapes(**changed)
    refuse(ValueError, parts, onchip.plan, *given)


def test_shapes_in_bhsd_are_read_as_such():
    q, k, v = (torch.randn(2, *rest, 8) for rest in ((6, 4), (4, 10), (4, 10)))
    refuse(ValueError, ["heads", r"\b6\b", r"\b4\b"], onchip.attention, q, k, v, layout="bhsd")


@pytest.mark.parametrize("which", [0, 1, 2])
def test_dtypes_and_devices_of_q_k_v(which):
    name = "qkv"[which]
    good = list(qkv(1, 3, 5, 2))

    def with_other(tensor):
        return [tensor if i == which else t for i, t in enumerate(good)]

    for dtype in (torch.int32, torch.bool, torch.complex64, torch.float8_e4m3fn):
        expected = [f"^{name}", str(dtype), "float16.*float32"]
        refuse(TypeError, expected, onchip.attention, *with_other(good[which].to(dtype)))
    other = with_other(good[which].double())
    refuse(TypeError, ["^k" if which == 0 else f"^{name}", "float64", "float32"], onchip.attention, *other)
    other = with_other(good[which].to("meta"))
    refuse(ValueError, ["^k" if which == 0 else f"^{name}", "meta", "cpu"], onchip.attention, *other)
    for value in (None, 3.0, good[which].tolist(), good[which].numpy()):
        expected = [f"^{name}", type(value).__name__, "tensor"]
        refuse(TypeError, expected, onchip.attention, *with_other(value))


@pytest.mark.parametrize(
    "options, error, parts",
    [
        ({"layout": "sbhd"}, ValueError, ["layout", "sbhd", "bshd", "bhsd"]),
        ({"scale": "0.5"}, TypeError, ["scale", "str", "float"]),
        ({"scale": torch.tensor(0.5)}, TypeError, ["scale", "Tensor", "float"]),
        ({"scale": float("nan")}, ValueError, ["scale", "nan", "finite"]),
        ({"scale": float("inf")}, ValueError, ["scale", "inf", "finite"]),
        ({"dropout": 1.5}, ValueError, ["dropout", r"1\.5", r"\[0, 1\]"]),
        ({"dropout": -0.1}, ValueError, ["dropout", r"-0\.1", r"\[0, 1\]"]),
        ({"dropout": float("nan")}, ValueError, ["dropout", "nan", r"\[0, 1\]"]),
        ({"dropout": "0.5"}, TypeError, ["dropout", "str", "float"]),
        ({"dropout": None}, TypeError, ["dropout", "None", "float"]),
        ({"dropout": 0.5, "seed": 1.0}, TypeError, ["seed", "float", "int"]),
        ({"dropout": 0.5, "seed": -1}, ValueError, ["seed", "-1"]),
        ({"dropout": 0.5, "seed": 2**64}, ValueError, ["seed", str(2**64)]),
        ({"mask": torch.ones(4, 10, dtype=torch.bool)}, TypeError, ["mask", "Tensor", r"onchip\.dense"]),
        ({"mask": "causal"}, TypeError, ["mask", "str", r"onchip\.causal"]),
        ({"mask": onchip.causal}, TypeError, ["mask", "function", r"onchip\.causal"]),
        ({"score": 30.0}, TypeError, ["score", "float", "Score"]),
        ({"score": torch.zeros(4, 10)}, TypeError, ["score", "Tensor", "Score"]),
        ({"backend": "cuda"}, ValueError, ["backend", "cuda", "cpu", "reference"]),
        ({"backend": 3}, ValueError, ["backend", r"\b3\b", "cpu", "reference"]),
    ],
)
def test_options_of_attention(options, error, parts):
    refuse(error, parts, attend, **options)


def test_a_forced_backend_that_refuses(monkeypatch):
    for name in ("cpu", "native"):
        monkeypatch.setattr(select.load(name), "refuse", lambda problem: "it is Sunday")
    refuse(NotImplementedError, ["cpu", "it is Sunday"], attend, backend="cpu")
    refuse(NotImplementedError, ["cpu", "it is Sunday"], attend)
    # The reference is dense: nothing falls back to it.
    assert attend(backend="reference").shape == (2, 4, 6, 8)


def varlen(**changed):
    """attention_varlen on 12 query rows and 15 key rows in two sequences, some arguments replaced."""
    q, k, v = (torch.randn(n, 2, 8) for n in (12, 15, 15))
    arguments = {"q": q, "k": k, "v": v, "cu_seqlens_q": ints(0, 5, 12), "cu_seqlens_k": ints(0, 9, 15)}
    return onchip.attention_varlen(**{**arguments, **changed})


@pytest.mark.parametrize("name, total, other", [("cu_seqlens_q", 12, 15), ("cu_seqlens_k", 15, 12)])
def test_cu_seqlens(name, total, other):
    for value, error, parts in (
        (ints(1, 5, total), ValueError, [r"\b1\b", r"\b0\b"]),
        (ints(0, total + 3, total), ValueError, ["decreas", rf"\b{total + 3}\b"]),
        (ints(0, -1, total), ValueError, ["decreas", "-1"]),
        (ints(0, 5, total - 1), ValueError, [rf"\b{total - 1}\b", rf"\b{total}\b"]),
        (ints(0, 5, total + 1), ValueError, [rf"\b{total + 1}\b", rf"\b{total}\b"]),
        (ints(0, 5, total).float(), TypeError, ["float32", "int32"]),
        (ints(0, 5, total).bool(), TypeError, ["bool", "int32"]),
        (ints(0, 5, total)[None], ValueError, [r"\(1, 3\)"]),
        (ints(0, 5, total)[0], ValueError, [r"\(\)"]),
        (ints(), ValueError, [r"\(0,\)"]),
        ([0, 5, total], TypeError, ["list", "tensor"]),
        (None, TypeError, ["None", "tensor"]),
        (ints(0, 5, total).to("meta"), ValueError, ["meta", "cpu"]),
        (ints(0, 5, 9, total), ValueError, ["cu_seqlens_q", "cu_seqlens_k", r"\b3\b|\b4\b", r"\b2\b|\b3\b"]),
    ):
        refuse(error, [name, *parts], varlen, **{name: value})


def test_lengths_of_packed_sequences():
    for name, longest in (("max_seqlen_q", 7), ("max_seqlen_k", 9)):
        refuse(ValueError, [name, r"\b4\b", rf"\b{longest}\b"], varlen, **{name: 4})
        refuse(TypeError, [name, "float", "int"], varlen, **{name: 20.0})
    for name, top in (("seqused_q", 7), ("seqused_k", 6)):
        first = {"seqused_q": 5, "seqused_k": 9}[name]
        refuse(ValueError, [name, rf"\b{top + 1}\b", rf"\b{top}\b"], varlen, **{name: ints(first, top + 1)})
        refuse(ValueError, [name, "-1", r"\b0\b"], varlen, **{name: ints(-1, 1)})
        refuse(ValueError, [name, r"\(3,\)", r"\(2,\)"], varlen, **{name: ints(1, 1, 1)})
        refuse(TypeError, [name, "float32", "int32"], varlen, **{name: torch.ones(2)})
        refuse(TypeError, [name, "list", "tensor"], varlen, **{name: [1, 1]})


def test_packed_tensors():
    refuse(ValueError, ["^q", r"\(1, 12, 2, 8\)", "3 dims"], varlen, q=torch.randn(1, 12, 2, 8))
    refuse(ValueError, ["^v", r"\b14\b", r"\b15\b"], varlen, v=torch.randn(14, 2, 8))
    refuse(ValueError, ["heads", r"\b3\b", r"\b2\b"], varlen, q=torch.randn(12, 3, 8))
    refuse(ValueError, ["^k", "dim", r"\b4\b", r"\b8\b"], varlen, k=torch.randn(15, 2, 4))
    refuse(TypeError, ["^v", "bfloat16", "float32"], varlen, v=torch.randn(15, 2, 8).bfloat16())
    refuse(ValueError, ["backend", "nope"], varlen, backend="nope")


@pytest.mark.parametrize(
    "make, error, parts",
    [
        (lambda: onchip.causal(align="middle"), ValueError, ["align", "middle", "bottom_right", "top_left"]),
        (lambda: onchip.window(-1, 0), ValueError, ["left", "-1", r"\b0\b"]),
        (lambda: onchip.window(0, -3), ValueError, ["right", "-3", r"\b0\b"]),
        (lambda: onchip.window(1.5, 0), TypeError, ["left", r"1\.5", "int"]),
        (lambda: onchip.sinks(-1), ValueError, ["sinks", "-1", r"\b0\b"]),
        (lambda: onchip.sinks("4"), TypeError, ["sinks", "str", "int"]),
        (lambda: onchip.chunked(0), ValueError, ["chunked", r"\b0\b", r"\b1\b"]),
        (lambda: onchip.chunked(4.0), TypeError, ["chunked", "float", "int"]),
        (lambda: onchip.padding(11), ValueError, ["padding", "11", "10"]),
        (lambda: onchip.padding(ints(3, 11)), ValueError, ["padding", "11", "10"]),
        (lambda: onchip.padding(-1), ValueError, ["padding", "-1", r"\b0\b"]),
        (lambda: onchip.padding(ints(3, -1)), ValueError, ["padding", "-1", r"\b0\b"]),
        (lambda: onchip.padding(ints(3, 4, 5)), ValueError, ["padding", r"\b3\b", r"\b2\b"]),
        (lambda: onchip.padding(ints(3, 4)[None]), ValueError, ["padding", r"\(1, 2\)", "batch"]),
        (lambda: onchip.padding(torch.ones(2)), TypeError, ["padding", "float32", "int32"]),
        (lambda: onchip.padding([3, 4]), TypeError, ["padding", "list", "int"]),
        (lambda: onchip.prefix(11), ValueError, ["prefix", "11", "10"]),
        (lambda: onchip.prefix(ints(3, -1)), ValueError, ["prefix", "-1", r"\b0\b"]),
        (lambda: onchip.prefix(2.0), TypeError, ["prefix", "float", "int"]),
        (lambda: onchip.documents(), ValueError, ["documents", "ids", "cu_seqlens"]),
        (lambda: onchip.documents(ints(0), cu_seqlens=ints(0, 10)), ValueError, ["ids", "cu_seqlens"]),
        (lambda: onchip.documents(torch.ones(10)), TypeError, ["ids", "float32", "integer"]),
        (lambda: onchip.documents(torch.zeros(3, 1, 10).int()), ValueError, ["ids", r"\(3, 1, 10\)"]),
        (lambda: onchip.documents(torch.zeros(2, 9).int()), ValueError, ["ids", r"\b9\b", r"\b10\b"]),
        (lambda: onchip.documents(torch.zeros(3, 10).int()), ValueError, ["ids", r"\b3\b", r"\b2\b"]),
        (
            lambda: onchip.documents(torch.zeros(2, 4).int(), ids_k=torch.zeros(2, 9).int()),
            ValueError,
            ["ids_k", r"\b9\b", r"\b10\b"],
        ),
        (
            lambda: onchip.documents(cu_seqlens=ints(1, 10)),
            ValueError,
            ["cu_seqlens", r"\[1, 10\]", r"\b0\b"],
        ),
        (lambda: onchip.documents(cu_seqlens=ints(0, 8, 5, 10)), ValueError, ["cu_seqlens", "decrease"]),
        (lambda: onchip.documents(cu_seqlens=ints(0, 12)), ValueError, ["cu_seqlens", r"\b12\b", r"\b10\b"]),
        (lambda: onchip.documents(cu_seqlens=ints(0, 10)[None]), ValueError, ["cu_seqlens", r"\(1, 2\)"]),
        (lambda: onchip.documents(cu_seqlens=torch.ones(2)), TypeError, ["cu_seqlens", "float32", "int32"]),
        (lambda: onchip.dense(torch.ones(4, 10)), TypeError, ["dense", "float32", "bool"]),
        (lambda: onchip.dense([[True] * 10] * 4), TypeError, ["dense", "list", "bool"]),
        (lambda: onchip.dense(torch.ones(4, 9).bool()), ValueError, ["dense", r"4, 9\)", r"\(2, 6, 4, 10\)"]),
        (
            lambda: onchip.dense(torch.ones(1, 3, 4, 10).bool()),
            ValueError,
            ["dense", r"\(1, 3, 4, 10\)", "6"],
        ),
        (lambda: onchip.dense(torch.ones(1, 1, 1, 4, 10).bool()), ValueError, ["dense", r"\b5\b", r"\b4\b"]),
        (lambda: onchip.block_sparse(torch.ones(2, 3), (2, 4)), TypeError, ["blocks", "float32", "bool"]),
        (
            lambda: onchip.block_sparse(torch.ones(2, 2).bool(), (2, 4)),
            ValueError,
            ["blocks", "2, 2", "2, 3"],
        ),
        (
            lambda: onchip.block_sparse(torch.ones(3, 2, 3).bool(), (2, 4)),
            ValueError,
            ["blocks", "3, 2, 3", "6"],
        ),
        (
            lambda: onchip.block_sparse(torch.ones(3).bool(), (2, 4)),
            ValueError,
            ["blocks", r"\b1\b", "2 to 4"],
        ),
        (lambda: onchip.block_sparse(torch.ones(2, 3).bool(), (2, 0)), ValueError, ["tile_n", r"\b0\b"]),
        (
            lambda: onchip.block_sparse(torch.ones(2, 3).bool(), (2.0, 4)),
            TypeError,
            ["tile_m", "float", "int"],
        ),
        (lambda: onchip.block_sparse(torch.ones(2, 3).bool(), 4), TypeError, ["tile", r"\b4\b", "tile_m"]),
        (lambda: onchip.where(3), TypeError, ["where", "int", "function"]),
        (lambda: onchip.where(lambda b, h, q, k, t: q > k, 3), TypeError, ["where", "int", "tensor"]),
        (lambda: onchip.where(lambda b, h, q, k: q - k), TypeError, ["where", "int64", "bool"]),
        (lambda: onchip.causal() & 3, TypeError, ["&", "Mask", "int"]),
        (lambda: onchip.dense(torch.ones(4, 10, device="meta").bool()), ValueError, ["mask", "meta", "cpu"]),
    ],
)
def test_masks(make, error, parts):
    refuse(error, parts, lambda: attend(mask=make()))


@pytest.mark.parametrize("mask", ["union", "intersection"])
def test_masks_inside_others_are_checked(mask):
    wrong = onchip.dense(torch.ones(4, 9, dtype=torch.bool))
    both = onchip.causal() | wrong if mask == "union" else onchip.causal() & wrong
    refuse(ValueError, ["dense", r"4, 9\)", r"\(2, 6, 4, 10\)"], attend, mask=both)


@pytest.mark.parametrize(
    "make, error, parts",
    [
        (lambda: onchip.Score(softcap=0.0), ValueError, ["softcap", r"0\.0"]),
        (lambda: onchip.Score(softcap=-2.0), ValueError, ["softcap", r"-2\.0"]),
        (lambda: onchip.Score(softcap=float("nan")), ValueError, ["softcap", "nan"]),
        (lambda: onchip.Score(softcap="15"), TypeError, ["softcap", "str", "float"]),
        (lambda: onchip.Score(alibi=torch.ones(5)), ValueError, ["alibi", r"\(5,\)", r"\(6,\)", r"\(2, 6\)"]),
        (lambda: onchip.Score(alibi=torch.ones(1, 2, 6)), ValueError, ["alibi", r"\(1, 2, 6\)", r"\(2, 6\)"]),
        (lambda: onchip.Score(alibi=[0.5] * 6), TypeError, ["alibi", "list", "tensor"]),
        (lambda: onchip.Score(alibi=torch.ones(6).int()), TypeError, ["alibi", "int32", "float"]),
        (lambda: onchip.Score(sink=torch.ones(3)), ValueError, ["sink", r"\(3,\)", r"\(6,\)"]),
        (lambda: onchip.Score(sink=torch.ones(1, 6)), ValueError, ["sink", r"\(1, 6\)", r"\(6,\)"]),
        (lambda: onchip.Score(sink=1.0), TypeError, ["sink", "float", "tensor"]),
        (lambda: onchip.Score(bias=torch.ones(4, 9)), ValueError, ["bias", r"\(4, 9\)", r"\(2, 6, 4, 10\)"]),
        (
            lambda: onchip.Score(bias=torch.ones(3, 1, 1, 1)),
            ValueError,
            ["bias", r"\(3, 1, 1, 1\)", r"\(2, 6"],
        ),
        (lambda: onchip.Score(bias=torch.ones(1, 1, 1, 4, 10)), ValueError, ["bias", r"\(1, 1, 1, 4, 10\)"]),
        (lambda: onchip.Score(bias=torch.ones(4, 10).bool()), TypeError, ["bias", "bool", "float"]),
        (lambda: onchip.Score(bias=torch.ones(4, 10, device="meta")), ValueError, ["bias", "meta", "cpu"]),
        (lambda: onchip.Score(mod=3), TypeError, ["mod", "int", "function"]),
        (lambda: onchip.mod("score"), TypeError, ["mod", "str", "function"]),
        (lambda: onchip.mod(lambda s, b, h, q, k, t: s, 3), TypeError, ["mod", "int", "tensor"]),
        (lambda: onchip.mod(lambda s, b, h, q, k: s, grad=3), TypeError, ["grad", "int", "function"]),
        (
            lambda: onchip.mod(lambda s, b, h, q, k, t: s + t[h], torch.ones(6, requires_grad=True)),
            ValueError,
            ["requires grad", "bias"],
        ),
    ],
)
def test_scores(make, error, parts):
    refuse(error, parts, lambda: attend(score=make()))


def test_patterns():
    for size in (0, 3, 6, 12, -4):
        refuse(ValueError, [r"\bn\b", str(size)], onchip.patterns.butterfly, size)
    refuse(TypeError, [r"\bn\b", "float", "int"], onchip.patterns.butterfly, 4.0)
    refuse(ValueError, ["local", "-1", r"\b0\b"], onchip.patterns.local_global, 4, 4, local=-1, global_=1)
    refuse(ValueError, ["stride", r"\b0\b", r"\b1\b"], onchip.patterns.strided, 4, 4, stride=0, local=1)
    refuse(ValueError, ["nq", r"\b0\b", r"\b1\b"], onchip.patterns.strided, 0, 4, stride=2, local=1)


@pytest.mark.parametrize("strided", [False, True])
def test_inputs_are_never_changed(backend, strided):
    q, k, v = qkv(2, 4, 10, 6, 3, dim=8)
    if strided:
        q, k, v = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v))
    small = {"alibi": torch.rand(6), "sink": torch.randn(6), "bias": torch.randn(2, 1, 4, 10)}
    lengths, keep = ints(7, 9), torch.rand(2, 1, 4, 10) < 0.5
    tensors = [q, k, v, *small.values()]
    before = [t.clone() for t in (*tensors, lengths, keep)]
    for t in tensors:
        t.requires_grad_()
    score = onchip.Score(softcap=9.0, **small)
    mask = onchip.padding(lengths) & onchip.dense(keep)
    out, lse = onchip.attention(
        q, k, v, mask=mask, score=score, dropout=0.2, return_lse=True, backend=backend
    )
    dout = torch.randn_like(out)
    upstream = dout.clone()
    torch.autograd.backward([out, lse.exp()], [dout, torch.ones_like(lse)])
    assert torch.equal(dout, upstream)
    for t, old in zip((*tensors, lengths, keep), before, strict=True):
        assert torch.equal(t.detach(), old)


def test_packed_inputs_are_never_changed(backend):
    q, k, v = (torch.randn(n, 2, 8, requires_grad=True) for n in (12, 15, 15))
    lengths = [ints(0, 5, 12), ints(0, 9, 15), ints(4, 7), ints(9, 2)]
    before = [t.detach().clone() for t in (q, k, v, *lengths)]
    names = ("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k")
    out = varlen(
        q=q, k=k, v=v, **dict(zip(names, lengths, strict=True)), mask=onchip.causal(), backend=backend
    )
    out.sum().backward()
    for t, old in zip((q, k, v, *lengths), before, strict=True):
        assert torch.equal(t.detach(), old)


@pytest.mark.parametrize("make", [onchip.padding, onchip.prefix])
def test_lengths_on_a_device_are_not_read(make):
    """There a look would wait, at each call; a meta tensor, which has no values, stands for any device."""
    q, k = torch.empty(2, 4, 6, 8, device="meta"), torch.empty(2, 10, 6, 8, device="meta")
    mask = onchip.causal() & (make(torch.empty(2, dtype=torch.int32, device="meta")) | onchip.sinks(2))
    problem = problems.state(q, k, k, problems.dense_layout(q, k, k), "dense", mask, None)
    assert problem.mask_parts == ("band", "unions")
    refuse(
        ValueError,
        [make.__name__, r"\b3\b"],
        make(torch.empty(3, dtype=torch.int32, device="meta")).check,
        problem,
    )
