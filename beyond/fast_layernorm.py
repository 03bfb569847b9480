"""LayerNorm at memory speed: the kernel of Section 20.3, taken to what a GPU's memory gives.

    from fast_layernorm import fast_layernorm
    y = fast_layernorm(x, weight, bias)  # as torch.nn.functional.layer_norm(x, x.shape[-1:], ...)

Four kernels, each one idea further than the chapter's layernorm_forward_kernel. What each gains is
measured by benchmark.py, and told in README.md:

layernorm_rows_kernel takes several rows a program, where one is too short to keep it busy; some of
them in pieces, as the next does.
layernorm_pieces_kernel takes a row in pieces, and so needs no power of two as long as the row. It
reads most rows again for the output, from the cache (REREAD); of a long one in half precision it
keeps the 16-bit values, and not twice as many registers of float32 (HIDE).
layernorm_ring_kernel keeps most of a row in shared memory, where float32 outgrows the registers.
layernorm_chunks_kernel reads a row of any length, twice.

Where row length or stride is no multiple of 16, they are told what it is a multiple of (ALIGN).

All compute in float32. Where a row's sum may lose bits (CORRECT), the mean is corrected by what is
left of the differences from it: the corrected two-pass algorithm of Chan, Golub and LeVeque,
"Algorithms for Computing the Sample Variance", 1983. The last two kernels see a row's parts one by
one: they take mean and squares of each column of them, by Welford's algorithm, and merge the
columns as Chan, Golub and LeVeque do.
"""

import functools
import math
import os

import torch

# Triton looks at TRITON_INTERPRET as it is imported: without a GPU, switch its interpreter on.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

import triton
import triton.language as tl

try:
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia.ampere import async_copy
except ModuleNotFoundError:  # an older triton, where layernorm_ring_kernel is not launched
    gluon, gl, async_copy = triton, tl, None

VERSION = tuple(map(int, triton.__version__.split(".")[:2]))
TUPLES = VERSION >= (3, 4)  # before, there were none in kernels: chunks take all rows, and longer
TRITON_3_6 = VERSION >= (3, 6)  # before, gluon was another, and compiled.run took other arguments
TENSORS = (torch.Tensor, torch.nn.Parameter)  # other subclasses may hold their values elsewhere
BITS = {torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}  # of a significand


@triton.jit
def add_pairs(a, b, c, d):
    return a + c, b + d


@triton.jit
def multiple(n, ALIGN: tl.constexpr):
    """n, so that the compiler sees what it is a multiple of, and loads more than a value at once.

    Triton looks only for multiples of 16: rows of 1000 would be loaded value by value.
    """
    return n // ALIGN * ALIGN if ALIGN < 16 else n


@triton.jit
def load(ptr, cols, N, MASKED: tl.constexpr, EVICTION: tl.constexpr):
    if MASKED:
        return tl.load(ptr + cols, mask=cols < N, other=0.0, eviction_policy=EVICTION)
    return tl.load(ptr + cols, eviction_policy=EVICTION)


@triton.jit
def store(ptr, cols, x, N, MASKED: tl.constexpr, EVICTION: tl.constexpr):
    x = x.to(ptr.dtype.element_ty)
    if MASKED:
        tl.store(ptr + cols, x, mask=cols < N, eviction_policy=EVICTION)
    else:
        tl.store(ptr + cols, x, eviction_policy=EVICTION)


@triton.jit
def scale_and_shift(
    x_norm, gamma_ptr, beta_ptr, cols, N, MASKED: tl.constexpr, EVICTION: tl.constexpr
):
    if gamma_ptr is not None:
        x_norm *= load(gamma_ptr, cols, N, MASKED, EVICTION).to(tl.float32)
    if beta_ptr is not None:
        x_norm += load(beta_ptr, cols, N, MASKED, EVICTION).to(tl.float32)
    return x_norm


@triton.jit
def mean_of(sum, N):
    """sum / N, and not an approximation: equal values have themselves as their mean.

    tl.div_rn is as exact, but its way out for extreme values takes registers, and so speed.
    """
    inv_n = 1.0 / N
    mean = sum * inv_n
    return tl.fma(tl.fma(-mean, N + 0.0, sum), inv_n, mean)


