"""Packed, varlen, cached and private forms: each option, alone and all at once, gives what the plain function gives.

FlashAttention-4's are in test_compat_forms_cute.py.
"""

import pytest
import torch

import onchip.compat.flash_attn_interface as fa3
from onchip.compat.flash_attn import flash_attn_interface as fa2

BATCH, SEQLEN, HEADS, DIM = 2, 9, 4, 16
CU = torch.arange(BATCH + 1, dtype=torch.int32) * SEQLEN
LENGTHS = (CU, CU, SEQLEN, torch.tensor(SEQLEN))


def flat(*tensors):
    return [x.flatten(0, 1) for x in tensors]


def dense(out, lse, *rest):
    """Results of packed sequences as those of a batch."""
    return out.unflatten(0, (BATCH, SEQLEN)), lse.unflatten(1, (BATCH, SEQLEN)).transpose(0, 1), *rest


def tensors(*leading):
    return [torch.randn(*leading, BATCH, SEQLEN, HEADS, DIM, requires_grad=True) for _ in range(3)]


def same(call, want, leaves):
    """Outputs, and gradients by the leaves; both calls draw the same keys for dropout."""
    found = []
    for f in (call, want):
        torch.manual_seed(7)
        results = f()
        results = results if isinstance(results, tuple) else (results,)
        total = sum((x.float() * torch.linspace(-1, 1, x.numel()).view(x.shape)).nan_to_num(neginf=0.0).sum()
                    for x in results if x.requires_grad)  # fmt: skip
        found.append((results, torch.autograd.grad(total, leaves) if isinstance(total, torch.Tensor) else ()))
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-5)


def each(options):
    """Every option alone, then all."""
    return [pytest.param({name: value}, id=name) for name, value in options.items()] + [
        pytest.param(options, id="all")
    ]


# FlashAttention-2

OPTIONS2 = {
    "dropout_p": 0.3,
    "softmax_scale": 0.4,
    "causal": True,
    "window_size": (5, 2),
    "softcap": 3.0,
    "alibi_slopes": torch.rand(BATCH, HEADS),
    "deterministic": True,
    "return_attn_probs": True,
}
FORMS2 = {
    "flash_attn_qkvpacked_func": lambda q, k, v, **o: fa2.flash_attn_qkvpacked_func(
        torch.stack([q, k, v], 2), **o
    ),
    "flash_attn_kvpacked_func": lambda q, k, v, **o: fa2.flash_attn_kvpacked_func(
        q, torch.stack([k, v], 2), **o
    ),
    "flash_attn_varlen_func": lambda q, k, v, **o: fa2.flash_attn_varlen_func(*flat(q, k, v), *LENGTHS, **o),
    "flash_attn_varlen_kvpacked_func": lambda q, k, v, **o: fa2.flash_attn_varlen_kvpacked_func(
        *flat(q), torch.stack(flat(k, v), 1), *LENGTHS, **o
    ),
    "flash_attn_varlen_qkvpacked_func": lambda q, k, v, **o: fa2.flash_attn_varlen_qkvpacked_func(
        torch.stack(flat(q, k, v), 1), CU, SEQLEN, **o
    ),
}


@pytest.mark.parametrize("options", each(OPTIONS2))
@pytest.mark.parametrize("name", FORMS2)
def test_forms_of_version_2(name, options):
    leaves = tensors()

    def call():
        found = FORMS2[name](*leaves, **options)
        if "varlen" not in name:
            return found
        return dense(*found) if isinstance(found, tuple) else found.unflatten(0, (BATCH, SEQLEN))

    same(call, lambda: fa2.flash_attn_func(*leaves, **options), leaves)


