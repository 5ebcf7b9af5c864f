"""`onchip.bench.run` on sequences whose keys are not as many as their queries, and what it tells while it prepares."""

import io

from rich.console import Console

from onchip.bench import command, peers, run
from onchip.bench.cases import Case
from onchip.bench.timing import Regime

FAST = Regime(repeats=2, least=0.0)
SMALL = {"seqlen_q": 40, "heads_q": 2, "dim": 8}


def test_keys_of_other_lengths_than_the_queries():
    """Packed, one sequence without a query; and a cache that holds another number of keys for each sequence."""
    packed = Case(lengths=(5, 0, 9), lengths_k=(3, 2, 11), heads_q=2, dim=8, mask="causal", what="both")
    cached = Case(batch=2, seqlen_q=1, seqlen_k=30, lengths_k=(30, 4), heads_q=2, dim=8, cache=True)
    for case, lens in ((packed, [3, 2, 11]), (cached, [30, 4])):
        assert run.stated(peers.inputs(case, "cpu")).operands.layout.k_lens == lens
        rows = run.run([case], ["onchip", "standard"], "cpu", FAST)
        ours = [row for row in rows if row.impl == "onchip"]
        assert all(row.ok and row.error is not None and row.seconds for row in ours)
        assert next(row.note for row in rows if row.impl == "standard").startswith("does not take")


def test_what_happens_before_the_first_measurement_is_told():
    """To compile an implementation may take a minute."""
    told = []
    run.run([Case(**SMALL)], ["onchip", "sdpa-math"], "cpu", FAST, lambda *what: told.append(what))
    checks = [what[1:] for what in told if "checks" in what[0]]
    assert checks == [(0, 2), (1, 2), (2, 2)] and told[-1][1:] == (2, 2)


def test_a_terminal_gets_a_bar_and_a_file_does_not():
    for terminal in (True, False):
        console = Console(file=io.StringIO(), force_terminal=terminal, width=120)
        with command.progress(console) as tick:
            tick("causal", 1, 4)
            tick("causal", 3, 4)
        shown = console.file.getvalue()
        assert ("causal" in shown and "3/4" in shown) == terminal, shown
