"""Cases c01, c13, c52 and c81 to c87: attention over a key/value cache, dense and paged."""

import pytest
import torch

import onchip
import oracle
from checks import assert_empty, qkv


def paged(cache, page_size):
    """A cache (batch, capacity, heads, dim) as shuffled pages (num_pages, page_size, heads, dim) and their table."""
    batch, capacity = cache.shape[:2]
    count = -(-capacity // page_size)
    table = torch.randperm(batch * count + 2)[: batch * count].view(batch, count).to(torch.int32)
    padded = torch.nn.functional.pad(cache, (0, 0, 0, 0, 0, count * page_size - capacity))
    pages = cache.new_full((batch * count + 2, page_size, *cache.shape[2:]), float("nan"))
    pages[table.long()] = padded.view(batch, count, page_size, *cache.shape[2:])
    return pages, table


def truth(q, k, v, lengths, causal=False):
    """The oracle on the first lengths[b] keys of each sequence."""
    found = []
    for i, length in enumerate(lengths):
        visible = oracle.band(q.shape[1], length, None, 0) if causal else None
        one = (t[i : i + 1] for t in (q, k[:, :length], v[:, :length]))
        found.append(oracle.attention(*(t.double() for t in one), visible=visible))
    return torch.cat([out for out, _ in found]), torch.cat([lse for _, lse in found])


def close(found, expected, tolerance=1e-5):
    for value, exact in zip(found, expected, strict=True):
        torch.testing.assert_close(value.double(), exact, rtol=tolerance, atol=tolerance)


def test_c01_an_empty_cache_beside_a_filled_one(backend):
    q, k, v = qkv(2, 1, 6, 4, 2, dim=8)
    out, lse = onchip.attention_with_cache(
        q, k, v, cache_seqlens=torch.tensor([0, 4], dtype=torch.int32), return_lse=True, backend=backend
    )
    assert_empty(out[0], lse[0])
    close((out, lse), truth(q, k, v, [0, 4]))


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_c13_poison_in_unused_slots(backend, poison):
    lengths = torch.tensor([1, 3], dtype=torch.int32)
    q, k, v = qkv(2, 1, 3, 1, dim=64)
    k[0, 1:] = v[0, 1:] = poison
    expected = truth(q, k, v, [1, 3])
    options = {"cache_seqlens": lengths, "return_lse": True, "backend": backend}
    close(onchip.attention_with_cache(q, k, v, **options), expected)
    for page_size in (1, 2, 5):
        (k_pages, table), (v_pages, _) = shared_table(k, v, page_size)
        close(onchip.attention_with_cache(q, k_pages, v_pages, page_table=table, **options), expected)


def shared_table(k, v, page_size):
    """`paged` k and v under the same table."""
    both, table = paged(torch.cat([k, v], 3), page_size)
    k_pages, v_pages = both.split([k.shape[3], v.shape[3]], 3)
    return (k_pages, table), (v_pages, table)


def test_c13_poison_past_seqused(backend):
    q, k, v = (t[0] for t in qkv(1, 2, 6, 1, dim=64))
    k[1:3] = v[1:3] = float("nan")
    out, lse = onchip.attention_varlen(
        q,
        k,
        v,
        cu_seqlens_q=torch.tensor([0, 1, 2]),
        cu_seqlens_k=torch.tensor([0, 3, 6]),
        seqused_k=torch.tensor([1, 3], dtype=torch.int32),
        return_lse=True,
        backend=backend,
    )
    exact = truth(q[:, None], k.view(2, 3, 1, 64), v.view(2, 3, 1, 64), [1, 3])
    close((out, lse.T[..., None]), (exact[0][:, 0], exact[1]))


def test_c13_poison_before_leftpad(backend):
    q, k, v = qkv(2, 2, 9, 4, 2, dim=8)
    k[0, :3] = v[0, :3] = float("nan")
    out, lse = onchip.attention_with_cache(
        q,
        k,
        v,
        cache_seqlens=torch.tensor([7, 9]),
        cache_leftpad=torch.tensor([3, 0], dtype=torch.int32),
        mask=onchip.causal(),
        return_lse=True,
        backend=backend,
    )
    close((out[:1], lse[:1]), truth(q[:1], k[:1, 3:], v[:1, 3:], [4], causal=True))
    close((out[1:], lse[1:]), truth(q[1:], k[1:], v[1:], [9], causal=True))


def test_c52_batch_stride_of_2_to_the_30(backend):
    heads, dim, capacity = 2, 8, 16
    stride = 2**30
    try:
        # Only the slots that are written take memory: five caches spread over 8 GiB of untouched pages.
        storage = torch.empty(4 * stride + 2 * capacity * heads * dim, dtype=torch.float16)
    except RuntimeError:
        pytest.skip("8 GiB of address space are not to be had")
    shape, strides = (5, capacity, heads, dim), (stride, heads * dim, dim, 1)
    k_cache = storage.as_strided(shape, strides)
    v_cache = storage.as_strided(shape, strides, capacity * heads * dim)
    for cache in (k_cache, v_cache):
        cache.copy_(torch.randn(shape))
    before = k_cache.clone(), v_cache.clone()
    q, k, v = qkv(4, 3, 3, heads, dim=dim, dtype=torch.float16)
    out = onchip.attention_with_cache(
        q,
        k_cache,
        v_cache,
        k=k,
        v=v,
        cache_seqlens=torch.tensor([2, 5, 0, 13], dtype=torch.int32),
        cache_batch_idx=torch.tensor([1, 2, 3, 4], dtype=torch.int32),
        mask=onchip.causal(),
        backend=backend,
    )
    for cache, old, new in zip((k_cache, v_cache), before, (k, v), strict=True):
        for i, length in enumerate((2, 5, 0, 13)):
            old[i + 1, length : length + 3] = new[i]
        assert torch.equal(cache.contiguous(), old)
    exact, _ = truth(q, before[0][1:], before[1][1:], [5, 8, 3, 16], causal=True)
    torch.testing.assert_close(out.double(), exact, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("lengths, new", [([8, 2], 1), ([7, 8], 2), ([0, 0], 9), ([2, 9], 0)])
def test_c81_append_past_capacity(backend, lengths, new):
    q, k, v = qkv(2, max(new, 1), new, 2, 1, dim=8)
    k_cache, v_cache = torch.randn(3, 8, 1, 8), torch.randn(3, 8, 1, 8)
    before = k_cache.clone(), v_cache.clone()
    fresh = {"k": k, "v": v} if new else {}
    for more in ({}, {"cache_batch_idx": torch.tensor([2, 0], dtype=torch.int32)}):
        caches = (k_cache, v_cache) if more else (k_cache[:2], v_cache[:2])
        with pytest.raises(ValueError, match=r"cache_seqlens.*\b8\b"):
            onchip.attention_with_cache(
                q,
                *caches,
                **fresh,
                cache_seqlens=torch.tensor(lengths, dtype=torch.int32),
                **more,
                backend=backend,
            )
    assert torch.equal(k_cache, before[0]) and torch.equal(v_cache, before[1])


def test_c81_append_past_the_last_page(backend):
    q, k, v = qkv(1, 1, 1, 1, dim=8)
    pages = torch.randn(4, 4, 1, 8)
    before = pages.clone()
    with pytest.raises(ValueError, match="page_table"):
        onchip.attention_with_cache(
            q,
            pages,
            pages.clone(),
            k=k,
            v=v,
            cache_seqlens=8,
            page_table=torch.tensor([[2, 0]], dtype=torch.int32),
            backend=backend,
        )
    assert torch.equal(pages, before)


def test_c82_page_table_too_narrow(backend):
    q, k, v = qkv(1, 1, 1, 1, dim=8)
    pages = torch.randn(3, 256, 1, 8)
    before = pages.clone()
    narrow = {"page_table": torch.tensor([[1]], dtype=torch.int32), "backend": backend}
    with pytest.raises(ValueError, match=r"page_table.*\b2\b"):
        onchip.attention_with_cache(q, pages, pages, cache_seqlens=257, **narrow)
    with pytest.raises(ValueError, match=r"page_table.*\b2\b"):
        onchip.attention_with_cache(q, pages, pages.clone(), k=k, v=v, cache_seqlens=256, **narrow)
    assert torch.equal(pages, before)


def test_c84_an_empty_cache_equals_every_other_form(backend):
    lengths = torch.tensor([0, 5], dtype=torch.int32)
    q, k, v = qkv(2, 2, 5, 4, 2, dim=8)
    options = {"return_lse": True, "backend": backend}
    out, lse = onchip.attention_with_cache(q, k, v, cache_seqlens=lengths, **options)
    assert_empty(out[0], lse[0])
    close((out, lse), truth(q, k, v, [0, 5]))
    (k_pages, table), (v_pages, _) = shared_table(k, v, 4)
    by_page = onchip.attention_with_cache(
        q, k_pages, v_pages, page_table=table, cache_seqlens=lengths, **options
    )
    by_mask = onchip.attention(q, k, v, mask=onchip.padding(lengths), **options)
    packed = onchip.attention_varlen(
        q.flatten(0, 1),
        k[1],
        v[1],
        cu_seqlens_q=torch.tensor([0, 2, 4]),
        cu_seqlens_k=torch.tensor([0, 0, 5]),
        **options,
    )
    by_length = packed[0].view(2, 2, 4, 8), packed[1].view(4, 2, 2).transpose(0, 1)
    for other in (by_page, by_mask, by_length):
        torch.testing.assert_close(other[0], out, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(other[1], lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("old, new", [(5, 3), (0, 8), (130, 70), (7, 1)])
@pytest.mark.parametrize("page_size", [None, 3, 64])
def test_c85_chunked_prefill_equals_one_shot(backend, old, new, page_size):
    total = old + new
    q, k, v = qkv(2, total, total, 4, 2, dim=8)
    one_shot = oracle.attention(*(t.double() for t in (q, k, v)), visible=oracle.band(total, total, None, 0))
    k_cache, v_cache = torch.full((2, 2, total + 3, 2, 8), float("nan")).unbind(0)
    k_cache[:, :old], v_cache[:, :old] = k[:, :old], v[:, :old]
    paging = {}
    if page_size:
        (k_cache, table), (v_cache, _) = shared_table(k_cache, v_cache, page_size)
        paging = {"page_table": table}
    out, lse = onchip.attention_with_cache(
        q[:, old:],
        k_cache,
        v_cache,
        k=k[:, old:],
        v=v[:, old:],
        cache_seqlens=old,
        mask=onchip.causal(),
        return_lse=True,
        backend=backend,
        **paging,
    )
    close((out, lse), (one_shot[0][:, old:], one_shot[1][:, :, old:]))


@pytest.mark.parametrize("lead", [{}, {"mask": "causal"}])
def test_c87_paged_decoding_with_any_number_of_splits(backend, lead):
    steps, heads, dim = 12, 2, 16
    lengths = torch.tensor([70, 3], dtype=torch.int32)
    q, k, v = qkv(2, steps, 100, 4, heads, dim=dim)
    mask = onchip.causal() if lead else None
    found = {}
    order = torch.randperm(32)[:28].view(2, 14).to(torch.int32)
    for splits in (0, 1, 2, 4, 50):
        pages = torch.full((2, 32, 8, heads, dim), float("nan"))
        rows = torch.arange(100)
        for b in range(2):
            used = rows[: int(lengths[b])]
            pages[0, order[b, used // 8].long(), used % 8] = k[b, used]
            pages[1, order[b, used // 8].long(), used % 8] = v[b, used]
        outs = []
        for step in range(steps):
            at = lengths + step
            new = {"k": k[torch.arange(2), at.long()][:, None], "v": v[torch.arange(2), at.long()][:, None]}
            outs.append(
                onchip.attention_with_cache(
                    q[:, step : step + 1],
                    pages[0],
                    pages[1],
                    **new,
                    cache_seqlens=at,
                    page_table=order,
                    num_splits=splits,
                    mask=mask,
                    backend=backend,
                )
            )
        found[splits] = torch.cat(outs, 1)
    for step in range(steps):
        exact, _ = truth(q[:, step : step + 1], k, v, [int(n) + step + 1 for n in lengths])
        for out in found.values():
            torch.testing.assert_close(out[:, step : step + 1].double(), exact, rtol=1e-5, atol=1e-5)
