"""The cases of tests/test_cases_*.py on the Triton backend: each test that takes a backend."""

import cases
import pytest
import torch

NOT_INTERPRETED = {"test_c56_more_than_65535_of_batch_and_heads"}  # 65,536 programs, one by one
globals().update(
    cases.of_a_backend(
        "float64: its kernels|bfloat16: Triton's interpreter",
        cases.ON_CPU_ONLY if torch.cuda.is_available() else NOT_INTERPRETED,
    )
)


@pytest.fixture
def backend():
    return "triton"


@pytest.fixture(autouse=True)
def tensors_on_the_gpu():
    if torch.cuda.is_available():
        torch.set_default_device("cuda")
    yield
    torch.set_default_device(None)
