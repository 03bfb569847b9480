"""Both functions under compilers, exporters, modes, autocast, and in any order of imports."""

import os
import subprocess
import sys
import threading

import pytest
import torch
from helpers import DEVICE, INTERPRET, ROOT, draw, load, on_a_gpu
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.functional import gelu, layer_norm, linear

norms, linears = load("beyond/fast_layernorm.py"), load("beyond/fast_linear_gelu.py")
sys.modules |= {module.__name__: module for module in (norms, linears)}  # torch.compile looks there
# The function, torch's, and the shapes of the arguments.
CASES = {
    "fast_layernorm": (
        norms.fast_layernorm,
        lambda x, weight, bias: layer_norm(x, x.shape[-1:], weight, bias),
        [(40, 64), (64,), (64,)],
    ),
    "fast_linear_gelu": (
        linears.fast_linear_gelu,
        lambda x, weight, bias: gelu(linear(x, weight, bias)),
        [(40, 64), (48, 64), (48,)],
    ),
}
each = pytest.mark.parametrize("name", CASES)


def case(name):
    """The function, torch's, and arguments."""
    function, torchs, shapes = CASES[name]
    return function, torchs, [draw(*shape, seed=seed) for seed, shape in enumerate(shapes)]


def assert_close(result, expected, tolerance=1e-5):
    assert (result.dtype, result.device) == (expected.dtype, expected.device)
    torch.testing.assert_close(result, expected, rtol=tolerance, atol=tolerance)


@each
@pytest.mark.parametrize("has_bias", [True, False])
def test_the_operator_passes_opcheck(name, has_bias):
    module = norms if name == "fast_layernorm" else linears
    x, weight, bias = case(name)[2]
    rest = (1e-5,) if name == "fast_layernorm" else ()
    torch.library.opcheck(module.operator, (x, weight, bias if has_bias else None, *rest))


@each
@pytest.mark.parametrize("options", [{}, {"mode": "reduce-overhead"}, {"dynamic": True}], ids=str)
def test_compiled_without_a_graph_break(name, options):
    function, torchs, (x, weight, bias) = case(name)
    if INTERPRET:  # inductor's own code for the CPU would take a C++ compiler and its time
        options = {"backend": "aot_eager", "dynamic": options.get("dynamic", False)}
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: function(x * 2, weight, bias) + 1, fullgraph=True, **options)
    for rows in (40, 40, 40, 33):
        assert_close(compiled(x[:rows]), torchs(x[:rows] * 2, weight, bias) + 1)


@each
def test_what_has_no_values_has_a_shape(name):
    function, torchs, tensors = case(name)
    on_meta = function(*[t.to("meta") for t in tensors])
    with FakeTensorMode() as mode:
        fake = function(*map(mode.from_tensor, tensors))
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
        if name == "fast_linear_gelu":
            with pytest.raises(TypeError, match="weight torch.int64"):
                function(tensors[0], tensors[1].long())


@pytest.mark.parametrize("eps", ["0.5", 1, True, torch.tensor(0.25)], ids=str)
def test_eps_is_a_number_each_time(eps):
    x = draw(40, 64)
    for _ in range(3):
        assert_close(norms.fast_layernorm(x, eps=eps), layer_norm(x, (64,), eps=float(eps)))
    with pytest.raises(TypeError, match="NoneType"):
        norms.fast_layernorm(x, eps=None)


@on_a_gpu
@each
def test_threads_and_streams(name):
    function, torchs, (x, weight, bias) = case(name)
    failures = []

    def work(seed):
        with torch.cuda.stream(torch.cuda.Stream()):
            for step in range(50):
                t = draw(40, 64, seed=seed) * step
                try:
                    assert_close(function(t, weight, bias), torchs(t, weight, bias), 1e-4)
                except Exception as error:
                    failures.append(error)

    torch.cuda.synchronize()
    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


LOADS = """
import importlib.util, os, sys
def load(path):
    spec = importlib.util.spec_from_file_location("loaded", path)
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
"""
FILES = [*sorted(ROOT.glob("chapter20/*.py")), *sorted(ROOT.glob("beyond/fast_*.py"))]


def python(source, *arguments, **environment):
    environment = os.environ | {"TRITON_INTERPRET": "0"} | environment
    command = [sys.executable, "-c", LOADS + source, *arguments]
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_triton_imported_first_without_a_gpu():
    source = """
import triton
for path in sys.argv[1:]:
    try: load(path)
    except ImportError as error: print(error)
    else: print("loaded")
"""
    refused = python(source, *FILES).splitlines()
    assert len(refused) == len(FILES)
    assert all("import" in line and "triton" in line for line in refused)
    assert python(source, *FILES, TRITON_INTERPRET="1").splitlines() == ["loaded"] * len(FILES)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_the_environment_is_as_it_was():
    source = """
for value in (None, "0"):
    os.environ.pop("TRITON_INTERPRET", None)
    if value: os.environ["TRITON_INTERPRET"] = value
    for path in sys.argv[1:]: load(path)
    assert os.environ.get("TRITON_INTERPRET") == value
import torch
import fast_layernorm
fast_layernorm.fast_layernorm(torch.ones(2, 8))  # works all the same
"""
    python(source, *FILES[-2:], PYTHONPATH=str(ROOT / "beyond"))
