"""Initial values of BERT's parameters (``vitpar.models.initial``)."""

from vitpar.models.initial import Rules, constant, lecun_normal, normal

SCHEMES: dict[str, Rules] = {
    # arXiv 1810.04805 cuts the normal numbers at two deviations, transformers does not.
    "bert": (
        ("*norm*.weight", constant(1.0)),
        ("*.bias", constant(0.0)),
        ("*", normal(0.02)),
    ),
    # Embeddings as large as what follows them, so that mistakes in any of them show.
    "perturbed": (
        ("*norm*.weight", normal(0.1, mean=1.0)),
        ("*embed*", normal(0.5)),
        ("*.bias", normal(0.05)),
        ("*.weight", lecun_normal),
    ),
}
"""The rules of each scheme; the first pattern that matches a parameter's name decides."""
