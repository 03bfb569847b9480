"""Section 20.1's fused linear layer at matmul speed: gelu(linear(x, weight, bias)), exact, forward.

    from fast_linear_gelu import fast_linear_gelu

The file stands alone. linear_gelu_kernel is the chapter's kernel on the tensor cores: each dtype in
its own precision, tiles in grouped order. linear_gelu_tma_kernel keeps its programs running from
tile to tile and lets the tensor memory accelerator (TMA) fetch and store them. half_gelu is the
exact GELU by a polynomial and one exp2 in place of erf, as accurate as 16-bit outputs can hold.
"""

import functools

import torch
import triton
import triton.language as tl

try:
    from triton.tools.tensor_descriptor import TensorDescriptor
except ModuleNotFoundError:  # an older triton: the step without descriptors
    TensorDescriptor = None

GROUP_M = 8
TENSORS = (torch.Tensor, torch.nn.Parameter)  # other subclasses may hold their values elsewhere
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@triton.jit
def tile_of(tile, num_m, num_n, GROUP_M: tl.constexpr):
    """Row and column of a tile, GROUP_M rows at a time: what runs together shares x and w in L2."""
    first = tile // (GROUP_M * num_n) * GROUP_M
    height = tl.minimum(num_m - first, GROUP_M)
    rest = tile % (GROUP_M * num_n)
    return first + rest % height, rest // height


@triton.jit
def half_gelu(y, GELU: tl.constexpr):
    """gelu(2 * y), for an output of 16 bits.

    With u = |y|, gelu(2 * y) = y + u * (1 - 2 * Phi(-2 * u)), and log2(2 * Phi(-2 * u)) is close to
    a polynomial in u: of degree 5 and fitted on [0, 2.8], weighted by what an output may be off,
    2**-12 of its value + 1e-7. Its leading coefficient is negative: beyond the fit 2**p goes to 0,
    as it should. Absolute error before the output is rounded: 7.5e-6, at x = 0.97.
    """
    u = tl.abs(y)
    p = u * -0.011509988456964493 + 0.0991695374250412
    p = p * u - 0.39554065465927124
    p = p * u - 1.8502509593963623
    p = p * u - 2.299699306488037
    p = p * u - 8.312991849379614e-05
    if GELU == "ptx":  # tl.exp2 takes three more instructions, for results below 2**-126
        tail = tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [p], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        tail = tl.exp2(p)
    return u * (1.0 - tail) + y


@triton.jit
def bias_and_gelu(acc, bias, GELU: tl.constexpr):
    """gelu(acc + bias): GELU is "erf", or half_gelu's "exp2" or "ptx"."""
    if GELU == "erf":
        acc += bias[None, :]
        return acc * 0.5 * (1.0 + tl.erf(acc * 0.7071067811865476))  # 1 / sqrt(2)
    return half_gelu(acc * 0.5 + (bias * 0.5)[None, :], GELU)  # one multiply-add; halving is exact


@triton.jit
def linear_gelu_kernel(
    x_ptr,  # (M, K) input
    w_ptr,  # (N, K) weight
    bias_ptr,  # (N,) bias, contiguous, or None
    out_ptr,  # (M, N) output, contiguous
    M: tl.int64,  # int64: k + BLOCK_K passes 2**31 where K is just below
    N: tl.int64,
    K: tl.int64,
    stride_xm,
    stride_xk,
    stride_wn,
    stride_wk,
    PRECISION: tl.constexpr,
    GELU: tl.constexpr,
    GROUP_M: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    pid_m, pid_n = tile_of(tl.program_id(0), tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N), GROUP_M)
    rows = pid_m.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = pid_n.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    ks = tl.arange(0, BLOCK_K).to(tl.int64)
    step = tl.full((), BLOCK_K, tl.int64)
    x_ptrs = x_ptr + rows[:, None] * stride_xm + ks[None, :] * stride_xk
    w_ptrs = w_ptr + cols[None, :] * stride_wn + ks[:, None] * stride_wk
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k in range(0, K, BLOCK_K):
        x = tl.load(x_ptrs, mask=(rows[:, None] < M) & (ks[None, :] < K - k), other=0.0)
        w = tl.load(w_ptrs, mask=(cols[None, :] < N) & (ks[:, None] < K - k), other=0.0)
        acc = tl.dot(x, w, acc, input_precision=PRECISION)
        x_ptrs += step * stride_xk
        w_ptrs += step * stride_wk

    bias = tl.zeros((BLOCK_N,), dtype=tl.float32)
    if bias_ptr is not None:
        bias += tl.load(bias_ptr + cols, mask=cols < N, other=0.0)
    tl.store(
        out_ptr + rows[:, None] * N + cols[None, :],
        bias_and_gelu(acc, bias, GELU).to(out_ptr.dtype.element_ty),
        mask=(rows[:, None] < M) & (cols[None, :] < N),
    )


