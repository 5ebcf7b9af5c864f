"""What kernels ask of a mask and of a score."""

import pytest
import torch
import triton
import triton.language as tl

from onchip.backends.compiled import emit
from onchip.backends.compiled.terms import Scores, modified

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@triton.jit
def scores_kernel(out, args, q_len, k_len, MOD: tl.constexpr):
    b, h = tl.program_id(0), tl.program_id(0)
    q, k = tl.arange(0, 4)[:, None], tl.arange(0, 8)[None, :]
    found, _ = modified(tl.zeros([4, 8], tl.float32), Scores(args=args), b, h, q, k, q_len, k_len, MOD)
    tl.store(out + q * 8 + k, found)


@pytest.mark.parametrize(("q_len", "k_len"), [(0, 0), (1, 0), (0, 1), (3, 5), (4, 8)])
def test_a_function_is_asked_about_places_that_its_tables_have(q_len, k_len):
    """Also where a sequence has no queries or no keys, beside which a tile may still lie."""
    around = torch.full((3, 20), float("nan"), device=DEVICE)
    table = around[1, 4 : 4 + max(k_len, 1)].copy_(torch.arange(max(k_len, 1)))
    rows = around[2, 4 : 4 + max(q_len, 1)].copy_(10 * torch.arange(max(q_len, 1)))
    out = torch.empty(4, 8, device=DEVICE)
    fn = emit.mod_function(lambda s, b, h, q, k, rows, table: s + rows[q] + table[k], (rows, table))
    scores_kernel[(1,)](out, (emit.table(rows), emit.table(table)), q_len, k_len, MOD=fn)
    q = torch.arange(4).clamp(max=max(q_len - 1, 0))[:, None]
    k = torch.arange(8).clamp(max=max(k_len - 1, 0))
    torch.testing.assert_close(out.cpu(), (10 * q + k).float(), atol=0, rtol=0)
