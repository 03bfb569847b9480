"""LayerNorm at memory speed: the kernel of Section 20.3, taken to what a GPU's memory gives.

    from fast_layernorm import fast_layernorm
    y = fast_layernorm(x, weight, bias)  # as torch.nn.functional.layer_norm(x, x.shape[-1:], ...)

The file stands alone. Steps 2 to 6 of the table in README.md, from the chapter's kernel on:

2. layernorm_rows_kernel: a program takes several short rows.
3. layernorm_pieces_kernel: a row is cut into pieces, not padded to a power of two.
4. ALIGN, in all kernels: the compiler is told what a row's length is a multiple of.
5. READ_AGAIN, in the pieces: the row is read again for the output, from the cache.
6. STAY_16_BIT, in the pieces: a long row of 16-bit values is held as such, not as float32.

layernorm_chunks_kernel takes all other rows, of any length: it reads them twice.

All compute in float32. Where a row's sum may lose bits (CORRECT_MEAN), the mean is corrected by
what is left of the differences from it: the corrected two-pass algorithm of Chan, Golub and
LeVeque, "Algorithms for Computing the Sample Variance", 1983. The chunks come one by one: mean and
squares of each column follow Welford's algorithm, and the columns are merged as by Chan, Golub and
LeVeque.
"""

import contextlib
import functools
import math
import os

import torch

# Without a GPU, Triton interprets the kernels. It reads this variable when it is imported, for each
# kernel, and when Gluon is imported, which a launch does. After the last kernel, it is set back.
TRITON_INTERPRET = os.environ.get("TRITON_INTERPRET")
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


def restore_environment():
    os.environ.pop("TRITON_INTERPRET", None)
    if TRITON_INTERPRET is not None:
        os.environ["TRITON_INTERPRET"] = TRITON_INTERPRET


import triton
import triton.language as tl

INTERPRET = not isinstance(tl.cdiv, triton.JITFunction)
if INTERPRET:
    os.environ["TRITON_INTERPRET"] = "1"  # triton may have been imported, and it unset, earlier
    with contextlib.suppress(ImportError):
        import triton.experimental.gluon
elif not torch.cuda.is_available():
    restore_environment()
    raise ImportError(f"no GPU: import {__name__} before triton, or set TRITON_INTERPRET=1")
DEVICE = "cpu" if INTERPRET else "cuda"
VERSION = tuple(map(int, triton.__version__.split(".")[:2]))
TUPLES = VERSION >= (3, 4)  # older kernels know no tuples: the chunks take all rows there
TRIED = (3, 6) <= VERSION <= (3, 9)  # the versions on which launching without Triton was tried
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
def inv_std_and_rest(squares, diff, N, eps, axis: tl.constexpr, CORRECT_MEAN: tl.constexpr):
    """From x - mean and its squares: 1 / std, and by how much the mean was still too small."""
    if CORRECT_MEAN:
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
    PIECES: tl.constexpr,
    BLOCK_N: tl.constexpr,  # a power of two: the columns of a piece
    MASKED: tl.constexpr,  # does the last piece reach past the row?
    CORRECT_MEAN: tl.constexpr,
    ALIGN: tl.constexpr,  # a power of two that divides N and stride_m, at most 16
    ROWS: tl.constexpr,  # at most M
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
    inv_std, rest = inv_std_and_rest(squares, diffs, N, eps, 1, CORRECT_MEAN)

    for p in tl.static_range(PIECES):
        c = p * BLOCK_N + cols
        x_norm = (x[p] - mean - rest[:, None]) * inv_std[:, None]
        x_norm = scale_and_shift(x_norm, gamma_ptr, beta_ptr, c, N, MASKED and p == PIECES - 1, "")
        out_rows = out_ptr + first * N + rows * N
        store(out_rows, c[None, :], x_norm, N, MASKED and p == PIECES - 1, "")


