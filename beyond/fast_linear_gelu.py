"""Section 20.1's fused linear layer at matmul speed: gelu(linear(x, weight, bias)), exact, forward.

    from fast_linear_gelu import fast_linear_gelu

The file stands alone. Steps 2 to 5 of the table in README.md, from the chapter's kernel on:

2. linear_gelu_kernel: the tensor cores in each dtype's own precision, tiles in grouped order.
3. linear_gelu_tma_kernel: programs go on from tile to tile, and the tensor memory accelerator (TMA)
   fetches and stores tiles.
4. half_gelu, in all kernels: the exact GELU by a polynomial and one exp2 in place of erf, to one
   unit in the last place of 16 bits plus 1e-6.
5. linear_gelu_pingpong_kernel: GELU and the store behind the next tile's matmul, on Hopper.
"""

import functools
import os

import torch

# Without a GPU, Triton interprets the kernels. It reads this variable when it is imported, for each
# kernel, and when Gluon is imported. After the last kernel, it is set back.
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
elif not torch.cuda.is_available():
    restore_environment()
    raise ImportError(f"no GPU: import {__name__} before triton, or set TRITON_INTERPRET=1")
DEVICE = "cpu" if INTERPRET else "cuda"
# The versions on which Gluon, which is experimental, and launching without Triton were tried.
TRIED = (3, 6) <= tuple(map(int, triton.__version__.split(".")[:2])) <= (3, 9)

try:
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia import hopper
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonDescriptor
    from triton.tools.tensor_descriptor import TensorDescriptor

    # Their names since Triton 3.8, and before.
    tma_load = getattr(hopper.tma, "async_load", None) or hopper.tma.async_copy_global_to_shared
    tma_store = getattr(hopper.tma, "async_store", None) or hopper.tma.async_copy_shared_to_global
except (ImportError, AttributeError):  # another triton: the step without descriptors
    gluon, gl, TensorDescriptor = triton, tl, None

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
def top_of(pid_m, M, BLOCK_M: tl.constexpr):
    """A tile's first row, for TMA, which is slow where a block reaches past the edge: the last tile
    begins so early that it ends with the matrix, and computes some rows of the one before again.
    """
    return tl.maximum(tl.minimum(pid_m * BLOCK_M, M - BLOCK_M), 0)