@triton.jit
def inv_sqrt(x, EXACT: tl.constexpr):
    """1 / sqrt(x); EXACT, where the output may show what tl.rsqrt's approximation loses."""
    tiny = x < 1e-30  # tl.rsqrt takes what is below 2**-126 for 0
    near = tl.rsqrt(tl.where(tiny, x * 2.0**64, x))
    near = tl.where(tiny, near * 2.0**32, near)
    if EXACT:
        error = 1.0 - x * near * near
        near = tl.where(error == error, near + 0.5 * near * error, near)  # NaN: x is 0 or infinite
    return near


@triton.jit
def inv_std_and_rest(squares, diff, N, eps, axis: tl.constexpr, CORRECT: tl.constexpr):
    """From x - mean and its squares: 1 / std, and by how much the mean was still too small."""
    if CORRECT:
        sum_squares, sum_diff = tl.reduce((squares, diff), axis, add_pairs)
        rest = mean_of(sum_diff, N)
        return inv_sqrt(sum_squares / N - rest * rest + eps, True), rest
    inv_std = inv_sqrt(tl.sum(squares, axis=axis) * (1.0 / N) + eps, False)
    return inv_std, tl.zeros_like(inv_std)


@triton.jit(do_not_specialize=["M"])
def layernorm_rows_kernel(
    x_ptr,  # (M, N) input, its columns contiguous
    gamma_ptr,  # (N,) scale, or None
    beta_ptr,  # (N,) shift, or None
    out_ptr,  # (M, N) output, contiguous
    M,
    N,
    stride_m,
    eps,
    ROWS: tl.constexpr,  # at most M
    PIECES: tl.constexpr,
    BLOCK_N: tl.constexpr,  # a power of two: the columns of a piece
    MASKED: tl.constexpr,  # does the last piece reach past the row?
    CORRECT: tl.constexpr,
    ALIGN: tl.constexpr,  # a power of two that divides N and stride_m, at most 16
):
    N, stride_m = multiple(N, ALIGN), multiple(stride_m, ALIGN)
    # The last program takes up rows of the one before, where its own are too few, and writes the
    # same values. A mask for each row would cost more, and delay the loads.
    first = tl.minimum(tl.program_id(0).to(tl.int64) * ROWS, M - ROWS)
    rows = tl.arange(0, ROWS).to(tl.int64)[:, None]
    cols = tl.arange(0, BLOCK_N)
    x = ()
    for p in tl.static_range(PIECES):
        c = (p * BLOCK_N + cols)[None, :]
        x_rows = x_ptr + first * stride_m + rows * stride_m
        x = x + (load(x_rows, c, N, MASKED and p == PIECES - 1, "").to(tl.float32),)
    sums = x[0]
    for p in tl.static_range(1, PIECES):
        sums += x[p]
    mean = mean_of(tl.sum(sums, axis=1), N)[:, None]

    diffs = x[PIECES - 1] - mean
    squares = diffs * diffs
    if MASKED:
        beyond = (PIECES - 1) * BLOCK_N + cols >= N
        diffs, squares = tl.where(beyond, 0.0, diffs), tl.where(beyond, 0.0, squares)
    for p in tl.static_range(PIECES - 1):
        diff = x[p] - mean
        squares += diff * diff
        diffs += diff
    inv_std, rest = inv_std_and_rest(squares, diffs, N, eps, 1, CORRECT)

    for p in tl.static_range(PIECES):
        c = p * BLOCK_N + cols
        x_norm = (x[p] - mean - rest[:, None]) * inv_std[:, None]
        x_norm = scale_and_shift(x_norm, gamma_ptr, beta_ptr, c, N, MASKED and p == PIECES - 1, "")
        out_rows = out_ptr + first * N + rows * N
        store(out_rows, c[None, :], x_norm, N, MASKED and p == PIECES - 1, "")


@triton.jit
def same(x, HIDE: tl.constexpr):
    """x; with HIDE in a way that the compiler cannot see through, so that it converts 16-bit values
    anew at each use, instead of keeping them as float32 in twice the registers.
    """
    if HIDE:
        x = tl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False, pack=2
        )
    return x


