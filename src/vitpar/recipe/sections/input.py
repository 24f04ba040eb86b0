"""Sections about what is trained on what: [task], [model], [data], [stream] and [augment]."""

from typing import Literal, Self

from pydantic import Field, model_validator

from vitpar.data.transforms import CropMode, Interpolation
from vitpar.limits import MAX_BATCH_SIZE, MAX_CLASSES, MAX_IMAGE_SIZE
from vitpar.recipe.sections import Section

CLASSIFY = "classify"
"""Name of the task that recipes have by default."""
TEXT = ("mlm", "span")
"""Names of the tasks of text."""


class TaskSection(Section):
    """The task: meaning of the labels, loss, metrics and predictions."""

    name: str = CLASSIFY
    """classify; mae (masked autoencoding, for models of that family); mlm (masked language modelling, BERT) or span
    (span corruption, T5) for packed text; or a task of your own as FILE.py:NAME (docs/own-task.md)."""
    options: dict[str, int | float | bool | str | list[float]] | None = None
    """Fields of the task by name: class_weights, bce, bce_sum, bce_target_threshold and bce_positive_weight of classify
    (docs/losses.md), norm_pix_loss of mae, rate and whole_words of mlm, rate and mean_length of span, or those of your
    own."""


class ModelSection(Section):
    """The model: timm's name of it, and the sizes and options that differ. Unset keys are as in the named model."""

    name: str = "vit_small_patch16_224"
    """timm's model name (`vitpar models` lists them), or vit_custom with the sizes below."""
    weights: str | None = None
    """Folder of weights, or checkpoint, to start from instead of initial values."""
    image_size: int | None = None
    """Side of the square input image, in pixels."""
    patch_size: int | None = None
    """Side of a patch, in pixels; divides `image_size`."""
    embed_dim: int | None = None
    """Number of features of a token; for Swin in the first stage."""
    depth: int | None = None
    """Number of transformer blocks."""
    depths: tuple[int, ...] | None = None
    """Number of blocks of each stage (Swin)."""
    num_heads: int | tuple[int, ...] | None = None
    """Number of attention heads; divides `embed_dim`. Of each stage for Swin."""
    window_size: int | None = None
    """Side of the windows of attention, in tokens (Swin)."""
    mlp_ratio: float | None = None
    """Hidden features of a block's MLP for each of its features (Swin)."""
    mlp_hidden_dim: int | None = None
    """Number of hidden features of a block's MLP."""
    vocab_size: int | None = None
    """Number of token ids; that of the data if unset (text)."""
    tokens: int | None = None
    """Tokens of a sample, in T5 those of the encoder; as many as the data need if unset (text)."""
    positions: int | None = None
    """Number of learned positions, at least `tokens` (BERT)."""
    token_types: int | None = None
    """Number of token types (BERT)."""
    decoder_depth: int | None = None
    """Number of blocks of the decoder; `depth` if unset (T5)."""
    decoder_tokens: int | None = None
    """Tokens of a sample in the decoder; as many as the data need if unset (T5)."""
    head_dim: int | None = None
    """Number of features of an attention head (T5)."""
    num_buckets: int | None = None
    """Number of relative positions with a bias of their own (T5)."""
    max_distance: int | None = None
    """Distance from which on relative positions share a bias (T5)."""
    tied: bool | None = None
    """Whether the output multiplies by the word embeddings (T5)."""
    activation: Literal["gelu", "gelu_tanh", "swiglu", "geglu", "relu", "geglu_tanh"] | None = None
    """Activation of the MLP. gelu_tanh approximates GELU; swiglu, geglu and geglu_tanh gate half of the features by the
    others; relu and geglu_tanh are T5's."""
    parallel_blocks: bool | None = None
    """Whether attention and MLP of a block are computed side by side, from one norm (ViT-22B)."""
    pool: Literal["cls", "avg", "map"] | None = None
    """Input of the classifier: the class token (cls), the mean of all patch tokens (avg), or what a learned query gets
    from all tokens by attention (map, as in SigLIP)."""
    num_reg_tokens: int | None = None
    """Number of register tokens."""
    distillation: bool | None = None
    """Whether there is a distillation token with a classifier of its own, as in DeiT."""
    representation_size: int | None = None
    """Features of a linear layer with tanh before the classifier."""
    position: Literal["learned", "sincos2d", "none"] | None = None
    """Position embedding: learned, fixed sines and cosines in two dimensions, or none."""
    prefix_positions: bool | None = None
    """Whether learned positions are also added to the tokens before the patches."""
    rope: Literal["none", "axial", "dinov3"] | None = None
    """Rotary positions of queries and keys: none, or as in EVA-02 (axial) or DINOv3."""
    rope_temperature: float | None = None
    """Ratio of the longest to the shortest period of rotary positions."""
    rope_grid: int | None = None
    """Side of the grid of patches that rotary positions (axial) are scaled to."""
    rope_register_temperature: float | None = None
    """Ratio of periods for register tokens, which are rotated as a grid of their own (ViT-5)."""
    norm: Literal["layer", "rms"] | None = None
    """Norm everywhere: LayerNorm, or RMSNorm."""
    qk_norm: bool | None = None
    """Whether queries and keys are normalised in each head."""
    attn_norm: bool | None = None
    """Whether the outputs of all heads are normalised before the projection."""
    mlp_norm: bool | None = None
    """Whether the hidden features of the MLP are normalised."""
    fc_norm: bool | None = None
    """Whether the last norm comes after the mean over tokens, instead of before."""
    norm_eps: float | None = None
    """Number added to variances in norms."""
    qkv_bias: Literal["all", "qv", "none"] | None = None
    """Which of queries, keys and values have biases."""
    layer_scale: float | None = None
    """Initial value of the learned scale of each residual branch."""
    drop_path: float | None = None
    """Probability that the last block's residual branches are dropped for a sample; it rises linearly over blocks."""
    dropout: float | None = None
    """Probability that an activation is dropped after the position embedding, projections and MLP layers."""
    init: Literal["jax", "timm", "moco", "bert", "t5"] | None = None
    """Scheme of initial values (docs/models.md)."""
    options: dict[str, int | float | bool | str] | None = None
    """Fields by name that have no setting here: of masked autoencoders, or a model of your own (docs/own-model.md)."""


