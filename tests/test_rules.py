"""rules.py against element-wise truth: bands, tile spans in both directions, and Philox's published vectors."""

import itertools
import random

import pytest
import torch

from onchip import rules

EMPTY, PARTIAL, FULL = 0, 1, 2
ROWS, MAX_LEN, MAX_TILE = 320_000, 20, 9


@pytest.fixture(autouse=True)
def same_seed(fresh_seed):
    """Python's own generator follows torch's, so that ONCHIP_SEED repeats both."""
    random.seed(torch.initial_seed())


@pytest.fixture
def on_tensors(monkeypatch):
    """Lets the functions of rules.py take min and max element by element."""

    def pairwise(function):
        return lambda a, b: function(*(torch.as_tensor(x) for x in (a, b)))

    monkeypatch.setattr(rules, "min", pairwise(torch.minimum), raising=False)
    monkeypatch.setattr(rules, "max", pairwise(torch.maximum), raising=False)


def visible(q, k, q_len, k_len, band):
    """Band visibility by its definition, a window to each side of either diagonal."""
    position = q + (k_len - q_len)
    seen = (q < q_len) & (k < k_len)
    if band.left is not None:
        seen = seen & (k >= position - band.left)
    if band.right is not None:
        seen = seen & (k <= position + band.right)
    if band.top_left is not None:
        seen = seen & (k >= q - band.top_left)
    if band.top_right is not None:
        seen = seen & (k <= q + band.top_right)
    return seen


def random_rows(n):
    """n tile rows: i, tile_q, tile_k, q_len, k_len as int64 tensors, where row i exists."""
    tile_q, tile_k = (torch.randint(1, MAX_TILE + 1, (n,)) for _ in range(2))
    q_len, k_len = torch.randint(1, MAX_LEN + 1, (n,)), torch.randint(0, MAX_LEN + 1, (n,))
    blocks = (q_len + tile_q - 1) // tile_q
    i = (torch.rand(n) * blocks).long()
    return i, tile_q, tile_k, q_len, k_len


def true_kinds(i, tile_q, tile_k, q_len, k_len, band, transposed=False):
    """Kind of every key tile of tile row i by its elements: [n, MAX_LEN]; -1 past the last tile.

    Transposed: of the tiles of queries that a tile of keys meets; then q_len counts keys, k_len queries.
    """
    rows = i[:, None] * tile_q[:, None] + torch.arange(MAX_TILE)
    exists = (torch.arange(MAX_TILE) < tile_q[:, None]) & (rows < q_len[:, None])
    a, b = rows[:, :, None], torch.arange(MAX_LEN)[None, None]
    a_len, b_len = q_len[:, None, None], k_len[:, None, None]
    seen = visible(b, a, b_len, a_len, band) if transposed else visible(a, b, a_len, b_len, band)
    exists = exists[:, :, None] & (b < b_len)
    seen = seen & exists
    some, every = seen.any(1), (seen | ~exists).all(1)  # [n, MAX_LEN]
    tile = torch.arange(MAX_LEN)[None] // tile_k[:, None]
    count = (k_len + tile_k - 1) // tile_k
    shape = (len(i), MAX_LEN)
    present = torch.arange(MAX_LEN)[None] < k_len[:, None]
    any_seen = torch.zeros(shape, dtype=torch.int64).scatter_add_(1, tile, (some & present).long()) > 0
    any_missing = torch.zeros(shape, dtype=torch.int64).scatter_add_(1, tile, (~every & present).long()) > 0
    kinds = torch.where(any_seen, torch.where(any_missing, PARTIAL, FULL), EMPTY)
    return kinds.masked_fill(torch.arange(MAX_LEN) >= count[:, None], -1)