@triton.jit(do_not_specialize=["M"])
def layernorm_pieces_kernel(
    x_ptr,  # (M, N) input, its columns contiguous
    gamma_ptr,  # (N,) scale, or None
    beta_ptr,  # (N,) shift, or None
    out_ptr,  # (M, N) output, contiguous
    M,
    N,
    stride_m,
    eps,
    PIECES: tl.constexpr,
    BLOCK_N: tl.constexpr,  # a power of two: the columns of a piece
    MASKED: tl.constexpr,  # does the last piece reach past the row?
    CORRECT: tl.constexpr,
    HIDE: tl.constexpr,  # does the row stay in 16 bits?
    REREAD: tl.constexpr,  # is the row read once more, from the cache, rather than held to the end?
    ALIGN: tl.constexpr,  # a power of two that divides N and stride_m, at most 16
):
    N, stride_m = multiple(N, ALIGN), multiple(stride_m, ALIGN)
    row = tl.program_id(0).to(tl.int64)
    x_row, out_row = x_ptr + row * stride_m, out_ptr + row * N
    cols = tl.arange(0, BLOCK_N)
    pieces = ()
    for p in tl.static_range(PIECES):
        c = p * BLOCK_N + cols
        piece = load(x_row, c, N, MASKED and p == PIECES - 1, "evict_last" if REREAD else "")
        pieces = pieces + (piece,)

    sums = tl.zeros([BLOCK_N], tl.float32)
    for p in tl.static_range(PIECES):
        sums += pieces[p].to(tl.float32)
    mean = mean_of(tl.sum(sums, axis=0), N)

    squares, diffs = tl.zeros([BLOCK_N], tl.float32), tl.zeros([BLOCK_N], tl.float32)
    again = ()
    for p in tl.static_range(PIECES):
        again = again + (same(pieces[p], HIDE),)
        diff = again[p].to(tl.float32) - mean
        if MASKED and p == PIECES - 1:
            diff = tl.where(p * BLOCK_N + cols < N, diff, 0.0)
        squares += diff * diff
        diffs += diff
    inv_std, rest = inv_std_and_rest(squares, diffs, N, eps, 0, CORRECT)

    for p in tl.static_range(PIECES):
        c = p * BLOCK_N + cols
        if REREAD:
            x = load(x_row, c, N, MASKED and p == PIECES - 1, "evict_first")
        else:
            x = same(again[p], HIDE)
        x_norm = (x.to(tl.float32) - mean - rest) * inv_std
        x_norm = scale_and_shift(
            x_norm, gamma_ptr, beta_ptr, c, N, MASKED and p == PIECES - 1, "evict_last"
        )
        store(out_row, c, x_norm, N, MASKED and p == PIECES - 1, "evict_first")


@gluon.jit
def load_affine(gamma_ptr, beta_ptr, cols):
    """gamma and beta, evict_last: every row reads them, and L2 is what limits it otherwise."""
    gamma, beta = 1.0, 0.0
    if gamma_ptr is not None:
        gamma = gl.load(gamma_ptr + cols, eviction_policy="evict_last").to(gl.float32)
    if beta_ptr is not None:
        beta = gl.load(beta_ptr + cols, eviction_policy="evict_last").to(gl.float32)
    return gamma, beta


