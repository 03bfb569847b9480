"""beyond/fast_layernorm.py: its values, what it reads and writes, and how long rows may be."""

import numpy as np
import pytest
import torch
import watched
from helpers import DEVICE, INTERPRET, interpreted, load, on_a_gpu
from torch.nn.functional import layer_norm

fast = load("beyond/fast_layernorm.py")
fast_layernorm = fast.fast_layernorm
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
# Of the relative error. Triton's interpreter adds one value after the other.
LIMIT = {torch.float32: 2e-6 if INTERPRET else 4e-7, torch.float16: 4e-4, torch.bfloat16: 3e-3}
# Every step and table row of choose(), each at its end and just past it; with odd ones.
LENGTHS = [1, 2, 31, 64, 65, 96, 97, 256, 300, 513, 520, 768, 1001]
HARD, LONG = [100, 768], []
if not INTERPRET:  # the interpreter is slow
    LENGTHS += [100, 257, 385, 512, 1000, 1025, 1536, 1792, 2048, 2560, 3584, 5120, 7168, 9000]
    LENGTHS += [12288, 16384, 20480, 24576, 32768, 40960, 1793, 2049, 4097, 8193, 16383, 16385]
    LENGTHS += [32769, 50256, 65535, 65536, 65537, 2**17 + 8, 2**20]
    HARD += [64, 512, 1000, 1024, 4096, 5120, 10000, 32768, 65536, 2**17]
    LONG += [4096, 32768, 40960, 65536, 2**17]