def span_kinds(spans, tile_k, k_len):
    lo, full_lo, full_hi, hi = (x[:, None] for x in spans)
    at = torch.arange(MAX_LEN)[None]
    kinds = ((lo <= at) & (at < hi)).long() + ((full_lo <= at) & (at < full_hi)).long()
    return kinds.masked_fill(at >= ((k_len + tile_k - 1) // tile_k)[:, None], -1)


def random_band(bounded):
    """A band with these of its four sides bounded; sides are large now and then, and far off the matrix."""
    sides = [random.choice((0, random.randrange(6), random.randrange(40), 10**9)) for _ in range(4)]
    return rules.Band(*(side if given else None for side, given in zip(sides, bounded, strict=True)))


def test_spans_of_random_tile_rows(on_tensors):
    """All 16 kinds of band; spans on tensors, all rows of a band at once."""
    bands, rows = 16 * 10, 0
    for bounded in itertools.product((False, True), repeat=4):
        for _ in range(bands // 16):
            band, sizes = random_band(bounded), random_rows(ROWS // bands)
            i, tile_q, tile_k, q_len, k_len = sizes
            for transposed in (False, True):
                own = rules.flip(band) if transposed else band
                with_band = rules.spans(i, tile_q, tile_k, q_len, k_len, own)
                found = span_kinds(torch.broadcast_tensors(*with_band), tile_k, k_len)
                expected = true_kinds(*sizes, band, transposed)
                wrong = (found != expected).any(1).nonzero().flatten()
                assert not len(wrong), (
                    f"spans({[int(x[wrong[0]]) for x in sizes]}, {own}), transposed {transposed}"
                )
                rows += len(i)
    assert rows >= 2 * ROWS


def test_spans_of_ints_equal_those_of_tensors(request):
    sizes = random_rows(20_000)
    on_ints = []
    bands = [random_band(bounded) for bounded in itertools.product((False, True), repeat=4)]
    for n, row in enumerate(zip(*(x.tolist() for x in sizes), strict=True)):
        on_ints.append(rules.spans(*row, bands[n % 16]))
    request.getfixturevalue("on_tensors")
    for n, band in enumerate(bands):
        own = [x[n::16] for x in sizes]
        found = torch.stack(torch.broadcast_tensors(*rules.spans(*own, band)), 1)
        assert found.tolist() == [list(x) for x in on_ints[n::16]]


class Careful(int):
    """An int that refuses to be divided where a compiler and CPython disagree: below zero."""

    def __floordiv__(self, other):
        assert self >= 0 and other > 0, f"{int(self)} // {int(other)}"
        return Careful(int(self) // int(other))


for _name in ("add", "radd", "sub", "rsub", "mul", "rmul", "and", "or", "rand", "ror"):
    _method = f"__{_name}__"
    setattr(Careful, _method, lambda a, b, _f=getattr(int, _method): Careful(_f(int(a), int(b))))


def test_no_division_of_negative_numbers():
    for row in zip(*(x.tolist() for x in random_rows(3_000)), strict=True):
        band = random_band([random.random() < 0.6 for _ in range(4)])
        careful = rules.Band(*(None if x is None else Careful(x) for x in band))
        assert rules.spans(*map(Careful, row), careful) == rules.spans(*row, band)
    rules.dropout_counter(Careful(2), Careful(1), Careful(4), Careful(7), Careful(9), Careful(0))


@pytest.mark.parametrize("bounded", list(itertools.product((False, True), repeat=4)))
def test_allow(bounded):
    for _ in range(20):
        band = random_band(bounded)
        q_len, k_len = (int(torch.randint(0, MAX_LEN, ())) for _ in "qk")
        q, k = torch.arange(MAX_LEN)[:, None], torch.arange(MAX_LEN)[None]
        expected = visible(q, k, q_len, k_len, band)
        assert torch.equal(rules.allow(q, k, q_len, k_len, band, None, None), expected)
        lo, hi = (torch.randint(-3, MAX_LEN + 3, (MAX_LEN, 1)) for _ in "lh")
        inside = expected & (k >= lo) & (k < hi)
        assert torch.equal(rules.allow(q, k, q_len, k_len, band, lo, hi), inside)
        assert torch.equal(rules.allow(q, k, q_len, k_len, band, lo, None), expected & (k >= lo))
        for a, b in ((0, 0), (3, 5), (19, 2)):
            ints = rules.allow(a, b, q_len, k_len, band, int(lo[a]), int(hi[a]))
            assert bool(ints) == bool(inside[a, b])


def test_a_flipped_band_is_the_transposed_one():
    for _ in range(200):
        band = random_band([random.random() < 0.5 for _ in range(4)])
        q_len, k_len = random.randrange(MAX_LEN), random.randrange(MAX_LEN)
        q, k = torch.arange(MAX_LEN)[:, None], torch.arange(MAX_LEN)[None]
        straight = rules.allow(q, k, q_len, k_len, band, None, None)
        assert torch.equal(rules.allow(k, q, k_len, q_len, rules.flip(band), None, None), straight)
        assert rules.flip(rules.flip(band)) == band


def test_spans_at_lengths_of_millions():
    """The first and last tile rows of a window of 4096 at 2^21 keys, where the answer is known by hand."""
    n, band = 2**21, rules.Band(left=4095, right=0)
    assert rules.spans(0, 128, 128, n, n, band) == (0, 0, 0, 1)
    assert rules.spans(n // 128 - 1, 128, 128, n, n, band) == (
        n // 128 - 33,
        n // 128 - 32,
        n // 128 - 1,
        n // 128,
    )
    assert rules.spans(0, 128, 128, 1, n, rules.Band(right=0)) == (0, 0, n // 128, n // 128)


VECTORS = [  # of Random123's kat_vectors: counter, key, result of philox4x32-10
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


@pytest.mark.parametrize("kind", [int, torch.tensor], ids=["ints", "tensors"])
@pytest.mark.parametrize("counter, key, result", VECTORS)
def test_philox_published_vectors(counter, key, result, kind):
    words = [[kind(int(word, 16)) for word in text.split()] for text in (key, counter)]
    found = rules.philox(*words[0], *words[1])
    assert [f"{int(word):08x}" for word in found] == result.split()


def test_modify_and_its_derivative():
    s = torch.randn(50, dtype=torch.float64, requires_grad=True)
    slope, distance, bias = torch.rand(50).double(), torch.randint(0, 9, (50,)), torch.randn(50).double()
    modified = rules.modify(s, torch.tanh, 1.5, slope, distance, bias)
    torch.testing.assert_close(modified, 1.5 * torch.tanh(s / 1.5) - slope * distance + bias)
    (expected,) = torch.autograd.grad(modified.sum(), s)
    torch.testing.assert_close(rules.modify_grad(s, torch.tanh, 1.5), expected)
    assert rules.modify(s, torch.tanh, None, None, None, None) is s
