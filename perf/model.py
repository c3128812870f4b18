"""A small Llama-shaped model trained with our module and with a float32 norm.

    python -m perf.model [--out DIR]

Two layers, bf16, 200 steps on one stream of data: with the reference norm from two seeds, with ours
from the first. The bar: the mean over the steps of |loss - reference's loss| is at most what lies
between the two seeds. Writes model.csv and environment.json; exit code 1 where the bar fails.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

try:
    import torch
except ModuleNotFoundError:
    sys.exit("perf.model trains a model in torch: pip install torch")

from torch import nn
from torch.nn import functional

import rmsnorm_raw as rr
from rmsnorm_raw import environment

EPS = 1e-5
Norm = Callable[[int], nn.Module]


@dataclass(frozen=True)
class Size:
    """What is trained."""

    width: int = 1024
    hidden: int = 2816
    heads: int = 8
    layers: int = 2
    vocabulary: int = 4096
    batch: int = 8
    length: int = 512
    learning_rate: float = 3e-4


class FloatNorm(nn.Module):
    """The reference: RMSNorm in float32 by torch's own operations, rounded once."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        rstd = torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS)
        return (wide * rstd * self.weight.float()).to(x.dtype)


def our_norm(width: int) -> nn.Module:
    return rr.nn.RMSNorm(width, EPS)


class Attention(nn.Module):
    """Causal self-attention with rotary positions."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads = size.heads
        self.qkv = nn.Linear(size.width, 3 * size.width, bias=False)
        self.out = nn.Linear(size.width, size.width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.qkv(x).chunk(3, dim=-1)
        )
        y = functional.scaled_dot_product_attention(rotary(q), rotary(k), v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


def rotary(x: torch.Tensor) -> torch.Tensor:
    half = x.shape[-1] // 2
    steps = torch.arange(x.shape[-2], device=x.device, dtype=torch.float32)
    rates = 10000.0 ** -(torch.arange(half, device=x.device, dtype=torch.float32) / half)
    angle = torch.outer(steps, rates)
    sine, cosine = angle.sin().to(x.dtype), angle.cos().to(x.dtype)
    a, b = x[..., :half], x[..., half:]
    return torch.cat((a * cosine - b * sine, a * sine + b * cosine), dim=-1)


class Layer(nn.Module):
    def __init__(self, size: Size, norm: Norm) -> None:
        super().__init__()
        self.before_attention, self.before_mlp = norm(size.width), norm(size.width)
        self.attention = Attention(size)
        self.gate_and_up = nn.Linear(size.width, 2 * size.hidden, bias=False)
        self.down = nn.Linear(size.hidden, size.width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.before_attention(x))
        gate, up = self.gate_and_up(self.before_mlp(x)).chunk(2, dim=-1)
        return x + self.down(functional.silu(gate) * up)


class Llama(nn.Module):
    def __init__(self, size: Size, norm: Norm) -> None:
        super().__init__()
        self.embed = nn.Embedding(size.vocabulary, size.width)
        self.layers = nn.Sequential(*(Layer(size, norm) for _ in range(size.layers)))
        self.norm = norm(size.width)
        self.head = nn.Linear(size.width, size.vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.layers(self.embed(tokens))))


def batches(size: Size, steps: int) -> list[torch.Tensor]:
    """Tokens of which nine in ten follow from the one before: there is something to learn."""
    generator = torch.Generator().manual_seed(1234)
    successor = torch.randperm(size.vocabulary, generator=generator)
    made = []
    for _ in range(steps):
        shape = (size.batch, size.length + 1)
        tokens = torch.randint(size.vocabulary, shape, generator=generator)
        follows = torch.rand(shape, generator=generator) < 0.9
        for at in range(size.length):
            tokens[:, at + 1] = torch.where(
                follows[:, at + 1], successor[tokens[:, at]], tokens[:, at + 1]
            )
        made.append(tokens)
    return made


def train(norm: Norm, seed: int, size: Size, data: list[torch.Tensor], device: str) -> list[float]:
    """The loss at each step."""
    torch.manual_seed(seed)
    model = Llama(size, norm).to(device, torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=size.learning_rate)
    losses = []
    for tokens in data:
        tokens = tokens.to(device)
        logits = model(tokens[:, :-1])
        loss = functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [float(loss) for loss in losses]


def distance(one: list[float], other: list[float]) -> float:
    """Mean |difference| over the steps."""
    return sum(abs(a - b) for a, b in zip(one, other, strict=True)) / len(one)


def main() -> int:
    """The command line."""
    from perf.command_line import start  # the suites import this file without the package

    _, out = start("model", __doc__)
    size, steps = Size(), 200
    data = batches(size, steps)
    runs = {
        "reference": train(FloatNorm, 0, size, data, "cuda"),
        "another seed": train(FloatNorm, 1, size, data, "cuda"),
        "ours": train(our_norm, 0, size, data, "cuda"),
    }
    with (out / "model.csv").open("w", newline="") as file:
        table: Any = csv.writer(file)
        table.writerow(("step", *runs))
        table.writerows((step, *row) for step, row in enumerate(zip(*runs.values(), strict=True)))
    ours = distance(runs["ours"], runs["reference"])
    seeds = distance(runs["another seed"], runs["reference"])
    first, last = runs["ours"][0], runs["ours"][-1]
    print(f"loss {first:.3f} -> {last:.3f} in {steps} steps; mean |difference| to the reference:")
    print(f"ours {ours:.5f}, another seed {seeds:.5f}: {'holds' if ours <= seeds else 'FAILS'}")
    facts = {"command": "python -m perf.model", "size": asdict(size), "steps": steps}
    environment.write(out / "environment.json", facts)
    return int(not ours <= seeds or not last < first)


if __name__ == "__main__":
    sys.exit(main())
