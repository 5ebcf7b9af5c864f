"""A kept launch takes the compiled kernel of its first call, which Triton chose by the values of whole numbers too."""

import weakref
from types import SimpleNamespace

import pytest
import torch
import triton
from triton import knobs
from triton.backends.nvidia import driver as nvidia
from triton.compiler import CompiledKernel
from triton.runtime import driver

import onchip
from onchip import problem as problems
from onchip.backends import reference
from onchip.backends.compiled import launch, relaunch
from onchip.backends.hopper import launch as hopper
from onchip.backends.triton import backward_pass, forward_pass
from onchip.backends.triton.parts import View
from onchip.inputs import varlen_layout
from onchip.problem import Operands, Saved
from onchip.tiles import Tiles

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FREE = {"new", "lse_stride", "seed_lo", "seed_hi"}  # do_not_specialize: of any value
BLOCKS = torch.arange(9, device=DEVICE).view(1, 1, 3, 3) % 4 > 0
MASKS = {
    "full": onchip.Mask,
    "window": lambda: onchip.window(9, 0),
    "blocks": lambda: onchip.block_sparse(BLOCKS, tile=(16, 16)),
    "where": lambda: onchip.where(lambda b, h, q, k: (q + k) % 3 > 0),
    "padding": lambda: onchip.padding(torch.tensor([9, 33, 20], device=DEVICE)),
}
CASES = (
    ("full", False),
    ("full", True),
    ("window", False),
    ("blocks", True),
    ("where", False),
    ("padding", False),
)
# Rows in all 0, 1, 57, 96 and 41: also of none and of one, whose strides are those of others.
LENGTHS = ((0, 0, 0), (0, 1, 0), (40, 16, 1), (40, 40, 16), (40, 1, 0))


def kind(x, name=""):
    """What Triton compiles a kernel for, of an argument."""
    if isinstance(x, torch.Tensor):
        return x.dtype, x.data_ptr() % 16 == 0
    if isinstance(x, tuple):
        return tuple(kind(each, name) for each in x)
    if isinstance(x, int):
        return name if name in FREE else (x == 1, x % 16 == 0, abs(x) < 2**31)
    if isinstance(x, hopper.TensorDescriptor):  # whose strides are kept
        return tuple(x.block_shape), tuple(x.strides)
    return x if x is None else type(x).__name__


@pytest.fixture
def steady(monkeypatch):
    """The steps whose launches were steady; each is held to what its first one was of."""
    found, run, descriptors = {}, launch.Step.run, {}

    def checked(step, changing, steady):
        if steady:
            names = step.kernel.arg_names
            made = descriptors.setdefault(step, relaunch.Descriptors(changing)).filled(changing)
            kinds = [kind(x, name) for x, name in zip(made, names, strict=False)]
            assert found.setdefault(step, kinds) == kinds
        if step.kernel is not hopper.forward_kernel:
            run(step, changing, steady)

    monkeypatch.setattr(launch.Step, "run", checked)
    monkeypatch.setattr(hopper, "multiprocessors", lambda index: 132)
    monkeypatch.setattr(hopper, "zero", lambda device: torch.zeros(1, dtype=torch.int32, device=device))
    launch.forget()
    return found


def stated(lengths, mask, score):
    """A dense problem, or with `lengths` a packed one, of fresh tensors."""
    rows = (3, 40) if lengths is None else (sum(lengths),)
    q, k, v = (torch.randn(*rows, heads, 16, device=DEVICE).half() for heads in (4, 2, 2))
    if lengths is None:
        place = problems.dense_layout(q, k, v)
    else:
        cu = torch.tensor([0, *lengths], device=DEVICE).cumsum(0).int()
        place = varlen_layout(q, k, v, cu, cu, 40, 40, None, None)
    kind = "dense" if lengths is None else "varlen"
    return problems.state(q, k, v, place, kind, mask, score), Operands(q, k, v, place, mask, score)


@pytest.mark.parametrize(("name", "has_sink"), CASES)
@pytest.mark.parametrize("layout", ["dense", "packed"])
def test_steady_launches_are_of_one_kind(layout, name, has_sink, steady):
    mask = MASKS[name]()
    for lengths in LENGTHS if layout == "packed" else [None] * 2:
        sink = torch.randn(4, device=DEVICE) if has_sink else None
        problem, operands = stated(lengths, mask, onchip.Score(sink=sink))
        hopper.forward(problem, operands)
        out, lse, rest = forward_pass.forward(problem, operands)
        truth = reference.forward(problem, operands, Tiles(16, 16))
        torch.testing.assert_close(out, truth.out, atol=2e-3, rtol=2e-3)
        torch.testing.assert_close(lse, truth.lse, atol=2e-3, rtol=2e-3)
        saved = Saved(out, lse, rest, frozenset("qkv"))
        backward_pass.backward(problem, operands, saved, torch.randn_like(out), None)
    names = {step.kernel.fn.__name__ for step in steady}
    if (layout, name) == ("packed", "padding"):  # which would wait for the lengths
        assert not names
        return
    assert names == {"forward_kernel", "delta_kernel", "dkdv_kernel", "dq_kernel"}
    assert any(step.kernel is hopper.forward_kernel for step in steady)


