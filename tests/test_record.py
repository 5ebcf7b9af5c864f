"""Workloads that `record` saw, through a file and back: masks of tensors lose nothing, what cannot be kept is said."""

import json

import pytest
import torch
import torch.nn.functional as F

import onchip
from checks import qkv
from contract_masks import MASKS, Shape
from onchip import cli
from onchip.bench import run
from onchip.bench.cases import Case, on, snapshot
from onchip.bench.files import load, save, tensors_of
from onchip.bench.timing import Regime
from onchip.integrations.sdpa import replace_sdpa
from onchip.mask import Region
from onchip.recording import record

FAST = Regime(repeats=1, least=0.0)
SHAPES = [Shape((45,), (70,), 2), Shape((33, 33), (33, 33), 2)]


def visible(mask, shape):
    """(batch, heads, queries, keys), by the mask's own rule."""
    b, h, m, n = shape.batch, shape.heads_q, shape.seqlen_q, shape.seqlen_k
    return mask.allow(Region(torch.arange(b), 0, h, 0, m, 0, n, m, n)).expand(b, h, m, n)


def some(mask):
    return onchip.Mask() if mask is None else mask


def holds_a_function(mask):
    return "where(" in repr(mask)


@pytest.mark.parametrize("shape", SHAPES, ids=["cross", "self"])
@pytest.mark.parametrize("name", MASKS)
def test_every_mask_but_functions_goes_through_a_file(name, shape, tmp_path):
    """The same pairs after it, for every sequence and head; masks without tensors stay readable."""
    mask = some(MASKS[name](shape).mask)
    sizes = {
        "batch": shape.batch,
        "seqlen_q": shape.seqlen_q,
        "seqlen_k": shape.seqlen_k,
        "heads_q": 2,
        "dim": 8,
    }
    case, path = Case(name, **sizes, mask=mask), tmp_path / "cases.json"
    if holds_a_function(mask):
        with pytest.raises(ValueError, match=f"{name}: mask.*holds a function"):
            save([Case(**sizes), case], path)
        assert not list(tmp_path.iterdir())
        return
    save([case, Case("plain", **sizes, mask="causal"), case], path)
    again = load(path)
    assert again[1].mask == "causal"
    for one in (again[0], again[2]):
        assert torch.equal(visible(some(one.make_mask()), shape), visible(mask, shape))
    stated = json.loads(path.read_text())[0]["mask"]
    assert isinstance(stated, str) or mask.tensors() or "top_left" in name
    assert tensors_of(path).exists() == bool(mask.tensors())


def test_a_running_model_s_masks_are_measured_again(tmp_path, capsys):
    """Key padding, a bool mask and a block map of torch's function and of ours, by `onchip bench --cases`."""
    q, k, v = (x.requires_grad_() for x in qkv(2, 32, 32, 2, dim=8))
    allowed = torch.rand(2, 1, 32, 32) < 0.5
    blocks = torch.rand(2, 4, 4) < 0.5
    with record() as seen, replace_sdpa():
        F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), attn_mask=allowed)
        onchip.attention(q, k, v, mask=onchip.padding(torch.tensor([20, 32])) & onchip.causal())
        onchip.attention(q, k, v, mask=onchip.block_sparse(blocks, tile=(8, 8)))
    path = tmp_path / "cases.json"
    seen.save(path)
    again = load(path)
    assert len(again) == 3 and [case.name for case in again] == [case.name for case in seen.cases]
    shape = Shape((32, 32), (32, 32), 2)
    for old, new in zip(seen.cases, again, strict=True):
        assert torch.equal(visible(old.mask, shape), visible(new.mask, shape))
    with pytest.raises(SystemExit) as ended:
        cli.main(("bench", "--cases", str(path), "--impl", "onchip,sdpa-math,standard", "--repeats", "1"))
    text = capsys.readouterr().out
    assert not ended.value.code and all(name in text for name in ("call 0", "call 1", "call 2", "standard"))


def test_a_mask_is_kept_as_it_was(tmp_path):
    """Changes in place after the call do not reach it; what it repeats is not stored again."""
    q, k, v = qkv(2, 32, 32, 2, dim=8)
    row = torch.rand(2, 1, 1, 32) < 0.5
    row[..., 0] = True
    was = row.clone()
    with record() as seen:
        onchip.attention(q, k, v, mask=onchip.dense(row.expand(2, 2, 32, 32)))
    row.logical_not_()
    (case,) = seen.cases
    (held,) = case.mask.tensors()
    assert torch.equal(held, was.expand(2, 2, 32, 32)) and held.untyped_storage().nbytes() == row.numel()
    seen.save(tmp_path / "cases.json")
    assert tensors_of(tmp_path / "cases.json").stat().st_size < 2000
    (again,) = load(tmp_path / "cases.json")
    assert torch.equal(again.mask.tensors()[0], held)
    assert run.run([again], ["onchip"], "cpu", FAST)[0].ok


