"""Input errors of attention_with_cache: each names the argument, and leaves the cache as it was."""

import pytest
import torch

import onchip
from test_errors import ints, refuse

BATCH, HEADS, CAPACITY, DIM = 2, 2, 8, 4


def call(paged=False, **changed):
    """attention_with_cache: 2 sequences of 3 and 5 keys, one new key each, some arguments replaced.

    The cache holds 3 rows of 8 slots, or 5 pages of 4. Asserts that a call that raises wrote nothing.
    """
    shape = (5, 4, HEADS, DIM) if paged else (BATCH, CAPACITY, HEADS, DIM)
    arguments = {
        "q": torch.randn(BATCH, 1, 2 * HEADS, DIM),
        "k_cache": torch.randn(shape),
        "v_cache": torch.randn(shape),
        "cache_seqlens": ints(3, 5),
        "k": torch.randn(BATCH, 1, HEADS, DIM),
        "v": torch.randn(BATCH, 1, HEADS, DIM),
    }
    if paged:
        arguments["page_table"] = ints(4, 0, 2, 1).view(2, 2)
    arguments |= changed
    tensors = {n: t for n, t in arguments.items() if isinstance(t, torch.Tensor) and not t.is_meta}
    before = {name: t.clone() for name, t in tensors.items()}
    try:
        return onchip.attention_with_cache(**arguments)
    except Exception:
        assert all(torch.equal(t, before[name]) for name, t in tensors.items())
        raise


def test_the_calls_are_valid_as_they_stand():
    assert call().shape == call(paged=True).shape == (BATCH, 1, 2 * HEADS, DIM)


