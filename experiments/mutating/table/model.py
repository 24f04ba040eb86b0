"""Mutations of the model's arithmetic and initial values."""

from mutating.mutation import Mutation

WEIGHTS = "tests/weights"
MUTATIONS = (
    Mutation(
        name="drop-scale",
        breaks="What drop-path and dropout keep is not scaled up.",
        file="src/vitpar/models/keyed_random.py",
        old="    return x * keep.to(x.dtype) / (1.0 - rate)\n",
        new="    return x * keep.to(x.dtype)\n",
        caught_by="pytest tests/models/test_models.py::test_dropout_rate_scale_and_independence",
    ),
    Mutation(
        name="layer-norm-eps",
        breaks="LayerNorms add 1e-5 to the variance, not 1e-6.",
        file="src/vitpar/models/vit/config.py",
        old="norm_eps: float = 1e-6",
        new="norm_eps: float = 1e-5",
        caught_by=f'pytest "{WEIGHTS}/test_against_libraries.py::test_logits_and_gradients_equal_timms[distilled]"',
    ),
    Mutation(
        name="cross-attention-drops-alike",
        breaks="T5's cross-attention drops what its self-attention drops.",
        file="src/vitpar/models/t5/layers.py",
        old="self.dropped(self.cross_attn(self.norm2(x), encoded, attention_mask), keys, 1)",
        new="self.dropped(self.cross_attn(self.norm2(x), encoded, attention_mask), keys, 0)",
        caught_by='pytest "tests/models/test_text_models.py::test_dropout_depends_on_the_samples_keys[t5]"',
    ),
    Mutation(
        name="drop-path-of-branches-alike",
        breaks="Stochastic depth drops the attention and the MLP of a block for the same samples.",
        file="src/vitpar/models/layers.py",
        old="at_place(keys, self.place + 2 * number + 1)",
        new="at_place(keys, self.place + 1)",
        caught_by="pytest tests/models/test_models.py::test_every_dropout_has_its_own_random_stream",
    ),
    Mutation(
        name="t5-eps-not-imported",
        breaks="An imported T5 has the usual epsilon, not that of its config.json.",
        file="src/vitpar/models/t5/names.py",
        old='layer_norm_epsilon="norm_eps"',
        new='layer_norm_epsilon_="norm_eps"',
        caught_by=f'pytest "{WEIGHTS}/test_text_weights.py::test_files_of_transformers_are_imported[t5]"',
    ),
    Mutation(
        name="bert-eps-not-imported",
        breaks="An imported BERT has the usual epsilon, not that of its config.json.",
        file="src/vitpar/models/rows.py",
        old='layer_norm_eps="norm_eps"',
        new='layer_norm_eps_="norm_eps"',
        caught_by=f'pytest "{WEIGHTS}/test_text_weights.py::test_files_of_transformers_are_imported[bert]"',
    ),
    Mutation(
        name="rotary-keys",
        breaks="Rotary positions rotate queries but not keys.",
        file="src/vitpar/models/vit/attention.py",
        old="            q, k = (rotate(x, self.cosines, self.sines, halves=halves) for x in (q, k))\n",
        new="            q = rotate(q, self.cosines, self.sines, halves=halves)\n",
        caught_by=f'pytest "{WEIGHTS}/test_exports.py::test_timm_reads_what_is_exported_and_computes_the_same[dinov3]"',
    ),
    Mutation(
        name="xavier-of-three-matrices",
        breaks="Queries, keys and values start as three matrices, not as the one that the scheme takes.",
        file="src/vitpar/models/vit/layers.py",
        old="""        ("*.mlp.*.bias", normal(1e-6)),
        ("*.bias", constant(0.0)),
""",
        new="""        ("*.mlp.*.bias", normal(1e-6)),
        ("*.bias", constant(0.0)),
        ("*.qkv.weight", xavier_uniform(parts=3)),
""",
        caught_by="pytest tests/models/test_initial_schemes.py::test_distributions_match_timm[jax-{}]",
    ),
)