def test_a_softcap_is_a_float():
    """A kernel compiled for a whole number takes no other: 30 and 30.0 are one key of what is kept."""
    assert type(onchip.Score(softcap=30).softcap) is float


class Loaded(CompiledKernel):
    """A kernel that is on its device, and a launcher that notes what it is given."""

    def __init__(self):
        self.function, self.packed_metadata, self.name = "function", "packed", "name"
        self.module, self.src, self.calls = None, None, []
        self._run = lambda *args: self.calls.append(args)

    def _init_handles(self):
        pass


def test_a_relaunch_without_more_gives_descriptors(monkeypatch):
    """Where a launch is left to Triton, the tensors that stand for descriptors become those of the first launch."""
    active = SimpleNamespace(get_current_device=lambda: 0, get_current_stream=lambda device: 7)
    monkeypatch.setattr(driver, "_active", active)
    first, other = (torch.randn(1, 4, 2, 16).half() for _ in range(2))
    wanted, kernel = hopper.descriptor(first, 16, 16), Loaded()
    again = relaunch.relaunch(kernel, (1, 1, 1), (5, wanted), ("c",))
    again((6, other))
    number, made, rest = kernel.calls[0][9:]
    assert (number, rest, type(made), made.base) == (6, "c", type(wanted), other)
    assert relaunch.fields_of(made) == relaunch.fields_of(wanted)


def test_a_relaunch_is_tritons_own(monkeypatch):
    """It differs in what is for hooks, while there are none."""
    active = SimpleNamespace(get_current_device=lambda: 1, get_current_stream=lambda device: 70 + device)
    monkeypatch.setattr(driver, "_active", active)
    kernel, grid = Loaded(), (2, 3, 1)
    again = relaunch.relaunch(kernel, grid, ("a", "b"), ("c", "d"))
    kernel[grid](*"abcd")
    again(("a", "b"))
    theirs, ours = kernel.calls
    assert list(theirs[7:9]) == [knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook]
    assert ours == (*theirs[:6], None, None, None, *theirs[9:])
    assert theirs[9:] == tuple("abcd") and theirs[3] == 71


class Noted:
    """In place of the function of the driver that launches."""

    def __init__(self):
        self.calls = []

    def __call__(self, *args):
        self.calls.append(args)


def launcher(launch, *signature, scratch=0):
    """Triton's own, of a kernel with such arguments."""
    layouts = [f"layout {i}" for i, kind in enumerate(signature) if kind.startswith("tensordesc")]
    run = nvidia.CudaLauncher.__new__(nvidia.CudaLauncher)
    run.num_ctas, run.launch_cooperative_grid, run.launch_pdl = 1, False, True
    run.global_scratch_size, run.profile_scratch_size = scratch, 0
    run.global_scratch_align = run.profile_scratch_align = 16
    run.launch = nvidia.wrap_handle_tensordesc(launch, dict(enumerate(signature)), layouts)
    return run


