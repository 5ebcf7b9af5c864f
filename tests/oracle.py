"""What attention must return: a dense, differentiable oracle, independent of the package under test.

`attention` and `varlen` compute the definition in any float dtype. `assert_close_as_torch` holds a result to float64
attention, allowing twice the error that plain PyTorch makes in the inputs' own dtype, plus a rounding band:

    tensors = {"q": q, "k": k, "v": v}
    actual = outputs_and_grads(lambda q, k, v: onchip.attention(q, k, v, return_lse=True), tensors, dout, dlse)
    assert_close_as_torch(actual, q, k, v, visible=band(Sq, Sk, None, 0), dout=dout, dlse=dlse)
"""

import math
from functools import partial

import torch

NEG_INF = float("-inf")

# Roundings, relative to the largest value, that a result may differ by beside torch's own error. A tiled backward
# takes sum(dO * O) for sum(P * dP): the two are rounded apart, in float32, before they cancel. float64 has no better
# reference, so its band holds the reordered sums themselves.
_ROUNDINGS = {torch.float16: 2, torch.bfloat16: 2, torch.float32: 96, torch.float64: 4096}


def band(seqlen_q, seqlen_k, left=None, right=None, shift=None):
    """Visibility (seqlen_q, seqlen_k) of a window; causal is `right=0`. `shift` defaults to bottom-right."""
    shift = seqlen_k - seqlen_q if shift is None else shift
    at = torch.arange(seqlen_q)[:, None] + shift
    key = torch.arange(seqlen_k)[None, :]
    visible = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool)
    if left is not None:
        visible &= key >= at - left
    if right is not None:
        visible &= key <= at + right
    return visible


def alibi(slopes, seqlen_q, seqlen_k):
    """The ALiBi term (batch|1, heads, seqlen_q, seqlen_k) of slopes (heads,) or (batch, heads)."""
    at = torch.arange(seqlen_q, device=slopes.device)[:, None] + seqlen_k - seqlen_q
    distance = (at - torch.arange(seqlen_k, device=slopes.device)[None, :]).abs()
    slopes = slopes if slopes.dim() == 2 else slopes[None]
    return -slopes[:, :, None, None] * distance.to(slopes.dtype)


def attention(
    q,
    k,
    v,
    *,
    visible=None,
    add=None,
    softcap=None,
    modify=None,
    sink=None,
    scale=None,
    keep=None,
    dropout=0.0,
):
    """Dense attention in the inputs' dtype: matmuls and stored values in it, softmax in float32 or better.

    q (batch, seqlen_q, heads_q, dim), k and v (batch, seqlen_k, heads_k, dim | dim_v). `visible` (bool), `add` and
    `keep` (bool: the element survives `dropout`) broadcast to (batch, heads_q, seqlen_q, seqlen_k); `modify` maps the
    scores of that shape; `sink` is (heads_q,). Returns out (batch, seqlen_q, heads_q, dim_v) and
    lse (batch, heads_q, seqlen_q). A row without a visible key: out 0, lse -inf (or its sink), gradients 0.
    A key that no query sees, and the query of an empty row, may hold NaN or inf.
    """
    batch, seqlen_q, heads_q, dim = q.shape
    seqlen_k, heads_k, dim_v = k.shape[1], k.shape[2], v.shape[3]
    group = heads_q // heads_k
    shape = (batch, heads_q, seqlen_q, seqlen_k)
    seen = torch.ones(shape, dtype=torch.bool, device=q.device)
    if visible is not None:
        seen = seen & visible
    if add is not None:
        seen = seen & (add.detach() != NEG_INF)
    used = seen.any(2).view(batch, heads_k, group, seqlen_k).any(2).transpose(1, 2)[..., None]
    q = torch.where(seen.any(3).transpose(1, 2)[..., None], q, 0).transpose(1, 2)
    k = torch.where(used, k, 0).transpose(1, 2).repeat_interleave(group, 1)
    v = torch.where(used, v, 0).transpose(1, 2).repeat_interleave(group, 1)

    scale = 1 / math.sqrt(dim) if scale is None and dim else scale or 0.0
    s = (q * scale) @ k.transpose(2, 3)
    if softcap is not None:
        s = softcap * torch.tanh(s / softcap)
    if add is not None:
        s = s + torch.where(add.detach() == NEG_INF, 0, add)
    if modify is not None:
        s = modify(s)
    p, lse = _softmax(s, seen, sink)
    if keep is not None:
        p = p * keep / (1 - dropout) if dropout < 1 else p * 0
    out = p.to(v.dtype) @ v
    return out.transpose(1, 2).reshape(batch, seqlen_q, heads_q, dim_v), lse


