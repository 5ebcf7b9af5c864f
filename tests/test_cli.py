"""The command line: what each command prints, and that anything wrong is one line."""

import importlib.util
import json
import os
import re
import subprocess
import sys
import types

import pytest

import onchip
from checks import ON_CPU
from onchip import cli, doctor, select


def call(*arguments):
    """The exit status of the command line on these arguments: a number, or the sentence that it ends with."""
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    return ended.value.code


def wrong(capsys, *arguments):
    """What the command line says of these arguments: one line on stderr, nothing on stdout, exit status 2."""
    assert call(*arguments) == 2
    printed = capsys.readouterr()
    assert not printed.out and printed.err.startswith("onchip: ") and len(printed.err.splitlines()) == 1, (
        printed
    )
    return printed.err.strip()


def test_plan(capsys):
    assert not call("plan", "-n", "600", "-H", "4", "--heads-k", "2", "-m", "causal", "--dtype", "bf16")
    text = capsys.readouterr().out
    for part in (
        "600 x 600",
        "heads 4/2",
        "bfloat16",
        "not triton",
        "█",
        "▒",
        "·",
        "FLOP/byte",
        "floor",
        "-bound",
    ):
        assert part in text, part


def test_plan_as_json(capsys):
    assert not call("plan", "-n", "300", "-m", "window(20, 0)", "--json", "--device", "cpu")
    found = json.loads(capsys.readouterr().out)
    shape = (1, 300, 8, 64)
    plan = onchip.plan(shape, shape, shape, mask=onchip.window(20, 0))
    assert found["pairs"] == plan.pairs and found["flops"] == plan.flops and found["backend"] == ON_CPU
    assert set(found["traffic"]) == {"onchip", "standard", "eager", "flash1", "flash2", "minimum"}
    assert found["floor"]["forward"]["bound"] in ("compute", "memory")


def test_plan_of_packed_sequences(capsys):
    assert not call("plan", "--lengths", "300,0,17", "-m", "causal", "--device", "H200", "--dtype", "bf16")
    text = capsys.readouterr().out
    assert (
        "3 packed, longest 300 x 300" in text and f"{8 * (300 * 301 + 17 * 18) // 2:,} visible pairs" in text
    )


@pytest.mark.parametrize("pages", [False, True])
def test_plan_of_a_cache(capsys, pages):
    """One query of each sequence, over the keys that it has; pages hold no more than they must."""
    sizes = ("-H", "8", "--heads-k", "2", "-d", "64", "--dtype", "bf16", "--device", "H200", "-m", "causal")
    more = ("--page-size", "16") if pages else ()
    assert not call("plan", "--cache", "300,17,1000", "--append", "1", *sizes, *more)
    text = capsys.readouterr().out
    row = 2 * 2 * 128  # bytes of a key and its value
    room = row * (16 * (19 + 2 + 63) if pages else 3 * 1000)
    for part in (
        "batch 3 over a cache, 1 x 17 to 1,000, heads 8/2",
        f"{row * 1317 / 2**20:.1f} MiB of keys and values, in room for {room / 2**20:.1f} MiB",
        "append     1 to each sequence: 1.5 KiB read, 1.5 KiB written",
        f"{8 * 1317:,} visible pairs",
        "floor      forward",
        "memory-bound",
    ):
        assert part in text, part
    assert ("in pages of 16" in text) == pages and "backward" not in text
    assert not call("plan", "--cache", "300", "-b", "2", "-n", "4", *sizes, *more, "--json")
    found = json.loads(capsys.readouterr().out)
    assert found["cache"] == {
        "lengths": [300, 300], "new": 0, "appended": 0, "slots": 608 if pages else 600,
        "page_size": 16 if pages else None,
    }  # fmt: skip
    assert found["problem"]["seqlen_q"] == 4 and set(found["floor"]) == {"forward"}


def test_plan_of_a_gpu_that_is_not_named(capsys):
    """Without one here there are no times, and none of another device in their place."""
    assert not call("plan", "-n", "64", "--device", "cuda")
    text = capsys.readouterr().out
    assert (
        "on cuda" in text
        and "no GPU here; name one of A100" in text
        and "on cpu" not in text.split("floor")[1]
    )
    assert not call("plan", "-n", "64", "--device", "cuda", "--json")
    found = json.loads(capsys.readouterr().out)
    assert found["device"] is None and found["floor"] == {} and found["backend"] == "triton"


