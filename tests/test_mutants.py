"""Small faults put into the scripts, one at a time: a check must notice each of them.

A mutant is caught by the script's output, by a test, by a rule on its source, or as it is compiled
for GPUs. A sample of the mutants is tried; with --mutants all of them.
"""

import collections
import concurrent.futures
import dataclasses
import json
import subprocess
import sys

import mutants
import pytest
import test_style
from scripts import INTERPRET, ROOT, SCRIPTS, name_of
from test_compiles_for_gpus import compile_all

# Changes of the wrappers and sections, and those of the kernels that are not mechanical: a text of
# a script, and what is put in its place. Each place where it stands makes a mutant of its own.
CHOSEN = {
    # The wrappers' launches.
    "            x.stride(0),\n            x.stride(1),": (
        "            x.stride(1),\n            x.stride(0),",
        "            K,\n            1,",
    ),
    "weight.stride(1),  # weight is (N, K): swapping its strides reads it as (K, N)\n"
    "            weight.stride(0),": (
        "weight.stride(0),\n            weight.stride(1),",
        "1,\n            K,",
    ),
    "            out.stride(0),\n            out.stride(1),": (
        "            out.stride(1),\n            out.stride(0),",
    ),
    "            N,\n            K,\n": ("            K,\n            N,\n",),
    "            M,\n            N,\n            K,\n": (
        "            N,\n            M,\n            K,\n",
    ),
    "grid = (triton.cdiv(M, BLOCK_M), triton.cdiv(N, BLOCK_N))": (
        "grid = (triton.cdiv(N, BLOCK_N), triton.cdiv(M, BLOCK_M))",
        "grid = (triton.cdiv(M, BLOCK_N), triton.cdiv(N, BLOCK_M))",
        "grid = (M // BLOCK_M, triton.cdiv(N, BLOCK_N))",
        "grid = (triton.cdiv(M, BLOCK_M), N // BLOCK_N)",
        "grid = (triton.cdiv(M, BLOCK_M), triton.cdiv(N, BLOCK_N) + 1)",
    ),
    "BLOCK_N=BLOCK_N,\n": ("BLOCK_N=BLOCK_M,\n",),
    "BLOCK_K=BLOCK_K,\n": ("BLOCK_K=16,\n",),
    "        kernel[grid](": ("        fused_linear_gelu_kernel[grid](",),
    "        kernel[(M,)](": ("        layernorm_forward_kernel[(M,)](",),
    "kernel=fused_linear_gelu_kernel, ": ("kernel=fused_linear_gelu_kernel_buggy_bias_axis, ",),
    "kernel=layernorm_forward_kernel)": ("kernel=layernorm_forward_kernel_wrong_eps)",),
    "x, mean, var, M, N, x.stride(0)": ("x, var, mean, M, N, x.stride(0)", "x, mean, var, M, N, N"),
    "x, gamma, beta, out, M, N, x.stride(0), float(eps)": (
        "x, beta, gamma, out, M, N, x.stride(0), float(eps)",
        "x, gamma, beta, out, M, N, N, float(eps)",
        "x, gamma, beta, out, M, N, x.stride(0), 1e-5",
        "x, gamma, beta, out, M, N, x.stride(0), 0.0",
    ),
    "gamma, beta, eps=1e-5": ("gamma, beta, eps=1e-6",),
    "return mean, var": ("return var, mean",),
    "var = torch.empty_like(mean)": ("var = mean",),
    "torch.empty((M, N), ": ("torch.empty((N, M), ", "torch.zeros((M, N), "),
    "BLOCK_N = max(1, triton.next_power_of_2(N))": (
        "BLOCK_N = triton.next_power_of_2(N)",
        "BLOCK_N = max(1, triton.next_power_of_2(N) // 2)",
        "BLOCK_N = max(1, N)",
    ),
    "min(max(BLOCK_N // 512, 1), max_warps)": ("1", "min(BLOCK_N // 512, max_warps)"),
    "16 if torch.version.hip else 32": ("32",),
    # What is copied first.
    "bias = bias.contiguous()": ("pass",),
    "gamma if gamma is None else gamma.contiguous()": ("gamma",),
    "beta if beta is None else beta.contiguous()": ("beta",),
    "if x.stride(1) != 1:": ("if False:", "if x.stride(0) != 1:", "if not x.is_contiguous():"),
    # What is refused.
    "    check_float32(x=x, weight=weight, bias=bias)\n": (
        "",
        "    check_float32(weight=weight, bias=bias)\n",
        "    check_float32(x=x, bias=bias)\n",
        "    check_float32(x=x, weight=weight)\n",
    ),
    "    check_float32(x=x)\n": ("",),
    "    check_float32(x=x, gamma=gamma, beta=beta)\n": (
        "",
        "    check_float32(gamma=gamma, beta=beta)\n",
        "    check_float32(x=x, beta=beta)\n",
        "    check_float32(x=x, gamma=gamma)\n",
    ),
    " if t is not None or name in required}": ("}", " if t is not None}"),
    'if any(describe(t) != "torch.float32" for t in': (
        'if all(describe(t) != "torch.float32" for t in',
        'if any(not describe(t).startswith("torch.float") for t in',
    ),
    "if not isinstance(tensor, torch.Tensor):": ("if tensor is None:", "if False:"),
    "if tensor.layout != torch.strided:": ("if False:",),
    'f"{tensor.dtype} (a view that negates)" if tensor.is_neg() else str(tensor.dtype)': (
        "str(tensor.dtype)",
    ),
    "if len(devices) > 1 or devices.pop().type != DEVICE:": (
        "if len(devices) > 1:",
        "if devices.pop().type != DEVICE:",
        "if False:",
    ),
    "x.dim() != 2 or weight.dim() != 2 or x.shape[1] != weight.shape[1]": (
        "weight.dim() != 2 or x.shape[1] != weight.shape[1]",
        "x.dim() != 2 or x.shape[1] != weight.shape[1]",
        "x.dim() != 2 or weight.dim() != 2",
    ),
    "bias.shape != (N,):": ("False:", "bias.numel() != N:", "len(bias) < N:"),
    "side < 16 or side & (side - 1)": ("side & (side - 1)", "side < 16", "side <= 16"),
    "in (BLOCK_M, BLOCK_N, BLOCK_K):": (
        "in (BLOCK_N, BLOCK_K):",
        "in (BLOCK_M, BLOCK_K):",
        "in (BLOCK_M, BLOCK_N):",
    ),
    "triton.cdiv(N, BLOCK_N) > 65535": (
        "False",
        "triton.cdiv(N, BLOCK_N) >= 65535",
        "triton.cdiv(N, BLOCK_N) > 65536",
        "N > 65535",
    ),
    "kernel is fused_linear_gelu_kernel_buggy_bias_axis and bias is not None:": (
        "False:",
        "bias is not None:",
    ),
    " - bias.storage_offset()": ("",),
    " // bias.element_size()": ("",),
    "if owned < M:": ("if owned < N:", "if owned < M - 1:", "if owned <= M:"),
    "if x.dim() != 2:": ("if False:",),
    "BLOCK_N < max(1, N) or BLOCK_N & (BLOCK_N - 1) or BLOCK_N > 2**20": (
        "BLOCK_N & (BLOCK_N - 1) or BLOCK_N > 2**20",
        "BLOCK_N < max(1, N) or BLOCK_N > 2**20",
        "BLOCK_N < max(1, N) or BLOCK_N & (BLOCK_N - 1)",
        "BLOCK_N < N or BLOCK_N & (BLOCK_N - 1) or BLOCK_N > 2**20",
        "BLOCK_N <= max(1, N) or BLOCK_N & (BLOCK_N - 1) or BLOCK_N > 2**20",
        "BLOCK_N < max(1, N) or BLOCK_N & (BLOCK_N - 1) or BLOCK_N >= 2**20",
    ),
    "if BLOCK_N > 2**20:": ("if False:", "if BLOCK_N >= 2**20:"),
    "parameter is not None and parameter.shape != (N,)": (
        "False",
        "parameter is not None and parameter.numel() != N",
        "parameter is not None and len(parameter) < N",
    ),
    '(("gamma", gamma), ("beta", beta))': ('(("gamma", gamma),)', '(("beta", beta),)'),
    # The kernels, beyond what is mechanical.
    "acc * 0.5 * (1.0 + tl.erf(acc / 1.4142135623730951))": (
        "acc * tl.sigmoid(1.5957691216057308 * (acc + 0.044715 * acc * acc * acc))",
        "acc * tl.sigmoid(1.702 * acc)",
        "acc * 0.5 * (1.0 + tl.erf(acc / 1.4142))",
        "tl.maximum(acc, 0.0)",
        "acc",
    ),
    "BLOCK_N), dtype=tl.float32)": (
        "BLOCK_N), dtype=tl.float16)",
        "BLOCK_N), dtype=tl.float64)",
    ),
    "bias = tl.load(bias_ptr + rows, mask=rows < M, other=0.0)  # BUG: N long, read up to M - 1\n"
    "        acc += bias[:, None]": (
        "bias = tl.load(bias_ptr + cols, mask=cols < N, other=0.0)\n        acc += bias[None, :]",
        "bias = tl.load(bias_ptr + rows, mask=rows < N, other=0.0)\n        acc += bias[:, None]",
    ),
    "tl.sum(x, axis=0) / N": ("tl.sum(x, axis=0) / (N - 1)", "tl.sum(x, axis=0) / BLOCK_N"),
    "tl.sum(diff * diff, axis=0) / N": (
        "tl.sum(diff * diff, axis=0) / (N - 1)",
        "tl.sum(diff * diff, axis=0) / BLOCK_N",
        "(tl.sum(x * x, axis=0) / N - mean * mean)",
    ),
    "1.0 / tl.sqrt(var + eps)": (
        "1.0 / (tl.sqrt(var) + eps)",
        "1.0 / tl.sqrt(var + 1e-5)",
        "1.0 / tl.sqrt(var)",
        "1.0 / tl.sqrt(var + eps * eps)",
    ),
    "1.0 / (tl.sqrt(var) + eps)": (
        "1.0 / tl.sqrt(var + eps)",
        "1.0 / (tl.sqrt(var) + 1e-5)",
        "1.0 / tl.sqrt(var)",
    ),
    "x_norm = diff * inv_std": ("x_norm = x * inv_std",),
    # What the sections check.
    "torch.manual_seed(0)": ("torch.manual_seed(1)",),
    "torch.manual_seed(1)": ("torch.manual_seed(0)",),
    "M, K, N = 20, 12, 16": ("M, K, N = 16, 12, 20", "M, K, N = 20, 12, 20"),
    "M, N = 5, 10": ("M, N = 10, 5",),
    "M, N = 6, 17": ("M, N = 6, 16",),
    "torch.randn(4, 8)": ("torch.randn(8, 8)",),
    "5.0 + steps * 1e-6": ("5.0 + steps * 1e-5", "steps * 1e-6"),
    "atol=1e-4": ("atol=1",),
    "atol=1e-5": ("atol=1",),
    'approximate="none"': ('approximate="tanh"',),
    'return layer, x, torch.nn.functional.gelu(layer(x), approximate="none")': (
        "return layer, x, run_layer(layer, x, fused_linear_gelu_kernel)",
    ),
    'oracle = torch.nn.functional.gelu(layer(x), approximate="none")': (
        "oracle = fused_linear_gelu(x.to(DEVICE), layer.weight.to(DEVICE), layer.bias.to(DEVICE))",
    ),
    "biased = x.var(dim=-1, unbiased=False)": (
        "biased = var",
        "biased = x.var(dim=-1, unbiased=True)",
    ),
    "unbiased = x.var(dim=-1, unbiased=True)": ("unbiased = x.var(dim=-1, unbiased=False)",),
    "mean, x.mean(dim=-1), ": ("mean, mean, ", "mean, x.mean(dim=-2).mean(), "),
    "torch.allclose(var, unbiased, ": ("torch.allclose(var, biased, ",),
    "(out, oracle, ": ("(out, out, ",),
    "(out, module(x), ": ("(out, out, ",),
    "(correct, module(x), ": ("(correct, correct, ",),
    "(wrong, module(x), ": ("(wrong, correct, ",),
    "(correct, oracle, ": ("(correct, correct, ",),
    "(wrong, oracle, ": ("(correct, oracle, ",),
    "(correct_flat, oracle_flat, ": ("(oracle_flat, oracle_flat, ",),
    "(wrong_flat, oracle_flat, ": ("(wrong_flat, wrong_flat, ",),
    "module, layernorm_forward_kernel_wrong_eps)": ("module)",),
    "x, fused_linear_gelu_kernel_buggy_bias_axis)": ("x, fused_linear_gelu_kernel)",),
    "module.eps, kernel)": ("1e-5, kernel)", "module.eps, layernorm_forward_kernel)"),
    "module.weight.to(DEVICE), module.bias.to(DEVICE)": (
        "module.bias.to(DEVICE), module.weight.to(DEVICE)",
        "None, module.bias.to(DEVICE)",
        "module.weight.to(DEVICE), None",
    ),
    "bias, kernel=kernel)": ("bias)",),
    "torch.zeros(max(M, N))": ("torch.ones(max(M, N))", "torch.zeros(N)"),
    "    buffer[:N] = layer.bias\n": ("",),
    # What is printed.
    "    section_20_1()\n": ("",),
    "    section_20_2()\n": ("",),
    "    section_20_3()\n": ("",),
    "    if args.worked_examples:\n        worked_examples()\n": ("",),
    "kernel allclose to oracle?": ("kernel allclose to the oracle?",),
    '"typical row", typical': ('"typical rows", typical',),
    "(out - oracle).abs().max()": ("(out - oracle).max()", "(oracle - oracle).max()"),
    "(var - unbiased).abs()": ("(var - biased).abs()", "(biased - unbiased).abs()"),
    "(wrong - oracle).abs()": ("(correct - oracle).abs()", "(wrong - correct).abs()"),
    "(wrong_flat - oracle_flat).abs()": ("(wrong_flat - correct_flat).abs()",),
    'own var values:   ", var)': ('own var values:   ", biased)',),
    'oracle values: ", biased)': ('oracle values: ", var)',),
    'oracle_flat:", oracle_flat)': ('oracle_flat:", correct_flat)',),
    'wrong_flat: ", wrong_flat)': ('wrong_flat: ", wrong_flat.abs())',),
    "-1000.0 - ": ("-1000.0 + ",),
    "probe_bias(buffer[:N], M)": ("probe_bias(buffer[:N], N)",),
}

