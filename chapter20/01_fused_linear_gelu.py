"""Section 20.1: fusing an epilogue into a matmul, linear + bias + GELU in one kernel.

    python chapter20/01_fused_linear_gelu.py
    python chapter20/01_fused_linear_gelu.py --worked-examples

fused_linear_gelu_kernel computes gelu(x @ weight.T + bias) tile by tile and stores each tile once:
bias and GELU are applied while the tile is still in registers.

fused_linear_gelu_kernel_buggy_bias_axis is the same kernel with its bias on the row axis. It runs,
its output has the right shape, and the values are wrong; where M > N it also reads past the end
of the bias.
"""

import argparse
import os
import sys

try:
    import torch
except ModuleNotFoundError as error:
    sys.exit(f"{error}: ./run_all.sh finds a Python that has it, or makes one, .venv/bin/python")

# Triton looks at TRITON_INTERPRET as it is imported: without a GPU, switch its interpreter on.
INTERPRET = os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "yes", "on", "y")
INTERPRET = INTERPRET or not torch.cuda.is_available()
os.environ["TRITON_INTERPRET"] = "1" if INTERPRET else "0"
DEVICE = "cpu" if INTERPRET else "cuda"  # the kernels'; inputs and oracles stay on the CPU

import triton
import triton.language as tl


@triton.jit
def fused_linear_gelu_kernel(
    a_ptr,  # (M, K) input
    b_ptr,  # (K, N) weight, read through its strides: no transposed copy is made
    bias_ptr,  # (N,) bias, contiguous, or None
    c_ptr,  # (M, N) output
    M,
    N,
    K,
    stride_am,
    stride_ak,
    stride_bk,
    stride_bn,
    stride_cm,
    stride_cn,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    # int64, because an index times a stride passes 2**31 in a large tensor.
    pid_m = tl.program_id(0).to(tl.int64)
    pid_n = tl.program_id(1).to(tl.int64)
    rows = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k in range(0, K, BLOCK_K):
        ks = (k + tl.arange(0, BLOCK_K)).to(tl.int64)
        a = tl.load(
            a_ptr + rows[:, None] * stride_am + ks[None, :] * stride_ak,
            mask=(rows[:, None] < M) & (ks[None, :] < K),
            other=0.0,
        )
        b = tl.load(
            b_ptr + ks[:, None] * stride_bk + cols[None, :] * stride_bn,
            mask=(ks[:, None] < K) & (cols[None, :] < N),
            other=0.0,
        )
        # "ieee": by default an NVIDIA GPU takes TF32, with 10 bits of mantissa, for float32.
        acc += tl.dot(a, b, input_precision="ieee")

    # The epilogue: acc is still in registers, and nothing has been stored yet.
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + cols, mask=cols < N, other=0.0)
        acc += bias[None, :]
    acc = acc * 0.5 * (1.0 + tl.erf(acc / 1.4142135623730951))  # exact GELU; sqrt(2)
    tl.store(
        c_ptr + rows[:, None] * stride_cm + cols[None, :] * stride_cn,
        acc,
        mask=(rows[:, None] < M) & (cols[None, :] < N),
    )


@triton.jit
def fused_linear_gelu_kernel_buggy_bias_axis(
    a_ptr,  # (M, K) input
    b_ptr,  # (K, N) weight, read through its strides: no transposed copy is made
    bias_ptr,  # (N,) bias, contiguous, or None
    c_ptr,  # (M, N) output
    M,
    N,
    K,
    stride_am,
    stride_ak,
    stride_bk,
    stride_bn,
    stride_cm,
    stride_cn,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    # int64, because an index times a stride passes 2**31 in a large tensor.
    pid_m = tl.program_id(0).to(tl.int64)
    pid_n = tl.program_id(1).to(tl.int64)
    rows = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k in range(0, K, BLOCK_K):
        ks = (k + tl.arange(0, BLOCK_K)).to(tl.int64)
        a = tl.load(
            a_ptr + rows[:, None] * stride_am + ks[None, :] * stride_ak,
            mask=(rows[:, None] < M) & (ks[None, :] < K),
            other=0.0,
        )
        b = tl.load(
            b_ptr + ks[:, None] * stride_bk + cols[None, :] * stride_bn,
            mask=(ks[:, None] < K) & (cols[None, :] < N),
            other=0.0,
        )
        # "ieee": by default an NVIDIA GPU takes TF32, with 10 bits of mantissa, for float32.
        acc += tl.dot(a, b, input_precision="ieee")

    # The epilogue: acc is still in registers, and nothing has been stored yet.
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + rows, mask=rows < M, other=0.0)  # BUG: N long, read up to M - 1
        acc += bias[:, None]  # BUG: the bias belongs to the columns, not to the rows
    acc = acc * 0.5 * (1.0 + tl.erf(acc / 1.4142135623730951))  # exact GELU; sqrt(2)
    tl.store(
        c_ptr + rows[:, None] * stride_cm + cols[None, :] * stride_cn,
        acc,
        mask=(rows[:, None] < M) & (cols[None, :] < N),
    )


