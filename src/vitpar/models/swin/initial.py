"""Initial values of the Swin Transformer's parameters (``vitpar.models.initial``)."""

from vitpar.models.initial import Rules, constant, lecun_normal, normal, patch_convolution

SCHEMES: dict[str, Rules] = {
    # timm's trunc_normal_ cuts at ±2, which is 100 deviations here: it cuts nothing off.
    "timm": (
        ("*norm*.weight", constant(1.0)),
        ("*norm*.bias", constant(0.0)),
        ("embed.patch_embed.proj.*", patch_convolution),
        ("*.bias", constant(0.0)),
        ("*", normal(0.02)),
    ),
    # Biases by relative position as large as the scores, so that mistakes in them show.
    "perturbed": (
        ("*norm*.weight", normal(0.1, mean=1.0)),
        ("*.relative_position_bias_table", normal(0.5)),
        ("*.bias", normal(0.05)),
        ("*.weight", lecun_normal),
    ),
}
"""The rules of each scheme; the first pattern that matches a parameter's name decides."""
