"""beyond/fast_layernorm.py: what it takes, what it returns, and what it refuses."""

import math
import types

import numpy as np
import pytest
import torch
import triton
import watched
from helpers import DEVICE, INTERPRET, interpreted, load, on_a_gpu
from torch.nn.functional import layer_norm

fast = load("beyond/fast_layernorm.py")
fast_layernorm = fast.fast_layernorm
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
# Of the relative error. Triton's interpreter adds one value after the other, and rounds to bf16
# wrongly.
LIMIT = {
    torch.float32: 2e-6 if INTERPRET else 4e-7,
    torch.float16: 4e-4,
    torch.bfloat16: 6e-3 if INTERPRET else 3e-3,
}
# Every step and table row of choose(), each at its end and just past it; with odd ones.
LENGTHS = [1, 2, 31, 64, 65, 96, 97, 100, 256, 257, 300, 385, 512, 513, 520, 768, 1000, 1001, 1025]
LENGTHS += [3000]
LONG = [1536, 1792, 2048, 2560, 3584, 5120, 7168, 9000, 12288, 16384, 20480, 24576, 32768, 40960]
LONG += [1793, 2049, 4097, 8193, 16383, 16385, 32769, 50256, 65535, 65536, 65537, 2**17 + 8, 2**20]


def random(*shape, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(DEVICE, dtype)


def skip_where_slow(N):
    if INTERPRET and N > 3000:
        pytest.skip("needs a GPU: the interpreter is slow")


def exact(x, weight=None, bias=None, eps=1e-5):
    """LayerNorm in float64."""
    weight, bias = (t if t is None else t.double() for t in (weight, bias))
    return layer_norm(x.double(), x.shape[-1:], weight, bias, eps)


def error(y, expected):
    """The relative error in the Frobenius norm."""
    return ((y.double() - expected).norm() / expected.norm().clamp(min=1e-300)).item()


def assert_right(x, weight=None, bias=None, eps=1e-5):
    """fast_layernorm's shape, dtype and values, within what rounding to x's dtype explains."""
    y = fast_layernorm(x, weight, bias, eps)
    assert (y.shape, y.dtype, y.device) == (x.shape, x.dtype, x.device)
    assert y.is_contiguous()
    assert error(y, exact(x, weight, bias, eps)) < LIMIT[x.dtype]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("N", LENGTHS + LONG)
def test_rows_of_every_length(N, dtype):
    skip_where_slow(N)
    M = 37 if N <= 512 else 2
    assert_right(random(M, N, dtype=dtype), random(N, seed=1, dtype=dtype), random(N, seed=2))


def in_chunks(M, N, align, *_):
    constants = {"BLOCK_N": 256, "ALIGN": align}
    return fast.layernorm_chunks_kernel, 1, constants, {"num_warps": 8}


@pytest.mark.parametrize("N", [1, 256, 700])
def test_a_row_in_chunks(N, monkeypatch):
    monkeypatch.setattr(fast, "choose", in_chunks)
    monkeypatch.setattr(fast, "_launches", {})
    assert_right(random(3, N) + 100, random(N, seed=1))


@pytest.mark.parametrize("N", [1, 33, 700])
def test_rows_for_an_older_triton(N, monkeypatch):
    monkeypatch.setattr(fast, "TUPLES", False)
    kernel, _, constants, _ = fast.choose(5, N, 1, torch.float32, (True, 132))
    assert kernel is fast.layernorm_chunks_kernel and constants["BLOCK_N"] < 2 * N
    monkeypatch.setattr(fast, "_launches", {})
    assert_right(random(5, N), random(N, seed=1))


def layouts(M, N):
    """x of two or more dimensions, its rows contiguous or not, by the layout's name."""
    wide, tall = random(M, N + 8, seed=3), random(2 * M, N, seed=4)
    return {
        "contiguous": random(M, N),
        "one row": random(N),
        "four dimensions": random(2, 3, M, N),
        "no rows": random(0, N),
        "rows of none": random(M, 0),
        "none of either": random(0, 3, 0),
        "columns of a wider": wide[:, :N],
        "columns of a wider, unaligned": wide[:, 3 : 3 + N],
        "every other row": tall[::2],
        "rows of a transposed": random(3, M, N, seed=5).transpose(0, 1),
        "transposed": random(N, M, seed=6).T,
        "every other column": random(M, 2 * N, seed=7)[:, ::2],
        "one row, expanded": random(N, seed=8).expand(M, N),
        "one column, expanded": random(M, 1, seed=9).expand(M, N),
        "negated view": torch.complex(wide, -wide).conj().imag[:, :N],
        "channels last": random(2, M, 3, N).to(memory_format=torch.channels_last),
    }


@pytest.mark.parametrize("N", [33, 520])
@pytest.mark.parametrize("name", layouts(2, 2))
def test_every_layout(name, N):
    x = layouts(3, N)[name]
    if x.numel() == 0:
        y = fast_layernorm(x)
        assert (y.shape, y.dtype, y.device) == (x.shape, x.dtype, x.device)
        return
    before = x.clone()
    weight, bias = random(2 * N, seed=1)[::2], random(N + 1, seed=2)[1:]
    for parameters in [(weight, bias), (weight, None), (None, bias), (None, None)][
        : 4 if N < 64 else 1
    ]:
        for _ in range(1 if INTERPRET else 2):  # on a GPU the second launch is from the cache
            assert_right(x, *parameters)
    assert torch.equal(x, before)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("other", DTYPES, ids=str)
def test_weight_and_bias_of_another_dtype(dtype, other):
    x, weight, bias = random(6, 96, dtype=dtype), random(96, dtype=other), random(96, seed=1)
    assert_right(x, weight, bias)
    assert_right(x, bias, weight)


def test_each_call_takes_its_own_values():
    x, weight, bias = random(4, 64), random(64, seed=1), random(64, seed=2)
    for seed in range(3):
        x = random(4, 64, seed=seed)
        assert_right(x, weight, bias, eps=10.0**-seed)
        assert_right(x, bias, weight, eps=1)
        assert_right(x, None, weight)


VALUES = {
    "ordinary": lambda x: x,
    "mean 1e4 times the deviation": lambda x: x + 1e4,
    "1e19": lambda x: x * 1e19,
    "1e-30": lambda x: x * 1e-30,
    "denormal": lambda x: x * 1e-40,
    "constant": lambda x: torch.full_like(x, 1234.567),
    "constant, negative": lambda x: torch.full_like(x, -0.1),
    "one outlier": lambda x: x.index_fill(1, torch.zeros(1, dtype=torch.long, device=DEVICE), 1e6),
}


@pytest.mark.parametrize("eps", [1e-5, 1e-12])
@pytest.mark.parametrize("kind", VALUES)
@pytest.mark.parametrize("N", [100, 256, 768])
def test_error_of_what_is_hard_to_add(N, kind, eps):
    x = VALUES[kind](random(8 if N < 600 else 2, N))
    assert_no_worse_than_torch(x, eps, floor=5e-6 if INTERPRET else 5e-7)


@on_a_gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("eps", [1e-5, 1e-12])
@pytest.mark.parametrize(
    "kind", [k for k in VALUES if k != "one outlier"]
)  # luck decides who rounds better
@pytest.mark.parametrize(
    "N", [64, 100, 512, 768, 1000, 1024, 4096, 5120, 10000, 32768, 65536, 2**17]
)
def test_error_is_at_most_a_twentieth_above_torchs(N, kind, eps, dtype):
    x = VALUES[kind](random(max(2**22 // N, 64), N)).to(dtype)
    assert_no_worse_than_torch(x, eps, random(N, seed=1).to(dtype), random(N, seed=2).to(dtype))


def assert_no_worse_than_torch(x, eps, weight=None, bias=None, floor=0.0):
    """The error against float64 is 1.05 times torch's at most, its largest 1.5 times; or floor."""
    expected = exact(x, weight, bias, eps)
    ours = fast_layernorm(x, weight, bias, eps)
    torchs = layer_norm(x, x.shape[-1:], weight, bias, eps)
    right = expected.isfinite() & torchs.isfinite()  # 1e19 is no float16, its square no float32
    assert ours[right].isfinite().all()
    ours, torchs, expected = (t.double()[right] for t in (ours, torchs, expected))
    if len(expected):
        scale = floor * expected.abs().max()
        error, torchs = ours - expected, torchs - expected
        assert error.norm() <= max(1.05 * torchs.norm(), scale * len(error) ** 0.5)
        assert error.abs().max() <= max(1.5 * torchs.abs().max(), scale)


@pytest.mark.parametrize("offset", [1e4, 1e6])
@pytest.mark.parametrize("N", [256, 1100, 4096, 32768, 40960, 65536, 2**17])
def test_a_mean_far_from_0_costs_no_bits(N, offset):
    skip_where_slow(N)
    x = random(4, N) + offset
    assert error(fast_layernorm(x), exact(x)) < (5e-6 if INTERPRET else 1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("N", [256, 1100, 32768, 65536, 2**17])
def test_rows_whose_variance_is_denormal(N, dtype):
    skip_where_slow(N)
    x = (random(4, N) * 1e-20).to(dtype)
    assert error(fast_layernorm(x, eps=0.0), exact(x, eps=0.0)) < 4e-3  # it has few bits


@pytest.mark.parametrize("N", [64, 90, 768, 1100, 65536])
def test_nan_and_infinity_stay_in_their_rows(N):
    skip_where_slow(N)
    x = random(9, N)
    x[1, 3], x[3, 0], x[5, N - 1] = float("nan"), float("inf"), float("-inf")
    y = fast_layernorm(x, random(N, seed=1))
    assert torch.equal(y.isnan(), layer_norm(x, (N,), random(N, seed=1)).isnan())
    sound = [0, 2, 4, 6, 7, 8]
    assert error(y[sound], exact(x[sound], random(N, seed=1))) < LIMIT[x.dtype]


@interpreted
@pytest.mark.parametrize("name", ["contiguous", "columns of a wider, unaligned", "every other row"])
@pytest.mark.parametrize("N", [33, 64, 600])
@pytest.mark.parametrize("chunks", [False, True])
def test_it_reads_its_inputs_and_writes_its_output_and_nothing_else(name, N, chunks, monkeypatch):
    if chunks:
        monkeypatch.setattr(fast, "choose", in_chunks)
    # The last program of several rows takes up some of the one before.
    x, weight, bias = layouts(21 if N < 600 else 2, N)[name], random(N, seed=1), random(N, seed=2)
    with watched.record() as launches:
        y = fast_layernorm(x, weight, bias)
    (launch,) = launches
    assert np.array_equal(np.unique(launch.written()), np.sort(watched.addresses(y).ravel()))
    M = len(y)
    rows = fast.choose(M, N, 1, x.dtype, (False, 1))[1]
    assert launch.written().size == triton.cdiv(M, rows) * rows * N
    inputs = [watched.addresses(t).ravel() for t in (x, weight, bias)]
    assert np.array_equal(np.unique(launch.read()), np.unique(np.concatenate(inputs)))


class Subclass(torch.Tensor):
    pass


def freed(*shape, offset=0):
    tensor = torch.zeros(offset + math.prod(shape), device=DEVICE)[offset:].view(shape)
    tensor.untyped_storage().resize_(0)
    return tensor


X, W = torch.zeros(4, 8, device=DEVICE), torch.zeros(8, device=DEVICE)
CPU = {} if INTERPRET else {"the CPU's": (ValueError, (X.cpu(),), "x on cpu")}
REFUSED = CPU | {
    "float64": (TypeError, (X.double(),), "x torch.float64"),
    "integers": (TypeError, (X.long(),), "x torch.int64"),
    "complex": (TypeError, (X.cfloat(),), "x torch.complex64"),
    "a float64 weight": (TypeError, (X, W.double()), "x torch.float32, weight torch.float64"),
    "a float64 bias": (TypeError, (X, None, W.double()), "x torch.float32, bias torch.float64"),
    "a list": (TypeError, ([[1.0]],), "x <class 'list'>"),
    "no x": (TypeError, (None,), "x <class 'NoneType'>"),
    "an array": (TypeError, (np.zeros((2, 2), np.float32),), "x <class 'numpy.ndarray'>"),
    "sparse": (TypeError, (X.to_sparse(),), r"x torch.float32 \(torch.sparse_coo\)"),
    "nested": (TypeError, (torch.nested.nested_tensor([W]),), r"x torch.float32 \(nested\)"),
    "a subclass": (TypeError, (X.as_subclass(Subclass),), "x <class '.*Subclass'>"),
    "freed": (ValueError, (freed(4, 8), W), "in memory, got x without"),
    "a freed bias": (ValueError, (X, W, freed(8)), "in memory, got bias without"),
    "a freed part": (ValueError, (X, freed(8, offset=64)), "in memory, got weight without"),
    "no parameter yet": (TypeError, (X, torch.nn.UninitializedParameter()), "UninitializedParam"),
    "no dimension": (ValueError, (X[0, 0],), r"x \(\)"),
    "a long weight": (ValueError, (X, W.repeat(2)), r"x \(4, 8\), weight \(16,\)"),
    "a weight of one": (ValueError, (X, W[:1]), r"x \(4, 8\), weight \(1,\)"),
    "a weight of x's shape": (ValueError, (X, X), r"weight \(4, 8\)"),
    "a short bias": (ValueError, (X, W, W[1:]), r"bias \(7,\)"),
    "a long row": (ValueError, (W[:1].expand(2**20 + 1),), r"at most 2\*\*20, got x \(1048577,\)"),
    "two devices": (ValueError, (X, W.to("meta")), f"x on {DEVICE}.*, weight on meta"),
    "x wants a gradient": (ValueError, (X.clone().requires_grad_(),), "no backward, and x"),
    "weight wants one": (ValueError, (X, torch.nn.Parameter(W)), "no backward, and weight"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_it_refuses(name, monkeypatch):
    error, arguments, message = REFUSED[name]
    monkeypatch.setattr(fast, "choose", None)  # nothing may come as far
    with pytest.raises(error, match=message):
        fast_layernorm(*arguments)


def test_it_refuses_a_transform():
    with pytest.raises(ValueError, match="in memory, got x without"):
        torch.func.vmap(fast_layernorm)(X)


@pytest.mark.parametrize("offset", [0, 64])
def test_a_freed_tensor_is_no_known_one(kernel, offset):
    x, weight = random(4, 64), random(128)[offset : offset + 64]
    fast_layernorm(x, weight)
    weight.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match="in memory, got weight without"):
        fast_layernorm(x, weight)


@pytest.mark.parametrize(
    "x, align",
    [
        (random(40, 64), 16),
        (random(40, 60), 4),
        (random(40, 72)[:, :64], 8),
        (random(40, 65)[:, :64], 1),
        (random(40, 80)[:, 1:65], 1),  # in memory at no multiple of 16 bytes
        (random(64).expand(40, 64), 16),
        (random(2, 68)[1:, :64], 16),  # a single row: its stride is another
    ],
)
def test_what_rows_are_said_to_begin_at_multiples_of(kernel, x, align):
    fast_layernorm(x)
    ((_, _, options),) = kernel.launches
    assert options["ALIGN"] == align


def test_a_gradient_is_refused_only_where_it_is_wanted():
    module = torch.nn.LayerNorm(64, device=DEVICE)
    x = random(4, 64)
    for _ in range(2):  # what is known of the first time must not let the second pass
        with torch.no_grad():
            assert_right(x, module.weight, module.bias)
        with pytest.raises(ValueError, match="weight, bias requires a gradient"):
            fast_layernorm(x, module.weight, module.bias)


class Compiled:
    """What a launch returns on a GPU; run() notes what it is called with."""

    function, packed_metadata = "function", "metadata"

    def __init__(self):
        self.runs = []

    def run(self, *arguments):
        self.runs.append(arguments)


class Kernel:
    """In a kernel's place: a launch is noted, and returns what Triton has compiled."""

    def __init__(self, kernel):
        self.kernel, self.launches, self.compiled = kernel, [], Compiled()

    def __getitem__(self, grid):
        def launch(*arguments, **options):
            self.launches.append((grid, arguments, options))
            return self.compiled

        return launch


@pytest.fixture
def kernel(monkeypatch):
    """layernorm_rows_kernel, which takes rows of 64, as on a GPU that launches nothing."""
    kernel = Kernel(fast.layernorm_rows_kernel)
    monkeypatch.setattr(fast, "layernorm_rows_kernel", kernel)
    monkeypatch.setattr(fast, "_launches", {})
    monkeypatch.setattr(fast, "RELAUNCH", True)
    monkeypatch.setattr(torch.cuda, "current_device", X.get_device)
    active = types.SimpleNamespace(get_current_stream=lambda device: "stream")
    monkeypatch.setattr(triton.runtime, "driver", types.SimpleNamespace(active=active))
    return kernel


def test_the_second_launch_is_as_the_first(kernel):
    for seed in range(3):
        x, weight, bias = random(40, 64, seed=seed), random(64), random(64, seed=1)
        out = fast_layernorm(x, weight, bias, eps=seed)
        assert (len(kernel.launches), len(kernel.compiled.runs)) == (1, seed)
    ((grid, arguments, options),) = kernel.launches
    *grid_of_last, stream, function, metadata, _, _, _ = kernel.compiled.runs[-1][:9]
    assert (*grid_of_last, stream, function, metadata) == (
        *grid,
        1,
        1,
        "stream",
        "function",
        "metadata",
    )
    named = dict(zip(kernel.kernel.arg_names, arguments, strict=False)) | options | {"eps": 2.0}
    tensors, rest = kernel.compiled.runs[-1][9:13], kernel.compiled.runs[-1][13:]
    assert tensors == tuple(t.data_ptr() for t in (x, weight, bias, out))
    assert list(rest) == [named[name] for name in kernel.kernel.arg_names[4:]]


def test_what_decides_a_launch(kernel):
    x, weight, bias = random(40, 64), random(64), random(64, seed=1)
    wide = random(40, 80)
    calls = [
        (x, weight, bias),
        (x, weight),
        (x, None, bias),
        (x[:39], weight, bias),
        (x.view(4, 10, 64), weight, bias),
        (x.half(), weight, bias),
        (x, weight.half(), bias),
        (x, weight, bias.half()),
        (wide[:, :64], weight, bias),
        (wide[:, 1:65], weight, bias),
        (x, wide[0, 1:65], bias),
        (torch._neg_view(x), weight, bias),
        (x, torch._neg_view(weight), bias),
        (x.t().contiguous().t(), weight, bias),
    ]
    for count, arguments in enumerate(calls, 1):
        fast_layernorm(*arguments)
        assert (len(kernel.launches), len(kernel.compiled.runs)) == (count, 0)
    fast_layernorm(x.clone(), bias, weight)
    assert (len(kernel.launches), len(kernel.compiled.runs)) == (count, 1)
    with pytest.raises(ValueError, match="no backward, and x"):
        fast_layernorm(x.clone().requires_grad_(), weight, bias)


@on_a_gpu
@pytest.mark.parametrize("N", [1, 1024, 65536])
def test_more_than_2_to_the_31_elements(N):
    M = 2**31 // N + 3
    x = torch.zeros(M, N, dtype=torch.float16, device=DEVICE)
    ends = torch.tensor([0, 1, M - 2, M - 1], device=DEVICE)
    x[ends] = random(4, N, dtype=torch.float16)
    bias = torch.ones(N, dtype=torch.float16, device=DEVICE)
    y = fast_layernorm(x, None, bias)
    assert error(y[ends], exact(x[ends], None, bias)) < LIMIT[x.dtype]
    assert (y[2:-2] == 1).all()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("N", [64, 1024, 65536])
def test_on_another_gpu_than_the_current(N):
    for _ in range(2):
        for device in ("cuda:1", "cuda:0"):
            x, weight = random(4, N).to(device), random(N, seed=1).to(device)
            assert_right(x, weight)
            assert torch.cuda.current_device() == 0
    with pytest.raises(ValueError, match="x on cuda:0, weight on cuda:1"):
        fast_layernorm(x, weight.to("cuda:1"))
