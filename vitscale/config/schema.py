"""What a run is: every section a frozen dataclass, a docstring under each field.

The docstrings are the reference of all keys: they feed the generated `docs/config.md` and the JSON schema that editors
read. Nothing here does I/O and nothing fills in a field:
derived values are functions of the config and the world. `name: B/16` is expanded by `config.validate` before
this schema sees it, so that a `RunConfig` always holds every number of the run. Bounds of a single key stand in its
type; what several keys owe each other stands in `config.check`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import AfterValidator, ConfigDict, Field

from vitscale.config.duration import Duration as Duration

STRICT = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True)


def _longer_than_zero(duration: Duration) -> Duration:
    if duration.value <= 0:
        raise ValueError(f"'{duration}' is no time at all; write a duration longer than 0")
    return duration


Text = Annotated[str, Field(min_length=1)]
Count = Annotated[int, Field(ge=1)]
CountOr0 = Annotated[int, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]
"""A number from 0 to 1, both included."""
PositiveShare = Annotated[float, Field(gt=0, le=1)]
Below1 = Annotated[float, Field(ge=0, lt=1)]
Span = Annotated[Duration, AfterValidator(_longer_than_zero)]
"""A duration longer than 0."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A Vision Transformer. `name` sets the dimensions; each may also be given by itself."""

    __pydantic_config__ = STRICT

    name: str | None = None
    """A size and patch from the papers, e.g. `Ti/16`, `B/16`, `So400m/14`, `22B/14`, the patch being any number; or one
    of a family, e.g. `DeiT3-L/16`, `DINOv2-g/14`, `DINOv3-B/16`."""
    image_size: Count | tuple[Count, Count] = 224
    """Height and width of the images in pixels; one number for a square."""
    dynamic_image_size: bool = False
    """Take images of any size, learned positions being resized in every forward; otherwise only `image_size`."""
    in_channels: Count = 3
    """Channels of the images."""
    patch_size: Count = 16
    """Side of a patch in pixels."""
    patch_stride: Count | None = None
    """Pixels from one patch to the next; unset: `patch_size`, so that patches lie side by side. With another one, what
    no patch reaches at the right and lower border is left out (TransReID's overlapping patches)."""
    patch_padding: Literal["none", "same", "corner"] = "none"
    """Zeros around images that the patches do not fill: none (such images are refused), on all sides alike (`same`),
    or on the right and below (`corner`)."""
    patch_sizes: tuple[Count, ...] = ()
    """FlexiViT: patch sizes that training draws from, one a step; each must divide `image_size`. The kernel is kept at
    `patch_size` and resized to the one drawn; learned positions are kept at the grid of `patch_size`, cut to whole
    patches."""
    patch_dropout: Below1 = 0.0
    """Share of the patch tokens that each training image loses, drawn anew each time."""
    embed_dim: Count = 768
    """Width of a token."""
    depth: Count = 12
    """Number of blocks."""
    num_heads: Count = 12
    """Attention heads in a block; must divide `embed_dim`."""
    mlp_dim: Count = 3072
    """Width of the hidden layer of a block's MLP; of SwiGLU, after gating."""
    num_fcs: Annotated[int, Field(ge=2)] = 2
    """Linear layers in a block's MLP."""
    num_classes: CountOr0 = 1000
    """Width of the classifier; 0 for no head. At least the number of classes in the training set."""
    representation_size: Count | None = None
    """Width of a linear layer with tanh between pooling and classifier (`pre_logits` of ViT on ImageNet-21k); unset:
    none."""
    pool: Literal["cls", "gap", "cls_gap", "map", "none"] = "cls"
    """What the classifier reads: the class token, the mean over the patch tokens, the two side by side (DINOv2's linear
    heads), attention pooling over the patch tokens, or every token by itself."""
    class_token: bool | None = None
    """Whether there is a class token; unset: only where `pool` reads it."""
    num_registers: CountOr0 = 0
    """Register tokens: learned, after the class token, read by no classifier. DeiT's distillation token is one."""
    pos_embed: Literal["learned", "sincos", "sincos_mae", "rotary"] = "learned"
    """Positions: learned; fixed 2-D sines and cosines, with the frequencies of big_vision or of MAE; or
    rotary: queries and keys turned by row and column (DINOv3)."""
    pos_embed_prefix: Literal["all", "class", "none"] = "all"
    """Which of the tokens before the patches have a learned position: class token and registers (timm), the class token
    alone (DINOv2 with registers), or none (DeiT III). Fixed and rotary positions are the patches' alone."""
    pos_embed_resize: Literal[
        "bicubic_antialias", "bicubic", "bicubic_offset", "bilinear_antialias", "bilinear", "corner_aligned"
    ] = "bicubic_antialias"
    """How learned positions come to another grid: timm's and DINOv2's with registers; mmpretrain's, DeiT's and Hugging
    Face's; DINOv2's, which adds 0.1 to the grid wanted; FlexiViT's in training; plain bilinear; scipy's zoom as in
    big_vision."""
    pre_norm: bool = False
    """A norm between positions and blocks; the patch embedding then has no bias (CLIP)."""
    final_norm: Literal["tokens", "pooled", "both", "none"] | None = None
    """Where the last norm stands: over all tokens, after pooling, both (mmpretrain's `avg_featmap`), or nowhere. Unset:
    `pooled` with `pool: gap` (timm; big_vision's gap is `tokens`), else `tokens`."""
    norm: Literal["layernorm", "rmsnorm"] = "layernorm"
    """Every norm of the model: LayerNorm, or RMSNorm, which has no bias and does not centre (ViT-22B)."""
    norm_eps: Positive = 1e-6
    """Epsilon of every norm."""
    block: Literal["sequential", "parallel"] = "sequential"
    """Attention, then MLP; or both of the same normalised tokens, added together (ViT-22B)."""
    qkv_bias: bool = True
    """Whether queries, keys and values have a bias."""
    qk_norm: bool = False
    """Normalise queries and keys in each head (ViT-22B)."""
    qk_scale: Positive | None = None
    """Factor of query-key products before the softmax; unset: 1 / sqrt(width of a head)."""
    v_shortcut: bool = False
    """Add the values to attention's output (T2T-ViT)."""
    activation: Literal["gelu", "gelu_tanh", "swiglu"] = "gelu"
    """Activation of the MLP: exact GELU, its tanh approximation as in JAX code, or SwiGLU, where one half of the first
    layer gates the other by SiLU (DINOv2-g, DINOv3)."""
    layer_scale: Positive | None = None
    """First value of LayerScale, a learned factor a channel on each residual branch; unset: no such factor."""
    dropout: Below1 = 0.0
    """Dropout after the positions, after attention's projection and in the MLP."""
    attention_dropout: Below1 = 0.0
    """Dropout on the attention weights."""
    drop_path: Below1 = 0.0
    """Stochastic depth: chance that a sample loses a residual branch, at the last block."""
    drop_path_schedule: Literal["linear", "constant"] = "linear"
    """Whether that chance grows linearly from 0 at the first block, or is the same in all (DeiT III)."""
    frozen_stages: CountOr0 = 0
    """Blocks from the first on that are not trained and stay in evaluation mode, with all that comes before them; the
    last norm too where it is every block; 0: nothing is frozen."""
    activation_checkpointing: Literal["none", "full", "offload"] = "none"
    """What backward recomputes instead of keeping: `full` every block; `offload` the same, with the blocks' inputs
    held in host memory meanwhile (fairscale)."""


