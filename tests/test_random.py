"""Random draws of mask x score x layout x dtype x sizes; a failure prints the line that repeats it."""

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings, strategies as st

import contract_run
from contract_masks import MASKS
from contract_run import STRIDES, Case, Target, check
from contract_scores import SCORES

TARGETS = {
    "cpu": Target("cpu"),
    "cpu in tiles of 16 x 32": Target("cpu", tile=(16, 32), forced=True),
    "cpu in tiles of 5 x 7": Target("cpu", tile=(5, 7), forced=True),
    "reference": Target("reference"),
}
DIMS = st.one_of(st.sampled_from([1, 5, 16, 63, 64, 72, 128, 256]), st.integers(1, 40))
LENGTHS = st.one_of(st.integers(0, 80), st.sampled_from([0, 1, 15, 16, 17, 31, 32, 33, 64, 65]))


@st.composite
def cases(draw):
    """A Case; lengths, heads and dropout as its layout allows."""
    layout = draw(st.sampled_from([*STRIDES, "varlen", "varlen_used", "varlen", "cache", "cache"]))
    batch = draw(st.integers(1, 4))
    q_lens = [draw(LENGTHS) for _ in range(batch)]
    k_lens = [draw(LENGTHS) for _ in range(batch)]
    more = {}
    if layout == "cache":
        q_lens = [draw(st.integers(1, 20))] * batch
        append = draw(st.integers(0, 5))
        more = {"append": append, "page_size": draw(st.sampled_from([None, 1, 3, 8, 16, 100]))}
        more |= {"leftpad": draw(st.booleans()), "batch_idx": draw(st.booleans()), "backward": False}
        more["rotary"] = draw(st.sampled_from([None, None, "half", "interleaved"]))
        least = q_lens[0] if more["rotary"] else 0  # a query above the first key has no position to turn to
        k_lens = [max(k, append, least) for k in k_lens]
    elif not layout.startswith("varlen"):
        q_lens, k_lens = q_lens[:1] * batch, k_lens[:1] * batch
    heads_k = draw(st.integers(1, 3))
    dim = draw(DIMS)
    return Case(
        mask=draw(st.sampled_from(list(MASKS))),
        score=draw(st.sampled_from(["none", *SCORES])),
        layout=layout,
        dtype=draw(st.sampled_from(["float32", "float32", "bfloat16", "float16", "float64"])),
        q_lens=tuple(q_lens),
        k_lens=tuple(k_lens),
        heads=(heads_k * draw(st.sampled_from([1, 1, 2, 3])), heads_k),
        dims=(dim, draw(st.one_of(st.just(dim), DIMS))),
        scale=draw(st.sampled_from([None, None, None, 0.3, -0.5])),
        dropout=0.0 if layout == "cache" else draw(st.sampled_from([0.0, 0.0, 0.0, 0.2, 0.7])),
        # An expanded tensor is one sequence and head for all, and what one does not see another may.
        poison=None
        if layout == "expanded"
        else draw(st.sampled_from([None, None, float("nan"), float("inf")])),
        upstream=draw(st.sampled_from(["both", "both", "out", "lse"])),
        seed=draw(st.integers(0, 2**31)),
        **more,
    )


@settings(
    max_examples=400,
    deadline=None,
    database=None,
    print_blob=False,
    phases=[Phase.generate, Phase.shrink],
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)
@given(target=st.sampled_from(list(TARGETS)), case=cases())
def test_a_random_case(target, case):
    check(TARGETS[target], case)


def test_a_failure_prints_the_line_that_repeats_it(monkeypatch):
    """The line is Python, and stands for the same case."""
    case = Case(mask="causal", layout="varlen", q_lens=(5, 0), k_lens=(7, 2), poison=float("nan"), seed=7)
    seen = []

    def fail(target, case):
        seen.append((target, case))
        raise ValueError("no good")

    monkeypatch.setattr(contract_run, "run", fail)
    with pytest.raises(AssertionError, match="no good") as caught:
        check(TARGETS["cpu in tiles of 16 x 32"], case)
    line = str(caught.value).splitlines()[-1].removeprefix("repeat with: ")
    with pytest.raises(AssertionError, match="no good"):
        eval(line, vars(contract_run))
    assert str(seen[0]) == str(seen[1])


def test_a_case_is_its_seed():
    """Twice the same case gives the same numbers, whatever torch's generator did in between."""
    case = Case(mask="everything", score="everything", seed=3)
    first = check(TARGETS["cpu"], case)
    torch.randn(100)
    second = check(TARGETS["cpu"], case)
    assert first is not None and second is not None
    assert all(torch.equal(first[name], second[name]) for name in first)