@pytest.mark.parametrize(
    "arguments, words",
    [
        (("plan", "-m", "causl"), "causl"),
        (("plan", "--dtype", "int8"), "int8"),
        (("plan", "--device", "H900"), "H900.*A100"),
        (("plan", "--heads", "3", "--heads-k", "2"), "3 and 2 heads"),
        (("plan", "--backend", "cuda"), "cuda"),
        (("plan", "--backend", "triton", "--device", "cpu"), "triton.*cpu"),
        (("plan", "-m", "padding(9999)"), "padding"),
        (("plan", "-n", "0"), "seqlen"),
        (("plan", "--softcap", "0"), "softcap"),
        (("plan", "-m", "blocks(0.5, 0)"), "tile.*0"),
        (("plan", "--lengths", "3,x"), "lengths.*3,x"),
        (("plan", "--cache", "3,x"), "--cache.*3,x"),
        (("plan", "--cache", "0"), "--cache.*0"),
        (("plan", "--cache", "9", "--append", "10"), "--append.*10"),
        (("plan", "--cache", "9", "--seqlen-k", "9"), "--seqlen-k"),
        (("plan", "--cache", "9", "--lengths", "9"), "cache.*lengths"),
        (("plan", "--page-size", "9"), "--page-size.*--cache"),
        (("plan", "--append", "9"), "--append.*--cache"),
        (("plan", "--cache", "9", "--page-size", "0"), "--page-size"),
        (
            ("plan", "--cache", "9", "--device", "H200", "--backend", "hopper", "--dtype", "bf16"),
            "hopper.*cache",
        ),
        (("plan", "--device", "A100", "--backend", "hopper", "--dtype", "bf16"), "A100.*no Hopper"),
        (("plan", "--device", "H100", "--backend", "hopper"), "hopper.*float32"),
        (("verify", "--lengths", "0"), "lengths"),
        (("plan", "--wrong"), "--wrong"),
        (("plan", "-n", "many"), "seqlen"),
        (("bench", "papers"), "papers"),
        (("bench", "--pass", "up"), "--pass"),
        (("bench", "--seqlen", "a,b"), "a,b"),
        (("bench", "--cases", "/nowhere/cases.json"), "cases.json"),
        (("bench", "--impl", "fa9"), "fa9"),
        (("bench", "paper", "--cases", "x.json"), "--cases.*paper"),
        (("bench", "paper", "-n", "64", "--impl", "onchip"), "--seqlen, --impl.*paper"),
        (("bench", "--cases", "x.json", "-n", "64", "-m", "causal"), "--seqlen, --mask.*--cases"),
        (("bench", "--quick"), "--quick.*paper"),
        (("bench", "--lengths", "3,4", "-n", "64"), "--seqlen.*--lengths"),
        (("bench", "-n", "9" * 20), "seqlen_q.*2**31"),
        (("plan", "--lengths", "3,4", "--batch", "2"), "--batch.*--lengths"),
        (("plan", "--cache", "3,4", "--batch", "3"), "--batch: got 3.*2"),
        (("plan", "--cache", "9" * 20), "seqlen_k.*2**31"),
        (("verify", "-n", "16", "--backend", "cuda"), "backend: got 'cuda'"),
        (("verify", "--lengths", "3,4", "--seqlen-k", "64"), "--seqlen-k.*--lengths"),
        (("verify", "--dropout", "2"), "dropout"),
        (("verify", "--backend", "triton", "-n", "16"), "triton"),
        (("bench", "--impl", ","), "--impl: got ','"),
        (("bench", "--impl", "onchip,,standard"), "--impl: got 'onchip,,standard'"),
        (("bench", "-n", ""), "--seqlen: got ''"),
        (("bench", "--heads", "3", "--heads-k", "2"), "3 and 2 heads"),
        (("bench", "-n", "16,32", "-m", "padding(20)", "--impl", "onchip"), "padding: got length 20"),
        (("bench", "-m", "window({[]: 1}, 0)"), "not a number"),
        (("bench", "-m", "causal" + " & causal" * 9999), "nested too deeply"),
        (("bench", "--pass", "decode", "--seqlen-k", "8"), "--seqlen-k.*--pass decode"),
        (("bench", "--pass", "decode", "--lengths", "3,4"), "cache.*lengths"),
        (("bench", "--cool", "inf"), "--cool"),
        (("bench", "--cool", "nan"), "--cool"),
        (("bench", "--softcap", "nan"), "softcap: got nan"),
        (("bench", "--dropout", "nan"), "--dropout"),
        (("plan", "--device", ""), "device: got ''"),
        (("plan", "--backend", ""), "backend: got ''"),
        (("plan", "--device", "meta"), "meta"),
        (("plan", "--lengths", "5,"), "--lengths: got '5,'"),
        (("plan", "-m", "blocks(0.5, 8)", "--lengths", "16,8"), "block_sparse"),
        (("verify", "--heads", "3", "--heads-k", "2"), "3 and 2 heads"),
        (("verify", "-n", "16", "-m", "padding(99)"), "padding"),
        (("verify", "-n", "16", "-d", "1000000000", "-H", "100"), "memory.*takes at least.*expected at most"),
        (("explain", "-n", "0"), "seqlen: got 0"),
        (("explain", "-d", "999"), "dim: got 999"),
        (("explain", "-m", "padding(9999)", "--no-open"), "padding"),
        (("tune", "--dims", "64,x"), "dims '64,x'"),
        (("tune", "--dims", ""), "dims ''"),
        (("tune", "--itemsize", "3"), "itemsize 3"),
        (("tune", "--seqlen", "1"), "--seqlen"),
        (("doctor", "more"), "more"),
        (("doctor", "--wrong"), "--wrong"),
        (("nothing",), "nothing"),
    ],
)
def test_anything_wrong_is_one_line(capsys, arguments, words):
    said = wrong(capsys, *arguments)
    assert all(word in said for word in words.split(".*"))


