"""Both functions: what they refuse and keep, compilers, autocast, and orders of import."""

import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from helpers import DEVICE, INTERPRET, ROOT, draw, load, masked_loads_without_other, on_a_gpu
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.functional import gelu, layer_norm, linear

norms, linears = load("beyond/fast_layernorm.py"), load("beyond/fast_linear_gelu.py")
sys.modules |= {module.__name__: module for module in (norms, linears)}  # torch.compile looks there
MODULES = {"fast_layernorm": norms, "fast_linear_gelu": linears}
SHAPES = {
    "fast_layernorm": [(4, 16), (16,), (16,)],
    "fast_linear_gelu": [(4, 16), (24, 16), (24,)],
}
TORCHS = {
    "fast_layernorm": lambda x, weight, bias=None: layer_norm(x, x.shape[-1:], weight, bias),
    "fast_linear_gelu": lambda x, weight, bias=None: gelu(linear(x, weight, bias)),
}
each = pytest.mark.parametrize("name", MODULES)


def case(name):
    """The function, torch's, and arguments."""
    tensors = [draw(*shape, seed=seed) for seed, shape in enumerate(SHAPES[name])]
    return getattr(MODULES[name], name), TORCHS[name], tensors


def assert_close(result, expected, tolerance=1e-5):
    assert (result.dtype, result.device) == (expected.dtype, expected.device)
    torch.testing.assert_close(result, expected, rtol=tolerance, atol=tolerance)


# --- What they refuse, before anything is launched ---


class Subclass(torch.Tensor):
    pass


def freed(t):
    """A view into memory that is given back."""
    t = t.repeat(2, *[1] * (t.dim() - 1))[len(t) :]
    t.untyped_storage().resize_(0)
    return t


# Which argument is changed (0: x, 1: weight, 2: bias), and how; the error's type and text.
DTYPES = "float32, float16 or bfloat16"
REFUSED = [
    (0, torch.Tensor.double, TypeError, f"{DTYPES}.*x torch.float64"),
    (1, torch.Tensor.double, TypeError, "weight torch.float64"),
    (2, torch.Tensor.long, TypeError, "bias torch.int64"),
    (0, torch.Tensor.cfloat, TypeError, "x torch.complex64"),
    (0, lambda t: t.tolist(), TypeError, "x <class 'list'>"),
    (2, lambda t: t.cpu().numpy(), TypeError, "bias <class 'numpy.ndarray'>"),
    (0, lambda t: None, TypeError, "x <class 'NoneType'>"),
    (0, torch.Tensor.to_sparse, TypeError, r"x torch.float32 \(torch.sparse_coo\)"),
    (1, lambda t: torch.nested.nested_tensor([t]), TypeError, r"weight torch.float32 \(nested\)"),
    (0, lambda t: t.as_subclass(Subclass), TypeError, "Subclass"),
    (1, lambda t: torch.nn.UninitializedParameter(False), TypeError, "weight .*Uninitialized"),
    (1, lambda t: t.to("meta"), ValueError, f"on one {DEVICE} device.*weight on meta"),
    (2, lambda t: t.to("meta"), ValueError, "bias on meta"),
    (0, lambda t: t[0, 0], ValueError, r"x \(\)"),
    (0, lambda t: t[:, 1:], ValueError, r"x \(4, 15\), weight \((24, )?16,?\)"),
    (1, lambda t: t[..., :1], ValueError, r"x \(4, 16\), weight \((24, )?1,?\)"),
    (1, lambda t: t[None, None], ValueError, r"weight \(1, 1, "),
    (2, lambda t: t[1:], ValueError, r"bias \((23|15),\)"),
    (2, lambda t: t[:1], ValueError, r"bias \(1,\)"),
    (2, lambda t: t[None], ValueError, r"bias \(1, (24|16)\)"),
    (0, freed, ValueError, "in memory.*x "),
    (1, freed, ValueError, "in memory.*weight "),
    (2, freed, ValueError, "in memory.*bias "),
]
REFUSED += [] if INTERPRET else [(0, torch.Tensor.cpu, ValueError, "x on cpu")]


@each
@pytest.mark.parametrize("which, change, error, message", REFUSED, ids=[r[3] for r in REFUSED])
def test_refuses(name, which, change, error, message, monkeypatch):
    function, _, tensors = case(name)
    function(*tensors)  # what is known must not let it pass
    monkeypatch.setattr(MODULES[name], "choose", None)  # nothing may come as far
    tensors[which] = change(tensors[which])
    with pytest.raises(error, match=message):
        function(*tensors)