PRIVATE2 = {
    "dropout_p": 0.3,
    "softmax_scale": 0.4,
    "causal": True,
    "window_size_left": 5,
    "window_size_right": 2,
    "softcap": 3.0,
    "alibi_slopes": torch.rand(HEADS),
}
PLAIN2 = {
    "dropout_p": 0.0,
    "softmax_scale": 0.25,
    "causal": False,
    "window_size_left": -1,
    "window_size_right": -1,
    "softcap": 0.0,
    "alibi_slopes": None,
}


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "varlen"])
@pytest.mark.parametrize("options", each(PRIVATE2))
def test_private_forms_of_version_2(options, packed):
    """_flash_attn_forward, _flash_attn_backward and the _flash_attn_varlen ones, against autograd."""
    leaves, stated = tensors(), {**PLAIN2, **options}
    public = {n: x for n, x in stated.items() if "window" not in n}
    public["window_size"] = (stated["window_size_left"], stated["window_size_right"])
    torch.manual_seed(7)
    wanted = fa2.flash_attn_func(*leaves, **public, return_attn_probs=True)
    dout = torch.randn_like(wanted[0])
    grads = torch.autograd.grad(wanted[0], leaves, dout)
    torch.manual_seed(7)
    inputs, given = [x.detach() for x in leaves], [torch.empty(BATCH, SEQLEN, HEADS, DIM) for _ in "qkv"]
    if packed:
        forward, backward, lengths = fa2._flash_attn_varlen_forward, fa2._flash_attn_varlen_backward, LENGTHS
        inputs, given, dout = flat(*inputs), flat(*given), dout.flatten(0, 1)
        more = {"zero_tensors": True}
    else:
        forward, backward, lengths, more = fa2._flash_attn_forward, fa2._flash_attn_backward, (), {}
    out, lse, weights, rng = forward(*inputs, *lengths, **stated, return_softmax=True, **more)
    delta = backward(
        dout, *inputs, out, lse, *given, *lengths, **stated, deterministic=True, rng_state=rng, **more
    )
    if packed:
        torch.testing.assert_close(delta, (dout * out).sum(-1).T)
        (out, lse), given = dense(out, lse), [x.unflatten(0, (BATCH, SEQLEN)) for x in given]
    torch.testing.assert_close((out, lse, weights), tuple(x.detach() for x in wanted), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(tuple(given), grads, rtol=1e-5, atol=1e-5)


# FlashAttention-3

OPTIONS3 = {
    "softmax_scale": 0.4,
    "causal": True,
    "window_size": (5, 2),
    "attention_chunk": 4,
    "softcap": 3.0,
    "deterministic": True,
    "sm_margin": 8,
    "return_attn_probs": True,
}
MORE3 = {"qv": torch.randn(BATCH, SEQLEN, HEADS, DIM), "num_splits": 3, "pack_gqa": True, **OPTIONS3}


@pytest.mark.parametrize("heads_q", [None, HEADS])
@pytest.mark.parametrize("options", each(OPTIONS3))
def test_packed_form_of_version_3(options, heads_q):
    """flash_attn_qkvpacked_func with three tensors of one shape, and with fewer key heads."""
    q, k, v = leaves = tensors()
    packed = torch.stack(leaves, 2) if heads_q is None else torch.cat([q, k[:, :, :2], v[:, :, :2]], 2)
    keys = (k, v) if heads_q is None else (k[:, :, :2], v[:, :, :2])
    same(
        lambda: fa3.flash_attn_qkvpacked_func(packed, num_heads_q=heads_q, **options),
        lambda: fa3.flash_attn_func(q, *keys, **options),
        leaves,
    )


def packed3(call, q, k, v, options):
    options = {n: x.flatten(0, 1) if n == "qv" else x for n, x in options.items()}
    found = call(*flat(q, k, v), *LENGTHS, **options)
    return dense(*found) if isinstance(found, tuple) else found.unflatten(0, (BATCH, SEQLEN))


@pytest.mark.parametrize("options", each(MORE3))
def test_varlen_form_of_version_3(options):
    leaves = tensors()
    same(
        lambda: packed3(fa3.flash_attn_varlen_func, *leaves, options),
        lambda: fa3.flash_attn_func(*leaves, **options),
        leaves,
    )


def small(*leaves):
    return [x.detach().to(torch.float8_e4m3fn) for x in leaves]


DESCALES = {name: torch.rand(BATCH, HEADS) + 0.5 for name in ("q_descale", "k_descale", "v_descale")}


def test_descales_of_every_form_of_version_3():
    """flash_attn_varlen_func, flash_attn_qkvpacked_func and _flash_attn_forward of float8."""
    parts = small(*tensors())
    want = fa3.flash_attn_func(*parts, **DESCALES)
    torch.testing.assert_close(packed3(fa3.flash_attn_varlen_func, *parts, DESCALES), want)
    torch.testing.assert_close(fa3.flash_attn_qkvpacked_func(torch.stack(parts, 2), **DESCALES), want)
    torch.testing.assert_close(fa3._flash_attn_forward(*parts, **DESCALES)[0], want)


def private3(options):
    """The public options in the private entry points' words."""
    stated = {
        n: x for n, x in options.items() if n not in ("window_size", "deterministic", "return_attn_probs")
    }
    if "window_size" in options:
        stated["window_size_left"], stated["window_size_right"] = options["window_size"]
    return stated


@pytest.mark.parametrize("options", each(MORE3))
def test_private_form_of_version_3(options):
    """_flash_attn_forward, dense and with cu_seqlens."""
    leaves = [x.detach() for x in tensors()]
    options = {**options, "return_attn_probs": True}
    want = fa3.flash_attn_func(*leaves, **options)
    hints = {"scheduler_metadata": torch.empty(0, dtype=torch.int32)}
    out, lse, *none = fa3._flash_attn_forward(*leaves, **private3(options), **hints)
    torch.testing.assert_close((out, lse), want)
    assert [x.numel() for x in none] == [0, 0]
    stated = {n: x.flatten(0, 1) if n == "qv" else x for n, x in private3(options).items()}
    names = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
    packed = fa3._flash_attn_forward(*flat(*leaves), **dict(zip(names, LENGTHS)), **stated)
    torch.testing.assert_close(dense(*packed[:2]), want)


def caches(pages):
    """A cache of two sequences, 4 and 7 keys long, and where it lies: rows by number, or pages of 5."""
    k_cache, v_cache = torch.randn(2, 3, 20, 2, DIM)
    lengths = torch.tensor([4, 7], dtype=torch.int32)
    if pages:
        table = torch.randperm(12)[:8].view(2, 4).int()
        return k_cache.view(12, 5, 2, DIM), v_cache.view(12, 5, 2, DIM), {"page_table": table}, lengths
    return k_cache, v_cache, {"cache_batch_idx": torch.tensor([2, 0], dtype=torch.int32)}, lengths


CACHED3 = {
    "softmax_scale": 0.4,
    "causal": True,
    "window_size": (5, 2),
    "attention_chunk": 4,
    "softcap": 3.0,
    "num_splits": 2,
    "pack_gqa": True,
    "sm_margin": 8,
    "cache_leftpad": torch.tensor([1, 3], dtype=torch.int32),
    "rotary": True,
    "rotary_seqlens": torch.tensor([5, 2], dtype=torch.int32),
}


@pytest.mark.parametrize("pages", [False, True])
@pytest.mark.parametrize("append", [False, True])
@pytest.mark.parametrize("options", each(CACHED3))
def test_cached_forms_of_version_3(options, append, pages):
    """flash_attn_with_kvcache against flash_attn_func over each sequence's keys, and _flash_attn_forward against it."""
    k_cache, v_cache, place, lengths = caches(pages)
    q, (k, v) = torch.randn(2, 3, HEADS, DIM), torch.randn(2, 2, 3, 2, DIM)
    new = {"k": k, "v": v} if append else {}
    options = {n: x for n, x in options.items() if n != "rotary_seqlens" or "rotary" in options}
    if options.pop("rotary", False):
        options |= {
            "rotary_cos": torch.ones(30, 4),
            "rotary_sin": torch.ones(30, 4),
            "rotary_interleaved": False,
        }
        if not append:
            with pytest.raises(NotImplementedError, match="rotary_cos: without k"):
                fa3.flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=lengths, **place, **options)
            return
    copies = [x.clone() for x in (k_cache, v_cache) for _ in range(2)]
    out, lse, *_ = fa3.flash_attn_with_kvcache(
        q, copies[0], copies[2], cache_seqlens=lengths, return_softmax_lse=True, **new, **place, **options
    )
    words = {"k": "k_new", "v": "v_new", "cache_batch_idx": "kv_batch_idx", "cache_leftpad": "leftpad_k",
             "rotary_seqlens": "seqlens_rotary"}  # fmt: skip
    stated = {words.get(n, n): x for n, x in {**new, **place, **private3(options)}.items()}
    private = fa3._flash_attn_forward(q, copies[1], copies[3], seqused_k=lengths, **stated)
    torch.testing.assert_close(private[:2], (out, lse))
    torch.testing.assert_close(copies[0], copies[1])
    if "rotary_cos" in options:
        return  # q is turned within: test_kvcache_rotary_counts_from_rotary_seqlens has the truth
    kept = {n: x for n, x in options.items() if n in OPTIONS3}
    for b, n in enumerate((lengths + (3 if append else 0)).tolist()):
        first = int(options["cache_leftpad"][b]) if "cache_leftpad" in options else 0
        rows = [
            x[place["page_table"][b]].flatten(0, 1) if pages else x[place["cache_batch_idx"][b]]
            for x in (copies[0], copies[2])
        ]
        keys = [x[None, first:n] for x in rows]
        want = fa3.flash_attn_func(q[b : b + 1], *keys, **kept, return_attn_probs=True)
        torch.testing.assert_close((out[b : b + 1], lse[b : b + 1]), want, rtol=1e-5, atol=1e-5)