@triton.jit
def linear_gelu_tma_kernel(
    x_desc,  # (M, K) input, in blocks of (BLOCK_M, BLOCK_K); zeros lie beyond its edges
    w_desc,  # (N, K) weight, in blocks of (BLOCK_N, BLOCK_K)
    out_desc,  # (M, N) output, in blocks of (BLOCK_M, BLOCK_N // 2)
    bias_ptr,  # (N,) bias, contiguous, or None
    M,
    N,
    K,
    PRECISION: tl.constexpr,
    GELU: tl.constexpr,
    GROUP_M: tl.constexpr,
    FLATTEN: tl.constexpr,  # one loop over all tiles' blocks: the next tile's loads start early
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    HALF_N: tl.constexpr = BLOCK_N // 2
    num_m, num_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    for tile in tl.range(tl.program_id(0), num_m * num_n, tl.num_programs(0), flatten=FLATTEN):
        pid_m, pid_n = tile_of(tile, num_m, num_n, GROUP_M)
        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for k in range(tl.cdiv(K, BLOCK_K)):
            x = x_desc.load([pid_m * BLOCK_M, k * BLOCK_K])
            w = w_desc.load([pid_n * BLOCK_N, k * BLOCK_K])
            acc = tl.dot(x, w.T, acc, input_precision=PRECISION)

        # Half the columns at a time: half the shared memory, so that two programs fit an SM, and
        # one multiplies while the other is here.
        left, right = tl.split(tl.permute(tl.reshape(acc, (BLOCK_M, 2, HALF_N)), (0, 2, 1)))
        cols = pid_n * BLOCK_N + tl.arange(0, HALF_N)
        bias_left = tl.zeros((HALF_N,), dtype=tl.float32)
        bias_right = tl.zeros((HALF_N,), dtype=tl.float32)
        if bias_ptr is not None:
            bias_left += tl.load(bias_ptr + cols, mask=cols < N, other=0.0)
            bias_right += tl.load(bias_ptr + cols + HALF_N, mask=cols + HALF_N < N, other=0.0)
        left = bias_and_gelu(left, bias_left, GELU).to(out_desc.dtype)
        out_desc.store([pid_m * BLOCK_M, pid_n * BLOCK_N], left)
        right = bias_and_gelu(right, bias_right, GELU).to(out_desc.dtype)
        out_desc.store([pid_m * BLOCK_M, pid_n * BLOCK_N + HALF_N], right)


INTERPRET = not isinstance(linear_gelu_kernel, triton.JITFunction)
DEVICE = "cpu" if INTERPRET else "cuda"


@functools.cache
def gpu(device):
    """A GPU's compute capability, (0, 0) where it is not NVIDIA's, and its number of SMs."""
    if INTERPRET:
        return (0, 0), 1
    found = torch.cuda.get_device_properties(device)
    nvidia = torch.version.hip is None
    return (found.major, found.minor) if nvidia else (0, 0), found.multi_processor_count


def takes_tma(tensor):
    """Whether a matrix can have a descriptor: rows of 16-byte steps, dense, and none empty."""
    row, column = tensor.stride()
    return (
        column == 1
        and row >= tensor.shape[1] > 0
        and row * tensor.element_size() % 16 == 0
        and tensor.data_ptr() % 16 == 0
        and max(tensor.shape) < 2**31 - 256  # the kernel's indices are int32
    )


def choose(M, N, dtype, capability, sms, tma):
    """The kernel, its (BLOCK_M, BLOCK_N, BLOCK_K), num_warps and num_stages.

    tma says whether the tensors can have descriptors. Measured on an H200 (132 SMs, torch 2.11,
    triton 3.6), as M, K, N; in milliseconds, GELU and all:

    float32            linear_gelu_tma_kernel, 3 stages            cuBLAS alone, then with GELU
                       128x64x32   64x128x32   128x128x32, 8 warps
    4096, 768, 3072      0.259       0.278       0.284               0.391    0.416
    8192, 1024, 4096     0.867       0.943       0.955               1.387    1.451
    8192, 4096, 16384   12.95       14.36       14.79               21.56    21.80

    bfloat16           128x128x64  not flat    128x256x64, 8 warps
    4096, 768, 3072      0.0373      0.0384      0.0416              0.0340   0.0513
    8192, 1024, 4096     0.112       0.114       0.120               0.0999   0.146
    8192, 4096, 16384      -         1.627       1.710               1.637    1.856
    8192, 8192, 8192       -         1.632       1.651               1.588    1.702

    16, 768, 3072      linear_gelu_kernel: bfloat16 at 16x32x128 0.0071, 16x64x128 0.0076, eager
    0.0109; float32 at 16x32x64 0.0126, 16x32x128 0.0118 but twice the error, eager 0.0226.

    Not measured: between 32 rows and enough tiles, large matrices by pointers, and other GPUs.
    There the tiles are such as fit shared memory and registers.
    """
    half = dtype != torch.float32
    BLOCK_N = 128 if half else 64
    # Enough tiles for half the SMs, of which not most of the rows are empty.
    large = M > 32 and 2 * triton.cdiv(M, 128) * triton.cdiv(N, BLOCK_N) >= sms
    # 9 and 10 have the 227 KiB of shared memory that two programs of this take; 12 has 99.
    if tma and capability[0] in (9, 10) and large:
        return linear_gelu_tma_kernel, (128, BLOCK_N, 64 if half else 32), 4, 3
    if capability < (8, 0):
        step = (32, 32, 32), 4, 2
    elif M <= 32:
        step = ((16, 32, 128), 4, 5) if half else ((16, 32, 64), 4, 8)
    elif half and large:
        step = (128, 128, 32), 8, 4
    else:
        step = ((64, 64, 64), 4, 4) if half else ((64, 64, 32), 4, 3)
    return linear_gelu_kernel, *step


def describe(tensor):
    """A tensor's dtype, and what else about it keeps a kernel from its values."""
    if type(tensor) not in TENSORS:
        return str(type(tensor))
    if tensor.layout != torch.strided or tensor.is_nested:
        return f"{tensor.dtype} ({'nested' if tensor.is_nested else tensor.layout})"
    return f"{tensor.dtype} (a view that negates)" if tensor.is_neg() else str(tensor.dtype)


def check(*tensors):
    """Check that x, weight and bias, if any, are what the kernels take; name what is not."""

    def refuse(error, expected, what):
        pairs = zip(("x", "weight", "bias"), tensors, strict=False)
        raise error(f"expected {expected}, got {', '.join(f'{n} {what(t)}' for n, t in pairs)}")

    x, weight, *bias = tensors
    for t in tensors:
        usable = type(t) in TENSORS and t.layout == torch.strided and not t.is_nested
        if not usable or t.dtype not in DTYPES or t.dtype != x.dtype or t.is_neg():
            refuse(TypeError, "dense tensors, all float32, float16 or bfloat16", describe)
    if x.device.type != DEVICE or any(t.device != x.device for t in tensors):
        refuse(ValueError, f"tensors on one {DEVICE} device", lambda t: f"on {t.device}")
    if x.dim() == 0 or weight.dim() not in (1, 2) or x.shape[-1] != weight.shape[-1]:
        expected = "x (..., K) and weight (N, K) or (K,)"
        refuse(ValueError, expected, lambda t: tuple(t.shape))
    if bias and bias[0].shape != weight.shape[:-1]:
        refuse(ValueError, f"bias {tuple(weight.shape[:-1])}", lambda t: tuple(t.shape))
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        expected = "tensors without grad, or torch.no_grad(): this is forward only"
        refuse(RuntimeError, expected, lambda t: f"requires_grad={t.requires_grad}")


@functools.lru_cache(1024)
def plan(M, N, dtype, device, tma):
    """What to launch: the kernel, how many programs, and the kernel's constants and options."""
    capability, sms = gpu(device)
    kernel, (BLOCK_M, BLOCK_N, BLOCK_K), num_warps, num_stages = choose(
        M, N, dtype, capability, sms, tma
    )
    half = dtype != torch.float32
    options = {
        # Three products in TF32, of the high and low parts: float32's accuracy, and faster.
        "PRECISION": "ieee" if half or capability < (8, 0) else "tf32x3",
        "GELU": "erf" if not half else "exp2" if capability == (0, 0) or INTERPRET else "ptx",
        "GROUP_M": GROUP_M,
        "BLOCK_M": BLOCK_M,
        "BLOCK_N": BLOCK_N,
        "BLOCK_K": BLOCK_K,
        "num_warps": num_warps,
        "num_stages": num_stages,
    }
    programs = triton.cdiv(M, BLOCK_M) * triton.cdiv(N, BLOCK_N)
    if kernel is linear_gelu_tma_kernel:
        programs = min(programs, 2 * sms)
        options["FLATTEN"] = half
    return kernel, programs, options


def fast_linear_gelu(x, weight, bias=None):
    """gelu(linear(x, weight, bias)) with the exact (erf) GELU; forward only (Section 20.1).

    x is (..., K), weight (N, K), bias (N,) or None, as for torch.nn.functional.linear; a weight of
    (K,) and a bias of () make one column, which the output then lacks. All float32, float16 or
    bfloat16, on one device, of any strides; empty ones too. Returns a new, contiguous (..., N)
    tensor of their dtype. Sums and GELU are in float32, and nothing is rounded in between.

    Copied are only an x whose leading dimensions are no one stride apart, and a strided bias.

    Raises TypeError for another dtype or two, another layout, and subclasses of torch.Tensor;
    ValueError for two devices and for shapes that do not chain; RuntimeError where one of the
    tensors requires grad and grad mode is on.
    """
    check(x, weight, *(() if bias is None else (bias,)))
    out = torch.empty(x.shape[:-1] + weight.shape[:-1], device=x.device, dtype=x.dtype)
    if out.numel() == 0:
        return out
    K = x.shape[-1]
    N = weight.shape[0] if weight.dim() == 2 else 1
    M = out.numel() // N
    x, weight, output = x.reshape(M, K), weight.reshape(N, K), out.view(M, N)
    if bias is not None:
        bias = bias.contiguous()

    tma = TensorDescriptor is not None and takes_tma(x) and takes_tma(weight) and takes_tma(output)
    kernel, programs, options = plan(M, N, x.dtype, x.device, tma)
    if kernel is linear_gelu_tma_kernel:
        BLOCK_M, BLOCK_N, BLOCK_K = options["BLOCK_M"], options["BLOCK_N"], options["BLOCK_K"]
        x_desc = TensorDescriptor.from_tensor(x, [BLOCK_M, BLOCK_K])
        w_desc = TensorDescriptor.from_tensor(weight, [BLOCK_N, BLOCK_K])
        out_desc = TensorDescriptor.from_tensor(output, [BLOCK_M, BLOCK_N // 2])
        arguments = x_desc, w_desc, out_desc, bias, M, N, K
    else:
        arguments = x, weight, bias, output, M, N, K, *x.stride(), *weight.stride()
    launch(x.device, kernel, programs, arguments, options)
    return out


def launch(device, kernel, programs, arguments, options):
    # Triton launches on the current GPU, which need not be the tensors'.
    with torch.cuda.device(device if device.type == "cuda" else -1):  # -1: no effect
        kernel[(programs,)](*arguments, **options)