FILES = {
    "a name of several": ("a.json", '[{"name": {"a": 1}}]', "case 0: name: got {'a': 1}"),
    "a name that is a number": ("a.json", '[{"name": 3}]', "case 0: name: got 3"),
    "not UTF-8": ("a.json", b"\xff\xfe{}", "a.json: is not UTF-8"),
    "not UTF-8 either": ("a.yaml", b"\xff\xfe{}", "a.yaml: is not UTF-8"),
    "heads": ("a.json", '[{}, {"heads_q": 3, "heads_k": 2, "name": "mine"}]', "case 1 (mine): q, k: have 3 and 2"),
    "heads in yaml": ("a.yaml", "mine: {heads_q: 3, heads_k: 2}", "case 0 (mine): q, k: have 3 and 2 heads"),
    "a mask that does not fit": ("a.json", '[{"mask": "padding(9999)"}]', "case 0: padding: got length 9999"),
    "a mask of packed": ("a.json", '[{"lengths": [3, 4], "mask": "documents(2)"}]', "case 0: documents: cu_seqlens"),
    "a mask of a cache": ("a.json", '[{"cache": true, "seqlen_k": 8, "mask": "padding(9)"}]', "case 0: padding: got"),
    "a mask that is a list": ("a.json", '[{"mask": ["causal"]}]', "case 0: mask: got ['causal']"),
    "a mask of words": ("a.json", '[{"mask": {}}]', "case 0: mask: expected an expression"),
    "a mask too deep": ("a.json", json.dumps([{"mask": "&".join(["causal"] * 9999)}]), "case 0: mask: 69992 letters"),
    "no field": ("a.yaml", "- {1: 2, a: 3}", "case 0 has 1, a, expected of batch"),
    "a float": ("a.json", '[{"batch": 1.0}]', "case 0: batch: got 1.0"),
    "a truth": ("a.yaml", "a: {batch: yes}", "case 0 (a): batch: got True"),
    "dtype of several": ("a.json", '[{"dtype": {}}]', "case 0: dtype: got {}"),
    "pass of several": ("a.json", '[{"what": []}]', "case 0: what: got []"),
    "cache in words": ("a.json", '[{"cache": "no"}]', "case 0: cache: got 'no'"),
    "calls in words": ("a.json", '[{"calls": "x"}]', "case 0: calls: got 'x'"),
    "no calls": ("a.json", '[{"calls": 0}]', "case 0: calls: got 0"),
    "without numbers": ("a.json", '[{"without": [1]}]', "case 0: without: got [1]"),
    "lengths in words": ("a.json", '[{"lengths": "12"}]', "case 0: lengths: got '12'"),
    "softcap of nothing": ("a.json", '[{"softcap": NaN}]', "case 0: softcap: got nan"),
    "dropout of nothing": ("a.json", '[{"dropout": NaN}]', "case 0: dropout: got nan"),
    "a wrong date": ("a.yaml", "- 2024-99-99", "a.yaml: month"),
    "a key of several": ("a.yaml", "? [a]\n: 3", "a.yaml: while constructing"),
    "deep": ("a.json", "[" * 99999, "a.json: maximum recursion"),
    "nothing": ("a.yaml", "", "a.yaml: expected a list of cases"),
    "too large": ("a.json", '[{"batch": 2147483647, "name": "big"}]', "big: "),
}  # fmt: skip