@pytest.mark.parametrize(
    "changed, error, parts",
    [
        ({"cache_seqlens": ints(3, 8)}, ValueError, ["cache_seqlens", r"\b(8|9)\b", r"\b8\b"]),
        ({"cache_seqlens": 8}, ValueError, ["cache_seqlens", r"\b(8|9)\b", r"\b8\b"]),
        ({"cache_seqlens": ints(-1, 5)}, ValueError, ["cache_seqlens", "-1", r"\b0\b"]),
        ({"cache_seqlens": -1}, ValueError, ["cache_seqlens", "-1", r"\b0\b"]),
        ({"cache_seqlens": ints(3, 5, 6)}, ValueError, ["cache_seqlens", r"\(3,\)", r"\(2,\)"]),
        ({"cache_seqlens": ints(3, 5)[None]}, ValueError, ["cache_seqlens", r"\(1, 2\)", r"\(2,\)"]),
        ({"cache_seqlens": torch.tensor([3.0, 5.0])}, TypeError, ["cache_seqlens", "float32", "int32"]),
        ({"cache_seqlens": 3.0}, TypeError, ["cache_seqlens", "float", "int"]),
        ({"cache_seqlens": None}, TypeError, ["cache_seqlens", "None", "int"]),
        ({"k": None}, ValueError, [r"\bk\b", r"\bv\b"]),
        ({"v": None}, ValueError, [r"\bk\b", r"\bv\b"]),
        ({"k": torch.randn(3, 1, 2, 4)}, ValueError, [r"\bk\b", r"\b3\b", r"\b2\b"]),
        ({"k": torch.randn(2, 1, 1, 4)}, ValueError, [r"\bk\b", r"\b1\b", r"\b2\b"]),
        ({"k": torch.randn(2, 1, 2, 6)}, ValueError, [r"\bk\b", r"\b6\b", r"\b4\b"]),
        ({"k": torch.randn(2, 2, 4)}, ValueError, [r"\bk\b", r"\(2, 2, 4\)"]),
        ({"v": torch.randn(2, 3, 2, 4)}, ValueError, [r"\bv\b", r"\b3\b", r"\b1\b"]),
        ({"v": torch.randn(2, 1, 2, 4).double()}, TypeError, [r"\bv\b", "float64", "float32"]),
        ({"k": 3.0}, TypeError, [r"\bk\b", "float", "tensor"]),
        (
            {"k_cache": torch.randn(2, 8, 3, 4)},
            ValueError,
            ["k_cache|v_cache", "heads", r"\b3\b", r"\b2\b|\b4\b"],
        ),
        ({"v_cache": torch.randn(2, 9, 2, 4)}, ValueError, ["v_cache", r"\b9\b", r"\b8\b"]),
        ({"v_cache": torch.randn(2, 8, 2, 4).half()}, TypeError, ["v_cache", "float16", "float32"]),
        ({"k_cache": torch.randn(8, 2, 4)}, ValueError, ["k_cache", r"\(8, 2, 4\)", "4 dims"]),
        ({"k_cache": torch.randn(2, 8, 2, 6)}, ValueError, ["k_cache", "dim", r"\b6\b", r"\b4\b"]),
        ({"q": torch.randn(2, 4, 4)}, ValueError, ["^q", r"\(2, 4, 4\)", "4 dims"]),
        ({"q": torch.randn(2, 1, 3, 4)}, ValueError, ["heads", r"\b3\b", r"\b2\b"]),
        ({"q": torch.randn(3, 1, 4, 4)}, ValueError, [r"\b3\b", r"\b2\b"]),
        ({"cache_batch_idx": ints(0, 2)}, ValueError, ["cache_batch_idx", r"\b2\b", r"\b(1|2)\b"]),
        ({"cache_batch_idx": ints(-1, 1)}, ValueError, ["cache_batch_idx", "-1", r"\b0\b"]),
        ({"cache_batch_idx": ints(0)}, ValueError, ["cache_batch_idx", r"\(1,\)", r"\(2,\)"]),
        ({"cache_batch_idx": torch.ones(2)}, TypeError, ["cache_batch_idx", "float32", "int32"]),
        ({"cache_leftpad": ints(4, 0)}, ValueError, ["cache_leftpad", r"\b4\b", r"\b3\b"]),
        ({"cache_leftpad": ints(-1, 0)}, ValueError, ["cache_leftpad", "-1", r"\b0\b"]),
        ({"cache_leftpad": ints(0, 0, 0)}, ValueError, ["cache_leftpad", r"\(3,\)", r"\(2,\)"]),
        ({"cache_leftpad": torch.zeros(2)}, TypeError, ["cache_leftpad", "float32", "int32"]),
        ({"num_splits": -1}, ValueError, ["num_splits", "-1", r"\b0\b"]),
        ({"num_splits": 2.0}, TypeError, ["num_splits", "float", "int"]),
        ({"rotary": (torch.ones(9, 2), torch.ones(9, 2))}, TypeError, ["rotary", "tuple", "Rotary"]),
        ({"mask": "causal"}, TypeError, ["mask", "str", r"onchip\.causal"]),
        ({"scale": "1"}, TypeError, ["scale", "str", "float"]),
        ({"backend": "nope"}, ValueError, ["backend", "nope", "cpu"]),
    ],
)
def test_dense_cache(changed, error, parts):
    refuse(error, parts, call, **changed)


