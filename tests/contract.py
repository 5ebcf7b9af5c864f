"""What every backend must do, written once: a backend's test file names its targets.

    class TestCpu(Contract):
        target = Target("cpu")

Each case either runs and agrees with the oracle, or raises for a reason that the target lists.
"""

import contextlib
import dataclasses
import itertools

import pytest
import torch

import onchip
import oracle
from contract_masks import MASKS, Shape, full_truth
from contract_run import STRIDES, Case, Target, check, survivors
from contract_scores import SCORES
from onchip import select, traffic

INF, NAN = float("inf"), float("nan")
HEADS = [(1, 1), (3, 3), (4, 2), (6, 2), (8, 1)]
BIG = {"score": "everything", "mask": "causal_and_padding"}


@contextlib.contextmanager
def poisoned_memory():
    """Memory that torch hands out uninitialised holds NaN, or the largest integer."""
    before = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        torch.utils.deterministic.fill_uninitialized_memory = before[1]


class Contract:
    target: Target

    def pytest_generate_tests(self, metafunc):
        if "dtype" in metafunc.fixturenames:
            metafunc.parametrize("dtype", self.target.dtypes)
        if "dims" in metafunc.fixturenames:
            metafunc.parametrize("dims", self.target.dims, ids=lambda d: f"{d[0]}-{d[1]}")

    def check(self, **options):
        """A case at lengths of some tiles and a tail, on fresh random data."""
        m, n = self.target.lengths
        defaults = {"q_lens": (m, m), "k_lens": (n, n), "dtype": self.target.dtypes[0]}
        if options.get("layout", "").startswith("varlen"):
            defaults |= self.packed
        if options.get("layout") == "cache":
            defaults |= {"k_lens": (n, n - 20)}
        case = Case(**(defaults | {"seed": int(torch.randint(2**31, ()))} | options))
        return check(self.target, case)

    @property
    def packed(self):
        """Empty sequences, more queries than keys, whole and cut tiles."""
        (m, n), (tile_m, tile_n) = self.target.lengths, self.target.tile
        return {"q_lens": (m, 0, 1, tile_m, 7, 5, 0, 1), "k_lens": (n, 4, 0, tile_n + 1, 3, 5, 4, 0)}

    # Masks and scores, in each place that sequences may lie.

    @pytest.mark.parametrize("mask", MASKS)
    def test_mask(self, mask, dtype):
        self.check(mask=mask, dtype=dtype)

    @pytest.mark.parametrize("mask", MASKS)
    def test_mask_with_more_queries_than_keys(self, mask):
        m, n = self.target.lengths
        self.check(mask=mask, q_lens=(n, n), k_lens=(m, m), heads=(4, 1))

    @pytest.mark.parametrize("mask", MASKS)
    @pytest.mark.parametrize("layout", ["varlen", "varlen_used"])
    def test_mask_of_packed_sequences(self, mask, layout):
        self.check(mask=mask, layout=layout)

    @pytest.mark.parametrize("mask", MASKS)
    def test_mask_over_a_cache(self, mask):
        self.check(mask=mask, layout="cache", page_size=7, append=3)
        self.check(mask=mask, layout="cache", q_lens=(1, 1), leftpad=True)

    @pytest.mark.parametrize("score", SCORES)
    def test_score(self, score, dtype):
        self.check(score=score, mask="causal", dtype=dtype)

    @pytest.mark.parametrize("score", SCORES)
    def test_score_of_packed_sequences(self, score):
        self.check(score=score, mask="window_both", layout="varlen")

    @pytest.mark.parametrize("score", SCORES)
    def test_score_over_a_cache(self, score):
        self.check(score=score, layout="cache", page_size=16, append=1, q_lens=(1, 1))
        self.check(score=score, mask="causal", layout="cache", batch_idx=True)

    @pytest.mark.parametrize("mask", MASKS)
    def test_every_score_under_every_mask(self, mask):
        self.check(mask=mask, score="everything", heads=(4, 4))

    @pytest.mark.parametrize("dtype_of_score", ["float16", "bfloat16", "float32", "float64"])
    def test_score_tensors_of_another_dtype(self, dtype_of_score, dtype):
        self.check(score="everything", score_dtype=dtype_of_score, dtype=dtype)

    # Where tensors lie.

    @pytest.mark.parametrize("layout", [*STRIDES, "varlen", "varlen_used"])
    def test_layout(self, layout, dtype):
        self.check(layout=layout, mask="causal", dtype=dtype)
        self.check(layout=layout, heads=(6, 3), dims=(24, 40), **BIG)

    @pytest.mark.parametrize("rotary", [None, "half", "interleaved"])
    @pytest.mark.parametrize("page_size", [None, 1, 3, 16, 100])
    def test_cache(self, page_size, rotary, dtype):
        for append, leftpad in ((0, True), (1, False), (5, True)):
            options = {"append": append, "leftpad": leftpad, "batch_idx": page_size is None, "dtype": dtype}
            q_lens = (max(append, 1),) * 2
            self.check(
                layout="cache", mask="causal", page_size=page_size, rotary=rotary, q_lens=q_lens, **options
            )

    def test_cache_of_empty_and_full_sequences(self):
        n = self.target.tile[1]
        for page_size in (None, 5):
            lens = {"q_lens": (3,) * 4, "k_lens": (0, 1, n, n + 1)}
            for mask in ("none", "causal"):
                self.check(layout="cache", mask=mask, page_size=page_size, leftpad=True, **lens)

    # Sizes.

    @pytest.mark.parametrize("heads", HEADS, ids=lambda h: f"{h[0]}-{h[1]}")
    @pytest.mark.parametrize("layout", ["bshd", "varlen", "cache"])
    def test_heads(self, heads, layout):
        for mask in ("causal", "blocks_heads", "dense_1HQ1"):
            self.check(heads=heads, layout=layout, mask=mask, score="everything_else")

    def test_dims(self, dims, dtype):
        self.check(dims=dims, dtype=dtype, mask="window_left", q_lens=(21, 21), k_lens=(40, 40))

    @pytest.mark.parametrize("mask", ["none", "causal", "window_both"])
    def test_lengths(self, mask):
        tile_m, tile_n = self.target.tile
        queries = (0, 1, tile_m - 1, tile_m, tile_m + 1, 2 * tile_m, 2 * tile_m + 3)
        keys = (0, 1, tile_n - 1, tile_n, tile_n + 1, 2 * tile_n, 2 * tile_n + 3)
        for m, n in itertools.product(queries, keys):
            self.check(mask=mask, q_lens=(m,), k_lens=(n,), heads=(2, 1), dims=(8, 8))

    @pytest.mark.parametrize("mask", MASKS)
    def test_no_queries_or_no_keys(self, mask):
        for m, n in ((0, 9), (9, 0), (0, 0)):
            self.check(mask=mask, score="everything", q_lens=(m, m), k_lens=(n, n))

    @pytest.mark.parametrize("scale", [0.0, -0.7, 3, 1e-6])
    def test_scale(self, scale, dtype):
        self.check(scale=scale, mask="causal", dtype=dtype)
        self.check(scale=scale, score="everything")

    # Dropout.

    @pytest.mark.parametrize("dropout", [0.1, 0.5, 0.93])
    def test_dropout_bits_are_the_references(self, dropout):
        shape = Shape((self.target.lengths[0],) * 2, (self.target.lengths[1],) * 2, 3, self.target.device)
        case = Case(dropout=dropout, seed=2**62 + int(torch.randint(2**31, ())))
        with self.target.in_use():
            try:
                found = survivors(case, shape, self.target.backend)
            except NotImplementedError:
                pytest.skip("refused: the other dropout tests hold the reason to the target's list")
        assert torch.equal(found, survivors(case, shape))

    @pytest.mark.parametrize("layout", ["bshd", "bhsd", "varlen", "varlen_used"])
    def test_dropout(self, layout, dtype):
        for dropout in (0.3, 1.0):
            self.check(dropout=dropout, layout=layout, mask="causal", dtype=dtype)
        self.check(dropout=0.5, layout=layout, **BIG)

    # Gradients.

    @pytest.mark.parametrize("upstream", ["out", "lse"])
    def test_one_upstream_gradient(self, upstream, dtype):
        self.check(upstream=upstream, mask="causal", dtype=dtype)
        self.check(upstream=upstream, layout="varlen", **BIG)

    @pytest.mark.parametrize("wanted", ["q", "k", "v", "bias", "alibi", "sink"])
    @pytest.mark.parametrize("layout", ["bshd", "varlen"])
    def test_one_wanted_gradient(self, wanted, layout):
        found = self.check(wanted=wanted, layout=layout, **BIG)
        assert found is None or set(found) == {"out", "lse", f"d{wanted}"}
        if wanted in "qkv":
            self.check(wanted=wanted, layout=layout, mask="window_both", dropout=0.2)

    # What nobody may read, and what nobody may see.

    @pytest.mark.parametrize("poison", [NAN, INF, -INF])
    @pytest.mark.parametrize("mask", MASKS)
    def test_poison_out_of_sight(self, mask, poison):
        self.check(mask=mask, poison=poison)
        self.check(mask=mask, poison=poison, layout="varlen_used", score="softcap_and_sink")

    @pytest.mark.parametrize("score", SCORES)
    def test_poison_under_every_score(self, score, dtype):
        self.check(mask="causal_and_padding", score=score, poison=NAN, dtype=dtype)
        self.check(mask="window_both", score=score, poison=INF, layout="varlen_used", dropout=0.1)

    @pytest.mark.parametrize("page_size", [None, 3, 64])
    def test_poison_in_a_cache(self, page_size):
        for mask in ("none", "causal", "window_left", "padding", "dense_B11K"):
            self.check(mask=mask, poison=NAN, layout="cache", page_size=page_size, leftpad=True, append=2)

    @pytest.mark.parametrize("mask", ["dense_none", "where_never", "top_left", "causal"])
    def test_rows_without_keys_are_exactly_zero(self, mask, dtype):
        m, n = self.target.lengths
        seed = int(torch.randint(2**31, ()))
        found = self.check(mask=mask, q_lens=(n, n), k_lens=(m, m), dtype=dtype, seed=seed)
        if found is None:
            return
        shape = Shape((n, n), (m, m), 4, self.target.device)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            seen = torch.stack(full_truth(MASKS[mask](shape), shape))
        empty, unseen = ~seen.any(3), ~seen.any(2).unflatten(1, (2, 2)).any(2)
        assert torch.equal(found["lse"] == -INF, empty)
        for name in ("out", "dq"):
            assert not found[name].transpose(1, 2)[empty].any(), name
        for name in ("dk", "dv"):
            assert not found[name].transpose(1, 2)[unseen].any(), name

    @pytest.mark.parametrize("poison", [NAN, INF])
    def test_poison_in_the_upstream_gradient_of_rows_without_keys(self, poison):
        n, dtype = self.target.lengths[0], getattr(torch, self.target.dtypes[0])
        tensors = [
            torch.randn(2, s, h, 8, device=self.target.device).to(dtype)
            for s, h in ((n + 9, 4), (n, 2), (n, 2))
        ]
        leaves = [x.requires_grad_() for x in tensors]
        upstream = torch.randn_like(leaves[0])
        found = []
        with self.target.in_use():
            out = onchip.attention(*leaves, mask=onchip.causal(), backend=self.target.backend)
            for value in (0.0, poison):
                upstream[:, :9] = value  # these stand above the first key
                found.append(torch.autograd.grad(out, leaves, upstream, retain_graph=True))
        for clean, poisoned in zip(*found, strict=True):
            assert torch.equal(clean, poisoned)

    def test_fresh_memory_holds_anything(self, dtype):
        """What `empty` gives is filled with NaN; no result may show it."""
        with poisoned_memory():
            assert torch.empty(3).isnan().all() and torch.zeros(3).new_empty(2, 2).isnan().all()
            assert torch.empty_like(torch.zeros(3)).isnan().all()
            for mask in ("none", "causal", "window_both", "dense_none", "blocks_odd"):
                for layout in ("bshd", "varlen_used", "cache"):
                    self.check(mask=mask, layout=layout, dtype=dtype)
            self.check(layout="varlen_used", dropout=0.5, **BIG)

    # Numbers.

    @pytest.mark.parametrize("mask", ["none", "causal", "dense_BHQK", "blocks_odd"])
    def test_huge_logits(self, mask, dtype):
        """Scores of 1e4 and more, as far as float16's own products reach."""
        found = self.check(mask=mask, logits=3e3, dtype=dtype)
        assert found is None or all(not value.isnan().any() for value in found.values())
        self.check(mask=mask, logits=3e3, score="softcap", layout="varlen", dtype=dtype, backward=False)

    @pytest.mark.parametrize(
        "mask", ["none", "causal", "window_both", "dense_BHQK", "blocks_odd", "streaming"]
    )
    @pytest.mark.parametrize("heads", [(2, 2), (4, 1)], ids=["mha", "mqa"])
    @pytest.mark.parametrize("sharing", [1, 2])
    def test_small_integers_are_exact(self, mask, heads, sharing, dtype):
        """A query picks the one or two keys of its code, with weight 1 or 1/2: out and dv are integers or halves.

        Where it picks one, lse is 0 and dS is dlse at that key and exactly 0 elsewhere.
        """
        shape = Shape((self.target.lengths[0],), (self.target.lengths[1],), heads[0], self.target.device)
        tensors, masked = exact_inputs(shape, heads[1], mask, getattr(torch, dtype), sharing)
        dout = torch.randint(-1, 2, (1, *shape.q_lens, heads[0], 8), device=shape.device)
        dlse = torch.randint(-2, 3, (1, heads[0], *shape.q_lens), device=shape.device)
        upstream = (dout, dlse) if sharing == 1 else ()
        options = {"scale": 1.0, "return_lse": True, "backend": self.target.backend}

        def call(q, k, v):
            return onchip.attention(q, k, v, mask=masked.mask, **options)

        def truth(q, k, v):
            return oracle.attention(
                q, k, v, visible=masked.visible(0, *shape.q_lens, *shape.k_lens), scale=1.0
            )

        with self.target.in_use() as answers:
            try:
                found = oracle.outputs_and_grads(call, tensors, *upstream)
            except NotImplementedError:
                assert answers[-1], "raised NotImplementedError where refuse() gives no reason"
                return
        exact = oracle.outputs_and_grads(truth, {name: t.double() for name, t in tensors.items()}, *upstream)
        for name in found.keys() - {"lse"}:
            # Float64 keeps the weights of e^-128, which the other dtypes lose.
            expected = exact[name].mul(2).round().div(2).to(found[name].dtype)
            # A backend may keep log2(e) in q or k while it works, which is a rounding of dk or dq.
            eps = torch.finfo(expected.dtype).eps if name in ("dq", "dk") else 0.0
            atol = 4 * min(eps, torch.finfo(torch.float32).eps) * expected.abs().max().item()
            torch.testing.assert_close(found[name], expected, rtol=2 * eps, atol=atol, msg=name)

    @pytest.mark.parametrize("layout", ["bshd", "varlen", "cache"])
    def test_the_same_bits_twice(self, layout, dtype):
        for options in ({"mask": "causal"}, {"mask": "blocks_heads", "score": "everything"}):
            seed = int(torch.randint(2**31, ()))
            dropout = 0.0 if layout == "cache" else 0.2
            runs = [
                self.check(layout=layout, dtype=dtype, heads=(6, 2), dropout=dropout, seed=seed, **options)
                for _ in range(2)
            ]
            if runs[0] is not None:
                for name, value in runs[0].items():
                    assert torch.equal(value, runs[1][name]), name

    # Refusals.

    def test_what_is_refused(self):
        """Every refusal that the target lists is real: its case raises, and so does nothing less."""
        for reason, case in self.target.refusals.items():
            assert check(self.target, case) is None, f"{reason}: its case runs"

    def test_the_backend_keeps_the_protocol(self):
        module = select.load(self.target.backend)
        plan = onchip.plan(
            (1, 9, 2, 8), (1, 9, 2, 8), (1, 9, 2, 8), backend="reference", device=self.target.device
        )
        assert module.refuse(plan.problem) is None
        tiles = module.tiles(plan.problem)
        assert tiles.tile_m >= 1 and tiles.tile_n >= 1
        for step in traffic.STEPS:
            counted = traffic.count(
                plan.problem, plan.layout, plan.mask, step=step, backend=self.target.backend
            )
            assert counted.extra_memory >= 0
        assert module.refuse(dataclasses.replace(plan.problem, device="moon")) is not None or (
            self.target.backend == "reference"
        )