@triton.jit
def half_gelu(y, GELU: tl.constexpr):
    """gelu(2 * y), for an output of 16 bits.

    With u = |y|, gelu(2 * y) = y + u * (1 - 2 * Phi(-2 * u)), and log2(2 * Phi(-2 * u)) is close to
    a polynomial in u: of degree 5 and fitted on [0, 2.8], weighted by what an output may be off,
    2**-12 of its value + 1e-7. Its leading coefficient is negative: beyond the fit 2**p goes to 0,
    as it should.
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
    acc = tl.zeros((BLOCK_K if BLOCK_M == 1 else BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k in range(0, K, BLOCK_K):
        x = tl.load(x_ptrs, mask=(rows[:, None] < M) & (ks[None, :] < K - k), other=0.0)
        w = tl.load(w_ptrs, mask=(cols[None, :] < N) & (ks[:, None] < K - k), other=0.0)
        if BLOCK_M == 1:  # the tensor cores have 8 rows at least
            acc += tl.trans(x).to(tl.float32) * w.to(tl.float32)
        else:
            acc = tl.dot(x, w, acc, input_precision=PRECISION)
        x_ptrs += step * stride_xk
        w_ptrs += step * stride_wk
    if BLOCK_M == 1:
        acc = tl.sum(acc, axis=0)[None, :]

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
    bias_ptr,  # (N,) bias, contiguous, or None
    out_desc,  # (M, N) output, in blocks of (BLOCK_M, BLOCK_N // 2)
    M,
    N,
    K,
    PRECISION: tl.constexpr,
    GELU: tl.constexpr,
    GROUP_M: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    HALF_N: tl.constexpr = BLOCK_N // 2
    num_m, num_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    # Flattened into one loop over all tiles' blocks: the next tile's loads start early.
    for tile in tl.range(tl.program_id(0), num_m * num_n, tl.num_programs(0), flatten=True):
        pid_m, pid_n = tile_of(tile, num_m, num_n, GROUP_M)
        top = top_of(pid_m, M, BLOCK_M)
        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for k in range(tl.cdiv(K, BLOCK_K)):
            x = x_desc.load([top, k * BLOCK_K])
            w = w_desc.load([pid_n * BLOCK_N, k * BLOCK_K])
            acc = tl.dot(x, w.T, acc, input_precision=PRECISION)

        # Half the columns at a time: half the shared memory, so that two programs fit an SM, and
        # one multiplies while the other is here.
        halves = tl.split(tl.permute(tl.reshape(acc, (BLOCK_M, 2, HALF_N)), (0, 2, 1)))
        for h in tl.static_range(2):
            cols = pid_n * BLOCK_N + h * HALF_N + tl.arange(0, HALF_N)
            bias = tl.zeros((HALF_N,), dtype=tl.float32)
            if bias_ptr is not None:
                bias += tl.load(bias_ptr + cols, mask=cols < N, other=0.0)
            half = bias_and_gelu(halves[h], bias, GELU).to(out_desc.dtype)
            out_desc.store([top, pid_n * BLOCK_N + h * HALF_N], half)


@gluon.jit
def fetch_blocks(x_desc, w_desc, ring, sizes, GROUP_M: gl.constexpr):
    """The producer, one warp: keeps the ring full, in the order in which the consumers read it."""
    x_ring, w_ring, full, empty = ring
    STAGES: gl.constexpr = x_ring.shape[0]
    BLOCK_M: gl.constexpr = x_ring.shape[1]
    BLOCK_N: gl.constexpr = w_ring.shape[1]
    BLOCK_K: gl.constexpr = w_ring.shape[2]
    M, N, K = sizes
    num_m, num_n = gl.cdiv(M, BLOCK_M), gl.cdiv(N, BLOCK_N)
    slot = 0
    phase = 1  # of a new barrier, as if the slot had been emptied before
    for tile in range(gl.program_id(0), num_m * num_n, gl.num_programs(0)):
        pid_m, pid_n = tile_of(tile, num_m, num_n, GROUP_M)
        top = top_of(pid_m, M, BLOCK_M)
        for k in range(gl.cdiv(K, BLOCK_K)):
            hopper.mbarrier.wait(empty.index(slot), phase)
            bar = full.index(slot)
            hopper.mbarrier.expect(bar, (BLOCK_M + BLOCK_N) * BLOCK_K * 2)  # 2 bytes a value
            tma_load(x_desc, [top, k * BLOCK_K], bar, x_ring.index(slot))
            tma_load(w_desc, [pid_n * BLOCK_N, k * BLOCK_K], bar, w_ring.index(slot))
            slot += 1
            if slot == STAGES:
                slot = 0
                phase ^= 1


@gluon.jit
def multiply_and_gelu(given, WHICH: gl.constexpr, GELU: gl.constexpr, GROUP_M: gl.constexpr):
    """A consumer, four warps: every other tile of the program, from WHICH on, 0 or 1."""
    bias_ptr, out_desc, out_halves, turns, ring, sizes = given
    x_ring, w_ring, full, empty = ring
    STAGES: gl.constexpr = x_ring.shape[0]
    BLOCK_M: gl.constexpr = x_ring.shape[1]
    BLOCK_N: gl.constexpr = w_ring.shape[1]
    BLOCK_K: gl.constexpr = w_ring.shape[2]
    M, N, K = sizes
    HALF_N: gl.constexpr = BLOCK_N // 2
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    out_half = out_halves.index(WHICH)
    half_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF_N, 16])
    num_m, num_n, num_k = gl.cdiv(M, BLOCK_M), gl.cdiv(N, BLOCK_N), gl.cdiv(K, BLOCK_K)
    turn = WHICH ^ 1  # as the producer's phase: the first turn is consumer 0's at once
    block = WHICH * num_k  # how many the producer fetches before this tile's
    first = gl.program_id(0) + WHICH * gl.num_programs(0)
    for tile in range(first, num_m * num_n, 2 * gl.num_programs(0)):
        pid_m, pid_n = tile_of(tile, num_m, num_n, GROUP_M)
        slot = block % STAGES
        phase = block // STAGES & 1
        # The slot before. Not prev = slot, though it is set anew before its first use: Triton would
        # see one value of two names, take prev for loop-invariant, and free only the first slot.
        prev = (slot + STAGES - 1) % STAGES
        # By turns, so that one multiplies while the other is in its epilogue. It is needed, too: a
        # barrier's phase is one bit, and a consumer must not be more than a round of the ring ahead
        # of what it waits for.
        hopper.mbarrier.wait(turns.index(WHICH), turn)
        acc = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, layout)
        for k in range(num_k):
            hopper.mbarrier.wait(full.index(slot), phase)
            w = w_ring.index(slot).permute((1, 0))
            acc = hopper.warpgroup_mma(x_ring.index(slot), w, acc, use_acc=k > 0, is_async=True)
            acc = hopper.warpgroup_mma_wait(1, deps=[acc])  # the block before is done with
            hopper.mbarrier.arrive(empty.index(prev), pred=k > 0)
            prev = slot
            slot += 1
            if slot == STAGES:
                slot = 0
                phase ^= 1
        hopper.mbarrier.arrive(turns.index(1 - WHICH))

        acc = hopper.warpgroup_mma_wait(0, deps=[acc])
        # Always so. But without a branch, the assembler moves most of GELU up here, before the last
        # slot is free, and the other consumer has to wait for it.
        if num_k > 0:
            hopper.mbarrier.arrive(empty.index(prev))
        cols = pid_n * BLOCK_N + gl.arange(0, BLOCK_N, gl.SliceLayout(0, layout))
        if bias_ptr is not None:
            bias = gl.load(bias_ptr + cols, mask=cols < N, other=0.0).to(gl.float32)
        else:
            bias = gl.zeros([BLOCK_N], gl.float32, gl.SliceLayout(0, layout))
        out = bias_and_gelu(acc, bias, GELU).reshape([BLOCK_M, 2, HALF_N]).permute((0, 2, 1))
        halves = out.split()
        for h in gl.static_range(2):  # half the shared memory, for a longer ring
            half = gl.convert_layout(halves[h], half_layout).to(out_desc.dtype)
            hopper.tma.store_wait(0)  # until the half before is out
            out_half.store(half)
            hopper.fence_async_shared()
            corner = [top_of(pid_m, M, BLOCK_M), pid_n * BLOCK_N + h * HALF_N]
            tma_store(out_desc, corner, out_half)
        block += 2 * num_k
        turn ^= 1
    hopper.tma.store_wait(0)


@gluon.jit
def linear_gelu_pingpong_kernel(
    x_desc,  # (M, K) input, in blocks of (BLOCK_M, BLOCK_K), of 16 bits a value
    w_desc,  # (N, K) weight, in blocks of (BLOCK_N, BLOCK_K)
    bias_ptr,  # (N,) bias, contiguous, or None
    out_desc,  # (M, N) output, in blocks of (BLOCK_M, BLOCK_N // 2)
    M,
    N,
    K,
    GELU: gl.constexpr,
    GROUP_M: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr,  # slots of the ring
):
    """linear_gelu_tma_kernel by hand: a producer fetches for two consumers, which take turns."""
    BARRIER: gl.constexpr = hopper.mbarrier.MBarrierLayout()
    dtype: gl.constexpr = x_desc.dtype
    x_ring = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_M, BLOCK_K], x_desc.layout)
    w_ring = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, BLOCK_K], w_desc.layout)
    out_halves = gl.allocate_shared_memory(dtype, [2, BLOCK_M, BLOCK_N // 2], out_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)  # which slots are to be read,
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)  # and which to be filled
    turns = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    for slot in gl.static_range(STAGES):
        hopper.mbarrier.init(full.index(slot), count=1)
        hopper.mbarrier.init(empty.index(slot), count=1)
    for which in gl.static_range(2):
        hopper.mbarrier.init(turns.index(which), count=1)
    ring, sizes = (x_ring, w_ring, full, empty), (M, N, K)
    given = (bias_ptr, out_desc, out_halves, turns, ring, sizes)
    gl.warp_specialize(
        [
            (multiply_and_gelu, (given, 0, GELU, GROUP_M)),
            (multiply_and_gelu, (given, 1, GELU, GROUP_M)),
            (fetch_blocks, (x_desc, w_desc, ring, sizes, GROUP_M)),
        ],
        [4, 1],  # warps of the second consumer and of the producer; the first's are the launch's
        [232, 40],  # and their registers a thread: the producer has no acc to hold
    )


restore_environment()


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


@functools.lru_cache(1024)
def choose(M, N, dtype, device, tma):
    """What to launch: the kernel, how many programs, and the kernel's constants and options.

    tma says whether the tensors can have descriptors. On Hopper the tile is the smallest of which
    there are no more than SMs: so all tiles are computed at once, by as many SMs as possible. Where
    even the largest tiles are more, programs go on from tile to tile. Tiles, warps and stages are
    the fastest on an H200 (torch 2.11, triton 3.6) of some 400, or a few percent slower. On other
    GPUs nothing was timed; there they fit the shared memory and the registers.
    """
    capability, sms = gpu(device)
    half, hopper, blackwell = dtype != torch.float32, capability[0] == 9, capability[0] == 10

    def count(BLOCK_M, BLOCK_N):
        return triton.cdiv(M, BLOCK_M) * triton.cdiv(N, BLOCK_N)

    def at_once(*tiles):
        """The first of which there are no more than SMs, or the last."""
        return next((tile for tile in tiles if count(*tile) <= sms), tiles[-1])

    large = M >= 128 and 2 * count(128, 128) > 3 * sms
    warps, stages = 4, 4 if half else 3
    if M <= (1 if half else 4):
        tile, BLOCK_K, warps = (1, 16), 256 if half else 128, 2
    elif capability < (8, 0):
        tile, BLOCK_K, stages = (32, 32), 32, 2
    elif M <= (16 if half else 32):
        tile, BLOCK_K = at_once((16, 32), (16, 64)), 128 if half else 64
    elif hopper and half and not large:
        tile, BLOCK_K = at_once((64, 32), (64, 64), (64, 128)), 128
        if M > 64 and count(*tile) > sms:  # two on each SM
            tile, BLOCK_K = (64, 128) if M < 128 else (128, 64), 64
    elif hopper and not half:
        small, big = ((64, 32), (64, 64)), ((128, 64), (128, 128)) if M >= 128 else ()
        tile, BLOCK_K = at_once(*small, *big), 64
        warps = 8 if tile in big else 4
    elif large and (hopper or blackwell) and tma:  # two on each SM, or linear_gelu_pingpong_kernel
        tile, BLOCK_K, stages = ((128, 128), 64, 3) if half else ((128, 64), 32, 3)
    elif large and half:
        tile, BLOCK_K, warps = (128, 128), 32, 8
    else:
        tile, BLOCK_K = (64, 64), 64 if half else 32

    programs = count(*tile)
    options = {"BLOCK_M": tile[0], "BLOCK_N": tile[1], "BLOCK_K": BLOCK_K, "num_warps": warps}
    options["GROUP_M"] = GROUP_M
    options["GELU"] = "erf" if not half else "exp2" if capability == (0, 0) or INTERPRET else "ptx"
    if tma and half and hopper and large and TRIED:
        # 12 warps, with the two groups that it adds; they have all the registers there are.
        options |= {"STAGES": 6, "maxnreg": 168}
        return linear_gelu_pingpong_kernel, min(programs, sms), options
    # Three products in TF32, of the high and low parts: float32's accuracy, and faster.
    options["PRECISION"] = "ieee" if half or capability < (8, 0) else "tf32x3"
    options["num_stages"] = stages
    if tma and (hopper and M > 64 or blackwell and large):
        return linear_gelu_tma_kernel, min(programs, sms if warps == 8 else 2 * sms), options
    return linear_gelu_kernel, programs, options


def describe(tensor):
    """A tensor's dtype, and what else about it keeps a kernel from its values."""
    if type(tensor) not in TENSORS:
        return str(type(tensor))
    if tensor.layout != torch.strided or tensor.is_nested:
        return f"{tensor.dtype} ({'nested' if tensor.is_nested else tensor.layout})"
    return f"{tensor.dtype} (a view that negates)" if tensor.is_neg() else str(tensor.dtype)


