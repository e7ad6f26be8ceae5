"""A transformer small enough for a step in a millisecond, with batches and an objective for it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from vitscale.config.schema import LossConfig
from vitscale.data.batch import Batch
from vitscale.train.losses import classification_loss

CLASSES = 5
LOSS = LossConfig(label_smoothing=0.1)


class Block(nn.Module):
    def __init__(self, dim: int, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Dropout(dropout), nn.Linear(2 * dim, dim))
        self.drop_path = dropout

    def forward(self, tokens: Tensor) -> Tensor:
        query, key, value = self.qkv(self.norm(tokens)).chunk(3, dim=-1)
        tokens = tokens + nn.functional.scaled_dot_product_attention(query, key, value)
        update = self.mlp(tokens)
        if self.training and self.drop_path:
            keep = torch.rand(len(tokens), 1, 1) >= self.drop_path
            update = update * keep / (1 - self.drop_path)
        return tokens + update


class Tiny(nn.Module):
    def __init__(self, *, dim: int = 6, depth: int = 2, dropout: float = 0.0) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, dim, 4, stride=4)
        self.cls_token = nn.Parameter(torch.randn(1, 1, dim) * 0.1)
        self.pos_embed = nn.Parameter(torch.randn(1, 5, dim) * 0.1)
        self.blocks = nn.ModuleList([Block(dim, dropout) for _ in range(depth)])
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        tokens = self.patch(images).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.cls_token.expand(len(tokens), -1, -1), tokens], dim=1) + self.pos_embed
        for block in self.blocks:
            tokens = block(tokens)
        out: Tensor = self.head(self.norm(tokens)[:, 0])
        return out


def tiny(*, dropout: float = 0.0, seed: int = 0) -> Tiny:
    torch.manual_seed(seed)
    return Tiny(dropout=dropout)


def global_batch(step: int, size: int) -> Batch:
    """The batch of a step, the same on every rank; a third of the samples are not valid, most in the first half."""
    random = torch.Generator().manual_seed(step)
    images = torch.randint(0, 256, (size, 3, 8, 8), dtype=torch.uint8, generator=random)
    labels = torch.randint(0, CLASSES, (size,), generator=random)
    valid = torch.rand(size, generator=random) > torch.linspace(0.6, 0.1, size)
    return Batch(images, labels, valid, torch.arange(size) + step * size)


def share(batch: Batch, rank: int, world_size: int) -> Batch:
    return batch.split(len(batch) // world_size)[rank]


def objective(model: nn.Module, batch: Batch) -> Tensor:
    images = batch.images.float() / 127.5 - 1
    return classification_loss(model(images), batch.labels, batch.valid, LOSS)


def nan_for_ids(bad: Tensor, model: nn.Module, batch: Batch) -> Tensor:
    """The objective, with pixels that are not numbers in the samples `bad`."""
    images = batch.images.float() / 127.5 - 1
    images[torch.isin(batch.ids, bad)] = torch.nan
    return classification_loss(model(images), batch.labels, batch.valid, LOSS)
