"""`onchip bench paper` on Triton's kernel: other tiles take the table's place while they are timed, and only then."""

import pytest
import torch

from onchip.backends.compiled import launch
from onchip.backends.triton import forward_pass, planning, table, tune
from onchip.backends.triton.table import Config
from onchip.bench import paper, peers, run
from onchip.bench.cases import Case
from onchip.bench.timing import Regime, Times

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FAST = Regime(repeats=2, least=0.0)


@pytest.fixture
def call():
    return run.stated(peers.inputs(Case(seqlen_q=128, heads_q=1, dim=16, dtype="fp16"), DEVICE))


def test_each_block_is_what_runs(call, monkeypatch):
    """The kernel's own result with each, the reference's; afterwards the table's tiles are back."""
    ran = []
    plain = forward_pass.Forward

    def noted(*args):
        ran.append(plain(*args))
        return ran[-1]

    def measure(calls, device, regime, told):
        (run_once,) = calls.values()
        out = run_once().out.float()
        expected = peers.peer("onchip-reference")
        given = peers.inputs(Case(seqlen_q=128, heads_q=1, dim=16, dtype="fp16"), DEVICE)
        torch.testing.assert_close(
            out, expected.forward(given)(given.q, given.k, given.v).float(), atol=4e-3, rtol=4e-3
        )
        return {"": Times([1.0])}

    monkeypatch.setattr(forward_pass, "Forward", noted)
    monkeypatch.setattr(paper, "measure", measure)
    launch.forget()
    found = paper.kernel_times(call, [32, 64, 128], DEVICE, FAST, None)
    assert list(found) == [32, 64, 128] and all(seconds == 1.0 for _, seconds in found.values())
    assert [one.chosen.tile_n for one in ran] == [32, 64, 128]
    assert [one.chosen.tile_m for one in ran] == [tiles.tile_m for tiles, _ in found.values()]
    assert planning.config is table.config


def test_times_are_measured(call):
    found = paper.kernel_times(call, [64], DEVICE, FAST, None)
    assert found[64][1] > 0


def test_a_block_that_does_not_fit_has_no_time(call, monkeypatch):
    def fails(problem, operands):
        raise RuntimeError("out of resource: shared memory")

    monkeypatch.setattr(forward_pass, "forward", fails)
    assert [seconds for _, seconds in paper.kernel_times(call, [32, 64], DEVICE, FAST, None).values()] == [
        None,
        None,
    ]
    assert planning.config is table.config


@pytest.mark.parametrize("present", [*table.TABLE.values(), *table.SMALL.values()])
def test_tiles_within_what_fits(present):
    """Of n keys, square where that is no more than twice the scores of a tile that fits, and powers of 2."""
    for n in paper.BLOCKS:
        found = paper._with_keys(present, n)
        scores = present.tile_m * present.tile_n
        assert found.tile_n == n and found.tile_m & (found.tile_m - 1) == 0 and 16 <= found.tile_m <= n
        assert found.tile_m == 16 or found.tile_m * n <= 2 * scores
        assert found.num_stages == 1 or found.num_stages * n <= present.num_stages * present.tile_n


def test_the_hook_lets_other_passes_be(monkeypatch):
    chosen = Config(16, 16, 4, 1)
    monkeypatch.setattr(table, "config", lambda problem, step, *more: step)
    for module in (planning, tune.backward_pass):
        monkeypatch.setattr(module, "config", table.config)
    found = tune.using("dq", chosen, lambda: [planning.config(None, step) for step in ("forward", "dq")])
    assert found == ["forward", chosen]
