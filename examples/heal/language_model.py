"""The replicas' model: a small byte-level transformer, with AdamW, a schedule and a ring of past weights."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import nn

CONTEXT = 64
BATCH = 8


def corpus() -> bytes:
    """Return real text that every Python has: some 500 kB of the sources of its standard library."""
    files = sorted(Path(os.__file__).parent.glob("[a-d]*.py"))
    return b"".join(path.read_bytes() for path in files)[:500_000]


class LanguageModel(nn.Module):
    """A causal transformer over bytes. It has no buffers that a forward pass would change."""

    def __init__(self, width: int, layers: int = 2) -> None:
        super().__init__()
        self.bytes = nn.Embedding(256, width)
        self.positions = nn.Parameter(torch.randn(CONTEXT, width) * 0.02)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(layers)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 256)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the logits of the next byte at each position."""
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        x = self.bytes(tokens) + self.positions
        for layer in self.layers:
            x = layer(x, src_mask=mask, is_causal=True)
        return self.head(self.norm(x))


class Trainee:
    """The state that must survive: the model, its optimizer, its schedule and a ring of past weights.

    Args:
        seed: picks the first weights, so that replicas differ until one heals from another
        width: of the model
        ring_mib: size of the ring, such as one that averages weights keeps; each step fills its next slot

    """

    def __init__(self, seed: int, width: int, ring_mib: int) -> None:
        torch.manual_seed(seed)
        self.model = LanguageModel(width)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=2e-3)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: min(1.0, (step + 1) / 50))
        self.parameters = list(self.model.parameters())
        numbers = sum(p.numel() for p in self.parameters)
        slots = -(-ring_mib * 2**20 // (4 * numbers))
        self.ring = [torch.full((numbers,), float(seed)) for _ in range(slots)]
        self.text = torch.frombuffer(bytearray(corpus()), dtype=torch.uint8)
        self.draw = torch.Generator().manual_seed(seed)

    def state_dict(self) -> dict[str, Any]:
        """Return the whole state, by reference."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "ring": list(self.ring),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a state of another replica."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])
        for mine, theirs in zip(self.ring, state["ring"], strict=True):
            mine.copy_(theirs)

    def backward(self) -> tuple[float, torch.Tensor]:
        """Run one batch of this replica's own; return the loss and all gradients as one vector."""
        starts = torch.randint(len(self.text) - CONTEXT - 1, (BATCH,), generator=self.draw)
        windows = torch.stack([self.text[start : start + CONTEXT + 1] for start in starts]).long()
        self.optimizer.zero_grad()
        logits = self.model(windows[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())
        loss.backward()
        return loss.item(), torch.cat([p.grad.flatten() for p in self.parameters])

    def update(self, gradients: torch.Tensor, step: int) -> None:
        """Step the optimizer and the schedule with the gradients that all replicas agreed on."""
        pieces = gradients.split([p.numel() for p in self.parameters])
        for parameter, piece in zip(self.parameters, pieces, strict=True):
            parameter.grad = piece.view_as(parameter)
        self.optimizer.step()
        self.scheduler.step()
        if self.ring:
            self.ring[step % len(self.ring)].copy_(torch.cat([p.detach().flatten() for p in self.parameters]))
