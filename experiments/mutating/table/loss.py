"""Mutations of the loss, for plain and mixed labels."""

from mutating.mutation import Mutation

DISTILL = "tests/parallel/test_distill.py"

MUTATIONS = (
    Mutation(
        name="label-smoothing-dropped",
        breaks="The loss of a plan has no label smoothing.",
        file="src/vitpar/models/loss.py",
        old="label_smoothing=self.label_smoothing",
        new="label_smoothing=0.0",
        caught_by="vitpar check --mesh dp2",
    ),
    Mutation(
        name="mixed-labels-swapped",
        breaks="The loss of a mixed image gives its label the weight of its partner's.",
        file="src/vitpar/models/loss.py",
        old="first, other, weight = targets.unbind(1)",
        new="other, first, weight = targets.unbind(1)",
        caught_by="vitpar check --mesh dp2",
    ),
    Mutation(
        name="mixed-loss-swapped-unsmoothed",
        breaks="The loss of a mixed image swaps the two weights and has no label smoothing.",
        file="src/vitpar/models/loss.py",
        old='        one, two = (loss(label.long(), reduction="none") for label in (first, other))\n',
        new="        loss = functools.partial(loss, label_smoothing=0.0)\n"
        '        two, one = (loss(label.long(), reduction="none") for label in (first, other))\n',
        caught_by="pytest tests/parallel/test_loss.py::test_mixed_label_loss_matches_timms_soft_targets",
    ),
    Mutation(
        name="binary-loss-of-unlabelled",
        breaks="Binary cross-entropy counts images without a label as images of no class.",
        file="src/vitpar/models/loss.py",
        old="return each.where(hard != IGNORED, 0.0).sum()",
        new="return each.sum()",
        caught_by="pytest tests/parallel/test_loss.py::test_binary_cross_entropy_matches_timms",
    ),
    Mutation(
        name="visible-patches-counted",
        breaks="The loss of a masked autoencoder counts the patches that its encoder sees.",
        file="src/vitpar/tasks/mae.py",
        old=".mean(dim=-1).where(counts, 0.0)",
        new=".mean(dim=-1)",
        caught_by="pytest tests/models/test_mae.py::test_outputs_loss_and_gradients_match_transformers_in_float64",
    ),
    Mutation(
        name="teacher-of-unlabelled",
        breaks="The teacher's loss counts images that could not be read.",
        file="src/vitpar/tasks/distill.py",
        old=".where(usable, 0.0).sum()",
        new=".sum()",
        caught_by=f"pytest {DISTILL}::test_loss_and_its_gradient_equal_deits",
    ),
    Mutation(
        name="teacher-of-the-wrong-head",
        breaks="The classifier of the class token learns from the teacher, too.",
        file="src/vitpar/tasks/distill.py",
        old="self._from_teacher(heads[-1], ",
        new="self._from_teacher(heads[0], ",
        caught_by=f"pytest {DISTILL}::test_loss_and_its_gradient_equal_deits",
    ),
    Mutation(
        name="teacher-not-divided-by-classes",
        breaks="The divergence from the teacher is summed over classes, where DeiT divides by their number.",
        file="src/vitpar/tasks/distill.py",
        old="log_target=True).mean(dim=1)",
        new="log_target=True).sum(dim=1)",
        caught_by=f"pytest {DISTILL}::test_loss_and_its_gradient_equal_deits",
    ),
    Mutation(
        name="teacher-of-other-images",
        breaks="Ranks that take other images for the teacher than for the model give it those of other rows.",
        file="src/vitpar/tasks/image_input.py",
        old="images[self._taught]",
        new="images[self._taught].flip(0)",
        caught_by=f"pytest {DISTILL}::test_plans_match_one_process",
    ),
)