@pytest.mark.parametrize("name", FILES)
def test_a_wrong_file_is_one_line(capsys, tmp_path, name):
    """It names the file and the case; before anything is measured."""
    file, body, words = FILES[name]
    path = tmp_path / file
    path.write_bytes(body if isinstance(body, bytes) else body.encode())
    assert words in wrong(capsys, "bench", "--cases", str(path), "--impl", "onchip")


def test_a_file_where_none_can_be(capsys, tmp_path):
    path = tmp_path / "file"
    path.write_text("")
    for arguments in (
        ("bench", "-n", "16", "--impl", "onchip", "--out", str(path)),
        ("bench", "paper", "--quick", "--out", str(path)),
        ("bench", "--cases", str(tmp_path)),
        ("explain", "--no-open", "--no-cpu", "--out", str(path / "page.html")),
        ("explain", "--no-open", "--no-cpu", "--out", str(tmp_path)),
        ("demo", "--quick", "--out", str(path)),
    ):
        assert str(tmp_path) in wrong(capsys, *arguments)


def test_tune_where_it_cannot(capsys, monkeypatch, tmp_path):
    """No GPU; no Triton; a place that cannot be written; a GPU that fails: each in a line."""
    assert "no GPU" in wrong(capsys, "tune")
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    find = importlib.util.find_spec
    with monkeypatch.context() as hidden:
        hidden.setattr(
            importlib.util, "find_spec", lambda name, *rest: None if name == "triton" else find(name)
        )
        assert "tune needs triton" in wrong(capsys, "tune")
    if find("triton") is None:
        return
    from onchip.backends.triton import tune as tuning

    def fails(*args, **options):
        raise RuntimeError("CUDA error: out of memory\nmore")

    monkeypatch.setattr(tuning, "tune", fails)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ONCHIP_CACHE", str(tmp_path / "file" / "folder"))
    assert "folder" in wrong(capsys, "tune")
    monkeypatch.setenv("ONCHIP_CACHE", str(tmp_path))
    assert wrong(capsys, "tune") == "onchip: CUDA error: out of memory more"


@pytest.mark.parametrize("command", ["plan", "bench", "verify"])
def test_what_no_memory_holds_is_one_line(capsys, monkeypatch, command):
    def fails(*args, **kwargs):
        raise RuntimeError("can't allocate memory\nException raised from somewhere\nframe #0")

    monkeypatch.setattr("onchip.plan", fails)
    monkeypatch.setattr("onchip.bench.peers.inputs", fails)
    assert wrong(capsys, command, "-n", "16").endswith(": can't allocate memory")


def test_names_of_implementations_may_be_apart_and_count_once(capsys):
    """Cases too."""
    sizes = ("-n", "16,16", "-H", "1", "-m", "causal", "-m", "causal", "--repeats", "1")
    assert not call("bench", *sizes, "--impl", "onchip, standard,onchip")
    text = capsys.readouterr().out
    assert "standard" in text and len(re.findall("(?m) onchip +[0-9]", text)) == 1


def test_bench(capsys, tmp_path):
    arguments = (
        "-n",
        "16,32",
        "-H",
        "1",
        "-d",
        "8",
        "--impl",
        "onchip,standard",
        "--repeats",
        "1",
        "-m",
        "causal",
    )
    assert not call("bench", *arguments, "--pass", "both", "--out", str(tmp_path / "new" / "folder"))
    text = capsys.readouterr().out
    assert "onchip" in text and "standard" in text and "TFLOP/s" in text
    found = json.loads((tmp_path / "new" / "folder" / "results.json").read_text())
    assert {r["step"] for r in found["results"]} == {"forward", "backward"}
    assert (tmp_path / "new" / "folder" / "tflops-backward.svg").exists()