def check_float32(**tensors):
    """Check that the tensors are what the kernels take: float32, dense, and on one device, theirs.

    All but x and weight may be None. Raises TypeError or ValueError, naming what each is.
    """
    required = ("x", "weight")
    tensors = {name: t for name, t in tensors.items() if t is not None or name in required}
    if any(describe(t) != "torch.float32" for t in tensors.values()):
        found = ", ".join(f"{name} {describe(t)}" for name, t in tensors.items())
        raise TypeError(f"expected float32 tensors, got {found}")
    devices = {t.device for t in tensors.values()}
    if len(devices) > 1 or devices.pop().type != DEVICE:
        found = ", ".join(f"{name} on {t.device}" for name, t in tensors.items())
        raise ValueError(f"expected tensors on one {DEVICE} device, got {found}")


def describe(tensor):
    """A tensor's dtype, and its layout where its memory does not hold its values one by one."""
    if not isinstance(tensor, torch.Tensor):
        return str(type(tensor))
    if tensor.layout != torch.strided:
        return f"{tensor.dtype} ({tensor.layout})"
    return f"{tensor.dtype} (a view that negates)" if tensor.is_neg() else str(tensor.dtype)


def fused_linear_gelu(
    x, weight, bias, kernel=fused_linear_gelu_kernel, BLOCK_M=16, BLOCK_N=16, BLOCK_K=16
):
    """gelu(x @ weight.T + bias) with the exact (erf) GELU, in one kernel launch (Section 20.1).

    x is (M, K), weight (N, K) as torch.nn.Linear holds it, bias (N,) or None; all float32, on one
    device, of any strides. Returns a new (M, N) float32 tensor; no gradient flows through it.

    BLOCK_M, BLOCK_N and BLOCK_K are the sides of a tile: powers of two, at least 16 (tl.dot's
    minimum for BLOCK_K on NVIDIA GPUs, and for all three before triton 3.3; the book has 8, 8, 4).

    Raises TypeError for another dtype; ValueError for another rank, for shapes that do not chain,
    for tensors on different devices, for other tile sides, for N over 65535 * BLOCK_N, and for a
    bias whose memory ends before the buggy kernel stops reading.
    """
    check_float32(x=x, weight=weight, bias=bias)
    shapes = f"x {tuple(x.shape)}, weight {tuple(weight.shape)}"
    if x.dim() != 2 or weight.dim() != 2 or x.shape[1] != weight.shape[1]:
        raise ValueError(f"expected x (M, K) and weight (N, K), got {shapes}")
    M, K = x.shape
    N = weight.shape[0]
    if bias is not None:
        if bias.shape != (N,):
            raise ValueError(f"expected bias ({N},), got {shapes}, bias {tuple(bias.shape)}")
        bias = bias.contiguous()
    for side in (BLOCK_M, BLOCK_N, BLOCK_K):
        if side < 16 or side & (side - 1):
            raise ValueError(
                "expected tile sides that are powers of two and at least 16, got "
                f"BLOCK_M={BLOCK_M}, BLOCK_N={BLOCK_N}, BLOCK_K={BLOCK_K}"
            )
    if triton.cdiv(N, BLOCK_N) > 65535:  # CUDA's limit on a grid's second axis
        raise ValueError(f"N={N} is more than 65535 tiles of BLOCK_N={BLOCK_N}: take larger ones")
    if kernel is fused_linear_gelu_kernel_buggy_bias_axis and bias is not None:
        owned = bias.untyped_storage().nbytes() // bias.element_size() - bias.storage_offset()
        if owned < M:
            raise ValueError(
                f"the buggy kernel reads bias[0] to bias[{M - 1}], and this bias of {N} lies in a "
                f"buffer that ends after {owned}: pass a view of a buffer of at least {M}"
            )

    out = torch.empty((M, N), device=x.device, dtype=x.dtype)
    grid = (triton.cdiv(M, BLOCK_M), triton.cdiv(N, BLOCK_N))
    with torch.cuda.device_of(x):  # Triton launches on the current GPU; on the CPU, no effect
        kernel[grid](
            x,
            weight,
            bias,
            out,
            M,
            N,
            K,
            x.stride(0),
            x.stride(1),
            weight.stride(1),  # weight is (N, K): swapping its strides reads it as (K, N)
            weight.stride(0),
            out.stride(0),
            out.stride(1),
            BLOCK_M=BLOCK_M,
            BLOCK_N=BLOCK_N,
            BLOCK_K=BLOCK_K,
        )
    return out


