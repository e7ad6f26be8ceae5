"""A model as ONNX: `images` [batch, channels, height, width] float32 -> `logits` [batch, classes], for any batch.

What is written has been run: onnxruntime gives the outputs that torch gives, or there is no file.
"""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vitscale.config.schema import ModelConfig
from vitscale.errors import UserError
from vitscale.models.position import image_height_width
from vitscale.models.vit import VisionTransformer
from vitscale.weights.content import Preprocessing
from vitscale.weights.write import write_file, write_folder

_LARGEST = 2 * 1000**3
"""Bytes of weights that one file of protobuf can hold; more stand in a file beside it."""
_TOLERANCE = 1e-4
"""Largest difference to torch's outputs, relative to the largest output."""


def write_onnx(
    path: Path,
    state: Mapping[str, Tensor],
    config: ModelConfig,
    *,
    preprocessing: Preprocessing | None,
    class_names: Sequence[str] | None,
) -> None:
    """Write a model for any ONNX runtime, with its image size fixed and its batch free.

    How images are prepared and what the outputs are called stand in the metadata `preprocessing` and `class_names`, as
    JSON. A model of more than 2 GB becomes a folder, with the weights in a file beside `model.onnx`.

    Args:
        path: The file, or the folder.
        state: The tensors under vitscale's names.
        config: The model that they are of.
        preprocessing: What the model expects of images.
        class_names: What the outputs are called.

    Raises:
        UserError: The packages for ONNX are missing, the outputs differ, or the file cannot be written.
    """
    _require_packages()
    with torch.device("meta"):
        model = VisionTransformer(config)
    model.to_empty(device="cpu").load_state_dict(state)
    model.eval()
    height, width = image_height_width(config)
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(3, config.in_channels, height, width, generator=generator)
    program = _exported(model, images[:2])
    program.model.metadata_props.update(
        preprocessing=json.dumps(asdict(preprocessing) if preprocessing else None),
        class_names=json.dumps(list(class_names) if class_names is not None else None),
    )
    size = sum(parameter.numel() for parameter in model.parameters()) * 4

    def write_checked(file: Path) -> None:
        program.save(str(file), external_data=size > _LARGEST)
        _compare(file, model, images)

    if size > _LARGEST:
        write_folder(path, lambda folder: write_checked(folder / "model.onnx"))
    else:
        write_file(path, write_checked)


def _require_packages() -> None:
    try:
        import onnxruntime  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise UserError(f"ONNX needs the package {error.name}: pip install 'vitscale[onnx]'") from None


def _exported(model: VisionTransformer, images: Tensor) -> Any:
    """Torch's ONNX program; what it says on the way is for those who write exporters."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            return torch.onnx.export(
                model,
                (images,),
                dynamo=True,
                verbose=False,
                input_names=["images"],
                output_names=["logits"],
                dynamic_shapes={"images": {0: torch.export.Dim("batch")}},
            )
    finally:
        logger.setLevel(level)


def _compare(file: Path, model: VisionTransformer, images: Tensor) -> None:
    """Run the file on other batches than the one it was made with.

    Raises:
        UserError: Its outputs are not the model's.
    """
    import onnxruntime

    session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    for batch in (1, len(images)):
        with torch.no_grad():
            expected = model(images[:batch])
        (found,) = session.run(None, {"images": images[:batch].numpy()})
        difference = float((torch.from_numpy(found) - expected).abs().max())
        largest = float(expected.abs().max())
        if not difference <= _TOLERANCE * max(largest, 1.0):
            raise UserError(
                f"the ONNX file does not compute what the model does: outputs up to {largest:.3g} differ by "
                f"{difference:.3g} for a batch of {batch}; this is a fault of the exporter, try another torch version"
            )
