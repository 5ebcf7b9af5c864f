"""The cases of tests/test_cases_*.py on the Triton backend: each test that takes a backend."""

import functools
import inspect
import re

import pytest
import torch

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

# 65,536 programs, one by one.
NOT_INTERPRETED = {"test_c56_more_than_65535_of_batch_and_heads"}


def refusing(test):
    """The test, where refusing a dtype in words is an answer too: float64, and in the interpreter bfloat16."""

    @functools.wraps(test)
    def run(*args, **kwargs):
        try:
            test(*args, **kwargs)
        except NotImplementedError as error:
            if not re.search("float64: its kernels|bfloat16: Triton's interpreter", str(error)):
                raise

    return run


for module in MODULES:
    for name, test in vars(module).items():
        if not name.startswith("test_") or "backend" not in inspect.signature(test).parameters:
            continue
        if name not in (ON_CPU_ONLY if torch.cuda.is_available() else NOT_INTERPRETED):
            globals()[name] = refusing(test)


@pytest.fixture
def backend():
    return "triton"


@pytest.fixture(autouse=True)
def tensors_on_the_gpu():
    if torch.cuda.is_available():
        torch.set_default_device("cuda")
    yield
    torch.set_default_device(None)
