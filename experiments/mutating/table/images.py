"""Mutations of the order of samples and of image transforms."""

from mutating.mutation import Mutation

MUTATIONS = (
    Mutation(
        name="no-antialias",
        breaks="Images are made smaller without a filter against aliasing.",
        file="src/vitpar/data/transforms/sample.py",
        old="antialias=True",
        new="antialias=False",
        caught_by="pytest tests/data/test_transform_oracles.py::test_eval_transform_matches_timm_on_photographs",
    ),
    Mutation(
        name="crop-ratio-uniform",
        breaks="The aspect ratio of a random crop is uniform, not log-uniform, so wide crops are too frequent.",
        file="src/vitpar/data/transforms/sample.py",
        old="ratio = math.exp(draws.uniform(math.log(self.ratio[0]), math.log(self.ratio[1])))",
        new="ratio = draws.uniform(self.ratio[0], self.ratio[1])",
        caught_by="pytest tests/data/test_transform_oracles.py::test_crop_distribution_matches_torchvision",
    ),
    Mutation(
        name="cutmix-box-shifted",
        breaks="The box that CutMix pastes lies one pixel too far down and right.",
        file="src/vitpar/data/transforms/batch.py",
        old="uniforms(pair[cuts], which)).astype(np.int64) - side // 2",
        new="uniforms(pair[cuts], which)).astype(np.int64) - side // 2 + 1",
        caught_by="pytest tests/data/test_mix_oracles.py::test_cutmix_boxes_match_timm",
    ),
    Mutation(
        name="shuffle-without-epoch",
        breaks="The samples come in the same order in every epoch.",
        file="src/vitpar/data/randomness.py",
        old="return shuffled(places, self.size, self.seed, epoch)",
        new="return shuffled(places, self.size, self.seed, 0)",
        caught_by="pytest tests/data/test_order.py::test_epochs_and_seeds_differ",
    ),
    Mutation(
        name="shuffle-repeats-samples",
        breaks="Some samples of a shuffled epoch come twice, others not at all.",
        file="src/vitpar/data/randomness.py",
        old="    return permuted.astype(np.int64)\n",
        new="    return permuted.astype(np.int64) // 2 * 2\n",
        caught_by="pytest tests/data/test_order.py::test_each_epoch_has_every_repeat_of_every_sample_exactly_once",
    ),
    Mutation(
        name="repeats-alike",
        breaks="All repeats of a sample in an epoch are cropped and dropped alike.",
        file="src/vitpar/data/loader.py",
        old="sample_keys(self._order.seed, epochs, samples, repeats)",
        new="sample_keys(self._order.seed, epochs, samples, repeats * 0)",
        caught_by="pytest tests/data/test_loader.py::test_repeats_of_a_sample_have_different_keys",
    ),
)
