"""How a score matrix is cut into tiles."""

from __future__ import annotations

from dataclasses import dataclass

from onchip import rules


@dataclass(frozen=True)
class Tiles:
    """Queries and keys of one tile. `lead`: rows that the first tile lacks at its start, under a band alone."""

    tile_m: int
    tile_n: int
    lead: int = 0

    def count(self, q_len: int, k_len: int) -> tuple[int, int]:
        lead = self.lead if q_len else 0
        return -(-(q_len + lead) // self.tile_m), -(-k_len // self.tile_n)

    def queries(self, i: int, q_len: int) -> tuple[int, int]:
        """[start, stop) of tile i."""
        start = i * self.tile_m - self.lead
        return max(start, 0), min(start + self.tile_m, q_len)

    def heights(self, q_len: int) -> list[int]:
        """The queries of each tile."""
        tiles = (self.queries(i, q_len) for i in range(self.count(q_len, 0)[0]))
        return [stop - start for start, stop in tiles]

    def widths(self, k_len: int) -> list[int]:
        """The keys of each tile."""
        return [min(self.tile_n, k_len - start) for start in range(0, k_len, self.tile_n)]

    def led(self, band: rules.Band, q_len: int, k_len: int) -> rules.Band:
        """The same band over queries that are counted from the start of the first tile."""
        if not self.lead:
            return band
        (to_left, to_right), left, right = rules.bounded(band), None, None
        if to_left:
            left = self.lead - rules.first_diagonal(q_len, k_len, band)
        if to_right:
            right = rules.last_diagonal(q_len, k_len, band) - self.lead
        return rules.Band(top_left=left, top_right=right)