class DataSection(Section):
    """The training data on disk, and how images are prepared."""

    path: str | None = None
    """Folder that `vitpar data pack` or `vitpar data index` made; unset for a stream."""
    crop_scale: tuple[float, float] = (0.08, 1.0)
    """Least and largest part of the image's area that a training crop covers."""
    crop_ratio: tuple[float, float] = (3 / 4, 4 / 3)
    """Least and largest ratio of width to height of a training crop."""
    crop_padding: int | None = Field(None, ge=0, lt=MAX_IMAGE_SIZE)
    """Black pixels that are added on each side before a random crop of the model's size, without resizing, as for
    CIFAR (torchvision's `RandomCrop` with `pad_if_needed`); instead of `crop_scale` and `crop_ratio`."""
    flip: float = Field(0.5, ge=0, le=1)
    """Probability of a horizontal flip in training."""
    crop_pct: float = Field(0.875, gt=0, le=1)
    """Part of the resized image's side that the centre crop covers in evaluation."""
    crop_mode: CropMode = "center"
    """How evaluation makes an image square: `center` resizes the shorter side and crops, `squash` resizes both sides to
    the same length, `border` resizes the longer side and adds borders of the mean colour."""
    interpolation: Interpolation = "bicubic"
    """Method of resizing."""
    mean: tuple[float, float, float] = (0.485, 0.456, 0.406)
    """Mean of red, green and blue that is subtracted, for pixels from 0 to 1."""
    std: tuple[float, float, float] = (0.229, 0.224, 0.225)
    """Standard deviation of red, green and blue to divide by."""
    shuffle_window: int = Field(0, ge=0, le=1 << 40)
    """Samples that are shuffled together, for slow disks and network mounts; 0 for all. A multiple of
    `shuffle_block`."""
    shuffle_block: int = Field(256, ge=1, le=1 << 40)
    """Neighbouring samples that stay in one window."""
    workers: int | None = Field(None, ge=0, le=1_024)
    """Decoding threads of a rank; 0 decodes in the main thread; chosen by the rank's cores if unset."""
    decode: Literal["host", "device"] = "host"
    """Decoder of training JPEGs, which also crops them: threads of the host, or the training device by torchcodec,
    whose pixels differ in the last bits. In either case threads decode images for evaluation, of other kinds and
    damaged ones."""
    cache: Literal["none", "memory", "device"] = "none"
    """Place of decoded images: none, memory that the ranks of a machine share, or the training device, which then holds
    all images, of one size, and augments batches of them."""
    cache_gb: float | None = Field(None, gt=0, le=1e6)
    """Most memory of a machine for cached images, in GB; half of what is available at the start if unset."""
    bad_sample: Literal["fail", "skip"] = "fail"
    """Reaction to an image that cannot be decoded: stop the run, or skip and count it."""

    @model_validator(mode="after")
    def _window_is_of_blocks(self) -> Self:
        if self.shuffle_window % self.shuffle_block:
            raise ValueError(
                f"data.shuffle_window is {self.shuffle_window}, which is not a multiple of data.shuffle_block "
                f"{self.shuffle_block}: make it one"
            )
        return self