def random(*shape, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(DEVICE, dtype)


def exact(x, weight=None, bias=None, eps=1e-5):
    """LayerNorm in float64."""
    weight, bias = (t if t is None else t.double() for t in (weight, bias))
    return layer_norm(x.double(), x.shape[-1:], weight, bias, eps)


def error(y, expected):
    """The relative error in the Frobenius norm."""
    return ((y.double() - expected).norm() / expected.norm().clamp(min=1e-300)).item()


def assert_right(x, weight=None, bias=None):
    """fast_layernorm's shape, dtype and values, within what rounding to x's dtype explains."""
    y = fast_layernorm(x, weight, bias)
    assert (y.shape, y.dtype, y.device) == (x.shape, x.dtype, x.device)
    assert y.is_contiguous()
    assert error(y, exact(x, weight, bias)) < LIMIT[x.dtype]


@pytest.mark.parametrize("dtype", DTYPES[: 2 if INTERPRET else 3], ids=str)  # bfloat16: as float32
@pytest.mark.parametrize("N", LENGTHS)
def test_rows_of_every_length(N, dtype):
    M = 21 if N <= 64 else 5 if N <= 512 else 2
    assert_right(random(M, N, dtype=dtype), random(N, seed=1, dtype=dtype), random(N, seed=2))


def in_chunks(M, N, align, *_):
    constants = {"BLOCK_N": 256, "ALIGN": align}
    return fast.layernorm_chunks_kernel, 1, constants, {"num_warps": 8}


@pytest.mark.parametrize("N", [1, 33, 256, 700])
@pytest.mark.parametrize("name, value", [("choose", in_chunks), ("TUPLES", False)])
def test_rows_in_chunks(name, value, N, monkeypatch):
    """Chunks of 256, and those that an older Triton takes."""
    monkeypatch.setattr(fast, name, value)
    monkeypatch.setattr(fast, "_launches", {})
    with watched.record() as launches:
        assert_right(random(3, N) + 100, random(N, seed=1))
    assert all(launch.name == "layernorm_chunks_kernel" for launch in launches)


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
    x = layouts(2, N)[name]
    n = x.shape[-1]
    for _ in range(1 if INTERPRET else 2):  # on a GPU the second launch is from the cache
        assert_right(x, random(2 * n, seed=1)[::2], random(n + 1, seed=2)[1:])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("other", DTYPES, ids=str)
def test_weight_and_bias_of_another_dtype_or_none(dtype, other):
    x, weight, bias = random(2, 96, dtype=dtype), random(96, dtype=other), random(96, seed=1)
    for parameters in [(weight, bias), (bias, weight), (weight, None), (None, weight), ()]:
        assert_right(x, *parameters)


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


@pytest.mark.parametrize("dtype", DTYPES[: 1 if INTERPRET else 3], ids=str)
@pytest.mark.parametrize("eps", [1e-5, 1e-12])
@pytest.mark.parametrize("kind", VALUES)
@pytest.mark.parametrize("N", HARD)
def test_error_is_at_most_a_twentieth_above_torchs(N, kind, eps, dtype):
    """Against float64; the largest error half more at most."""
    M = max(400 // N, 2) if INTERPRET else max(2**22 // N, 64)
    x = VALUES[kind](random(M, N)).to(dtype)
    weight, bias = random(N, seed=1).to(dtype), random(N, seed=2).to(dtype)
    expected = exact(x, weight, bias, eps)
    ours = fast_layernorm(x, weight, bias, eps)
    torchs = layer_norm(x, x.shape[-1:], weight, bias, eps)
    right = expected.isfinite() & torchs.isfinite()  # 1e19 is no float16, its square no float32
    assert ours[right].isfinite().all()
    ours, torchs, expected = (t.double()[right] for t in (ours, torchs, expected))
    if len(expected):
        # Luck decides who rounds an outlier better.
        floor = 5e-6 if INTERPRET else 5e-7 if kind == "one outlier" else 0.0
        scale = floor * expected.abs().max()
        error, torchs = ours - expected, torchs - expected
        assert error.norm() <= max(1.05 * torchs.norm(), scale * len(error) ** 0.5)
        assert error.abs().max() <= max(1.5 * torchs.abs().max(), scale)


@pytest.mark.parametrize("N", [256, 1100, *LONG])
def test_a_mean_far_from_0_costs_no_bits_and_a_denormal_variance_few(N):
    for offset in (1e4, 1e6):
        x = random(2, N) + offset
        assert error(fast_layernorm(x), exact(x)) < (5e-6 if INTERPRET else 1e-6)
    for dtype in (torch.float32, torch.bfloat16):
        x = (random(2, N) * 1e-20).to(dtype)
        assert error(fast_layernorm(x, eps=0.0), exact(x, eps=0.0)) < 4e-3


@pytest.mark.parametrize("N", [64, 90, 768, 1100, *LONG])
def test_nan_and_infinity_stay_in_their_rows(N):
    x, weight, sound = random(6, N), random(N, seed=1), [0, 3, 5]
    x[1, 3], x[2, 0], x[4, N - 1] = float("nan"), float("inf"), float("-inf")
    y = fast_layernorm(x, weight)
    assert torch.equal(y.isnan(), layer_norm(x, (N,), weight).isnan())
    assert error(y[sound], exact(x[sound], weight)) < LIMIT[x.dtype]


@interpreted
@pytest.mark.parametrize("name", ["contiguous", "columns of a wider, unaligned", "every other row"])
@pytest.mark.parametrize("N, chunks", [(33, False), (64, False), (600, False), (600, True)])
def test_it_reads_its_inputs_and_writes_its_output_and_nothing_else(name, N, chunks, monkeypatch):
    if chunks:
        monkeypatch.setattr(fast, "choose", in_chunks)
    x, weight, bias = layouts(11 if N < 600 else 2, N)[name], random(N, seed=1), random(N, seed=2)
    with watched.record() as launches:
        y = fast_layernorm(x, weight, bias)
    (launch,) = launches
    assert np.array_equal(np.unique(launch.written()), np.sort(watched.addresses(y).ravel()))
    # The last program of several rows takes up some of the one before: here less than all.
    assert launch.written().size < 2 * y.numel()
    inputs = [watched.addresses(t).ravel() for t in (x, weight, bias)]
    assert np.array_equal(np.unique(launch.read()), np.unique(np.concatenate(inputs)))


def test_what_rows_are_said_to_begin_at_multiples_of(monkeypatch):
    found, choose = [], fast.choose
    monkeypatch.setattr(fast, "_launches", {})
    monkeypatch.setattr(fast, "choose", lambda *of: found.append(of[2]) or choose(*of))
    for x in (
        random(4, 64),
        random(4, 60),
        random(4, 72)[:, :64],
        random(4, 65)[:, :64],
        random(4, 80)[:, 1:65],  # in memory at no multiple of 16 bytes
        random(64).expand(4, 64),
        random(2, 68)[1:, :64],  # a single row: its stride is another
    ):
        fast_layernorm(x)
    assert found == [16, 4, 8, 1, 1, 16, 16]


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