def test_masks_made_anew_are_one_workload_and_other_densities_others():
    q, k, v = qkv(1, 32, 32, 1, dim=8)
    with record() as seen:
        for share in (0.25, 0.25, 0.75):
            tiles = (torch.arange(16).view(4, 4) < 16 * share)[:, torch.randperm(4)]
            onchip.attention(q, k, v, mask=onchip.block_sparse(tiles, tile=(8, 8)))
    assert [case.calls for case in seen.cases] == [2, 1]


def test_a_mask_over_the_slots_of_a_cache(tmp_path):
    """It covers slots that no sequence uses yet, and fits when it is measured again."""
    q, cache = torch.randn(2, 1, 2, 8), torch.randn(2, 30, 2, 8)
    allowed = torch.rand(2, 1, 1, 30) < 0.9
    allowed[..., 0] = True
    with record() as seen:
        onchip.attention_with_cache(
            q, cache, cache, cache_seqlens=torch.tensor([30, 7]), mask=onchip.dense(allowed)
        )
    seen.save(tmp_path / "cases.json")
    (case,) = load(tmp_path / "cases.json")
    assert case.k_len == 30 and case.lengths_k == (30, 7)
    assert run.run([case], ["onchip"], "cpu", FAST)[0].ok


def test_a_function_stays_in_the_process(tmp_path):
    q, k, v = qkv(1, 8, 8, 1)
    with record() as seen:
        for _ in range(2):
            onchip.attention(q, k, v, mask=onchip.where(lambda b, h, q, k: (q + k) % 3 == 0))
    (case,) = seen.cases
    with pytest.raises(ValueError, match="call 0.*function"):
        seen.save(tmp_path / "cases.json")
    assert run.run([case], ["onchip"], "cpu", FAST)[0].ok


def test_masks_go_where_they_are_measured():
    mask = onchip.padding(torch.tensor([3])) & onchip.documents(torch.zeros(8, dtype=torch.int64))
    there = on(mask, "meta")
    assert {t.device.type for t in there.tensors()} == {"meta"} and on(mask, "cpu") is mask
    assert repr(there) == repr(mask) and repr(snapshot(mask)) == repr(mask)
    (documents,) = there.elements
    assert documents.ids_q is documents.ids_k


def saved(tmp_path):
    path = tmp_path / "cases.json"
    mask = onchip.dense(torch.eye(8, dtype=torch.bool)) & onchip.padding(torch.tensor([5])) & onchip.sinks(3)
    save([Case("eye", seqlen_q=8, dim=8, mask=mask)], path)
    return path


def edited(path, **changes):
    body = json.loads(path.read_text())
    body[0]["mask"] |= changes
    path.write_text(json.dumps(body))


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"text": "( rows padding"}, "mask: expected"),
        ({"text": "( nonsense )"}, "mask: expected"),
        ({"text": "( where 0 )"}, "mask: expected"),
        ({"text": "mod 0"}, "mask: expected"),
        ({"text": ""}, "mask: expected"),
        ({"text": 3}, "mask: expected"),
        ({"ints": []}, "mask: expected"),
        ({"ints": [3, 4]}, "mask: expected"),
        ({"ints": "3"}, "mask: expected"),
        ({"tensors": [0]}, "mask: expected"),
        ({"tensors": [0, 9]}, "names tensors .0, 9., expected some of the 2"),
        ({"tensors": [0, True]}, "mask: expected"),
        ({"more": 1}, "mask: expected"),
    ],
)
def test_a_mask_that_was_edited_wrongly(tmp_path, changes, words):
    path = saved(tmp_path)
    edited(path, **changes)
    with pytest.raises(ValueError, match=f"cases.json: case 0 .eye.: (mask: )?{words}"):
        load(path)


def test_the_tensors_file_is_missing_or_another(tmp_path):
    path = saved(tmp_path)
    tensors = tensors_of(path)
    tensors.write_bytes(b"not a file of torch's")
    for break_it, words in (
        (lambda: None, "cannot be read"),
        (lambda: torch.save({"a": 1}, tensors), "expected a list of bool and integer tensors"),
        (lambda: torch.save([torch.ones(3)] * 2, tensors), "expected a list of bool and integer tensors"),
        (lambda: torch.save([object], tensors), "cannot be read"),  # code is never run
        (lambda: tensors.write_bytes(b""), "cannot be read"),
        (tensors.unlink, "is not there"),
    ):
        break_it()
        with pytest.raises(ValueError, match=f"cases.json.pt: .*{words}"):
            load(path)
