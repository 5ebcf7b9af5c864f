"""Lists of tiles and kept launches follow their mask: its changes, also where torch counts none, and their call."""

import pytest
import torch
import triton
import triton.language as tl

import onchip
from onchip import capture, problem as problems, schedule
from onchip.backends.compiled import lists
from onchip.backends.triton import backward_kernels, forward_kernels, planning, tune
from onchip.backends.triton.parts import tile_of
from onchip.backends.triton.table import Config, Facts
from onchip.tiles import Tiles

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def test_a_mask_made_in_inference_mode_is_followed():
    q, k, v = (torch.randn(1, 40, 2, 16, device=DEVICE) for _ in range(3))
    with torch.inference_mode():
        visible = torch.zeros(40, 40, dtype=torch.bool, device=DEVICE)
        visible[:, :1] = True
        mask = onchip.dense(visible)
        onchip.attention(q, k, v, mask=mask, backend="triton")
        visible[:] = True
        out = onchip.attention(q, k, v, mask=mask, backend="triton")
        torch.testing.assert_close(out, onchip.attention(q, k, v, backend="reference"), atol=1e-5, rtol=1e-4)


def test_few_lists_are_kept():
    mask = onchip.where(lambda b, h, q, k: (q + k) % 3 == 0)
    for n in range(1, 36):  # a list and a launch of each
        x = torch.randn(1, n, 1, 16, device=DEVICE)
        onchip.attention(x, x, x, mask=mask, backend="triton")
    assert len(mask.cache) <= schedule._KEEP


def blocks(generator):
    return torch.rand(2, 4, 5, generator=generator).to(DEVICE) < 0.5


KEPT = {
    "blocks": lambda g: (x := blocks(g)[:1, :4, :5].contiguous(), onchip.block_sparse(x, tile=(16, 16))),
    "dense": lambda g: (x := (torch.rand(1, 4, 64, 80, generator=g) < 0.5).to(DEVICE), onchip.dense(x)),
    "padding": lambda g: (x := torch.tensor([70, 33], device=DEVICE), onchip.padding(x)),
    "documents": lambda g: (
        x := torch.arange(80, device=DEVICE) // 30,
        onchip.documents(x) & onchip.causal(),
    ),
    "where": lambda g: (
        x := torch.randint(0, 60, (64,), generator=g).to(DEVICE),
        onchip.where(lambda b, h, q, k, t: k < t[q] + 9 * h, x),
    ),
    "a union": lambda g: (
        x := torch.tensor([3, 17], device=DEVICE),
        onchip.causal() | onchip.prefix(x) | onchip.sinks(2),
    ),
}
GRADS = {"atol": 2e-2, "rtol": 2e-2}


@pytest.mark.parametrize("name", KEPT)
def test_launches_kept_with_a_mask_follow_their_call(name):
    """Its tensors and dtypes, strides and the mask's own values, in turn; a launch is kept from the second call on."""
    generator = torch.Generator().manual_seed(0)
    tensor, mask = KEPT[name](generator)

    def compare(dtype, turned, score=None):
        made = [torch.randn(2, n, 4, 16, generator=generator).to(DEVICE, dtype) for n in (64, 80, 80)]
        if turned:
            made = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in made]
        dout = torch.randn(2, 64, 4, 16, generator=generator).to(DEVICE, dtype)
        found = []
        for backend in ("triton", "reference"):
            inputs = [x.detach().requires_grad_() for x in made]
            out = onchip.attention(*inputs, mask=mask, score=score, backend=backend)
            found.append((out, *torch.autograd.grad(out, inputs, dout)))
        bounds = {"atol": 2e-5, "rtol": 1e-4} if dtype is torch.float32 else GRADS
        for ours, truth in zip(*found, strict=True):
            torch.testing.assert_close(ours, truth, **bounds)

    for _ in range(2):
        compare(torch.float32, False)
        compare(torch.float32, True)
        compare(torch.float16, False, onchip.Score(sink=torch.randn(4, device=DEVICE)))
        tensor.copy_(tensor.flip(-1))  # in place: the mask is another one now


def test_what_a_mask_without_tensors_shows_lasts_in_a_graph(monkeypatch):
    """Lists of a call before the capture, in which the kinds of tiles are exact, serve the captured call."""
    q, k, v = (torch.randn(1, 200, 2, 16, device=DEVICE) for _ in range(3))
    for mask, lasts in (
        (onchip.where(lambda b, h, q, k: k <= q), True),
        (
            onchip.where(
                lambda b, h, q, k, t: k <= q + t[0], torch.zeros(1, dtype=torch.int64, device=DEVICE)
            ),
            False,
        ),
    ):
        out = onchip.attention(q, k, v, mask=mask, backend="triton")
        kept = [x for key, x in mask.cache.items() if key[0] == "lists"]
        with monkeypatch.context() as patch:
            patch.setattr(capture, "capturing", lambda device: True)
            place, problem = problems.dense(q, k, v, mask, None, None, 0.0, True)
            operands = problems.Operands(q, k, v, place, mask, onchip.Score())
            tiles = [key[2] for key in mask.cache if key[0] == "lists"]
            found = [lists.build(problem, operands, each, False) for each in tiles]
            assert all((x is y) == lasts for x, y in zip(found, kept, strict=True))
            again = onchip.attention(q, k, v, mask=mask, backend="triton")
        torch.testing.assert_close(again, out, atol=1e-6, rtol=1e-5)