@gluon.jit(do_not_specialize=["M"])
def layernorm_ring_kernel(
    x_ptr,  # (M, N) float32 input, its columns contiguous
    gamma_ptr,  # (N,) scale, or None
    beta_ptr,  # (N,) shift, or None
    out_ptr,  # (M, N) float32 output, contiguous
    M,
    N,  # (1 + SLOTS) * BLOCK_N
    stride_m,
    eps,
    SLOTS: gl.constexpr,  # pieces of a row in shared memory: all but the first
    BLOCK_N: gl.constexpr,  # a power of two: the columns of a piece
    ALIGN: gl.constexpr,  # a power of two that divides stride_m, at most 16
):
    stride_m = multiple(stride_m, ALIGN)
    # A thread reads only what it has copied itself, 16 bytes at a time.
    layout: gl.constexpr = gl.BlockedLayout([4], [32], [gl.num_warps()], [0])
    shared: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    cols = gl.arange(0, BLOCK_N, layout=layout)
    x_row = x_ptr + gl.program_id(0).to(gl.int64) * stride_m
    first = gl.load(x_row + cols)
    slots = ()
    for p in gl.static_range(SLOTS):
        slots = slots + (gl.allocate_shared_memory(gl.float32, [BLOCK_N], shared),)
        async_copy.async_copy_global_to_shared(slots[p], x_row + (p + 1) * BLOCK_N + cols)
        async_copy.commit_group()
    for row32 in range(gl.program_id(0), M, gl.num_programs(0)):
        row = row32.to(gl.int64)
        x_row, out_row = x_ptr + row * stride_m, out_ptr + row * N
        # As the pieces come in, each column's mean over them, and squares: Welford's algorithm. Of
        # differences from the first piece, which are small where the mean is large.
        means = gl.zeros([BLOCK_N], gl.float32, layout=layout)
        squares = gl.zeros([BLOCK_N], gl.float32, layout=layout)
        for p in gl.static_range(SLOTS):
            async_copy.wait_group(SLOTS - 1 - p)
            x = slots[p].load(layout) - first
            diff = x - means
            means += diff * (1.0 / (p + 2))
            squares += diff * (x - means)
        gamma, beta = load_affine(gamma_ptr, beta_ptr, cols)
        mean = gl.sum(first, axis=0) * (1.0 / BLOCK_N)
        diff = first - mean + means
        squares += diff * diff * (SLOTS + 1)
        sum_squares, sum_diff = gl.reduce((squares, diff), 0, add_pairs)
        rest = sum_diff * (1.0 / BLOCK_N)
        inv_std = inv_sqrt(sum_squares / N - rest * rest + eps, True)

        # As soon as a piece goes out, the next row's comes in.
        next_row = x_row + gl.num_programs(0).to(gl.int64) * stride_m
        mask = (cols < N) & (row + gl.num_programs(0) < M)
        x = first
        for p in gl.static_range(SLOTS + 1):
            c = p * BLOCK_N + cols
            if p > 0:
                x = slots[p - 1].load(layout)
            x_norm = (x - mean - rest) * inv_std * gamma + beta
            if p < SLOTS:
                gamma, beta = load_affine(gamma_ptr, beta_ptr, BLOCK_N + c)
            if p == 0:
                first = gl.load(next_row + c, mask=mask, other=0.0)
            else:
                async_copy.async_copy_global_to_shared(slots[p - 1], next_row + c, mask=mask)
                async_copy.commit_group()
            gl.store(out_row + c, x_norm)