@dataclass(frozen=True, kw_only=True)
class MixtureSource:
    """One set of a mixture."""

    __pydantic_config__ = STRICT

    name: Text
    """What logs call it."""
    shards: Text | Annotated[tuple[Text, ...], Field(min_length=1)]
    """Its shards, written as `data.train` is."""
    weight: Positive = 1.0
    """Its share of every batch is this over the sum of all weights."""
    class_map: Text | None = None
    """A file that says which class of the first source each of this one's is: a line each, the two names with a tab
    between; unset: by WordNet id or name."""


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Where the images are and how they become batches."""

    __pydantic_config__ = STRICT

    train: Text | Annotated[tuple[Text, ...], Field(min_length=1)] | None = None
    """Training shards: a folder with its `index.json`, or tar files by path, brace range (`{000..127}.tar`), glob, URL
    (http, https, s3, gs), or `@FILE` with one of these a line."""
    mixture: Annotated[tuple[MixtureSource, ...], Field(max_length=16)] = ()
    """Several sets in place of `train`, each with its share of every batch. Classes are those of the first; an epoch is
    as many samples as all sets hold together."""
    validation: Text | Annotated[tuple[Text, ...], Field(min_length=1)] | None = None
    """Validation shards, written as `train` is."""
    workers: CountOr0 = 4
    """Threads that read and decode, per rank; with 0 the training loop does it itself."""
    prefetch: Count = 2
    """Batches ahead of training, for each worker."""
    crop: Literal["inception", "center", "resize"] = "inception"
    """Training crop: a random area and aspect (Inception), the centre, or the whole image squeezed."""
    crop_area: tuple[PositiveShare, PositiveShare] = (0.05, 1.0)
    """Smallest and largest share of the image's area that an Inception crop covers (big_vision 0.05, timm 0.08)."""
    crop_ratio: tuple[Positive, Positive] = (0.75, 1.3333333333333333)
    """Smallest and largest aspect (width over height) of an Inception crop."""
    interpolation: Literal["bicubic", "bilinear"] = "bicubic"
    """Kind of resizing, in training and evaluation, always with antialiasing."""
    flip: bool = True
    """Mirror half of the training images left to right. Wrong for digits and text."""
    augment: Literal["none", "randaugment", "three_augment"] = "none"
    """What is done to colours and shapes after crop and flip: RandAugment as torchvision defines it, or DeiT III's
    choice of grayscale, solarize and blur."""
    randaugment_ops: Count = 2
    """RandAugment: operations an image (AugReg's l; light1 none, else 2)."""
    randaugment_magnitude: Annotated[float, Field(ge=0, le=30)] = 10.0
    """RandAugment: strength in AugReg's scale, where 10 is AutoAugment's strongest and torchvision's bin 30 of 31:
    light2 10, medium1 and medium2 15, strong1 and strong2 20."""
    color_jitter: NotNegative = 0.0
    """Brightness, contrast and saturation change by factors from 1 - this to 1 + this (DeiT III 0.3)."""
    erasing: Share = 0.0
    """Chance that a rectangle of an image is overwritten (Random Erasing; DeiT 0.25)."""
    erasing_fill: Literal["mean", "noise"] = "noise"
    """What it becomes: the mean pixel, or noise of `mean` and `std` (timm's `pixel`)."""
    mixup: NotNegative = 0.0
    """alpha of mixup's Beta(alpha, alpha), by which neighbours in the batch are blended; 0: off (AugReg's medium1 0.2,
    medium2 and strong1 0.5, strong2 0.8). The batch of each rank must be even."""
    cutmix: NotNegative = 0.0
    """alpha of CutMix's, by which neighbours exchange rectangles; 0: off. With `mixup`, `mix_switch` decides which."""
    mix_probability: Share = 1.0
    """Chance that a step, or with `mix_mode: elem` a sample, is mixed at all."""
    mix_switch: Share = 0.5
    """Where both are on: chance of CutMix."""
    mix_mode: Literal["batch", "elem"] = "batch"
    """Whether all samples of a step are mixed alike, or each by numbers of its own."""
    eval_resize: Count | None = None
    """Evaluation: length of the shorter side before the centre crop, in pixels; unset: image size / 0.875."""
    mean: tuple[float, float, float] = (0.5, 0.5, 0.5)
    """Subtracted on the device after scaling pixels to 0..1, per channel."""
    std: tuple[Positive, Positive, Positive] = (0.5, 0.5, 0.5)
    """Divided by on the device, per channel."""
    shuffle_window: Count = 4
    """Shards that are mixed with each other at any moment within one stream of the order."""
    streams: Count | None = None
    """Streams that the order is made of, read side by side; must divide `global_batch`. Where the number of ranks
    divides it, each piece of a shard is read by one rank alone. Unset: chosen from `global_batch` and the number of
    samples."""
    cache_dir: Text | None = None
    """Folder on this node's disk where remote shards are kept, shared by all its ranks; unset: only the ranges that are
    needed are fetched, each time anew."""
    cache_gigabytes: Positive = 100.0
    """Size of that cache in GB (1e9 bytes); the least recently used shards make room."""
    read_timeout: Positive = 60.0
    """Seconds without an answer of a remote store after which a read is tried again."""
    allow_pipe: bool = False
    """Whether shards named `pipe:COMMAND` are read, by running the command; its output must be the shard that is in the
    index, and is kept in `cache_dir`."""
    allow_changed_index: bool = False
    """Resume although shards were added, taken away or changed: from there on the order is that of the new set, and
    samples may come again or later than an epoch."""
    max_bad_fraction: Share = 0.01
    """The run stops when more than this share of the samples read so far could not be used."""