def exact_inputs(shape: Shape, heads_k: int, mask: str, dtype: torch.dtype, sharing: int):
    """{q, k, v} of one sequence whose attention is exact in any float dtype, and the mask.

    Keys are codes of ±1, each shared by so many neighbours. A query holds the code of a key that it sees, if it sees
    any: that key's score is 0, and every other's -128 or less (-1024 in float64), which weighs nothing.
    """
    (m,), (n,), bits = shape.q_lens, shape.k_lens, 10
    device, masked = shape.device, MASKS[mask](shape)
    visible = masked.visible(0, m, n).expand(shape.heads_q, m, n)
    pick = torch.where(visible, torch.rand(shape.heads_q, m, n, device=device), -1.0).argmax(2)
    number = torch.arange(n, device=device) // sharing
    code = 2 * (number[:, None] >> torch.arange(bits, device=device) & 1) - 1
    code = torch.cat([code, torch.ones_like(code[:, :1])], 1)  # the last column takes the match to 0
    height = 512 if dtype is torch.float64 else 64
    q = height * code[pick].transpose(0, 1)[None]
    q[..., -1] = -height * bits
    k = code[None, :, None].expand(1, n, heads_k, bits + 1)
    v = torch.randint(-2, 3, (1, n, heads_k, 8), device=device)
    return {"q": q.to(dtype), "k": k.to(dtype), "v": v.to(dtype)}, masked