def test_refuses_what_only_one_of_them_cannot_take():
    x, row = draw(20, 12), draw(1).expand(2**20 + 1)
    with pytest.raises(ValueError, match=r"at most 2\*\*20, got x \(1048577,\)"):
        norms.fast_layernorm(row)
    for tensors in [(x.half(), x), (torch._neg_view(x), x), (x, torch._neg_view(x))]:
        with pytest.raises(TypeError, match="x torch.float(16|32).*, weight torch.float32"):
            linears.fast_linear_gelu(*tensors)


@each
def test_refuses_gradients_and_transforms(name):
    function, torchs, tensors = case(name)
    for which, argument in enumerate(("x", "weight", "bias")):
        given = [t.clone().requires_grad_(i == which) for i, t in enumerate(tensors)]
        for _ in range(2):  # what is known of the first time must not let the second pass
            with torch.no_grad():
                assert_close(function(*given), torchs(*tensors))
            with pytest.raises(ValueError, match=f"(forward only|no backward).*{argument}"):
                function(*given)
    with FakeTensorMode() as mode, pytest.raises(ValueError, match="forward only|no backward"):
        function(*[mode.from_tensor(t) for t in given])
    with pytest.raises(ValueError, match="in memory.*x "):
        torch.func.vmap(lambda x: function(x, *tensors[1:]))(tensors[0])
    with torch.inference_mode():
        assert_close(function(*tensors), torchs(*tensors))


# --- Launches again of what has been compiled ---


@each
def test_each_call_takes_its_own_values_and_layout(name):
    """Each twice, in turn: what is kept of a launch on a GPU must not serve another."""
    function, torchs, (x, weight, bias) = case(name)
    wide, half = draw(4, 32, seed=3), [t.half() for t in (x, weight, bias)]
    calls = [
        (x, weight, bias),
        (x, weight),
        (x[:3], weight, bias),
        (x.view(2, 2, 16), weight, bias),
        (x.view(2, 2, 16).transpose(0, 1), weight, bias),
        half,
        (wide[:, :16], weight, bias),
        (wide[:, 1:17], weight, bias),
        (x.T.contiguous().T, weight, bias),
        (x, weight, bias.repeat(2)[::2]),
        (x, weight, torch.cat([bias[:1], bias])[1:]),
        (x, weight[..., -1:] * weight, bias - 1),
        (x + 1, weight, bias),
    ]
    if name == "fast_linear_gelu":
        calls += [(x, weight[:8], bias[:8]), (draw(40, 16), weight, bias)]
    else:
        calls += [(x, weight.half(), bias), (torch._neg_view(x), weight, torch._neg_view(bias))]
    kept = []
    for arguments in calls * (1 if INTERPRET else 2):
        before = [t.clone() for t in arguments]
        out = function(*arguments)
        wide = [t.float() for t in arguments]
        assert_close(out, torchs(*wide).to(arguments[0].dtype), 3e-3 if out.itemsize == 2 else 1e-5)
        assert all(map(torch.equal, arguments, before))
        kept.append((out, out.clone()))
    assert all(torch.equal(out, copy) for out, copy in kept)


@pytest.mark.skipif(torch.cuda.device_count() < 2 or INTERPRET, reason="needs two GPUs")
@each
def test_on_a_gpu_that_is_not_the_current_one(name):
    function, torchs, tensors = case(name)
    there = [t.to("cuda:1") for t in tensors]
    for _ in range(2):
        for given in (there, tensors):
            assert_close(function(*given), torchs(*given))
            assert torch.cuda.current_device() == 0
    with pytest.raises(ValueError, match="weight on cuda:0"):
        function(there[0], tensors[1])


# --- Compilers, exporters, modes, autocast ---


@each
@pytest.mark.parametrize("has_bias", [True, False])
def test_the_operator_passes_opcheck(name, has_bias):
    x, weight, bias = case(name)[2]
    rest = (1e-5,) if name == "fast_layernorm" else ()
    torch.library.opcheck(MODULES[name].operator, (x, weight, bias if has_bias else None, *rest))