@pytest.mark.parametrize(
    "changed, error, parts",
    [
        ({"cache_seqlens": ints(3, 8)}, ValueError, ["page_table", r"\b8\b", r"\b3\b"]),
        ({"page_table": ints(4, 2)[:, None]}, ValueError, ["page_table", r"\b2\b", r"\b1\b"]),
        ({"page_table": ints(4, 0, 2, 5).view(2, 2)}, ValueError, ["page_table", r"\b5\b"]),
        ({"page_table": ints(4, 0, -1, 1).view(2, 2)}, ValueError, ["page_table", "-1"]),
        ({"page_table": ints(4, 0, 2, 1, 3, 0).view(3, 2)}, ValueError, ["page_table", r"\b3\b", r"\b2\b"]),
        ({"page_table": ints(4, 0)}, ValueError, ["page_table", r"\(2,\)", "batch"]),
        ({"page_table": torch.ones(2, 2)}, TypeError, ["page_table", "float32", "int32"]),
        ({"page_table": [[4, 0], [2, 1]]}, TypeError, ["page_table", "list", "tensor"]),
        ({"cache_batch_idx": ints(0, 1)}, ValueError, ["cache_batch_idx", "page_table"]),
        ({"v_cache": torch.randn(4, 4, 2, 4)}, ValueError, ["v_cache", r"\b4\b", r"\b5\b"]),
        ({"v_cache": torch.randn(5, 3, 2, 4)}, ValueError, ["v_cache", r"\b3\b", r"\b4\b"]),
        ({"cache_leftpad": ints(4, 0)}, ValueError, ["cache_leftpad", r"\b4\b", r"\b3\b"]),
    ],
)
def test_paged_cache(changed, error, parts):
    refuse(error, parts, call, paged=True, **changed)


def test_page_numbers_past_the_used_length_are_not_read():
    filler = ints(4, -1, 2, 1).view(2, 2)
    assert call(paged=True, page_table=filler).isfinite().all()


@pytest.mark.parametrize(
    "make, error, parts",
    [
        (
            lambda: onchip.Rotary(torch.ones(9, 1), torch.ones(9, 2)),
            ValueError,
            ["sin", r"\(9, 2\)", r"\(9, 1\)"],
        ),
        (lambda: onchip.Rotary(torch.ones(9), torch.ones(9)), ValueError, ["cos", r"\(9,\)", "positions"]),
        (
            lambda: onchip.Rotary(torch.ones(9, 2).int(), torch.ones(9, 2)),
            TypeError,
            ["cos", "int32", "float"],
        ),
        (lambda: onchip.Rotary(torch.ones(9, 2), [1.0]), TypeError, ["sin", "list", "tensor"]),
        (
            lambda: onchip.Rotary(torch.ones(9, 3), torch.ones(9, 3)),
            ValueError,
            ["rotary", r"\b3\b", r"\b2\b"],
        ),
        (
            lambda: onchip.Rotary(torch.ones(5, 2), torch.ones(5, 2)),
            ValueError,
            ["rotary", r"\b5\b", r"\b6\b"],
        ),
    ],
)
def test_rotary(make, error, parts):
    refuse(error, parts, lambda: call(rotary=make()))


@pytest.mark.parametrize("name", ["q", "k", "v", "k_cache", "v_cache"])
def test_gradients_are_refused_only_in_grad_mode(name):
    seqlen, heads = (8, 2) if "cache" in name else (1, 4 if name == "q" else 2)
    tensor = torch.randn(2, seqlen, heads, 4, requires_grad=True)
    refuse(NotImplementedError, ["attention_with_cache", "grad", rf"\b{name}\b"], call, **{name: tensor})
    with torch.no_grad():
        assert not call(**{name: tensor}).requires_grad


@pytest.mark.parametrize("paged", [False, True])
def test_only_the_new_slots_of_the_cache_change(paged):
    shape = (5, 4, HEADS, DIM) if paged else (BATCH, CAPACITY, HEADS, DIM)
    cache = torch.randn(shape)
    before = cache.clone()
    new = torch.randn(BATCH, 1, HEADS, DIM)
    rotary = onchip.Rotary(torch.ones(9, 2), torch.zeros(9, 2))
    q = torch.randn(BATCH, 1, 4, DIM)
    inputs = [t.clone() for t in (q, new)]
    call(paged=paged, q=q, k_cache=cache, k=new, rotary=rotary)
    changed = (cache != before).any(3).any(2).nonzero().tolist()
    # Sequences of 3 and 5 keys: slot 3 of the first, slot 5 of the second, whose second page is number 1.
    assert changed == ([[1, 1], [4, 3]] if paged else [[0, 3], [1, 5]])
    assert torch.equal(q, inputs[0]) and torch.equal(new, inputs[1])