@dataclass(frozen=True, kw_only=True)
class LossConfig:
    """What is minimised."""

    __pydantic_config__ = STRICT

    kind: Literal["softmax", "sigmoid"] = "softmax"
    """Cross-entropy over exclusive classes, or one binary cross-entropy a class, summed over classes (ViT on JFT)."""
    label_smoothing: Below1 = 0.0
    """Share of a label's weight that is spread evenly over all classes: target * (1 - e) + e / classes."""


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """How weights follow gradients."""

    __pydantic_config__ = STRICT

    kind: Literal["adamw", "sgd"] = "adamw"
    """AdamW (torch's, fused where there is a GPU), or SGD with momentum."""
    lr: Positive = 1e-3
    """Peak learning rate, for `global_batch` as it is; nothing rescales it."""
    betas: tuple[Below1, Below1] = (0.9, 0.999)
    """AdamW: decay of the first and second moment."""
    eps: Positive = 1e-8
    """AdamW: added to the root of the second moment."""
    momentum: Below1 = 0.9
    """SGD: momentum."""
    weight_decay: NotNegative = 0.1
    """Decoupled weight decay, multiplied by the learning rate as in torch's AdamW (big_vision's 1e-4 at rate 1e-3 is
    0.1 here); under SGD an L2 penalty. Never on biases, norms, positions or the class token."""
    clip_norm: Positive | None = 1.0
    """Gradients are scaled down to this global L2 norm; unset: never."""
    ema_decay: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Decay of an exponential moving average of the weights, updated each step; unset: no average."""


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """The learning rate over the run, as a factor of `optim.lr`."""

    __pydantic_config__ = STRICT

    kind: Literal["cosine", "linear", "constant"] = "cosine"
    """Shape of the decay after warm-up."""
    warmup: Duration = field(default_factory=lambda: Duration(0, "steps"))
    """Linear rise to the peak; the first step already has rate peak / warm-up steps."""
    final: Share = 0.0
    """The factor that the decay ends at."""


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """How parameters, gradients and optimizer state lie across ranks."""

    __pydantic_config__ = STRICT

    kind: Literal["auto", "ddp", "deepspeed"] = "auto"
    """`auto`: deepspeed for several processes, ddp for one."""
    zero_stage: Literal[0, 1, 2] = 2
    """DeepSpeed: shard nothing (0), optimizer state (1), gradients too (2)."""
    precision: Literal["float32", "bfloat16"] = "bfloat16"
    """Type of forward and backward; weights, moments and the average are kept in float32 either way."""
    micro_batch: Count | None = None
    """Samples a rank takes through the model at once; unset: all of its share, no accumulation."""


@dataclass(frozen=True, kw_only=True)
class InitConfig:
    """Where weights come from when the run has no checkpoint of its own."""

    __pydantic_config__ = STRICT

    weights: Text | None = None
    """A model file, or a run whose last checkpoint is taken; adapted to this run's image size, patch and classes."""
    head: Literal["keep", "zero", "map"] = "zero"
    """The classifier of `weights`: taken over (same classes); begun anew at zero; or picked class by class by the
    names in both (WordNet id, else the words), as from ImageNet-21k to ImageNet-1k."""
    patch_resize: Literal["pseudo_inverse", "bilinear"] = "pseudo_inverse"
    """How the patch kernel of `weights` comes to another `model.patch_size`: FlexiViT's pseudo-inverse, or bilinear
    resizing of the kernel itself."""
    resume: Text | None = None
    """Another run to go on from: weights, optimizer, average and position."""


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When the run is saved, and what is kept."""

    __pydantic_config__ = STRICT

    every: Span = field(default_factory=lambda: Duration(1000, "steps"))
    """Distance between checkpoints; the last step is always saved."""
    keep_last: Count = 2
    """Newest checkpoints that are kept."""
    keep_every: Span | None = None
    """Besides, checkpoints at multiples of this are kept for ever."""


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig:
    """Evaluation on `data.validation` during training."""

    __pydantic_config__ = STRICT

    every: Span | None = None
    """Distance between evaluations; unset: only after the last step."""
    batch: Count = 256
    """Images a rank evaluates at once."""
    ema: bool = True
    """Evaluate the averaged weights where the run keeps an average; else those trained."""


@dataclass(frozen=True, kw_only=True)
class MonitorConfig:
    """What the run tells about itself, and where."""

    __pydantic_config__ = STRICT

    every: Count = 10
    """Steps between two records of the metrics."""
    tensorboard: bool = True
    """Write TensorBoard event files."""
    prometheus_port: Annotated[int, Field(ge=1, le=65535)] | None = 9400
    """Port of the metrics endpoint, which rank 0 serves; the next free one is taken and said if it is in use. Unset:
    none."""
    prometheus_host: Text = "127.0.0.1"
    """Address the endpoint listens on; `0.0.0.0` lets other machines scrape it."""
    max_skipped: Count = 10
    """Steps in a row with a loss or gradient that is not finite, after which the run stops."""


@dataclass(frozen=True, kw_only=True)
class ClusterConfig:
    """Processes and patience."""

    __pydantic_config__ = STRICT

    timeout: Positive = 600.0
    """Seconds that ranks wait for each other before the run stops and names who is missing."""
    max_restarts: CountOr0 = 3
    """How often a failed run is started again from its last checkpoint."""


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """One run of vitscale."""

    __pydantic_config__ = STRICT

    name: Text
    """What the run is called in tables and dashboards."""
    run_dir: Text
    """Folder that holds everything about the run."""
    duration: Span
    """How long to train."""
    global_batch: Count
    """Samples in one optimizer step, over all ranks and micro-batches."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Everything random follows from this number."""
    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    init: InitConfig = field(default_factory=InitConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    evaluate: EvaluateConfig = field(default_factory=EvaluateConfig)
    monitor: MonitorConfig = field(default_factory=MonitorConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