# Mutants that nothing can notice, with the reason: function, old line and new line.
STORED_OR_ZERO = "a lane past K meets the other operand's 0, and none past M or N is stored"
NOT_STORED = "a lane past the edge is not stored"
BIAS_COLS = "bias = tl.load(bias_ptr + cols, mask=cols < N, other={})"
BIAS_ROWS = "bias = tl.load(bias_ptr + rows, mask=rows < M, other={}) # BUG: "
GAMMA = "x_norm *= tl.load(gamma_ptr + cols, mask=mask, other={})"
BETA = "x_norm += tl.load(beta_ptr + cols, mask=mask, other={})"
EQUIVALENT = {
    (function, old.format("0.0"), old.format("1.0")): reason
    for function, old, reason in [
        ("fused_linear_gelu_kernel", "other={},", STORED_OR_ZERO),
        ("fused_linear_gelu_kernel", BIAS_COLS, NOT_STORED),
        ("fused_linear_gelu_kernel_buggy_bias_axis", "other={},", STORED_OR_ZERO),
        (
            "fused_linear_gelu_kernel_buggy_bias_axis",
            BIAS_ROWS + "N long, read up to M - 1",
            NOT_STORED,
        ),
        ("probe_bias_kernel", BIAS_ROWS + "the buggy kernel's own load", NOT_STORED),
        ("layernorm_forward_kernel", GAMMA, NOT_STORED),
        ("layernorm_forward_kernel", BETA, NOT_STORED),
        ("layernorm_forward_kernel_wrong_eps", GAMMA, NOT_STORED),
        ("layernorm_forward_kernel_wrong_eps", BETA, NOT_STORED),
    ]
}

