"""From pixels to patch tokens: padding, the linear layer on patches, and its kernel at other patch sizes (FlexiViT)."""

# ruff: noqa: F722  (dimension names in annotations are words, not code)

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from hashlib import sha256
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from vitscale.models.layers import lecun_normal_
from vitscale.models.position import Resize, interpolate

Padding = Literal["none", "same", "corner"]


class Patches(NamedTuple):
    """Tokens row by row from the top left, `[batch, rows * columns, dim]`, and their grid."""

    tokens: Tensor
    grid: tuple[int, int]


class PatchEmbed(nn.Module):
    """Square patches, each mapped to a token: a linear layer, computed as a convolution.

    Args:
        in_channels: Channels of the images.
        patch_size: Side of a patch.
        embed_dim: Width of a token.
        stride: Pixels from one patch to the next; None: `patch_size`.
        padding: Where zeros go when patches do not fill the images.
        bias: Whether the layer has one.
    """

    def __init__(
        self,
        *,
        in_channels: int,
        patch_size: int,
        embed_dim: int,
        stride: int | None = None,
        padding: Padding = "none",
        bias: bool = True,
    ) -> None:
        super().__init__()
        self.patch_size, self.stride, self.padding = patch_size, stride, padding
        self.proj = nn.Conv2d(in_channels, embed_dim, kernel_size=patch_size, stride=stride or patch_size, bias=bias)

    def forward(self, images: Float[Tensor, "batch channels height width"], patch_size: int | None = None) -> Patches:
        """The tokens of all patches.

        Args:
            images: Normalised pixels.
            patch_size: FlexiViT: side of the patches to take, the kernel being resized to it; None: the kernel's own.
        """
        patch = patch_size or self.patch_size
        images = pad_to_patches(images, patch_size=patch, stride=self.stride or patch, padding=self.padding)
        if patch == self.patch_size:
            maps: Tensor = self.proj(images)
        else:
            kernel = resize_patch_kernel(self.proj.weight, patch, mode="bilinear")
            maps = F.conv2d(images, kernel, self.proj.bias, stride=patch)
        return Patches(maps.flatten(2).transpose(1, 2), (maps.shape[2], maps.shape[3]))

    @torch.no_grad()
    def init_weights(self) -> None:
        """LeCun's normal, truncated, for the linear layer this is: its fan-in is a whole patch; bias zero."""
        lecun_normal_(self.proj.weight)
        if self.proj.bias is not None:
            nn.init.zeros_(self.proj.bias)


def pad_to_patches(
    images: Float[Tensor, "batch channels height width"], *, patch_size: int, stride: int, padding: Padding
) -> Float[Tensor, "batch channels padded_height padded_width"]:
    """Zeros around images, as few as let patches reach every pixel: mmcv's adaptive padding.

    `corner` puts them to the right and below; `same` on all sides, the odd one to the right and below.
    """
    if padding == "none":
        return images
    missing = [max((-(-side // stride) - 1) * stride + patch_size - side, 0) for side in images.shape[2:]]
    top, left = (amount // 2 if padding == "same" else 0 for amount in missing)
    return F.pad(images, (left, missing[1] - left, top, missing[0] - top))


def resize_patch_kernel(
    kernel: Float[Tensor, "dim channels height width"],
    patch_size: int,
    *,
    mode: Resize = "bicubic_antialias",
    method: Literal["pseudo_inverse", "interpolate"] = "pseudo_inverse",
) -> Float[Tensor, "dim channels new_height new_width"]:
    """The weights of a patch embedding for patches of another size.

    `pseudo_inverse` (FlexiViT, https://arxiv.org/abs/2212.08013, section 3.4): with B the matrix that resizes a patch,
    the new weights are pinv(B^T) times the old. Then tokens of resized patches are those of the old ones, exactly where
    patches grow and in the least squares where they shrink. B is the product of a matrix for rows and one for columns,
    and so is its pseudo-inverse. `interpolate` resizes the weights as if they were an image.

    Computed in float32 and returned in the type it came in; the same tensor where nothing changes.

    Args:
        kernel: Weights of the convolution.
        patch_size: Side of the new patches.
        mode: How patches are resized: FlexiViT's training has `bilinear`, timm `bicubic_antialias`.
        method: See above.
    """
    old = (kernel.shape[2], kernel.shape[3])
    if old == (patch_size, patch_size):
        return kernel
    if method == "interpolate":
        return interpolate(kernel.float(), (patch_size, patch_size), mode=mode).to(kernel.dtype)
    rows, columns = (_transposed_inverse(side, patch_size, mode).to(kernel.device) for side in old)
    with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
        resized: Tensor = rows @ kernel.float() @ columns.T
    return resized.to(kernel.dtype)


@lru_cache(maxsize=64)
def _transposed_inverse(old: int, new: int, mode: Resize) -> Tensor:
    """pinv(B^T), `[new, old]`, on the host, of the matrix B `[new, old]` that resizes one side of a patch."""
    with torch.inference_mode(False), torch.no_grad(), torch.device("cpu"):
        # Two equal columns: torch's antialiased kernels are wrong for images of one column and one channel (2.14).
        basis = torch.eye(old, dtype=torch.float64)[:, None, :, None].expand(-1, -1, -1, 2)
        resize = interpolate(basis, (new, 2), mode=mode)[:, 0, :, 0]  # B^T: what becomes of each unit vector
        inverse: Tensor = torch.linalg.pinv(resize)
    return inverse.float()


def draw_patch_size(seed: int, step: int, patch_sizes: Sequence[int]) -> int:
    """FlexiViT: the patch size of a training step, the same on every rank and when a resumed run repeats the step.

    Args:
        seed: Of the run.
        step: Number of the step.
        patch_sizes: Those to draw from, each as likely as the others.
    """
    digest = sha256(f"patch size {seed} {step}".encode()).digest()
    return patch_sizes[int.from_bytes(digest[:8], "big") % len(patch_sizes)]