@triton.jit
def same(x, STAY_16_BIT: tl.constexpr):
    """x; with STAY_16_BIT in a way that the compiler cannot see through, so that it converts 16-bit
    values anew at each use, instead of keeping them as float32 in twice the registers.
    """
    if STAY_16_BIT:
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
    CORRECT_MEAN: tl.constexpr,
    ALIGN: tl.constexpr,  # a power of two that divides N and stride_m, at most 16
    STAY_16_BIT: tl.constexpr,  # does the row stay in 16 bits?
    READ_AGAIN: tl.constexpr,  # for the output, from the cache: is the row not held to the end?
    EARLY: tl.constexpr,  # are gamma and beta read at once, with the row?
):
    N, stride_m = multiple(N, ALIGN), multiple(stride_m, ALIGN)
    row = tl.program_id(0).to(tl.int64)
    x_row, out_row = x_ptr + row * stride_m, out_ptr + row * N
    cols = tl.arange(0, BLOCK_N)
    pieces, gammas, betas = (), (), ()
    for p in tl.static_range(PIECES):
        c = p * BLOCK_N + cols
        piece = load(x_row, c, N, MASKED and p == PIECES - 1, "evict_last" if READ_AGAIN else "")
        pieces = pieces + (piece,)
        if EARLY and gamma_ptr is not None:
            gammas = gammas + (load(gamma_ptr, c, N, MASKED and p == PIECES - 1, ""),)
        if EARLY and beta_ptr is not None:
            betas = betas + (load(beta_ptr, c, N, MASKED and p == PIECES - 1, ""),)

    sums = tl.zeros([BLOCK_N], tl.float32)
    for p in tl.static_range(PIECES):
        sums += pieces[p].to(tl.float32)
    mean = mean_of(tl.sum(sums, axis=0), N)

    squares, diffs = tl.zeros([BLOCK_N], tl.float32), tl.zeros([BLOCK_N], tl.float32)
    again = ()
    for p in tl.static_range(PIECES):
        again = again + (same(pieces[p], STAY_16_BIT),)
        diff = again[p].to(tl.float32) - mean
        if MASKED and p == PIECES - 1:
            diff = tl.where(p * BLOCK_N + cols < N, diff, 0.0)
        squares += diff * diff
        diffs += diff
    inv_std, rest = inv_std_and_rest(squares, diffs, N, eps, 0, CORRECT_MEAN)

    for p in tl.static_range(PIECES):
        c = p * BLOCK_N + cols
        if READ_AGAIN:
            x = load(x_row, c, N, MASKED and p == PIECES - 1, "evict_first")
        else:
            x = same(again[p], STAY_16_BIT)
        x_norm = (x.to(tl.float32) - mean - rest) * inv_std
        if EARLY:
            if gamma_ptr is not None:
                x_norm *= gammas[p].to(tl.float32)
            if beta_ptr is not None:
                x_norm += betas[p].to(tl.float32)
        else:
            x_norm = scale_and_shift(
                x_norm, gamma_ptr, beta_ptr, c, N, MASKED and p == PIECES - 1, "evict_last"
            )
        store(out_row, c, x_norm, N, MASKED and p == PIECES - 1, "evict_first")


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


restore_environment()

# For rows of up to so many values: the values of a piece, and the warps of a program. On an H200
# the fastest of 1 to 12 pieces and 1 to 32 warps, or at most 3% slower.
FLOAT32 = {
    768: (256, 2),
    1792: (1024, 4),
    2560: (1024, 8),
    5120: (2048, 8),
    12288: (2048, 16),
    16384: (4096, 16),
    20480: (4096, 32),
    32768: (8192, 32),
}
HALF = {
    768: (256, 1),
    1536: (512, 1),
    3584: (1024, 2),
    7168: (1024, 4),
    12288: (2048, 4),
    16384: (4096, 8),
    32768: (4096, 16),
    65536: (16384, 16),
}


