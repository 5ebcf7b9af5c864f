"""The cases of tests/test_cases_*.py, for a module that runs them on a GPU's backend."""

import functools
import inspect
import re

import test_cases_cache
import test_cases_cost
import test_cases_masks
import test_cases_parallel
import test_cases_rows
import test_cases_scores
import test_cases_shapes

MODULES = (
    test_cases_cache,
    test_cases_cost,
    test_cases_masks,
    test_cases_parallel,
    test_cases_rows,
    test_cases_scores,
    test_cases_shapes,
)
# On a GPU the caller vouches for lengths, which are not read back; and schedules are tested where they are built.
ON_CPU_ONLY = {
    "test_c34_a_sequence_longer_than_max_seqlen",
    "test_c40_cache_lengths_beyond_the_cache",
    "test_c40_lengths_beyond_the_keys",
    "test_c81_append_past_capacity",
    "test_c81_append_past_the_last_page",
    "test_c82_page_table_too_narrow",
    "test_c94_causal_flops_count_the_visible_pairs",
    "test_c94_pairs_of_any_mask",
}


def refusing(test, reasons: str):
    """The test, where refusing for one of these reasons is an answer too."""

    @functools.wraps(test)
    def run(*args, **kwargs):
        try:
            test(*args, **kwargs)
        except NotImplementedError as error:
            if not re.search(reasons, str(error)):
                raise

    return run


def of_a_backend(reasons: str, but: set[str]) -> dict:
    """Every test that takes a backend, by name, but those."""
    return {
        name: refusing(test, reasons)
        for module in MODULES
        for name, test in vars(module).items()
        if name.startswith("test_") and "backend" in inspect.signature(test).parameters and name not in but
    }