class StreamSection(Section):
    """Shards that are read by URL from begin to end, instead of `data.path`.

    All of train, val, samples, val_samples and classes are needed.
    """

    train: str | tuple[str, ...] | None = None
    """URLs of training shards, with braces: https://host/train-{000000..001023}.tar, s3://, gs://, paths,
    pipe:COMMAND."""
    val: str | tuple[str, ...] | None = None
    """URLs of validation shards."""
    samples: int | None = Field(None, ge=1, le=1 << 40)
    """Number of training images."""
    val_samples: int | None = Field(None, ge=1, le=1 << 40)
    """Number of validation images."""
    classes: int | None = Field(None, ge=1, le=MAX_CLASSES)
    """Number of classes."""
    label: str = "cls"
    """Where the label of a sample is: the member cls, or json:FIELD."""
    shuffle_buffer: int = Field(1000, ge=0, le=1 << 20)
    """Samples of a rank that are shuffled together."""
    allow_pipe: bool = False
    """Whether URLs may run commands, which pipe: and gs:// do."""

    def __bool__(self) -> bool:
        return any(value != type(self).model_fields[name].default for name, value in self)

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        missing = [name for name, value in self if value is None]
        if missing and self:
            raise ValueError(f"the recipe lacks 'stream.{missing[0]}', which streaming needs: set it")
        return self


class AugmentSection(Section):
    """Augmentation of training images after crop and flip."""

    policy: str | None = None
    """Random operations: rand-m9-n2-mstd0.5-inc1 (RandAugment), original (AutoAugment for ImageNet) or 3a (3-Augment),
    by timm's names; cifar10 or svhn (AutoAugment for these), by torchvision's."""
    color_jitter: float | tuple[float, float, float] = 0.0
    """Largest change of brightness, contrast and saturation, as a part of 1: one number for all, or three."""
    random_erasing: float = Field(0.0, ge=0, le=1)
    """Probability that a box of the image is replaced by noise."""
    repeats: int = Field(1, ge=1, le=MAX_BATCH_SIZE)
    """Number of times that a sample appears in a row, augmented differently each time (repeated augmentation)."""
    mixup: float = Field(0.0, ge=0)
    """Parameter alpha of mixup's Beta distribution; 0 turns mixup off."""
    cutmix: float = Field(0.0, ge=0)
    """Parameter alpha of CutMix's Beta distribution; 0 turns CutMix off."""
    mixup_prob: float = Field(1.0, ge=0, le=1)
    """Probability that a batch's samples are mixed."""
    mixup_switch_prob: float = Field(0.5, ge=0, le=1)
    """Probability of CutMix where both are on."""