def _softmax(s, seen, sink):
    """Probabilities and natural-log lse of scores s where `seen`, with the sink's logit in the denominator."""
    s = s.to(torch.promote_types(s.dtype, torch.float32))
    logit = None if sink is None else sink.to(s.dtype)[None, :, None, None]
    hidden = torch.where(seen, s.detach(), NEG_INF)
    row_max = hidden.amax(3, keepdim=True) if s.shape[3] else s.new_full((*s.shape[:3], 1), NEG_INF)
    if logit is not None:
        row_max = torch.maximum(row_max, logit.detach())
    row_max = torch.where(row_max == NEG_INF, 0, row_max)
    e = torch.where(seen, torch.exp(torch.where(seen, s, row_max) - row_max), 0)
    row_sum = e.sum(3, keepdim=True)
    if logit is not None:
        row_sum = row_sum + torch.exp(logit - row_max)
    empty = row_sum == 0
    safe = torch.where(empty, 1, row_sum)
    return e / safe, torch.where(empty, NEG_INF, row_max + torch.log(safe)).squeeze(3)


def varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, *, seqused_q=None, seqused_k=None, options=None, **common):
    """`attention` of each packed sequence. `options(i, seqlen_q, seqlen_k)` gives the i-th one's own keywords.

    q (total_q, heads_q, dim), k and v (total_k, heads_k, dim | dim_v). Returns out (total_q, heads_q, dim_v) and
    lse (heads_q, total_q). Rows past `seqused_q`: out 0, lse -inf.
    """
    outs, lses = [q.new_zeros(0, q.shape[1], v.shape[2])], [q.new_zeros(q.shape[1], 0)]
    for i in range(len(cu_seqlens_q) - 1):
        rows = slice(int(cu_seqlens_q[i]), int(cu_seqlens_q[i + 1]))
        used_q = rows.stop - rows.start if seqused_q is None else int(seqused_q[i])
        used_k = int(cu_seqlens_k[i + 1] - cu_seqlens_k[i]) if seqused_k is None else int(seqused_k[i])
        keys = slice(int(cu_seqlens_k[i]), int(cu_seqlens_k[i]) + used_k)
        mine = {**common, **(options(i, used_q, used_k) if options else {})}
        out, lse = attention(q[rows][:used_q][None], k[keys][None], v[keys][None], **mine)
        unused = rows.stop - rows.start - used_q
        outs.append(torch.nn.functional.pad(out[0], (0, 0, 0, 0, 0, unused)))
        lses.append(torch.nn.functional.pad(lse[0], (0, unused), value=NEG_INF))
    return torch.cat(outs), torch.cat(lses, 1)