def test_the_longest_rows_come_first_and_stay_so(monkeypatch):
    """Each list's own, kept with the mask; in a capture those of before, where the mask has no tensor."""
    tiles = Tiles(16, 32)
    q, k, v = (torch.randn(2, 200, 2, 16, device=DEVICE) for _ in range(3))
    limit = torch.tensor([3], device=DEVICE)
    for mask, lasts in (
        (onchip.where(lambda b, h, i, j: (j + 40 * h) % 70 <= i + 30 * b), True),
        (onchip.where(lambda b, h, i, j, t: (j + 40 * h) % 70 <= i + 30 * b - t[0], limit), False),
    ):
        place, problem = problems.dense(q, k, v, mask, None, None, 0.0, True)
        operands = problems.Operands(q, k, v, place, mask, onchip.Score())
        found, _ = lists.build(problem, operands, tiles, False, rows=True)
        order = lists.longest_first(problem, operands, tiles, found)
        lengths = found.counts.sum(-1).gather(-1, order.long())
        assert (lengths[..., :-1] >= lengths[..., 1:]).all() and lengths.unique().numel() > 2
        assert torch.equal(order.sort(-1).values, torch.arange(13, device=DEVICE).expand_as(order).int())
        assert lists.longest_first(problem, operands, tiles, found) is order
        with monkeypatch.context() as patch:
            patch.setattr(capture, "capturing", lambda device: True)
            assert (lists.longest_first(problem, operands, tiles, found) is order) == lasts


def test_one_tensor_as_query_key_and_value():
    """Kernels read a tensor by a descriptor or by its strides: which, they must not take from the tensor itself."""
    made = torch.randn(1, 70, 2, 16, device=DEVICE)
    found = []
    for backend in ("triton", "reference"):
        x = made.clone().requires_grad_()
        out = onchip.attention(x, x, x, mask=onchip.causal(), backend=backend)
        found.append(torch.autograd.grad(out.square().sum(), x)[0])
    torch.testing.assert_close(*found, atol=5e-5, rtol=1e-4)


def test_a_mod_of_an_infinite_score():
    """What it makes of it counts: a zero times infinity on the way would be NaN."""
    q, k, v = (torch.randn(1, 20, 1, 16, device=DEVICE) for _ in range(3))
    bias = torch.zeros(20, 20, device=DEVICE)
    bias[:, ::3] = -torch.inf
    mod = onchip.mod(
        lambda s, b, h, q, k: onchip.plain.where(k % 3 == 0, -4.0, s),
        grad=lambda s, b, h, q, k: onchip.plain.where(k % 3 == 0, 0.0, 1.0),
    )
    score = onchip.Score(bias=bias, mod=mod)
    found = []
    for backend in ("triton", "reference"):
        inputs = [x.detach().clone().requires_grad_() for x in (q, k, v)]
        out = onchip.attention(*inputs, score=score, backend=backend)
        found.append((out, *torch.autograd.grad(out.square().sum(), inputs)))
    for ours, truth in zip(*found, strict=True):
        assert ours.isfinite().all()
        torch.testing.assert_close(ours, truth, atol=5e-5, rtol=1e-4)


@pytest.mark.parametrize(
    "blocks, section, heads, sequences", [(5, 6, 4, 3), (7, 1, 3, 2), (1, 4, 2, 2), (4, 2, 2, 5)]
)
@pytest.mark.parametrize("last_first", [False, True])
def test_every_tile_is_some_program_s_the_longest_of_a_section_first(
    blocks, section, heads, sequences, last_first
):
    programs = blocks * heads * sequences
    taken = [tile_of.fn(pid, blocks, section, heads, None, None, last_first, 1) for pid in range(programs)]
    assert len({*taken}) == programs and {t[1:] for t in taken} == {
        (h, b) for h in range(heads) for b in range(sequences)
    }
    order = [*range(blocks)][:: -1 if last_first else 1]
    for first in range(0, programs, blocks * section):
        within = taken[first : first + blocks * section]
        assert [i for i, _, _ in within] == [i for i in order for _ in range(section)]
        assert len({t[1:] for t in within}) == section


@triton.jit
def order_kernel(out, heads_of, lists, order, blocks, section, heads, GROUP: tl.constexpr):
    i, head, b = tile_of(tl.program_id(0), blocks, section, heads, lists, order, False, GROUP)
    tl.store(out + tl.program_id(0), i)
    tl.store(heads_of + tl.program_id(0), b * heads + head)