@each
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_without_a_graph_break(name, dynamic):
    function, torchs, (x, weight, bias) = case(name)
    options = {"dynamic": True} if dynamic else {"mode": "reduce-overhead"}
    if INTERPRET:  # inductor's own code for the CPU would take a C++ compiler and its time
        options = {"backend": "aot_eager", "dynamic": dynamic}
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: function(x * 2, weight, bias) + 1, fullgraph=True, **options)
    for rows in (4, 4, 4, 3):
        assert_close(compiled(x[:rows]), torchs(x[:rows] * 2, weight, bias) + 1)


@each
def test_what_has_no_values_has_a_shape(name):
    function, torchs, tensors = case(name)
    on_meta = function(*[t.to("meta") for t in tensors])
    fake = function(*map(FakeTensorMode().from_tensor, tensors))
    wanted = torchs(*tensors)
    assert (on_meta.shape, on_meta.dtype) == (wanted.shape, wanted.dtype)
    assert (fake.shape, fake.dtype, fake.device) == (wanted.shape, wanted.dtype, wanted.device)


@each
def test_traced_and_exported(name):
    function, torchs, tensors = case(name)

    class Layer(torch.nn.Module):
        def forward(self, x, weight, bias):
            return function(x, weight, bias)

    traced = make_fx(Layer())(*tensors)
    exported = torch.export.export(Layer(), tuple(tensors)).module()
    for made in (traced, exported):
        assert f"chapter20.{name}" in made.code
        other = [t + 1 for t in tensors]
        assert_close(made(*other), torchs(*other), 1e-4)


@each
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_autocast_is_torchs(name, dtype):
    function, torchs, tensors = case(name)
    tensors = [t.to(dtype) for t in tensors]
    with torch.autocast(DEVICE, torch.bfloat16):
        assert_close(function(*tensors), torchs(*tensors), 2e-2)
        with pytest.raises(TypeError, match="weight torch.int64"):
            function(tensors[0], tensors[1].long())


@pytest.mark.parametrize("eps", ["0.5", 1, True, torch.tensor(0.25)], ids=str)
def test_eps_is_a_number_each_time(eps):
    x = draw(4, 16)
    for _ in range(3):
        assert_close(norms.fast_layernorm(x, eps=eps), layer_norm(x, (16,), eps=float(eps)))
    with pytest.raises(TypeError, match="NoneType"):
        norms.fast_layernorm(x, eps=None)


@on_a_gpu
@each
def test_threads_and_streams(name):
    function, torchs, (x, weight, bias) = case(name)

    def work(seed):
        with torch.cuda.stream(torch.cuda.Stream()):
            for step in range(50):
                t = draw(4, 16, seed=seed) * step
                assert_close(function(t, weight, bias), torchs(t, weight, bias), 1e-4)

    torch.cuda.synchronize()
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))  # raises what a thread has raised


# --- The files ---

TRITON_FIRST = """
import os, runpy, sys, triton
for path in sys.argv[1:]:
    try: runpy.run_path(path)
    except ImportError as error: print(error)
    assert "fast_" not in path or os.environ["TRITON_INTERPRET"] == "0"
    os.environ["TRITON_INTERPRET"] = "0"
"""
FILES_FIRST = """
import os, runpy, sys
for value in (None, "0", "1"):
    for path in sys.argv[1:]:
        os.environ.pop("TRITON_INTERPRET", None)
        if value: os.environ["TRITON_INTERPRET"] = value
        launch = runpy.run_path(path).get("fast_layernorm")
        assert "fast_" not in path or os.environ.get("TRITON_INTERPRET") == value
        if launch:
            import torch
            launch(torch.ones(2, 8))
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_without_a_gpu_triton_must_not_be_first_and_the_environment_stays():
    files = [*sorted(ROOT.glob("beyond/fast_*.py")), *sorted(ROOT.glob("chapter20/*.py"))]
    environment, printed = os.environ | {"TRITON_INTERPRET": "0"}, []
    for source in (TRITON_FIRST, FILES_FIRST):
        command = [sys.executable, "-c", source, *files]
        result = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert result.returncode == 0, result.stderr
        printed.append(result.stdout.splitlines())
    assert len(printed[0]) == len(files) and printed[1] == []
    assert all("import" in line and "triton" in line for line in printed[0])


@each
def test_the_file_stands_alone_in_ascii(name):
    source = (ROOT / f"beyond/{name}.py").read_bytes()
    imported = re.findall(r"^ *(?:import|from) (\w+)", source.decode("ascii"), re.MULTILINE)
    known = {"contextlib", "functools", "math", "os", "torch", "triton", name}  # its own example
    assert set(imported) <= known
    assert masked_loads_without_other(source) == []