if triton.__version__.startswith("3.6."):
    SIGNATURES = ("*fp16", "i32"), ("*fp16", "tensordesc", "i32", "tensordesc", "constexpr")

    @pytest.mark.parametrize("signature", SIGNATURES)
    def test_a_bare_launch_is_tritons_own(signature, monkeypatch):
        """The same arguments reach the driver, with descriptors taken apart."""
        monkeypatch.setattr(nvidia, "make_tensordesc_arg", lambda arg, layout: [arg, layout, 3, 4])
        theirs, ours = Noted(), Noted()
        args = tuple("abcde"[: len(signature)])
        launcher(theirs, *signature)(2, 3, 1, 70, "function", "packed", None, None, None, *args)
        bare(launcher(ours, *signature), args[:2], args[2:])(70, args[:2])
        assert ours.calls == theirs.calls and len(ours.calls) == 1
        assert len(ours.calls[0]) == 13 + len(signature) + 3 * signature.count("tensordesc")

    def test_a_bare_launch_gives_addresses(monkeypatch):
        """Of tensors wherever they stand, for the descriptors of which tensors do: each is encoded once by address."""
        made = []

        def encoded(descriptor, layout):
            made.append(descriptor)
            return [descriptor.base.data_ptr(), layout]

        monkeypatch.setattr(nvidia, "make_tensordesc_arg", encoded)
        x, y, z = tensors = [torch.randn(1, 4, 2, 16).half() for _ in range(3)]
        described = [hopper.descriptor(t, 16, 16) for t in tensors]
        first = (View(x, 128, 32, 16, 1), described[1], y, None, 5)
        noted = Noted()
        again = bare(
            launcher(noted, "view", "tensordesc", "*fp32", "none", "i32", "place", "*fp32"),
            first,
            ((z, 3), z),
        )
        for t in (y, z, y):
            again(70, (View(t, 128, 32, 16, 1), t, x, None, 6))
            at = t.data_ptr()
            view, *rest = noted.calls[-1][13:]
            assert view == (at, 128, 32, 16, 1)
            assert rest == [at, "layout 1", x.data_ptr(), None, 6, (z.data_ptr(), 3), z.data_ptr()]
        assert [d.base is t for d, t in zip(made, (y, z), strict=True)] == [True, True]
        assert all(relaunch.fields_of(d) == relaunch.fields_of(described[1]) for d in made)
        again(70, (View(x, 128, 32, 16, 1), described[2], x, None, 6))  # a descriptor is taken as it is
        assert made[-1] is described[2]

    def test_a_bare_launch_keeps_few_descriptors(monkeypatch):
        monkeypatch.setattr(relaunch, "_MAPS", 3)
        made = []
        monkeypatch.setattr(nvidia, "make_tensordesc_arg", lambda d, layout: [made.append(d)])
        tensors = [torch.randn(1, 4, 2, 16).half() for _ in range(4)]
        again = bare(launcher(Noted(), "tensordesc"), (hopper.descriptor(tensors[0], 16, 16),), ())
        for t in (*tensors, tensors[3], tensors[0]):
            again(70, (t,))
        assert [d.base for d in made] == [*tensors, tensors[0]]

    def test_a_bare_launch_holds_no_tensor(monkeypatch):
        """As a descriptor becomes where the bulk copy engine is not used: its tensor, and its shape and strides."""
        monkeypatch.setattr(nvidia, "make_tensordesc_arg", lambda d, layout: [d.base, *d.shape])
        run = launcher(lambda *args: None, "tensordesc")
        inner = nvidia.wrap_handle_tensordesc(lambda *args: None, {0: "tensordesc"}, [])
        run.launch = inner
        again = bare(run, (hopper.descriptor(torch.randn(1, 4, 2, 16).half(), 16, 16),), ())
        given = torch.randn(1, 4, 2, 16).half()
        seen = weakref.ref(given)
        again(70, (given,))
        del given
        assert seen() is None


def bare(run, first, rest):
    """`relaunch._bare` of a kernel on a grid of (2, 3, 1)."""
    return relaunch._bare(run, (2, 3, 1, "function", "packed"), relaunch.Descriptors(first), first, rest)


def test_other_launches_are_left_to_triton(monkeypatch):
    """Those that need scratch memory, on other GPUs, with a launcher of somebody's, and of other versions of Triton."""
    assert bare(launcher(Noted(), "*fp16", scratch=64), (), ()) is None
    assert bare(lambda *args: None, (), ()) is None
    run = launcher(Noted(), "*fp16")
    within = run.launch
    run.launch = lambda *args: within(*args)
    assert bare(run, (), ()) is None
    run.launch = within
    monkeypatch.setattr(triton, "__version__", "3.60.0")
    assert bare(run, (), ()) is None


@pytest.mark.parametrize("name", ["launch_enter_hook", "launch_exit_hook"])
@pytest.mark.parametrize("chained", [True, False])
def test_a_relaunch_serves_hooks(name, chained, monkeypatch):
    """A profiler's, added to Triton's or in their place, though the launch was kept before they came."""
    active = SimpleNamespace(get_current_device=lambda: 0, get_current_stream=lambda device: 7)
    monkeypatch.setattr(driver, "_active", active)
    kernel = Loaded()
    again = relaunch.relaunch(kernel, (1, 1, 1), ("a",), ())
    chain, hook = getattr(knobs.runtime, name), lambda metadata: None
    if chained:
        monkeypatch.setattr(chain, "calls", [hook])
    else:
        monkeypatch.setattr(knobs.runtime, name, hook)
    again(("a",))
    metadata, enter, leave = kernel.calls[0][6:9]
    assert metadata.get() == {"name": "name", "function": "function", "stream": 7}
    assert {"launch_enter_hook": enter, "launch_exit_hook": leave}[name] is (chain if chained else hook)