@triton.jit(do_not_specialize=["M"])
def layernorm_chunks_kernel(
    x_ptr,  # (M, N) input, its columns contiguous
    gamma_ptr,  # (N,) scale, or None
    beta_ptr,  # (N,) shift, or None
    out_ptr,  # (M, N) output, contiguous
    M,
    N,
    stride_m,
    eps,
    BLOCK_N: tl.constexpr,  # a power of two: the columns of a chunk
    ALIGN: tl.constexpr,  # a power of two that divides N and stride_m, at most 16
):
    N, stride_m = multiple(N, ALIGN), multiple(stride_m, ALIGN)
    row = tl.program_id(0).to(tl.int64)
    x_row, out_row = x_ptr + row * stride_m, out_ptr + row * N
    cols = tl.arange(0, BLOCK_N)
    # Less is lost of differences from a value near the mean: the first chunk's.
    near = tl.sum(load(x_row, cols, N, True, "").to(tl.float32), axis=0)
    near /= tl.minimum(N, BLOCK_N)
    # Each column's mean over the chunks, and squares: Welford's algorithm.
    means, squares = tl.zeros([BLOCK_N], tl.float32), tl.zeros([BLOCK_N], tl.float32)
    whole = N // BLOCK_N
    for i in range(whole):
        c = i * BLOCK_N + cols
        x = load(x_row, c, N, False, "evict_last").to(tl.float32) - near
        diff = x - means
        means += diff * (1.0 / (i + 1))
        squares += diff * (x - means)
    c = whole * BLOCK_N + cols
    x = load(x_row, c, N, True, "evict_last").to(tl.float32) - near
    diff = tl.where(c < N, x - means, 0.0)
    means += diff * (1.0 / (whole + 1))
    squares += diff * (x - means)
    # The columns together, as Chan, Golub and LeVeque merge them.
    count = tl.where(c < N, whole + 1, whole).to(tl.float32)
    mean = mean_of(tl.sum(count * means, axis=0), N)
    squares += count * (means - mean) * (means - mean)
    inv_std = inv_sqrt(tl.sum(squares, axis=0) / N + eps, True)
    # Backwards: what was read last is still in the cache.
    for i in range((N - 1) // BLOCK_N, -1, -1):
        c = i * BLOCK_N + cols
        x = load(x_row, c, N, True, "evict_first").to(tl.float32)
        x_norm = (x - near - mean) * inv_std
        x_norm = scale_and_shift(x_norm, gamma_ptr, beta_ptr, c, N, True, "evict_last")
        store(out_row, c, x_norm, N, True, "evict_first")


INTERPRET = not isinstance(layernorm_rows_kernel, triton.JITFunction)
DEVICE = "cpu" if INTERPRET else "cuda"
GPUS = torch.cuda.device_count() > 1  # is there one that is not the current?

# For rows of up to so many columns: the columns of a piece, the warps of a program, the most
# registers of a thread (None: what the compiler takes), REREAD and HIDE. On an H200 the fastest of
# what was tried: 1 to 40 pieces, 1 to 32 warps, rows held and rows read again.
# results/layernorm.csv has what some of them reach.
FLOAT32 = {
    768: (1024, 2, None, True, False),
    1024: (1024, 4, None, True, False),
    1280: (512, 4, None, True, False),
    1792: (2048, 4, None, True, False),
    2048: (2048, 8, None, True, False),
    2560: (512, 8, None, True, False),
    4095: (4096, 8, None, True, False),
    4096: (4096, 8, 64, True, False),
    6144: (1024, 16, None, True, False),
    8192: (2048, 16, None, True, False),
    16384: (4096, 16, None, True, False),
    20480: (4096, 32, None, True, False),
    32767: (8192, 32, None, False, False),
    32768: (32768, 32, None, False, False),
}
HALF = {
    768: (256, 1, None, False, False),
    1792: (512, 1, None, True, False),
    2048: (2048, 4, None, True, False),
    3072: (1024, 2, None, True, False),
    3584: (2048, 4, None, True, False),
    4096: (4096, 8, None, True, False),
    5120: (1024, 4, None, True, False),
    6144: (2048, 4, None, True, False),
    8192: (1024, 8, None, True, False),
    10240: (2048, 4, None, True, False),
    12288: (2048, 8, None, True, False),
    16384: (4096, 8, None, True, False),
    24576: (8192, 8, None, False, True),
    32768: (8192, 8, 128, False, True),
    45056: (8192, 16, None, False, True),
    65536: (16384, 16, None, False, True),
}
# The same for rows of an odd length or stride, or at an address that is no multiple of 16: they are
# read a value at a time.
FLOAT32_ODD = {
    1280: (128, 4, None, False, False),
    2560: (256, 8, None, False, False),
    8192: (512, 16, None, False, False),
    16384: (1024, 32, None, False, False),
}
HALF_ODD = {
    1792: (64, 1, None, False, False),
    3072: (128, 4, None, False, False),
    10240: (256, 8, None, False, False),
    16384: (512, 16, None, False, False),
}


def choose(M, N, align, dtype, capability):
    """What to launch for M rows of N that begin at multiples of align: (kernel, rows a program
    takes, its constants, its options).
    """
    half = dtype != torch.float32
    nvidia = capability > (0, 0)
    # The sum of so many values is exact, if they are equal, while it fits a float32's significand.
    correct = BITS[dtype] + (N - 1).bit_length() > BITS[torch.float32]
    if N <= 512 and TUPLES:
        length = triton.next_power_of_2(N)
        # Three quarters of a block, where a row fits them: less is padding.
        BLOCK_N = length // 4 if 32 < N <= length * 3 // 4 else length
        rows = max(1024 // length, 4) if half else max(512 // length, 2)
        rows = min(rows, 2 ** (M.bit_length() - 1))  # a power of two, at most M
        constants = {
            "ROWS": rows,
            "PIECES": triton.cdiv(N, BLOCK_N),
            "BLOCK_N": BLOCK_N,
            "MASKED": N % BLOCK_N > 0,
            "CORRECT": correct,
            "ALIGN": align,
        }
        return layernorm_rows_kernel, rows, constants, {"num_warps": 2 if half and N > 256 else 1}
    rings = TRITON_3_6 and capability[0] in (9, 10)
    if N % 8192 == 0 and 2**15 < N <= 2**16 and not half and rings:
        # Up to 225 KiB of shared memory, which other GPUs have not.
        constants = {"SLOTS": N // 8192 - 1, "BLOCK_N": 8192, "ALIGN": align}
        return layernorm_ring_kernel, 1, constants, {"num_warps": 32}
    even, odd = (HALF, HALF_ODD) if half else (FLOAT32, FLOAT32_ODD)
    plans = odd if align == 1 else even
    length = next((length for length in plans if N <= length), None)
    if length is None or not TUPLES:
        kernel = layernorm_chunks_kernel
        BLOCK_N, warps, registers = 8192, 16, 64
        if align == 1:
            BLOCK_N, warps, registers = 1024 if half else 2048, 8, None
        constants = {"BLOCK_N": min(BLOCK_N, triton.next_power_of_2(N)), "ALIGN": align}
    else:
        kernel = layernorm_pieces_kernel
        BLOCK_N, warps, registers, reread, hide = plans[length]
        constants = {
            "PIECES": triton.cdiv(N, BLOCK_N),
            "BLOCK_N": BLOCK_N,
            "MASKED": N % BLOCK_N > 0,
            "CORRECT": correct,
            "HIDE": hide and nvidia,
            "REREAD": reread,
            "ALIGN": align,
        }
    options = {"num_warps": warps if nvidia else min(warps, 16)}  # AMD's have 64 threads
    if nvidia and registers:
        options["maxnreg"] = registers
    return kernel, 1, constants, options


@functools.cache
def gpu(device):
    """A GPU's compute capability, (0, 0) for what is none of NVIDIA's, and its multiprocessors."""
    if INTERPRET:
        return (0, 0), 1
    nvidia = torch.version.hip is None
    properties = torch.cuda.get_device_properties(device)
    capability = (properties.major, properties.minor) if nvidia else (0, 0)
    return capability, properties.multi_processor_count


def address(tensor):
    """Where a tensor's values are; 0 if nowhere: it is empty, freed, or torch.func's."""
    try:
        return tensor.data_ptr() if tensor.untyped_storage().nbytes() else 0
    except RuntimeError:
        return 0


def check(tensors):
    """Raises TypeError or ValueError, naming what each is, unless fast_layernorm takes these."""
    x = tensors["x"]
    for t in tensors.values():
        dense = type(t) in TENSORS and t.layout == torch.strided and not t.is_nested
        if not dense or t.dtype not in BITS:
            found = ", ".join(f"{name} {describe(t)}" for name, t in tensors.items())
            raise TypeError(f"expected dense float32, float16 or bfloat16 tensors, got {found}")
    if len({t.device for t in tensors.values()}) > 1 or x.device.type != DEVICE:
        found = ", ".join(f"{name} on {t.device}" for name, t in tensors.items())
        raise ValueError(f"expected tensors on one {DEVICE} device, got {found}")
    shapes = ", ".join(f"{name} {tuple(t.shape)}" for name, t in tensors.items())
    if x.dim() == 0 or x.shape[-1] > 2**20:
        raise ValueError(f"expected x (..., N), N at most 2**20, got {shapes}")
    if any(t.shape != x.shape[-1:] for name, t in tensors.items() if name != "x"):
        raise ValueError(f"expected weight and bias of x's last dimension, got {shapes}")
    wanting = ", ".join(name for name, t in tensors.items() if t.requires_grad)
    if wanting and torch.is_grad_enabled():
        raise ValueError(f"fast_layernorm has no backward, and {wanting} requires a gradient")
    freed = ", ".join(name for name, t in tensors.items() if t.numel() and not address(t))
    if freed:
        raise ValueError(f"expected tensors with values in memory, got {freed} without")


def describe(tensor):
    if type(tensor) not in TENSORS:
        return str(type(tensor))
    if tensor.layout != torch.strided or tensor.is_nested:
        return f"{tensor.dtype} ({'nested' if tensor.is_nested else tensor.layout})"
    return str(tensor.dtype)


def launch_key(t, pointer, grad):
    """All of a tensor that decides if it is taken, what is launched, and how that is compiled; but
    of strides only whether it is contiguous, for no other launch is kept.
    """
    if t is None:
        return None
    return (
        t.shape,
        t.is_contiguous(),
        pointer & 15 if pointer >> 32 else None,  # a lower one is an offset, in what was freed
        t.get_device(),
        t.dtype,
        type(t),
        t.is_neg(),
        grad and t.requires_grad,
    )


_launches = {}  # what has been launched, by launch_key of x, weight and bias


def fast_layernorm(x, weight=None, bias=None, eps=1e-5):
    """LayerNorm over the last dimension, as torch.nn.functional.layer_norm(x, x.shape[-1:], ...).

    x is (..., N), of any strides, N at most 2**20; weight and bias are (N,) or None. Each is
    float32, float16 or bfloat16; all on one device. Returns a new contiguous tensor of x's shape
    and dtype, computed in float32. Copied first: an x whose rows are not contiguous or not evenly
    apart, a strided weight or bias, views that negate.

    There is no gradient, and a forward-mode tangent is dropped. Raises TypeError for another dtype,
    another layout, and subclasses of torch.Tensor; ValueError for shapes that do not match, for
    tensors on different devices, for those of a transform such as torch.func.vmap, and where a
    gradient is wanted.
    """
    try:
        grad = torch.is_grad_enabled()
        x_ptr = x.data_ptr()
        gamma_ptr = None if weight is None else weight.data_ptr()
        beta_ptr = None if bias is None else bias.data_ptr()
        key = (
            launch_key(x, x_ptr, grad),
            launch_key(weight, gamma_ptr, grad),
            launch_key(bias, beta_ptr, grad),
        )
    except (AttributeError, RuntimeError, ValueError):  # x is empty, or check tells what is wrong
        key = None
    known = _launches.get(key)
    if known is not None and (not GPUS or x.get_device() == torch.cuda.current_device()):
        # As kernel[grid](...), without its search for what it has compiled, and without the launch
        # hooks that a profiler may have set.
        run, current_stream, programs, handles, numbers, constants = known
        out = torch.empty_like(x)
        pointers = x_ptr, gamma_ptr, beta_ptr, out.data_ptr()
        stream = current_stream(x.get_device())
        run(programs, 1, 1, stream, *handles, *pointers, *numbers, eps, *constants)
        return out

    tensors = {"x": x, "weight": weight, "bias": bias}
    check({name: t for name, t in tensors.items() if t is not None or name == "x"})
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    if out.numel() == 0:
        return out
    N = x.shape[-1]
    M = out.numel() // N
    rows = x.resolve_neg().reshape(M, N)
    rows = rows if N == 1 or rows.stride(1) == 1 else rows.contiguous()
    stride_m = rows.stride(0)
    gamma, beta = (None if t is None else t.resolve_neg().contiguous() for t in (weight, bias))
    capability, multiprocessors = gpu(x.device)
    align = 1 if rows.data_ptr() % 16 else math.gcd(N, stride_m, 16)
    kernel, rows_a_program, constants, options = choose(M, N, align, x.dtype, capability)
    programs = triton.cdiv(M, rows_a_program)
    if kernel is layernorm_ring_kernel:
        programs = min(M, multiprocessors)
    numbers = M, N, stride_m
    with torch.cuda.device_of(x):  # Triton launches on the current GPU; on the CPU, no effect
        compiled = kernel[(programs,)](
            rows, gamma, beta, out, *numbers, float(eps), **constants, **options
        )
    as_given = x.is_contiguous() and not x.is_neg() and gamma is weight and beta is bias
    if as_given and TRITON_3_6 and compiled is not None and len(_launches) < 4096:
        run, current_stream = compiled.run, triton.runtime.driver.active.get_current_stream
        handles = compiled.function, compiled.packed_metadata, None, None, None
        _launches[key] = run, current_stream, programs, handles, numbers, tuple(constants.values())
    return out
