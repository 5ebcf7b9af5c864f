"""What scores become before the softmax: modified where the problem says so, and masked where they must be."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from onchip.backends.compiled.terms import hide as hide_pairs, modified
from onchip.backends.hopper.parts import LOG2E, column_of, row_of
from onchip.backends.hopper.variant import Variant


@gluon.jit
def hide(s, tile, key, q, h, k, work, FN: gl.constexpr, C: Variant):
    """-inf for the pairs that are not visible. q [64], k [tile_n] counts from the block's first key."""
    if C.band_only:
        # A column is a constant plus a part that is the same for all columns of a thread: with that part on the other
        # side, each comparison is one instruction with an immediate, and no column number takes a register.
        fixed, lane = (k & ~6)[None, :], (k & 6)[None, :]
        end = gl.full([64], 0, gl.int32, row_of(C.tile_n)) + (tile.seen_k - key)
        if C.right:
            end = gl.minimum(end, q + (tile.end + 1 - key))
        s = gl.where(fixed < end[:, None] - lane, s, float("-inf"))
        if C.left:
            s = gl.where((q + (tile.first - key))[:, None] - lane <= fixed, s, float("-inf"))
    else:
        k = (key + k)[None, :]
        s = hide_pairs(s, float("-inf"), work.band, work.rows, work.mask_args, tile.b, h, q[:, None], k, tile.q_len,
                       tile.k_len, FN)  # fmt: skip
    return s


@gluon.jit
def needs_mask(tile, position, FIRST: gl.constexpr, C: Variant):
    """Whether a block of the tile's visit is masked. A band's first one always is, where any may be.

    Blocks from `full` on are of a left bound, or the only one of a list that is empty.
    """
    if FIRST and C.band_only:
        masked = C.masked
    elif not C.edges:
        masked = False
    elif FIRST or C.left:
        masked = (position < tile.partial) | (position >= tile.full)
    else:
        masked = position < tile.partial
    return masked


@gluon.jit
def seen(s, tile, key, masked, work, score, scale, W: gl.constexpr, FN: gl.constexpr, MOD: gl.constexpr,
         C: Variant):  # fmt: skip
    """A block of scores after what modifies and what hides them, and the unit that they are in."""
    unit = scale * LOG2E
    r = W * 64 + gl.arange(0, 64, row_of(C.tile_n))
    q = tile.row0 + r // C.pack
    h = tile.head
    if C.pack > 1:
        h = (tile.head * C.pack + r % C.pack)[:, None]
    k = gl.arange(0, C.tile_n, column_of(C.tile_n))
    if C.modified:
        number = (tile.origin + key + k)[None, :]
        s, _ = modified(s * scale, score, tile.b, h, q[:, None], number, tile.q_len, tile.k_len, MOD)
        s = s * LOG2E
        unit = 1.0
    if masked:
        s = hide(s, tile, key, q, h, k, work, FN, C)
    return s, unit
