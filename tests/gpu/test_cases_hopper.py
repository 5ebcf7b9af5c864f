"""The same cases on the Hopper backend, in half precision, where there is such a GPU."""

import cases
import pytest
import torch

import checks

REASONS = r"float(32|64): |dim(_v)? \d+: its tiles|(cache|paged) layout|dropout|an additive bias"
# Their own tensors, or the bounds they compare with, are of single precision.
SINGLE_PRECISION = {
    "test_c01_an_empty_cache_beside_a_filled_one",
    "test_c04_single_key",
    "test_c08_an_empty_row_leaves_other_gradients_alone",
    "test_c13_poison_before_leftpad",
    "test_c13_poison_in_unused_slots",
    "test_c13_poison_past_seqused",
    "test_c19_lse_is_the_natural_log",
    "test_c20_loss_on_lse_and_on_both",
    "test_c41_odd_lengths_keep_their_last_token",
    "test_c41_odd_lengths_of_packed_sequences",
    "test_c45_balanced_shards_with_and_without_causal",
    "test_c46_gradients_reach_the_keys_of_every_hop",
    "test_c49_non_contiguous_inputs",
    "test_c56_more_than_65535_of_batch_and_heads",
    "test_c58_a_signal_in_the_last_dims_only",
    "test_c63_softcap_by_finite_differences",
    "test_c67_dropout_by_finite_differences",
    "test_c69_broadcast_bias_alone",
    "test_c69_one_gradient_at_a_time",
    "test_c75_modified_scores_under_a_mask_at_an_odd_length",
    "test_c84_an_empty_cache_equals_every_other_form",
    "test_c85_chunked_prefill_equals_one_shot",
    "test_c87_paged_decoding_with_any_number_of_splits",
    "test_c91_each_call_honours_its_own_arguments",
}

if torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0):
    globals().update(cases.of_a_backend(REASONS, cases.ON_CPU_ONLY | SINGLE_PRECISION))

    @pytest.fixture
    def backend():
        return "hopper"

    @pytest.fixture(autouse=True)
    def half_precision_on_the_gpu(monkeypatch):
        monkeypatch.setattr(checks, "DTYPE", torch.float16)
        torch.set_default_device("cuda")
        yield
        torch.set_default_device(None)
