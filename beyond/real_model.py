"""The chapter's check at the size of a model: torch's encoder with our two layers in it.

    python beyond/real_model.py              # checks, and with a GPU also times, in some minutes
    python beyond/real_model.py --out DIR    # writes the table into DIR, not into beyond/results/

As in Sections 20.1 and 20.3, the parameters are those of a real module, and its output is what ours
is compared with; the weights are random. Both are compared with the same encoder in float64 too.
Then four encoders are timed in turn: as it is, with our LayerNorm, with our linear + GELU, with
both. Each of them eager, compiled, and compiled and captured in a CUDA graph. Without a GPU, a
small encoder is checked, and nothing is timed.
"""

import argparse
import copy
import itertools
import statistics
import sys
import time
from pathlib import Path

try:
    import numpy  # noqa: F401 (Triton's interpreter needs it)
    import torch
    from fast_layernorm import DEVICE, fast_layernorm
    from fast_linear_gelu import fast_linear_gelu
    from triton import __version__ as VERSION
except ModuleNotFoundError as error:
    sys.exit(f"{error}: ./run_all.sh finds a Python that has it, or makes one, .venv/bin/python")

RESULTS = Path(__file__).resolve().parent / "results"
ROUNDING = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-9}


class FastLayerNorm(torch.nn.LayerNorm):
    def forward(self, x):
        return fast_layernorm(x, self.weight, self.bias, self.eps)


class FastLinearGelu(torch.nn.Linear):
    def forward(self, x):
        return fast_linear_gelu(x, self.weight, self.bias)


def swap(encoder, norms, linears):
    """A copy of the encoder with ours in the place of its LayerNorms, or its linear + GELU."""
    encoder = copy.deepcopy(encoder)
    for layer in encoder.layers:
        layer.activation_relu_or_gelu = 0  # torch's fused path for a layer would pass ours by
        if linears:
            layer.linear1.__class__ = FastLinearGelu
            layer.activation = torch.nn.Identity()
    for module in encoder.modules():
        if norms and type(module) is torch.nn.LayerNorm:
            module.__class__ = FastLayerNorm
    return encoder


def make_encoder(d, layers, norm_first):
    """Random weights, drawn on the CPU from a seed; LayerNorm's not all 1 and 0."""
    torch.manual_seed(20)
    layer = torch.nn.TransformerEncoderLayer(
        d, d // 64, 4 * d, activation="gelu", batch_first=True, norm_first=norm_first
    )
    encoder = torch.nn.TransformerEncoder(
        layer, layers, torch.nn.LayerNorm(d), enable_nested_tensor=False
    )
    for parameter in encoder.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    for module in encoder.modules():
        if isinstance(module, torch.nn.LayerNorm):
            module.weight.data += 1.0
    return encoder.eval()


def check(name, encoder, ours, x):
    """Print both encoders' errors against float64; exit unless ours is at most a quarter larger,
    or of a few roundings.
    """
    exact = copy.deepcopy(encoder).double()(x.double())
    outputs = [model(x).double() for model in (encoder, ours)]
    error, our_error = (((out - exact).norm() / exact.norm()).item() for out in outputs)
    print(f"{name}: error {error:.2e}, with ours {our_error:.2e}", flush=True)
    if not our_error <= max(1.25 * error, 4 * ROUNDING[x.dtype]):
        sys.exit(f"{name}: with ours, the error is too large")


def milliseconds(call):
    """Of calls in a row, for a tenth of a second or so."""
    torch.cuda.synchronize()
    start, count = time.perf_counter(), 0
    while time.perf_counter() - start < 0.1:
        for _ in range(5):
            call()
        torch.cuda.synchronize()
        count += 5
    return (time.perf_counter() - start) / count * 1e3


def captured(model, x):
    """A call that replays a CUDA graph of model(x)."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        model(x)
    return graph.replay


def calls_of(encoder, x):
    """What is timed, by mode and by what is ours in it."""
    calls = {}
    torch._dynamo.reset()
    swaps = {"as it is": (0, 0), "LayerNorm": (1, 0), "linear + GELU": (0, 1), "both": (1, 1)}
    for name, (norms, linears) in swaps.items():
        model = swap(encoder, norms, linears) if norms or linears else encoder
        compiled = torch.compile(model, fullgraph=True, dynamic=False)
        for _ in range(3):
            compiled(x)
        calls["eager", name] = lambda model=model: model(x)
        calls["compiled", name] = lambda compiled=compiled: compiled(x)
        calls["CUDA graph", name] = captured(compiled, x)
    return calls


def times_of(encoder, x, rounds=5):
    """Median milliseconds of each call, in rounds that take turns."""
    calls = calls_of(encoder, x)
    times = {key: [] for key in calls}
    for i in range(rounds):
        for key in reversed(calls) if i % 2 else calls:
            times[key].append(milliseconds(calls[key]))
    return {key: statistics.median(found) for key, found in times.items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=RESULTS, help="the folder that is written")
    options = parser.parse_args()
    torch.backends.mha.set_fastpath_enabled(False)  # its GELU is the tanh form, another function
    for norm_first, dtype in itertools.product([False, True], ROUNDING):
        encoder, x = make_encoder(64, 2, norm_first).to(DEVICE, dtype), torch.randn(2, 16, 64)
        name = f"2 layers of 64, norm {'first' if norm_first else 'last'}, {str(dtype)[6:]}"
        check(name, encoder, swap(encoder, True, True), x.to(DEVICE, dtype))
    if DEVICE == "cpu":
        print("There is no GPU: nothing was timed.")
        return
    options.out.mkdir(parents=True, exist_ok=True)
    versions = f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {VERSION}"
    rows = [f"12 layers, milliseconds. {versions}.", ""]
    rows += ["| d, tokens, dtype | mode | as it is | LayerNorm | linear + GELU | both |"]
    rows += ["| --- | --- | --- | --- | --- | --- |"]
    for d, tokens, dtype in itertools.product(
        (768, 1024), ((1, 128), (32, 128), (32, 512)), ROUNDING
    ):
        encoder = make_encoder(d, 12, norm_first=True).to(DEVICE, dtype)
        x = torch.randn(*tokens, d).to(DEVICE, dtype)
        name = f"{d}, {tokens[0]} x {tokens[1]}, {str(dtype)[6:]}"
        check(name, encoder, swap(encoder, True, True), x)
        times = times_of(encoder, x)
        for mode in ("eager", "compiled", "CUDA graph"):
            found = [f"{ms:.2f}" for (m, _), ms in times.items() if m == mode]
            rows.append(f"| {' | '.join([name, mode, *found])} |")
            print(rows[-1], flush=True)
        (options.out / "real_model.md").write_text("\n".join(rows) + "\n")


if __name__ == "__main__":
    with torch.no_grad():
        main()