def test_bench_writes_numbers_without_matplotlib(capsys, tmp_path, monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    find = importlib.util.find_spec
    hidden = lambda name, *rest: None if name == "matplotlib" else find(name, *rest)  # noqa: E731
    monkeypatch.setattr(importlib.util, "find_spec", hidden)
    sizes = ("-n", "16,32", "-H", "1", "-d", "8", "--impl", "onchip", "--repeats", "1")
    assert not call("bench", *sizes, "--out", str(tmp_path / "own"))
    assert not call("bench", "paper", "--quick", "--repeats", "1", "--out", str(tmp_path / "paper"))
    assert capsys.readouterr().out.count("no plots: they need matplotlib") == 2
    for folder, name in (("own", "results.json"), ("paper", "paper.json")):
        assert [path.name for path in (tmp_path / folder).iterdir()] == [name]
        json.loads((tmp_path / folder / name).read_text())


def test_the_package_is_a_command():
    run = subprocess.run([sys.executable, "-m", "onchip", "doctor"], capture_output=True, text=True)
    assert run.returncode == 0 and "triton" in run.stdout, run.stderr
    assert subprocess.run([sys.executable, "-m", "onchip", "bench", "x"], capture_output=True).returncode


def test_bench_of_a_file(capsys, tmp_path):
    path = tmp_path / "cases.json"
    path.write_text(json.dumps([{"name": "mine", "seqlen_q": 16, "heads_q": 1, "dim": 8}]))
    assert not call("bench", "--cases", str(path), "--impl", "onchip", "--repeats", "1")
    assert "mine" in capsys.readouterr().out


def test_a_narrow_terminal_cuts_no_figure(capsys, monkeypatch):
    for name, value in (("COLUMNS", "50"), ("FORCE_COLOR", "1"), ("TERM", "xterm")):
        monkeypatch.setenv(name, value)
    assert not call("bench", "-n", "32", "-H", "1", "--repeats", "1", "--impl", "onchip")
    text = capsys.readouterr().out
    assert "implementation" in text and "of the floor" in text and "…" not in text.split("implementation")[1]


def test_a_wrong_result_ends_in_failure(capsys, monkeypatch):
    module = select.load(ON_CPU)
    plain = module.forward

    def broken(*args):
        found = plain(*args)
        found.out[:] *= 1.01
        return found

    monkeypatch.setattr(module, "forward", broken)
    assert "wrong" in call("bench", "-n", "16", "-H", "1", "--impl", "onchip", "--repeats", "1")
    said = call("verify", "-n", "16", "-H", "1", "--forward")
    assert "out: off by more" in said
    assert "out" in capsys.readouterr().out


def test_verify(capsys):
    assert not call(
        "verify", "-n", "40", "-H", "2", "--heads-k", "1", "-d", "8", "-m", "causal", "--softcap", "3"
    )
    text = capsys.readouterr().out
    for name in ("out", "lse", "dq", "dk", "dv", "roundings"):
        assert name in text


def test_doctor(capsys):
    assert not call("doctor")
    text = capsys.readouterr().out
    assert f"onchip          {onchip.__version__}" in text and len(text.splitlines()) <= 24
    for name in select.BACKENDS:
        assert len(re.findall(f"^backend {name} ", text, re.M)) == 1
    assert "not installed" in text and "to bench against" in text
    assert not call("doctor", "--json")
    found = json.loads(capsys.readouterr().out)
    assert found["backends"]["cpu"]["refused"] is None
    assert set(found) == {"machine", "packages", "backends", "peers"}


@pytest.mark.parametrize("there", [True, False])
def test_doctor_of_the_two_cpu_backends(capsys, monkeypatch, there):
    """A row each: which native kernels, or why there are none, is said once, in theirs."""
    monkeypatch.setattr(select.load("native"), "status", lambda: "fast kernels of my own")
    why = None if there else "there is no compiler"
    monkeypatch.setattr(select.load("native"), "refuse", lambda problem: why)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert not call("doctor")
    rows = {
        line.split()[1]: line for line in capsys.readouterr().out.splitlines() if line.startswith("backend")
    }
    wanted = "usable on cpu; fast kernels of my own" if there else "no: there is no compiler"
    assert rows["native"] == f"backend native    {wanted}"
    assert rows["cpu"] == "backend cpu       usable on cpu: the tiled loop of torch operations"


def test_doctor_of_a_backend_that_breaks(monkeypatch):
    """One that refuses in words, one whose status raises, one that cannot be imported: each a line, none an end."""

    def breaks():
        raise OSError("no such library")

    broken = types.SimpleNamespace(refuse=lambda problem: "the moon is full")
    monkeypatch.setattr(select, "load", lambda name: broken if name == "cpu" else breaks())
    found = doctor.examine()["backends"]
    assert found["cpu"]["refused"] == "the moon is full"
    assert found["reference"]["refused"] == "OSError: no such library"
    assert any("the moon is full" in line for line in doctor.lines(doctor.examine()))


def test_the_commands_start_without_what_they_do_not_use():
    """Help, and plan, in a process in which the optional packages cannot be found."""
    code = (
        "import sys\n"
        "from test_imports import BLOCK\n"
        "exec(BLOCK.replace('\\'rich\\', \\'typer\\'', '\\'yaml\\''))\n"
        "from onchip import cli\n"
        "cli.main(['plan', '-n', '64', '--device', 'H200', '--backend', 'reference'])\n"
    )
    tests = os.path.dirname(__file__)
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([os.path.dirname(os.path.dirname(onchip.__file__)), tests]),
    }
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, timeout=120)
    assert done.returncode == 0 and "64 x 64" in done.stdout, done.stderr
