"""onchip inside Hugging Face transformers: tiny random models against transformers' own eager attention."""

import copy

import pytest
import torch

transformers = pytest.importorskip("transformers")

import onchip  # noqa: E402
from onchip.integrations import transformers as integration  # noqa: E402

# A mask that becomes a boolean tensor warns; only the tests that expect it may see that.
pytestmark = pytest.mark.filterwarnings("error:onchip")

SMALL = {
    "vocab_size": 97,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
GROUPED = {**SMALL, "num_key_value_heads": 2, "head_dim": 8}
CAUSAL = {
    "llama": (transformers.LlamaConfig, GROUPED),
    "mistral, window": (transformers.MistralConfig, {**GROUPED, "sliding_window": 5}),
    "gemma2, softcap": (
        transformers.Gemma2Config,
        {**GROUPED, "sliding_window": 5, "attn_logit_softcapping": 2.0},
    ),
    "gpt_oss, sinks": (
        transformers.GptOssConfig,
        {**GROUPED, "sliding_window": 5, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
}


@pytest.fixture(autouse=True)
def registered():
    integration.register()


@pytest.fixture
def calls(monkeypatch):
    """The keyword arguments of every call of onchip.attention."""
    seen, attention = [], onchip.attention
    monkeypatch.setattr(onchip, "attention", lambda *a, **kw: seen.append(kw) or attention(*a, **kw))
    return seen


def pair(auto, config):
    """The same random model with eager attention and with onchip."""
    torch.manual_seed(0)
    models = [
        auto.from_config(copy.deepcopy(config), attn_implementation=name) for name in ("eager", "onchip")
    ]
    for parameter in models[0].parameters():  # sinks and biases start at 0 or 1: make every parameter matter
        torch.nn.init.normal_(parameter, std=0.2)
    models[1].load_state_dict(models[0].state_dict())
    return [model.eval() for model in models]


def padded(side, batch=3, seqlen=14):
    """(input_ids, attention_mask), each row with other padding, the first with none."""
    torch.manual_seed(1)
    tokens = torch.ones(batch, seqlen, dtype=torch.long)
    for row in range(1, batch):
        tokens[row, : 3 * row] = 0
    if side == "right":
        tokens = tokens.flip(1)
    return torch.randint(3, 97, (batch, seqlen)) * tokens, tokens


def assert_same(models, output, tokens, **inputs):
    """Outputs at tokens and all parameters' gradients agree."""
    outs = [output(model(attention_mask=tokens, **inputs))[tokens.bool()] for model in models]
    torch.testing.assert_close(outs[1], outs[0], rtol=1e-4, atol=1e-5)
    for out in outs:
        out.square().sum().backward()
    for (name, theirs), ours in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        if theirs.grad is None:
            assert ours.grad is None, name
        else:
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-3, atol=1e-4, msg=name)


@pytest.mark.parametrize("side", ["right", "left"])
def test_bert_equals_eager(side, calls):
    ids, tokens = padded(side)
    models = pair(transformers.AutoModel, transformers.BertConfig(**SMALL))
    assert_same(models, lambda out: out.last_hidden_state, tokens, input_ids=ids)
    assert len(calls) == SMALL["num_hidden_layers"]


def test_padded_batch_equals_single_rows(calls):
    ids, tokens = padded("right")
    model = pair(transformers.AutoModel, transformers.BertConfig(**SMALL))[1]
    together = model(input_ids=ids, attention_mask=tokens).last_hidden_state
    for row, length in enumerate(tokens.sum(1).tolist()):
        alone = model(input_ids=ids[row : row + 1, :length]).last_hidden_state
        torch.testing.assert_close(together[row, :length], alone[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("name", CAUSAL)
def test_decoder_equals_eager(name, side, calls):
    config, options = CAUSAL[name]
    ids, tokens = padded(side)
    models = pair(transformers.AutoModelForCausalLM, config(**options))
    assert_same(models, lambda out: out.logits, tokens, input_ids=ids)
    assert len(calls) == GROUPED["num_hidden_layers"]


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", CAUSAL)
def test_greedy_generation_equals_eager(name, cache, calls):
    config, options = CAUSAL[name]
    ids, tokens = padded("left")
    models = pair(transformers.AutoModelForCausalLM, config(**options))
    kept = {"max_new_tokens": 8, "do_sample": False, "cache_implementation": cache, "eos_token_id": None}
    theirs, ours = (model.generate(input_ids=ids, attention_mask=tokens, **kept) for model in models)
    assert torch.equal(theirs, ours)
    assert len(calls) == 8 * GROUPED["num_hidden_layers"]


def test_encoder_decoder_with_position_bias():
    options = {"vocab_size": 97, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
    models = pair(transformers.AutoModelForSeq2SeqLM, transformers.T5Config(**options))
    ids, tokens = padded("right")
    target = torch.randint(3, 97, (3, 9))
    outs = [m(input_ids=ids, attention_mask=tokens, decoder_input_ids=target).logits for m in models]
    torch.testing.assert_close(outs[1], outs[0], rtol=1e-4, atol=1e-4)


def test_dropout_in_training_only(calls):
    options = {**GROUPED, "attention_dropout": 0.25}
    model = pair(transformers.AutoModelForCausalLM, transformers.LlamaConfig(**options))[1]
    ids, _ = padded("right")
    assert torch.equal(model(ids).logits, model(ids).logits)
    model.train()
    assert not torch.equal(model(ids).logits, model(ids).logits)
    assert {call["dropout"] for call in calls} == {0.0, 0.25}


def test_masks_stay_descriptions(calls):
    ids, tokens = padded("left")
    model = pair(transformers.AutoModelForCausalLM, transformers.LlamaConfig(**GROUPED))[1]
    model(input_ids=ids, attention_mask=tokens)
    shape = (3, 1, 14, 14)
    made = integration.visible_keys(3, 14, 14, attention_mask=tokens.bool())
    assert isinstance(made, integration.Visible) and made.shape == shape and made.causal
    with pytest.raises(NotImplementedError, match="computes with its attention mask"):
        made.logical_not()


def test_packed_sequences_become_a_boolean_tensor():
    models = pair(transformers.AutoModelForCausalLM, transformers.LlamaConfig(**GROUPED))
    ids, _ = padded("right")
    positions = torch.cat([torch.arange(5), torch.arange(9)]).expand(3, -1)
    theirs = models[0](input_ids=ids, position_ids=positions, use_cache=False).logits
    with pytest.warns(UserWarning, match="a boolean tensor of 588 bytes"):
        ours = models[1](input_ids=ids, position_ids=positions, use_cache=False).logits
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", [torch.bool, torch.float32])
def test_mask_given_as_a_tensor(kind):
    models = pair(transformers.AutoModelForCausalLM, transformers.LlamaConfig(**GROUPED))
    ids, _ = padded("right")
    seen = torch.ones(3, 1, 14, 14).tril().bool() & (torch.rand(3, 1, 14, 14) < 0.7) | torch.eye(14).bool()
    additive = torch.where(seen, 0.0, torch.finfo(torch.float32).min)
    theirs = models[0](input_ids=ids, attention_mask=additive).logits
    ours = models[1](input_ids=ids, attention_mask=seen if kind == torch.bool else additive).logits
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def attend(mask=None, module=None, seqlen_k=6, **options):
    q, k = torch.randn(1, 2, 6, 8), torch.randn(1, 2, seqlen_k, 8)
    return integration.attend(module or torch.nn.Module(), q, k, k, mask, **options)[0]


CAUSAL_MASK = {"batch_size": 1, "q_length": 6, "kv_length": 6}


@pytest.mark.parametrize(
    "options, named",
    [
        ({"head_mask": torch.ones(2)}, "head_mask"),
        ({"output_attentions": True}, "output_attentions"),
        ({"cu_seq_lens_q": torch.tensor([0, 6])}, "cu_seq_lens_q"),
        ({"is_causal": True, "sliding_window": 3}, "sliding_window=3"),
        ({"is_causal": True, "seqlen_k": 9}, "6 queries, 9 keys: ambiguous"),
        ({}, "is_causal=None"),
        ({"mask": {**CAUSAL_MASK, "tree": 1}}, "a mask with tree"),
        ({"mask": torch.ones(1, 6)}, "attention_mask of shape (1, 6)"),
        ({"mask": CAUSAL_MASK, "is_causal": False}, "is_causal=False contradicts"),
        ({"mask": CAUSAL_MASK, "seqlen_k": 9}, "a mask for 6 keys, but 9 keys"),
    ],
)
def test_refuses_by_name(options, named):
    with pytest.raises(NotImplementedError) as error:
        if isinstance(options.get("mask"), dict):
            options = {**options, "mask": integration.visible_keys(**options["mask"])}
        attend(**options)
    assert named in str(error.value)


def test_a_model_without_masks_says_what_it_is():
    torch.manual_seed(0)
    full = attend(is_causal=False)
    torch.manual_seed(0)
    causal = attend(is_causal=True)
    assert not torch.allclose(full[:, 0], causal[:, 0])
    torch.testing.assert_close(full[:, -1], causal[:, -1])