def address(tensor):
    """Where a tensor's values are; 0 if nowhere: it is empty, freed, or torch.func's."""
    try:
        return tensor.data_ptr() if tensor.untyped_storage().nbytes() else 0
    except RuntimeError:
        return 0


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
    if any(t.numel() and not address(t) for t in tensors):
        refuse(ValueError, "tensors with values in memory", lambda t: f"at {address(t):#x}")


def descriptor(kernel, tensor, block):
    if kernel is linear_gelu_tma_kernel:
        return TensorDescriptor.from_tensor(tensor, block)
    layout = gl.NVMMASharedLayout.get_default_for(block, gl.float16)  # or any type of 16 bits
    return GluonDescriptor.from_tensor(tensor, block, layout)


def arguments_of(kernel, options, x, weight, bias, out):
    """What a kernel takes beside its constants: x, weight, bias and out, then the numbers."""
    M, K = x.shape
    N = len(weight)
    if kernel is linear_gelu_kernel:
        return (x, weight, bias, out), (M, N, K, *x.stride(), *weight.stride())
    BLOCK_M, BLOCK_N, BLOCK_K = options["BLOCK_M"], options["BLOCK_N"], options["BLOCK_K"]
    x_desc = descriptor(kernel, x, [BLOCK_M, BLOCK_K])
    w_desc = descriptor(kernel, weight, [BLOCK_N, BLOCK_K])
    out_desc = descriptor(kernel, out, [BLOCK_M, BLOCK_N // 2])
    return (x_desc, w_desc, bias, out_desc), (M, N, K)


def launch(device, kernel, programs, arguments, options):
    # Triton launches on the current GPU, which need not be the tensors'.
    with torch.cuda.device(device if device.type == "cuda" else -1):  # -1: no effect
        return kernel[(programs,)](*arguments, **options)


def launch_key(tensor):
    """Cache key: whatever changes validation, the choice of kernel, or compilation."""
    if type(tensor) not in TENSORS or tensor.layout != torch.strided or tensor.is_nested:
        return type(tensor)
    try:
        pointer = tensor.data_ptr()
    except RuntimeError:  # torch.func's: check refuses it
        return type(tensor)
    # A lower one is an offset, in what was freed.
    aligned = pointer % 16 == 0 if pointer >> 32 else None
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device, aligned, tensor.is_neg()


# By launch_key of x, weight and bias: the compiled kernel, and what else launch_again takes.
_launches = {}


def launch_again(x, weight, bias, compiled, programs, descriptors, numbers, shape):
    """Launches as launch() did, without Triton's search for what it has compiled, and without the
    launch hooks that a profiler may have set.
    """
    out = torch.empty(shape, device=x.device, dtype=x.dtype)
    bias_ptr = None if bias is None else bias.data_ptr()
    if descriptors:
        x_desc, w_desc, out_desc = map(with_base, descriptors, (x, weight, out))
        arguments = x_desc, w_desc, bias_ptr, out_desc, *numbers
    else:
        arguments = x.data_ptr(), weight.data_ptr(), bias_ptr, out.data_ptr(), *numbers
    stream = triton.runtime.driver.active.get_current_stream(x.device.index)
    handles = stream, compiled.function, compiled.packed_metadata, None, None, None
    compiled.run(programs, 1, 1, *handles, *arguments)
    return out


def with_base(known, tensor):
    """A descriptor like another, which has passed Triton's checks; a copy, for threads' sake."""
    made = object.__new__(type(known))
    made.__dict__ = known.__dict__ | {"base": tensor}
    return made


def launch_checked(x, weight, bias):
    """fast_linear_gelu of tensors that hold values."""
    key = launch_key(x), launch_key(weight), launch_key(bias)
    known = _launches.get(key)
    if known is not None and x.device.index == torch.cuda.current_device():
        return launch_again(x, weight, bias, *known)

    check(x, weight, *(() if bias is None else (bias,)))
    if INTERPRET and x.dtype == torch.bfloat16:  # the interpreter computes bfloat16 wrongly
        wide = [t if t is None else t.float() for t in (x, weight, bias)]
        return launch_checked(*wide).bfloat16()
    out = torch.empty(x.shape[:-1] + weight.shape[:-1], device=x.device, dtype=x.dtype)
    if out.numel() == 0:
        return out
    K = x.shape[-1]
    N = weight.shape[0] if weight.dim() == 2 else 1
    M = out.numel() // N
    rows, columns, output = x.reshape(M, K), weight.reshape(N, K), out.view(M, N)
    dense_bias = None if bias is None else bias.contiguous()

    tma = TensorDescriptor is not None and all(map(takes_tma, (rows, columns, output)))
    kernel, programs, options = choose(M, N, x.dtype, x.device, tma)
    tensors, numbers = arguments_of(kernel, options, rows, columns, dense_bias, output)
    compiled = launch(x.device, kernel, programs, tensors + numbers, options)
    as_given = rows.data_ptr() == x.data_ptr() and dense_bias is bias
    if as_given and compiled is not None and TRIED and len(_launches) < 4096:
        described = () if kernel is linear_gelu_kernel else (tensors[0], tensors[1], tensors[3])
        descriptors = tuple(with_base(d, None) for d in described)  # keeps no tensor
        numbers += tuple(options[name] for name in kernel.arg_names if name in options)
        _launches[key] = compiled, programs, descriptors, numbers, out.shape
    return out


# An operator, for tensors without values, and for compilers and modes that look at each operator.
operator = torch.library.custom_op(
    "chapter20::fast_linear_gelu",
    launch_checked,
    mutates_args=(),
    schema="(Tensor x, Tensor weight, Tensor? bias) -> Tensor",
)


@operator.register_fake
def _(x, weight, bias):
    return x.new_empty(x.shape[:-1] + weight.shape[:-1])


def fast_linear_gelu(x, weight, bias=None):
    """gelu(linear(x, weight, bias)) with the exact (erf) GELU; forward only (Section 20.1).

    x is (..., K), weight (N, K), bias (N,) or None, as for torch.nn.functional.linear; a weight of
    (K,) and a bias of () make one column, which the output then lacks. All float32, float16 or
    bfloat16, on one device, of any strides; empty ones too. Returns a new, contiguous (..., N)
    tensor of their dtype; under autocast of autocast's, as torch does. Sums and GELU are in
    float32, and nothing is rounded in between.

    Copied are only an x whose leading dimensions are no one stride apart, and a strided bias.
    torch.compile and torch.export see one operator, chapter20::fast_linear_gelu; tensors without
    values are not checked.

    Raises TypeError for another dtype or two, another layout, views that negate, and subclasses of
    torch.Tensor; ValueError for two devices, for shapes that do not chain, for tensors of a
    transform such as torch.func.vmap, and where one requires grad and grad mode is on. A
    forward-mode tangent is dropped.
    """
    if torch.is_grad_enabled():
        tensors = {"x": x, "weight": weight, "bias": bias}
        wanting = [name for name, t in tensors.items() if getattr(t, "requires_grad", False)]
        if wanting:
            raise ValueError(f"no backward, but {', '.join(wanting)} requires grad: use no_grad()")
    if torch.is_autocast_enabled(DEVICE):
        dtype, tensors = torch.get_autocast_dtype(DEVICE), (x, weight, bias)
        x, weight, bias = (
            t.to(dtype) if getattr(t, "dtype", None) in DTYPES else t for t in tensors
        )
    traced = torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0
    if traced or (isinstance(x, torch.Tensor) and (type(x) not in TENSORS or x.is_meta)):
        return operator(x, weight, bias)
    return launch_checked(x, weight, bias)