SAMPLE = 97  # without --mutants one mutant of so many is tried


def key(mutant):
    return mutant.function, mutant.old, mutant.new


def chosen(source):
    return [
        mutant
        for old, news in CHOSEN.items()
        for new in news
        for mutant in mutants.chosen(source, old, new)
    ]


@pytest.fixture(scope="module")
def every_mutant():
    sources = [mutants.Source(script) for script in SCRIPTS]
    made = [mutant for s in sources for mutant in mutants.mechanical(s) + chosen(s)]
    return list({mutant.source: mutant for mutant in made}.values())


@pytest.fixture(scope="module")
def caught(every_mutant, pytestconfig, tmp_path_factory):
    """What caught each mutant that was tried, None where nothing did: by mutant."""
    if not INTERPRET:
        pytest.skip("a GPU is in use: the mutants are interpreted, each access watched")
    tried = every_mutant if pytestconfig.getoption("mutants") else every_mutant[::SAMPLE]
    rule = "rule", test_style.test_a_masked_load_says_what_its_other_lanes_hold.__name__
    caught = {m: rule for m in tried if test_style.masked_loads_without_other(m.source)}
    left = [mutant for mutant in tried if mutant not in caught]
    directory = tmp_path_factory.mktemp("mutants")
    caught |= zip(left, run_mutants(left, directory), strict=True)
    left = [mutant for mutant in tried if caught[mutant] is None]
    for mutant, (_, faults) in zip(left, compile_mutants(left, directory), strict=True):
        if faults:
            caught[mutant] = "compile", faults[0]
    return caught


