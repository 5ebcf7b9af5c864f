"""onchip inside Hugging Face transformers: tiny random models against transformers' own eager attention."""

import copy
import warnings

import pytest
import torch

transformers = pytest.importorskip("transformers")

import onchip  # noqa: E402
from checks import visible_pairs  # noqa: E402
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
EXPERTS = {"num_experts": 4, "moe_intermediate_size": 48, "shared_expert_intermediate_size": 48}
CAUSAL = {
    "llama": (transformers.LlamaConfig, GROUPED),
    "mistral, window": (transformers.MistralConfig, {**GROUPED, "sliding_window": 5}),
    "gemma2, softcap": (
        transformers.Gemma2Config,
        {**GROUPED, "sliding_window": 5, "attn_logit_softcapping": 2.0},
    ),
    "qwen3": (transformers.Qwen3Config, GROUPED),
    "gpt2": (
        transformers.GPT2Config,
        {"vocab_size": 97, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "pad_token_id": 0},
    ),
    "qwen2_moe, window off": (transformers.Qwen2MoeConfig, {**GROUPED, **EXPERTS}),
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
    assert_same_gradients(models, outs)


def assert_same_gradients(models, outs):
    """Outputs, and all parameters' gradients, agree within float32's error on the scale of each tensor."""
    assert_near(outs[1], outs[0], 1e-5)
    for out in outs:
        out.square().sum().backward()
    grads = [{n: p.grad for n, p in model.named_parameters() if p.grad is not None} for model in models]
    assert grads[0].keys() == grads[1].keys()
    largest = max(grad.abs().max().item() for grad in grads[0].values())
    for name, theirs in grads[0].items():  # a key's bias has a gradient of rounding alone, and so no scale
        assert_near(grads[1][name], theirs, 1e-4, 1e-2 * largest, name)


def assert_near(actual, expected, share, least=0.0, name="output"):
    error, scale = (actual - expected).abs().max().item(), expected.abs().max().item()
    assert error <= share * max(scale, least), f"{name}: differs by {error:.2e}, of {scale:.2e}"


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


@pytest.mark.parametrize("side", ["right", "left"])
def test_modernbert_equals_eager(side, calls):
    """Layers that see everything between layers with a window to both sides."""
    ids, tokens = padded(side)
    options = {**SMALL, "num_hidden_layers": 4, "global_attn_every_n_layers": 2, "local_attention": 6}
    models = pair(transformers.AutoModel, transformers.ModernBertConfig(**options))
    assert_same(models, lambda out: out.last_hidden_state, tokens, input_ids=ids)
    assert len(calls) == 4


def test_vit_equals_eager(calls):
    options = {**SMALL, "image_size": 12, "patch_size": 4}
    models = pair(transformers.AutoModel, transformers.ViTConfig(**options))
    images = torch.randn(2, 3, 12, 12)
    outs = [model(images).last_hidden_state for model in models]
    assert_same_gradients(models, outs)
    assert len(calls) == 2


T5 = {"vocab_size": 97, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
T5 |= {"pad_token_id": 0, "decoder_start_token_id": 0, "eos_token_id": None}
WHISPER = {
    "vocab_size": 97,
    "num_mel_bins": 8,
    "max_source_positions": 12,
    "max_target_positions": 32,
    "d_model": 32,
}
WHISPER |= {f"{side}_{name}": 2 for side in ("encoder", "decoder") for name in ("layers", "attention_heads")}
WHISPER |= {f"{side}_ffn_dim": 48 for side in ("encoder", "decoder")}
WHISPER |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None, "decoder_start_token_id": 1}
ENCODER_DECODER = {
    "t5, position bias": lambda: (transformers.T5Config(**T5), {"input_ids": padded("right")[0]}),
    "whisper": lambda: (transformers.WhisperConfig(**WHISPER), {"input_features": torch.randn(3, 8, 24)}),
}


def sequence_models(config):
    auto = (
        transformers.AutoModelForSpeechSeq2Seq
        if "Whisper" in type(config).__name__
        else transformers.AutoModelForSeq2SeqLM
    )
    return pair(auto, config)


@pytest.mark.parametrize("name", ENCODER_DECODER)
def test_encoder_decoder_equals_eager(name, calls):
    config, inputs = ENCODER_DECODER[name]()
    models = sequence_models(config)
    if "input_ids" in inputs:
        inputs["attention_mask"] = padded("right")[1]
    outs = [model(**inputs, decoder_input_ids=torch.full((3, 9), 5)).logits for model in models]
    assert_same_gradients(models, outs)  # of T5's relative position bias too
    assert len(calls) == 6


@pytest.mark.parametrize("name", ENCODER_DECODER)
def test_encoder_decoder_greedy_generation_equals_eager(name):
    config, inputs = ENCODER_DECODER[name]()
    models = sequence_models(config)
    if "input_ids" in inputs:
        inputs["attention_mask"] = padded("right")[1]
    kept = {"max_new_tokens": 8, "do_sample": False, "output_scores": True, "return_dict_in_generate": True}
    theirs, ours = (model.generate(**inputs, **kept) for model in models)
    assert len(theirs.scores) == len(ours.scores) == 8
    # The best two tokens of random inputs may be as good as each other: then rows go their own ways.
    same = torch.ones(3, dtype=torch.bool)
    for expected, found in zip(theirs.scores, ours.scores, strict=True):
        torch.testing.assert_close(found[same], expected[same], rtol=1e-5, atol=1e-5)
        same &= expected.argmax(1) == found.argmax(1)


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
    assert isinstance(made, integration.Visible) and made.shape == shape
    with pytest.raises(NotImplementedError, match="computes with its attention mask"):
        made.logical_not()


@pytest.mark.parametrize("name", ["llama", "mistral, window", "qwen3"])
def test_packed_sequences(name, calls):
    """position_ids that start anew are documents, not a boolean tensor (which would warn, and fail here)."""
    config, options = CAUSAL[name]
    models = pair(transformers.AutoModelForCausalLM, config(**options))
    ids, _ = padded("right")
    positions = torch.cat([torch.arange(5), torch.arange(9)]).expand(3, -1)
    outs = [model(input_ids=ids, position_ids=positions, use_cache=False).logits for model in models]
    assert_same_gradients(models, outs)
    assert all(call["mask"] is not None and "documents" in repr(call["mask"]) for call in calls)


def test_packed_sequences_by_cu_seq_lens():
    """What DataCollatorWithFlattening hands over: one row of sequences, their boundaries as keyword arguments."""
    models = pair(transformers.AutoModelForCausalLM, transformers.LlamaConfig(**GROUPED))
    ids = torch.randint(3, 97, (1, 14))
    starts = torch.tensor([0, 5, 14], dtype=torch.int32)
    positions = torch.cat([torch.arange(5), torch.arange(9)])[None]
    lengths = {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts, "max_length_q": 9, "max_length_k": 9}
    theirs = models[0](input_ids=ids, position_ids=positions, use_cache=False).logits
    ours = models[1](input_ids=ids, position_ids=positions, use_cache=False, **lengths).logits
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    alone = models[1](input_ids=ids[:, 5:]).logits
    torch.testing.assert_close(ours[:, 5:], alone, rtol=1e-4, atol=1e-5)


def test_an_unknown_pattern_becomes_a_boolean_tensor():
    m, ones = transformers.masking_utils, torch.ones(14, 14)
    either = m.or_masks(m.causal_mask_function, m.blockwise_overlay(torch.zeros(3, 14, dtype=torch.long)))
    for function, visible in ((either, ones), (m.sliding_window_overlay(0), ones.triu(1))):
        with pytest.warns(UserWarning, match="a boolean tensor of 588 bytes"):
            made = integration.visible_keys(3, 14, 14, mask_function=function)
        assert torch.equal(made, visible.bool().expand(3, 1, -1, -1))


@pytest.mark.parametrize("kind", [torch.bool, torch.float32])
def test_mask_given_as_a_tensor(kind):
    models = pair(transformers.AutoModelForCausalLM, transformers.LlamaConfig(**GROUPED))
    ids, _ = padded("right")
    seen = torch.ones(3, 1, 14, 14).tril().bool() & (torch.rand(3, 1, 14, 14) < 0.7) | torch.eye(14).bool()
    additive = torch.where(seen, 0.0, torch.finfo(torch.float32).min)
    theirs = models[0](input_ids=ids, attention_mask=additive).logits
    ours = models[1](input_ids=ids, attention_mask=seen if kind == torch.bool else additive).logits
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


FUNCTIONS = {
    "causal": lambda m: m.causal_mask_function,
    "window": lambda m: m.sliding_window_causal_mask_function(4),
    "window of no keys": lambda m: m.sliding_window_causal_mask_function(0),
    "window to both sides": lambda m: m.sliding_window_bidirectional_mask_function(3),
    "chunks": lambda m: m.chunked_causal_mask_function(4, torch.zeros(2, dtype=torch.long)),
    "packed": lambda m: m.and_masks(
        m.remap_positions_for_packed_sequence(m.sliding_window_causal_mask_function(4), PACKED_POSITIONS),
        m.packed_sequence_mask_function(m.find_packed_sequence_indices(PACKED_POSITIONS)),
    ),
}
PACKED_POSITIONS = torch.tensor([[0, 1, 2, 3, 4, 5, 6, 7, 8, 0, 1, 2], [0, 1, 0, 1, 2, 3, 4, 5, 0, 1, 2, 3]])


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_descriptions_equal_transformers_own_masks(name, padded):
    function = FUNCTIONS[name](transformers.masking_utils)
    tokens = torch.arange(12) < torch.tensor([[12], [9]]) if padded else None
    made = integration.visible_keys(2, 12, 12, mask_function=function, attention_mask=tokens)
    assert isinstance(made, integration.Visible)
    want = transformers.masking_utils.sdpa_mask(
        2, 12, 12, mask_function=function, attention_mask=tokens, allow_is_causal_skip=False
    )
    want = torch.ones(2, 1, 12, 12, dtype=torch.bool) if want is None else want
    seen = visible_pairs(None, made.mask, 12, 12, batch=2)
    assert torch.equal(seen, want.expand(2, 1, 12, 12))


@pytest.mark.parametrize("forgotten", [0, 2, 4, 5])
@pytest.mark.parametrize("name", ["causal", "window", "chunks"])
def test_caches_that_forget(name, forgotten):
    """A cache of a sliding or chunked layer begins at a later key: chunks keep counting from the first."""
    function = FUNCTIONS[name](transformers.masking_utils)
    place = (2, 3, 12 - forgotten, 9, forgotten)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # chunks that begin within one become a boolean tensor
        made = integration.visible_keys(*place, mask_function=function)
    want = transformers.masking_utils.sdpa_mask(*place, mask_function=function, allow_is_causal_skip=False)
    mask = made.mask if isinstance(made, integration.Visible) else onchip.dense(made)
    assert torch.equal(visible_pairs(None, mask, 3, 12 - forgotten, batch=2), want.expand(2, 1, 3, -1))


@pytest.mark.parametrize(
    "build",
    [
        lambda m: m.chunked_causal_mask_function(
            4, torch.tensor([0, 2, 1])
        ),  # chunks that count from the padding
        lambda m: m.remap_positions_for_packed_sequence(
            m.causal_mask_function, torch.arange(14).expand(3, -1)
        ),
        lambda m: m.and_masks(m.causal_mask_function, lambda b, h, q, k: q >= 0),
    ],
)
def test_what_has_no_description(build):
    assert integration.pattern(build(transformers.masking_utils)) is None


@pytest.mark.parametrize("pad", [False, True])
def test_a_compiled_model_is_one_graph(pad):
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = pair(
        transformers.AutoModelForCausalLM, transformers.LlamaConfig(**{**GROUPED, "num_hidden_layers": 1})
    )[1]
    compiled = torch.compile(model, backend="eager", fullgraph=True, dynamic=True)
    ids, tokens = padded("left")
    for seqlen in (14, 11):
        inputs = {"input_ids": ids[:, -seqlen:].clone(), "use_cache": False}
        if pad:
            inputs["attention_mask"] = tokens[:, -seqlen:].clone()
        with torch.no_grad():
            ours, want = compiled(**inputs).logits, model(**inputs).logits
        at = tokens[:, -seqlen:].bool() if pad else slice(None)
        torch.testing.assert_close(ours[at], want[at], rtol=1e-4, atol=1e-5)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    torch._dynamo.reset()


def attend(mask=None, module=None, seqlen_k=6, **options):
    q, k = torch.randn(1, 2, 6, 8), torch.randn(1, 2, seqlen_k, 8)
    return integration.attend(module or torch.nn.Module(), q, k, k, mask, **options)[0]


CAUSAL_MASK = {"batch_size": 1, "q_length": 6, "kv_length": 6}


@pytest.mark.parametrize(
    "options, named",
    [
        ({"head_mask": torch.ones(2)}, "head_mask"),
        ({"output_attentions": True}, "output_attentions"),
        ({"cu_seq_lens_q": torch.tensor([0, 6]), "is_causal": True}, "cu_seq_lens_q without cu_seq_lens_k"),
        ({"is_causal": True, "sliding_window": 3}, "sliding_window=3"),
        ({"is_causal": True, "seqlen_k": 9}, "6 queries, 9 keys: ambiguous"),
        ({}, "is_causal=None"),
        ({"mask": {**CAUSAL_MASK, "tree": 1}}, "a mask with tree"),
        ({"mask": torch.ones(1, 6)}, "attention_mask of shape (1, 6)"),
        ({"mask": CAUSAL_MASK, "seqlen_k": 9}, "a mask for 6 keys, but 9 keys"),
    ],
)
def test_refuses_by_name(options, named):
    with pytest.raises(NotImplementedError) as error:
        if isinstance(options.get("mask"), dict):
            options = {**options, "mask": integration.visible_keys(**options["mask"])}
        attend(**options)
    assert named in str(error.value)


def test_beside_a_mask_is_causal_says_nothing():
    """As in eager: Moonshine hands both over, and False means that the mask has it all."""
    outs = []
    for is_causal in (None, False, True):
        torch.manual_seed(0)
        outs.append(attend(integration.visible_keys(**CAUSAL_MASK), is_causal=is_causal))
    assert torch.equal(outs[0], outs[1]) and torch.equal(outs[0], outs[2])


HUBERT = {"num_feat_extract_layers": 2, "conv_dim": (16, 16), "conv_kernel": (4, 3), "conv_stride": (3, 2)}
HUBERT |= {"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2}
MOONSHINE = {n: SMALL[n] for n in ("vocab_size", "hidden_size", "intermediate_size")}
MOONSHINE |= {f"{side}_{name}": SMALL[name] for side in ("encoder", "decoder")
              for name in ("num_hidden_layers", "num_attention_heads")}  # fmt: skip
MOONSHINE |= {"pad_token_id": 0, "decoder_start_token_id": 1}


def test_hubert_equals_eager(calls):
    """It hands its own arguments, return_dict among them, down to attention."""
    models = pair(transformers.AutoModel, transformers.HubertConfig(**SMALL, **HUBERT))
    tokens = (torch.arange(120) < torch.tensor([[120], [80]])).long()
    sound = torch.randn(2, 120)
    assert_same_gradients(models, [model(sound, attention_mask=tokens).last_hidden_state for model in models])
    assert len(calls) == 2


def test_moonshine_equals_eager(calls):
    """It hands a mask over and is_causal=False beside it."""
    models = pair(transformers.AutoModelForSpeechSeq2Seq, transformers.MoonshineConfig(**MOONSHINE))
    sound, ids = torch.randn(2, 4000), torch.randint(3, 97, (2, 9))
    assert_same_gradients(
        models, [model(input_values=sound, decoder_input_ids=ids).logits for model in models]
    )
    assert len(calls) == 6


def test_a_model_without_masks_says_what_it_is():
    torch.manual_seed(0)
    full = attend(is_causal=False)
    torch.manual_seed(0)
    causal = attend(is_causal=True)
    assert not torch.allclose(full[:, 0], causal[:, 0])
    torch.testing.assert_close(full[:, -1], causal[:, -1])
