"""The contract on the Hopper backend, where there is such a GPU."""

import dataclasses
import math
from contextlib import nullcontext

import pytest
import torch
from few import few_programs

import onchip
from contract import Contract, Target
from contract_run import Case
from onchip import plain, traffic
from onchip.backends import hopper

REFUSALS = {
    "float32": Case(),
    r"dim \d+: its tiles": Case(dims=(5, 5), dtype="float16"),
    r"dim_v \d+: its tiles": Case(dims=(40, 3), dtype="float16"),
    "cache layout": Case(layout="cache", dtype="float16", k_lens=(71, 60)),
    "paged layout": Case(layout="cache", page_size=7, dtype="float16", k_lens=(71, 60)),
    "dropout": Case(dropout=0.3, dtype="float16"),
    "an additive bias": Case(score="everything", dtype="float16"),
}


def rising(seqlen_q, dim, dtype, device):
    """q, k, v whose scores change from each 128 keys to the next by a step of the row's own, in natural units."""
    rows = torch.arange(seqlen_q)
    steps = torch.tensor([0.0, 1.0, 3.0, -2.0, 5.0, 8.0, -9.0, 40.0])
    of_a_warp, of_a_row = steps[rows // 16 % 8], steps[(rows + rows // 8) % 8]
    slopes = torch.where(rows // 128 % 2 == 0, of_a_warp, of_a_row) * torch.where(
        rows // 256 % 2 == 0, 1.0, -1.0
    )
    q, k, v = (torch.randn(2, n, 2, dim) for n in (seqlen_q, 1024, 1024))
    q *= 0.25
    q[..., 0], k[..., 0] = slopes[:, None], (torch.arange(1024) // 128)[:, None].float()
    return [x.to(device, dtype) for x in (q, k, v)]


if torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0):
    from onchip.backends.hopper import launch

    class TestHopper(Contract):
        target = Target(
            "hopper", device="cuda", dtypes=("float16", "bfloat16"), tile=(128, 128), refusals=REFUSALS
        )

        def test_the_backend_keeps_the_protocol(self):
            shape = (1, 9, 2, 8)
            plan = onchip.plan(shape, shape, shape, backend="reference", device="cuda")
            problem = dataclasses.replace(plan.problem, dtype=torch.float16)
            assert hopper.refuse(problem) is None
            assert hopper.tiles(problem).tile_m >= 64
            for step in ("forward", "backward"):
                counted = traffic.count(problem, plan.layout, plan.mask, step=step, backend="hopper")
                assert counted.extra_memory >= 0
            assert hopper.refuse(dataclasses.replace(problem, device="moon")) is not None

        @pytest.mark.parametrize("dim", [64, 128, 256])
        def test_a_thousand_repeats_have_the_same_bits_and_leave_counters_at_zero(self, dim):
            q, k = (torch.randn(2, 700, h, dim, device="cuda", dtype=torch.float16) for h in (6, 3))
            for mask in (onchip.Mask(), onchip.causal()):

                def call(mask=mask):
                    return onchip.attention(q, k, k, mask=mask, backend="hopper", return_lse=True)

                first, differing = call(), torch.zeros(2, dtype=torch.int64, device="cuda")
                for _ in range(1000):  # without waiting for each: other processes may share the GPU
                    differing += torch.stack([(a != b).sum() for a, b in zip(first, call(), strict=True)])
                assert differing.tolist() == [0, 0]
            assert all(int(counter) == 0 for counter in launch._counters.values())

        @pytest.mark.parametrize("by_head", [False, True])
        @pytest.mark.parametrize("dim", [64, 128, 256])
        def test_blocks_of_whole_tiles_need_no_mask(self, dim, by_head):
            """Rows of tiles that see nothing, keys that nobody sees, a sink; NaN where nothing is seen."""
            blocks = torch.rand(4 if by_head else 1, 6, 8, device="cuda") < 0.4
            blocks[:, 2] = False
            blocks[:, :, [0, 5]] = False  # 0 is what a row that sees nothing visits
            q = torch.randn(2, 700, 4, dim, device="cuda", dtype=torch.float16)
            k, v = (torch.randn(2, 1024, 2, dim, device="cuda", dtype=torch.float16) for _ in range(2))
            for unseen in (slice(0, 128), slice(640, 768)):
                k[:, unseen], v[:, unseen] = torch.nan, torch.nan
            mask = onchip.block_sparse(blocks[None] if by_head else blocks[0], tile=(128, 128))
            seen = blocks.repeat_interleave(128, 1)[:, :700].repeat_interleave(128, 2)
            truth_mask = onchip.dense(seen[None].cpu())
            for sink in (None, torch.randn(4, device="cuda")):
                score = onchip.Score(sink=sink)
                found = onchip.attention(q, k, v, mask=mask, score=score, backend="hopper", return_lse=True)
                inputs = (q, k.nan_to_num(0.0), v.nan_to_num(0.0))
                truth = onchip.attention(
                    *(x.double().cpu() for x in inputs), mask=truth_mask,
                    score=onchip.Score(sink=None if sink is None else sink.cpu()), backend="reference", return_lse=True,
                )  # fmt: skip
                for x, y, atol in zip(found, truth, (4e-3, 1e-4), strict=True):
                    torch.testing.assert_close(x.double().cpu(), y, atol=atol, rtol=4e-3)

        @pytest.mark.parametrize("dim", [64, 128, 256])
        def test_a_row_whose_scores_all_become_infinite(self, dim):
            """Without a mask or a tail of keys, which would hide such a row anyway."""
            mod = onchip.mod(lambda s, b, h, i, j: plain.where(i == 1, float("-inf"), s))
            q = torch.randn(1, 256, 2, dim, device="cuda", dtype=torch.float16)
            options = {"score": onchip.Score(mod=mod), "return_lse": True}
            found = onchip.attention(q, q, q, backend="hopper", **options)
            truth = onchip.attention(*[q.double().cpu()] * 3, backend="reference", **options)
            assert (truth[0][:, 1] == 0).all() and (truth[1][..., 1] == -torch.inf).all()
            for x, y in zip(found, truth, strict=True):
                torch.testing.assert_close(x.double().cpu(), y, atol=4e-3, rtol=4e-3)

        @pytest.mark.parametrize("dim", [64, 128, 256])
        def test_scores_that_rise_from_block_to_block(self, dim, dtype):
            """By less than the kernel lets them pass the maximum that it keeps, by more, and for some of a warp's rows.

            Blocks are visited from the last to the first: slopes of either sign rise or fall on the way.
            """
            mod = onchip.Score(mod=onchip.mod(lambda s, b, h, i, j: s + 0 * (i - j)))
            for seqlen_q, mask, score in (
                (512, onchip.Mask(), onchip.Score()),
                (512, onchip.causal(), onchip.Score()),
                (512, onchip.window(700, 300), onchip.Score()),
                (1100, onchip.Mask(), onchip.Score()),
                (1100, onchip.causal(), onchip.Score()),
                (512, onchip.Mask(), mod),
            ):
                q, k, v = rising(seqlen_q, dim, getattr(torch, dtype), "cuda")
                options = {"mask": mask, "score": score, "scale": 1.0, "return_lse": True}
                found = onchip.attention(q, k, v, backend="hopper", **options)
                inputs = (x.double().cpu() for x in (q, k, v))
                truth = onchip.attention(*inputs, backend="reference", **options)
                room = 4 * torch.finfo(q.dtype).eps
                torch.testing.assert_close(found[0].double().cpu(), truth[0], atol=4 * room, rtol=room)
                torch.testing.assert_close(found[1].double().cpu(), truth[1], atol=1e-3, rtol=1e-5)

        @pytest.mark.parametrize("apart", [8, 16])
        def test_scores_so_large_that_little_adds_nothing(self, apart):
            """In units of log2 they are 2^26 or 2^27 and more, where float32 is `apart`, which is each block's step. A
            weight of 2^16 is infinite in float16.
            """
            blocks = torch.arange(1024, device="cuda") // 128
            q, k, v = (torch.zeros(1, n, 1, 64, device="cuda", dtype=torch.float16) for n in (64, 1024, 1024))
            q[..., 0], q[..., 1] = 1024.0 * apart, 4.0
            k[..., 0], k[..., 1] = 8192.0, (apart / 4 * (7 - blocks))[:, None]
            v[..., 0] = (blocks == 0).half()[:, None]  # where the scores are greatest
            out = onchip.attention(q, k, v, scale=math.log(2), backend="hopper")
            torch.testing.assert_close(out[..., 0], torch.ones_like(out[..., 0]), atol=5e-3, rtol=0)

        @pytest.mark.parametrize("few", [False, True])
        @pytest.mark.parametrize("lengths", [(33, 33), (300, 700), (1100, 1100), (1217, 1000), (1185, 1600)])
        @pytest.mark.parametrize("dim", [64, 128, 256])
        def test_a_band_that_ends_warpgroups_at_different_blocks(self, dim, dtype, lengths, few):
            """In a program's first tile (`few`: and in later ones, which begin beside the last one's end); a first tile
            may lack rows, of which nothing may be written: before each head's rows lie another's."""
            kind = getattr(torch, dtype)
            q, k, v = (torch.randn(2, n, 3, dim).to("cuda", kind) for n in (lengths[0], *lengths[1:] * 2))
            masks = onchip.causal(), onchip.causal("top_left"), onchip.window(None, 70), onchip.window(500, 5)
            cases = [(mask, onchip.Score()) for mask in masks]
            if lengths == (300, 700):
                cases.append((onchip.causal(), onchip.Score(softcap=3.0)))
            for mask, score in cases:
                options = {"mask": mask, "score": score, "return_lse": True}
                with few_programs() if few else nullcontext():
                    found = onchip.attention(q, k, v, backend="hopper", **options)
                truth = onchip.attention(
                    *(x.double().cpu() for x in (q, k, v)), backend="reference", **options
                )
                room = 4 * torch.finfo(kind).eps
                torch.testing.assert_close(found[0].double().cpu(), truth[0], atol=room / 2, rtol=room)
                torch.testing.assert_close(found[1].double().cpu(), truth[1], atol=1e-4, rtol=1e-5)

        @pytest.mark.parametrize("dim", [64, 256])
        def test_packed_sequences_whose_programs_take_several_tiles(self, dim, dtype):
            kind, lengths = getattr(torch, dtype), [300, 0, 65, 1217, 128]
            cu = torch.tensor([0, *lengths]).cumsum(0).to("cuda", torch.int32)
            q, k, v = (torch.randn(sum(lengths), h, dim).to("cuda", kind) for h in (4, 2, 2))
            options = {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "mask": onchip.causal(), "return_lse": True}
            with few_programs():
                out, lse = onchip.attention_varlen(q, k, v, backend="hopper", **options)
            room = 4 * torch.finfo(kind).eps
            for start, stop in zip(cu[:-1].tolist(), cu[1:].tolist(), strict=True):
                alone = (x[None, start:stop].double().cpu() for x in (q, k, v))
                truth = onchip.attention(*alone, mask=onchip.causal(), backend="reference", return_lse=True)
                torch.testing.assert_close(
                    out[start:stop].double().cpu(), truth[0][0], atol=room / 2, rtol=room
                )
                torch.testing.assert_close(
                    lse[:, start:stop].double().cpu(), truth[1][0], atol=1e-4, rtol=1e-5
                )

        def test_a_graph_has_a_counter_of_its_own(self):
            q = torch.randn(2, 700, 3, 64, device="cuda", dtype=torch.float16)
            expected = onchip.attention(q, q, q, mask=onchip.causal(), backend="hopper")
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                out = onchip.attention(q, q, q, mask=onchip.causal(), backend="hopper")
            for _ in range(3):
                out.zero_()
                graph.replay()
                assert torch.equal(out, expected)
