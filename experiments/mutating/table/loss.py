"""Mutations of the loss, for plain and mixed labels."""

from mutating.mutation import Mutation

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
)