def outputs_and_grads(fn, tensors, dout=None, dlse=None):
    """{"out", "lse", and "d" + name for each of `tensors`} of `fn(**tensors)`, which returns (out, lse).

    `tensors` maps names to float tensors (None entries are dropped); gradients only if dout or dlse is given.
    """
    wanted = dout is not None or dlse is not None
    leaves = {
        name: t.detach().clone(memory_format=torch.preserve_format).requires_grad_(wanted)
        for name, t in tensors.items()
        if t is not None
    }
    out, lse = fn(**leaves)
    found = {"out": out.detach(), "lse": lse.detach()}
    pairs = [(t, g) for t, g in ((out, dout), (lse, dlse)) if g is not None]
    if pairs:
        roots, upstream = zip(*[(t, g.to(t.dtype)) for t, g in pairs], strict=True)
        grads = torch.autograd.grad(roots, list(leaves.values()), upstream, allow_unused=True)
        for (name, leaf), grad in zip(leaves.items(), grads, strict=True):
            found["d" + name] = torch.zeros_like(leaf) if grad is None else grad
    return found


def assert_close_as_torch(
    actual, q, k, v, *, dtype=None, dout=None, dlse=None, add=None, sink=None, fn=attention, **options
):
    """Every tensor of `actual` ({"out", "lse", "dq", "dk", "dv", "dadd", "dsink"}, any of them) is as good as torch's.

    The oracle `fn` (`varlen` for packed inputs) runs on the same inputs in float64 and in `dtype` (default: q's);
    the actual error against float64 may be twice that of the second, plus a rounding band. Infinities must be in the
    same places, dtypes and shapes must agree, and there must be no NaN.

    Where few keys are seen, dq and dk are small by cancellation of dP and sum(dO * O): a rounding of these is allowed.
    """
    dtype = dtype or q.dtype
    call = partial(fn, **options)

    def run(to, extra):
        tensors = {"q": q.to(to), "k": k.to(to), "v": v.to(to)}
        given = {name: t for name, t in (("add", add), ("sink", sink)) if t is not None}
        tensors |= {name: t if extra is None else t.to(extra) for name, t in given.items()}
        return outputs_and_grads(call, tensors, dout, dlse)

    exact = run(torch.float64, torch.float64)
    plain = run(dtype, None)
    rooms = {}
    if dout is not None:
        scale = max(q.shape[-1], 1) ** -0.5 if options.get("scale") is None else abs(options["scale"])
        eps = torch.finfo(torch.promote_types(dtype, torch.float32)).eps
        rounding = eps * scale * longest(dout) * longest(v)
        rooms = {"dq": rounding * top(k), "dk": rounding * top(q)}
    for name, value in actual.items():
        assert value.dtype == plain[name].dtype, f"{name}: {value.dtype}, expected {plain[name].dtype}"
        assert_within(value, exact[name], plain[name], dtype, name, rooms.get(name, 0.0))


def top(x):
    """The largest finite size in x; 0 where there is none."""
    finite = x[x.isfinite()]
    return finite.abs().max().item() if finite.numel() else 0.0


def longest(x):
    """The largest norm of a row, with 0 for what is not finite in it."""
    return top(x.double().nan_to_num(0.0, 0.0, 0.0).norm(dim=-1))


def assert_within(actual, exact, plain, dtype, name="value", room=0.0):
    """The error of `actual` against `exact` is at most twice that of `plain`, a few roundings of dtype, and room."""
    assert actual.shape == exact.shape, f"{name}: shape {tuple(actual.shape)}, expected {tuple(exact.shape)}"
    finite = exact.isfinite()
    # Compared as float64 so that inf == inf; NaN equals nothing, so a NaN anywhere fails here or below.
    special = actual.double()[~finite]
    assert torch.equal(special, exact[~finite]), (
        f"{name}: {special[:8]} where {exact[~finite][:8]} is expected"
    )
    if not finite.any():
        return
    exact = exact[finite]
    error = (actual.double()[finite] - exact).abs().max().item()
    torch_error = (plain.double()[finite] - exact).abs().max().item()
    band = _ROUNDINGS[dtype] * torch.finfo(dtype).eps * (exact.abs().max().item() + 0.05)
    allowed = 2 * torch_error + band + room
    assert error <= allowed, (
        f"{name}: error {error:.3e} against float64, torch's {torch_error:.3e}, allowed {allowed:.3e}"
    )