def run_mutants(left, directory):
    """Which test fails for each mutant, as mutants.py finds it; None where none does."""
    result = subprocess.run(
        [sys.executable, ROOT / "tests/mutants.py", directory],
        input="".join(json.dumps(dataclasses.asdict(mutant)) + "\n" for mutant in left),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    found = dict(map(json.loads, result.stdout.splitlines()))
    return [found[i] for i in range(len(left))]


def compile_mutants(left, directory):
    """What gpu_compile.py says of each mutant, for one GPU of each make."""
    paths = [directory / f"mutant{i}.py" for i in range(len(left))]
    for path, mutant in zip(paths, left, strict=True):
        path.write_text(mutant.source)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        parts = pool.map(
            lambda part: compile_all(part, "sm_90", "gfx942"), [paths[::2], paths[1::2]]
        )
        results = {path: result for part in parts for path, result in part.items()}
    return [results[path] for path in paths]


HOW = ["rule", "output", "tests", "hang", "compile"]


def table(caught, every_mutant):
    """By script: how many mutants were tried, what caught them, and how many nothing caught."""
    lines = [["", "tried", *HOW, "equivalent", "survived"]]
    for script in [*map(name_of, SCRIPTS), "all"]:
        counts = collections.Counter()
        for mutant, how in caught.items():
            if script in (mutant.script, "all"):
                equivalent = "equivalent" if key(mutant) in EQUIVALENT else "survived"
                counts.update(["tried", how[0] if how else equivalent])
        lines.append([script, *(str(counts[column]) for column in lines[0][1:])])
    width = max(len(line[0]) for line in lines)
    text = [line[0].ljust(width) + "".join(cell.rjust(11) for cell in line[1:]) for line in lines]
    tried = f"{len(caught)} of {len(every_mutant)} mutants"
    return "\n".join(
        [tried + (" (--mutants: all)" if len(caught) < len(every_mutant) else ""), *text]
    )


def test_every_mutant_is_caught(caught, every_mutant, capsys):
    with capsys.disabled():
        print("\n" + table(caught, every_mutant))
    survivors = [m for m, how in caught.items() if how is None and key(m) not in EQUIVALENT]
    if survivors:
        pytest.fail("nothing caught\n" + "\n".join(map(str, survivors)), pytrace=False)


def test_equivalent_mutants_survive_and_are_few(caught, every_mutant):
    equivalent = [mutant for mutant in every_mutant if key(mutant) in EQUIVALENT]
    assert {key(mutant) for mutant in equivalent} == EQUIVALENT.keys()
    assert len(equivalent) <= 0.02 * len(every_mutant)
    assert [f"{m} caught by {caught[m]}" for m in equivalent if caught.get(m)] == []


def test_every_chosen_change_can_be_made():
    sources = [script.read_text() for script in SCRIPTS]
    assert [old for old in CHOSEN if not any(old in source for source in sources)] == []