def pieces(N, align, half, few):
    """The values of a piece and the warps of a program; None for rows that only the chunks take."""
    if align == 1:
        # Read value by value: one for each thread and piece, or two.
        BLOCK_N = triton.next_power_of_2(N) // (32 if half else 16)
        BLOCK_N = max(BLOCK_N, 64 if half else 128)
        return (BLOCK_N, BLOCK_N // 32 if BLOCK_N > 64 else 1) if N <= 16384 else None
    table = HALF if half else FLOAT32
    length = next((length for length in table if N <= length), None)
    if length is None:
        return None
    BLOCK_N, warps = table[length]
    return (2 * BLOCK_N, 2 * warps) if half and few and warps < 4 else (BLOCK_N, warps)


def choose(M, N, align, dtype, gpu):
    """What to launch for M rows of N that begin at multiples of align: (kernel, rows a program
    takes, its constants, its options).
    """
    nvidia, multiprocessors = gpu
    half = dtype != torch.float32
    length, rows = triton.next_power_of_2(N), 1
    # So few values that the time is that of their way from the memory, not of its bandwidth.
    few = M * N <= 2**14 * multiprocessors
    if N <= 512 and TUPLES:
        # Three quarters of a block, where a row fits them: less is padding.
        BLOCK_N = length // 4 if 32 < N <= length * 3 // 4 else length
        rows = max(1024 // length, 4) if half else max(512 // length, 2)
        rows = min(rows, 2 ** (M.bit_length() - 1))  # a power of two, at most M
        kernel, flags = layernorm_rows_kernel, {"ROWS": rows}
        warps = 2 if half and N > 256 else 1
    elif found := TUPLES and pieces(N, align, half, few):
        BLOCK_N, warps = found
        warps = warps if nvidia else min(warps, 16)  # AMD's have 64 threads, a program at most 1024
        early = few and N <= 16384 and align > 1
        stay = half and N >= 16384 and align > 1 and not early
        # Only if x is larger than the cache: else the row is better held.
        again = M * N * dtype.itemsize > 2**27 and N <= 20480 and align > 1 and not stay
        flags = {"STAY_16_BIT": stay and nvidia, "READ_AGAIN": again, "EARLY": early}
        kernel = layernorm_pieces_kernel
    else:
        BLOCK_N, warps = (8192, 16) if align > 1 else (1024, 8) if half else (2048, 8)
        # As many registers as leave room for two programs of 16 warps.
        registers = {"maxnreg": 64} if nvidia and align > 1 else {}
        constants = {"BLOCK_N": min(BLOCK_N, length), "ALIGN": align}
        return layernorm_chunks_kernel, 1, constants, {"num_warps": warps} | registers
    constants = {
        "PIECES": triton.cdiv(N, BLOCK_N),
        "BLOCK_N": BLOCK_N,
        "MASKED": N % BLOCK_N > 0,
        # The sum of so many values is exact, if they are equal, while a float32 has the bits.
        "CORRECT_MEAN": BITS[dtype] + (N - 1).bit_length() > BITS[torch.float32],
        "ALIGN": align,
    }
    return kernel, rows, constants | flags, {"num_warps": warps}


@functools.cache
def gpu(device):
    """Whether a GPU is one of NVIDIA's, and how many multiprocessors it has."""
    if INTERPRET:
        return False, 1
    return torch.version.hip is None, torch.cuda.get_device_properties(device).multi_processor_count


def address(tensor):
    """Where a tensor's values are; 0 if nowhere: it is empty, freed, or torch.func's."""
    try:
        return tensor.data_ptr() if tensor.untyped_storage().nbytes() else 0
    except RuntimeError:
        return 0


def check(tensors):
    """Raises TypeError or ValueError, naming what each is, unless fast_layernorm takes these."""

    def require(fine, error, expected, what):
        if not fine:
            found = ", ".join(f"{name} {what(t)}" for name, t in tensors.items())
            raise error(f"expected {expected}, got {found}")

    x, *others = tensors.values()
    dense = all(
        type(t) in TENSORS and t.layout == torch.strided and not t.is_nested and t.dtype in BITS
        for t in tensors.values()
    )
    require(dense, TypeError, "dense float32, float16 or bfloat16 tensors", describe)
    on_one = x.device.type == DEVICE and all(t.device == x.device for t in others)
    require(on_one, ValueError, f"tensors on one {DEVICE} device", lambda t: f"on {t.device}")
    fits = x.dim() > 0 and x.shape[-1] <= 2**20 and all(t.shape == x.shape[-1:] for t in others)
    shapes = "x (..., N), weight and bias (N,), N at most 2**20"
    require(fits, ValueError, shapes, lambda t: tuple(t.shape))
    held = all(address(t) for t in tensors.values() if t.numel())
    require(held, ValueError, "tensors with values in memory", lambda t: f"at {address(t):#x}")


def describe(tensor):
    if type(tensor) not in TENSORS:
        return str(type(tensor))
    if tensor.layout != torch.strided or tensor.is_nested:
        return f"{tensor.dtype} ({'nested' if tensor.is_nested else tensor.layout})"
    return str(tensor.dtype)


def launch_key(t, pointer):
    """Cache key: whatever changes validation, the choice of kernel, or compilation. Of strides only
    whether they are contiguous, for no other launch is kept.
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
    )


_launches = {}  # what has been launched, by launch_key of x, weight and bias


def launch(x, weight, bias, eps):
    """fast_layernorm of tensors that hold values."""
    try:
        x_ptr = x.data_ptr()
        gamma_ptr = None if weight is None else weight.data_ptr()
        beta_ptr = None if bias is None else bias.data_ptr()
        key = launch_key(x, x_ptr), launch_key(weight, gamma_ptr), launch_key(bias, beta_ptr)
    except (AttributeError, RuntimeError, ValueError):  # x is empty, or check tells what is wrong
        key = None
    known = _launches.get(key)
    if known is not None and x.get_device() == torch.cuda.current_device():
        # As kernel[grid](...), without its search for what it has compiled, and without the launch
        # hooks that a profiler may have set. benchmark.py's table of the host's time has the gain.
        run, current_stream, programs, handles, numbers, constants = known
        out = torch.empty_like(x)
        pointers = x_ptr, gamma_ptr, beta_ptr, out.data_ptr()
        stream = current_stream(x.get_device())
        run(programs, 1, 1, stream, *handles, *pointers, *numbers, eps, *constants)
        return out

    tensors = {"x": x, "weight": weight, "bias": bias}
    check({name: t for name, t in tensors.items() if t is not None or name == "x"})
    if INTERPRET and x.dtype == torch.bfloat16:  # the interpreter rounds to bfloat16 wrongly
        return launch(x.float(), weight, bias, eps).bfloat16()
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    if out.numel() == 0:
        return out
    N = x.shape[-1]
    M = out.numel() // N
    rows = x.resolve_neg().reshape(M, N)
    rows = rows if N == 1 or rows.stride(1) == 1 else rows.contiguous()
    stride_m = rows.stride(0)
    gamma, beta = (None if t is None else t.resolve_neg().contiguous() for t in (weight, bias))
    align = 1 if rows.data_ptr() % 16 else math.gcd(N, stride_m, 16)
    kernel, rows_a_program, constants, options = choose(M, N, align, x.dtype, gpu(x.device))
    programs = triton.cdiv(M, rows_a_program)
    numbers = M, N, stride_m
    with torch.cuda.device_of(x):  # Triton launches on the current GPU; on the CPU, no effect
        compiled = kernel[(programs,)](
            rows, gamma, beta, out, *numbers, eps, **constants, **options
        )
    as_given = x.is_contiguous() and not x.is_neg() and gamma is weight and beta is bias
    if as_given and TRIED and compiled is not None and len(_launches) < 4096:
        run, current_stream = compiled.run, triton.runtime.driver.active.get_current_stream
        handles = compiled.function, compiled.packed_metadata, None, None, None
        _launches[key] = run, current_stream, programs, handles, numbers, tuple(constants.values())
    return out


# An operator, for tensors without values, and for compilers and modes that look at each operator.
operator = torch.library.custom_op(
    "chapter20::fast_layernorm",
    launch,
    mutates_args=(),
    schema="(Tensor x, Tensor? weight, Tensor? bias, float eps) -> Tensor",
)


@operator.register_fake
def _(x, weight, bias, eps):
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def fast_layernorm(x, weight=None, bias=None, eps=1e-5):
    """LayerNorm over the last dimension, as torch.nn.functional.layer_norm(x, x.shape[-1:], ...).

    x is (..., N), of any strides, N at most 2**20; weight and bias are (N,) or None. Each is
    float32, float16 or bfloat16; all on one device. Returns a new contiguous tensor of x's shape
    and dtype, computed in float32; under autocast on a GPU float32, as torch does. Copied first: an
    x whose rows are not contiguous or not evenly apart, a strided weight or bias, views that
    negate.

    torch.compile and torch.export see one operator, chapter20::fast_layernorm; tensors without
    values are not checked. There is no gradient, and a forward-mode tangent is dropped.

    Raises TypeError for another dtype, another layout, and subclasses of torch.Tensor; ValueError
    for shapes that do not match, for tensors on different devices, for those of a transform such as
    torch.func.vmap, and where a gradient is wanted.
    """
    eps = float(eps)
    if torch.is_grad_enabled():
        tensors = {"x": x, "weight": weight, "bias": bias}
        wanting = [name for name, t in tensors.items() if getattr(t, "requires_grad", False)]
        if wanting:
            raise ValueError(f"no backward, but {', '.join(wanting)} requires grad: use no_grad()")
    if DEVICE == "cuda" and torch.is_autocast_enabled():
        tensors = x, weight, bias
        x, weight, bias = (t.float() if getattr(t, "dtype", None) in BITS else t for t in tensors)
    traced = torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0
    if traced or (isinstance(x, torch.Tensor) and (type(x) not in TENSORS or x.is_meta)):
        return operator(x, weight, bias, eps)
    return launch(x, weight, bias, eps)