@pytest.mark.parametrize("shape", [(2, 6), (2, 1), (1, 6), (1, 1)])
def test_programs_go_by_the_lists_of_their_first_query_head(shape):
    """Rows of a list for all heads, or all sequences, or of each; three query heads a key head."""
    kinds = torch.rand(*shape, 7, 9, device=DEVICE).lt(torch.linspace(0.1, 0.9, 7, device=DEVICE)[:, None])
    made, _ = lists._lists(kinds.to(torch.uint8), True)
    lengths = made.counts.sum(-1)
    order = lengths.argsort(dim=-1, descending=True, stable=True).int()
    out, heads_of = (torch.empty(4 * 9, dtype=torch.int32, device=DEVICE) for _ in range(2))
    order_kernel[(4 * 9,)](out, heads_of, made, order, 9, 2, 2, 3)
    wanted = order.expand(2, 6, 9)[:, ::3].flatten(0, 1)
    for number in range(4):
        assert torch.equal(out[heads_of == number], wanted[number])


if DEVICE == "cpu":  # only the interpreter calls a function that a test has wrapped

    @pytest.mark.parametrize(
        "mask, query_rows, key_rows",
        [
            (onchip.causal(), [3, 2, 1, 0], [0, 1, 2, 3]),
            (onchip.causal(align="top_left"), [3, 2, 1, 0], [0, 1, 2, 3]),
            (onchip.window(40, None), [0, 1, 2, 3], [3, 2, 1, 0]),
            (onchip.Mask(), [0, 1, 2, 3], [0, 1, 2, 3]),
        ],
        ids=["causal", "top left", "left", "full"],
    )
    def test_bands_take_their_longest_tiles_first(mask, query_rows, key_rows, monkeypatch):
        """As the kernels call `tile_of`."""
        found, real = [], tile_of.fn

        def seen(*args, **options):
            result = real(*args, **options)
            found.append(int(result[0].handle.data.item()))
            return result

        for module in (forward_kernels, backward_kernels):
            monkeypatch.setattr(module, "tile_of", seen)
        for step, wanted, rows in (
            ("forward", "", query_rows), ("dq", "q", query_rows), ("dkdv", "kv", key_rows)
        ):  # fmt: skip
            q, k, v = (torch.randn(1, 64, 1, 16, requires_grad=name in wanted) for name in "qkv")
            leaves = [x for x in (q, k, v) if x.requires_grad]
            run = lambda: onchip.attention(q, k, v, mask=mask, backend="triton")  # noqa: B023, E731
            if leaves:
                out = run()
                run = lambda: torch.autograd.grad(out.sum(), leaves)  # noqa: B023, E731
            found.clear()
            tune.using(step, Config(16, 16, 4, 1), run)
            assert found == rows, step


def test_sections_by_what_differs_in_length():
    """One head at a time where all tiles are as long, or there is but one; else as many as share the L2 cache."""

    def count(mask, step="forward", seqlen=2048, dim=64, blocks=16, heads=4):
        x = torch.empty(2, seqlen, heads, dim, dtype=torch.float16, device="meta")
        problem = problems.state(x, x, x, problems.dense_layout(x, x, x), "dense", mask, None, device="cpu")
        return planning.sections(problem, step, blocks, heads, Facts(9, 132, "", 32 << 20))

    causal, window, blocks = onchip.causal(), onchip.window(100, 0), torch.ones(8, 8) > 0
    sparse, where = onchip.block_sparse(blocks, tile=(256, 256)), onchip.where(lambda b, h, q, k: k <= q)
    for mask in (onchip.Mask(), window, where, window & where):
        assert count(mask) == 1
    assert count(causal, blocks=1) == count(causal & where) == count(where, "dkdv") == 1
    for mask in (causal, onchip.causal(align="top_left"), onchip.window(None, 5), sparse, window & sparse):
        assert count(mask) == count(mask, "dkdv") == 8
    # Keys and values of a head: 8 MiB. Half of the cache holds two of them, at dim 256 three quarters of it three.
    assert count(causal, seqlen=32768) == 2 and count(causal, seqlen=8192, dim=256) == 2
    assert count(causal, seqlen=8192, dim=256, heads=3) == 3
    assert count(causal, "dkdv", 16384, 128) == count(causal, "dq", 16384, 128) == 1
    assert count(causal, "dk", 8192, 256) == 2 and count(causal, seqlen=1 << 20) == 1


def test_lists_of_heads_that_share_keys():
    """Each query head has its own."""
    generator = torch.Generator().manual_seed(3)
    visible = torch.rand(1, 6, 5, 7, generator=generator).to(DEVICE) < torch.linspace(
        0.1, 0.9, 7, device=DEVICE
    )
    mask = onchip.block_sparse(visible, tile=(32, 32))
    q, k, v = (torch.randn(2, n, h, 16, device=DEVICE) for n, h in ((150, 6), (220, 2), (220, 2)))
    dout, found = torch.randn(2, 150, 6, 16, device=DEVICE), []
    for backend in ("triton", "reference"):
        inputs = [x.detach().requires_grad_() for x in (q, k, v)]
        out = onchip.attention(*inputs, mask=mask, backend=backend)
        found.append((out, *torch.autograd.grad(out, inputs, dout)))
    for ours, truth in zip(*found, strict=True):
        torch.testing.assert_close(ours, truth, atol=5e-5, rtol=1e-4)