def linear_and_input():
    """The chapter's torch.nn.Linear, its input x (20, 12), and the oracle's output, on the CPU."""
    torch.manual_seed(0)
    M, K, N = 20, 12, 16
    layer = torch.nn.Linear(K, N).requires_grad_(False)
    x = torch.randn(M, K)
    return layer, x, torch.nn.functional.gelu(layer(x), approximate="none")


def run_layer(layer, x, kernel):
    """The layer's output from one of the two kernels, back on the CPU."""
    # The buggy kernel reads M values where the bias has N. The bias is therefore a view of a
    # buffer of M values, ours to its end: zeros lie where the book's machine held garbage.
    M, N = len(x), len(layer.bias)
    buffer = torch.zeros(max(M, N))
    buffer[:N] = layer.bias
    bias = buffer.to(DEVICE)[:N]
    return fused_linear_gelu(x.to(DEVICE), layer.weight.to(DEVICE), bias, kernel=kernel).cpu()


def section_20_1():
    layer, x, oracle = linear_and_input()

    print("=== Section 20.1: fused Linear+bias+GELU vs. a real torch.nn.Linear module ===")
    out = run_layer(layer, x, fused_linear_gelu_kernel)
    print("allclose to nn.Linear + gelu oracle?", torch.allclose(out, oracle, atol=1e-4))

    print("\n=== Section 20.1: the bias-axis bug ===")
    out = run_layer(layer, x, fused_linear_gelu_kernel_buggy_bias_axis)
    print("buggy kernel allclose to oracle?", torch.allclose(out, oracle, atol=1e-4))


@triton.jit
def probe_bias_kernel(
    bias_ptr,  # (N,) bias
    out_ptr,  # (M,) what was read
    M,
    BLOCK_M: tl.constexpr,
):
    rows = tl.arange(0, BLOCK_M)
    bias = tl.load(bias_ptr + rows, mask=rows < M, other=0.0)  # BUG: the buggy kernel's own load
    tl.store(out_ptr + rows, bias, mask=rows < M)


def probe_bias(bias, M):
    """What the buggy kernel's load picks up at bias[0] to bias[M - 1]; the caller owns them all."""
    out = torch.empty(M, device=bias.device)
    probe_bias_kernel[(1,)](bias, out, M, BLOCK_M=triton.next_power_of_2(M))
    return out


def worked_examples():
    layer, x, oracle = linear_and_input()
    M, N = oracle.shape

    print("\n=== Worked Example 20.1.1 ===")
    out = run_layer(layer, x, fused_linear_gelu_kernel)
    print("shapes: x", x.shape, "weight", layer.weight.shape, "bias", layer.bias.shape, end=" ")
    print("out", out.shape)
    print("allclose to nn.Linear + gelu oracle?", torch.allclose(out, oracle, atol=1e-4))
    print("max abs diff:", (out - oracle).abs().max().item())

    print("\n=== Worked Example 20.1.2 ===")
    out = run_layer(layer, x, fused_linear_gelu_kernel_buggy_bias_axis)
    print("buggy kernel allclose to oracle?", torch.allclose(out, oracle, atol=1e-4))
    print("max abs diff:", (out - oracle).abs().max().item())

    # The book's probe, on memory that is ours: past the bias of 16 lie -1000 to -1003.
    buffer = torch.cat([torch.arange(float(N)), -1000.0 - torch.arange(float(M - N))]).to(DEVICE)
    print(f"\nbias of {N} values, read at 0 to {M - 1}:")
    print(probe_bias(buffer[:N], M).int().tolist())


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--worked-examples", action="store_true", help="then print what the worked examples print"
    )
    args = parser.parse_args()
    if INTERPRET:
        print("running in Triton's interpreter, on the CPU", file=sys.stderr)
    section_20_1()
    if args.worked_examples:
        worked_examples()


if __name__ == "__main__":
    main()
