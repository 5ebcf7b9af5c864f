"""What `onchip tune` keeps is what later runs take; without a GPU it says so."""

import json

import pytest
import torch

from onchip.backends.compiled import launch
from onchip.backends.triton import table, tune
from onchip.backends.triton.table import Config, Facts
from onchip.backends.triton.tune import Row, Timed
from onchip.problem import check_types, dense


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("ONCHIP_CACHE", str(tmp_path))
    table.overrides.cache_clear()
    yield
    table.overrides.cache_clear()
    launch.forget()


def problem(dim=64, dtype=torch.float16):
    q = torch.empty(1, 256, 2, dim, dtype=dtype)
    return dense(q, q, q, *check_types(None, None), None, 0.0, True)[1]


def test_kept_rows_replace_the_table(monkeypatch):
    facts = Facts(9, 132, "a device")
    before = table.config(problem(), "dq", facts)
    monkeypatch.setattr(tune, "device_facts", lambda index: facts)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    wanted = before._replace(tile_m=32)
    path = tune.keep({Row("dq", 64, 2): [Timed(wanted, (1.0, 1.0)), Timed(before, (2.0, 2.0))]})
    assert table.config(problem(), "dq", facts) == wanted
    assert table.config(problem(128), "dq", facts) == table.config(problem(128), "dq", Facts(9, 132, ""))
    assert table.config(problem(), "dq", Facts(9, 132, "another device")) == before
    tune.keep({Row("forward", 64, 2): [Timed(Config(64, 64, 4, 2), (1.0, 1.0))]})
    assert {row["pass"] for row in json.loads(path.read_text())["devices"]["a device"]} == {"dq", "forward"}


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("dim", table.DIMS)
def test_every_kept_row_is_taken(monkeypatch, dim, dtype):
    facts = Facts(9, 132, "a device")
    monkeypatch.setattr(tune, "device_facts", lambda index: facts)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    rows = tune.rows(dim, dtype.itemsize)
    wanted = {row: Config(16, 16 << n, 2, 5) for n, row in enumerate(rows)}
    tune.keep({row: [Timed(config, (1.0, 1.0))] for row, config in wanted.items()})
    assert {row: table.config(problem(dim, dtype), row.step, facts) for row in rows} == wanted


def test_what_never_ran_is_not_kept(monkeypatch):
    monkeypatch.setattr(tune, "device_facts", lambda index: Facts(9, 132, "a device"))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    path = tune.keep({Row("dq", 64, 2): [Timed(Config(64, 64, 4, 2), None)]})
    assert json.loads(path.read_text())["devices"]["a device"] == []


def test_a_broken_file_is_named():
    table.overrides_file().write_text("{}")
    with pytest.raises(ValueError, match=r"triton-tiles\.json.*tune"):
        table.config(problem(), "dq", Facts(9, 132, "a device"))


@pytest.mark.parametrize(
    "dim, steps",
    [
        (64, ["forward", "dkdv", "dq"]),
        (256, ["forward", "dk", "dv", "dq"]),
        (512, ["forward", "dk", "dv", "dq"]),
    ],
)
@pytest.mark.parametrize("itemsize", [2, 4])
def test_every_pass_has_candidates(dim, steps, itemsize):
    rows = tune.rows(dim, itemsize)
    assert [row.step for row in rows] == steps
    for row in rows:
        found = list(tune.candidates(row))
        assert len(found) == len(set(found)) > 10
