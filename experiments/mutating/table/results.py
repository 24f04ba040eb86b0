"""Mutations of a run's results: evaluation, averages, the schedule in the loop, exported weights."""

from mutating.mutation import Mutation

EVALUATION = "tests/training/test_evaluate.py::test_evaluation_matches_a_plain_loop"
CALIBRATION = "tests/training/test_evaluate.py::test_calibration_error_is_that_of_the_formula"
AVERAGE = "tests/training/test_training_parts.py::test_averages_replace_the_parameters_only_inside_the_block"
RUN = "tests/training/test_run_by_hand.py::test_run_matches_a_plain_loop"
UPDATE = "                self.optimizer.step(lr)\n"
AVERAGING = "                if self.ema:\n                    self.ema.update(number)\n"
MUTATIONS = (
    Mutation(
        name="padding-evaluated",
        breaks="Evaluation counts the padding of the last batch as samples.",
        file="src/vitpar/tasks/classify.py",
        old="usable = (targets != IGNORED).double()",
        new="usable = torch.ones_like(targets).double()",
        caught_by=f"pytest {EVALUATION}[val-dp1-{{}}]",
    ),
    Mutation(
        name="samples-of-rank-0-evaluated",
        breaks="Evaluation counts the samples of rank 0 alone.",
        file="src/vitpar/training/evaluate.py",
        old="sums += here if model.first_of_outputs else 0",
        new="sums += here if dist.get_rank() == 0 else 0",
        caught_by=f"pytest {EVALUATION}[val-dp2-{{}}]",
    ),
    Mutation(
        name="accuracy-of-all-tokens",
        breaks="The accuracy of text is divided by all tokens, not by those to predict.",
        file="src/vitpar/tasks/text.py",
        old="torch.stack([(targets != IGNORED).sum(), first_hits",
        new="torch.stack([torch.tensor(targets.numel()), first_hits",
        caught_by="pytest tests/tasks/test_text_tasks.py::test_loss_and_accuracy_are_means_over_tokens_to_predict",
    ),
    Mutation(
        name="padding-predicted",
        breaks="Predictions have rows for the padding of the last batch.",
        file="src/vitpar/training/evaluate.py",
        old="kept = (labels != IGNORED).nonzero().flatten()",
        new="kept = torch.arange(len(labels))",
        caught_by=f"pytest {EVALUATION}[val-dp1-{{}}]",
    ),
    Mutation(
        name="calibration-unweighted",
        breaks="The calibration error is the mean over the bins, whatever their number of images.",
        file="src/vitpar/tasks/classify.py",
        old="(confidence - correct).abs().sum().item() / samples",
        new="(confidence - correct).abs().mean().item() / samples",
        caught_by=f"pytest {CALIBRATION}",
    ),
    Mutation(
        name="ema-stays",
        breaks="After an evaluation the run trains on with the averaged parameters.",
        file="src/vitpar/training/optim/average.py",
        old="        finally:\n            self._swap()\n",
        new="        finally:\n            pass\n",
        caught_by=f"pytest {AVERAGE}",
    ),
    Mutation(
        name="ema-of-past-step",
        breaks="The moving average takes in the parameters before the update.",
        file="src/vitpar/training/step.py",
        old=f"{UPDATE}{AVERAGING}",
        new=f"{AVERAGING}{UPDATE}",
        caught_by=f"pytest {RUN}",
    ),
    Mutation(
        name="ema-not-evaluated",
        breaks="Evaluation uses the parameters, although the run keeps averages.",
        file="src/vitpar/training/trainer.py",
        old="        with self.ema.averaged() if self.ema else nullcontext():\n            return evaluate",
        new="        with nullcontext():\n            return evaluate",
        caught_by=f"pytest {RUN}",
    ),
    Mutation(
        name="ema-not-exported",
        breaks="The weights of a finished run are its last parameters, although it keeps averages.",
        file="src/vitpar/training/trainer.py",
        old="        with self.ema.averaged() if self.ema else nullcontext():\n            save_weights",
        new="        with nullcontext():\n            save_weights",
        caught_by=f"pytest {RUN}",
    ),
    Mutation(
        name="lr-of-past-step",
        breaks="Every step uses the learning rate of the step before, while the log shows the right one.",
        file="src/vitpar/training/trainer.py",
        old="self._step(number, self.lr(number), ",
        new="self._step(number, self.lr(number - 1), ",
        caught_by=f"pytest {RUN}",
    ),
    Mutation(
        name="clipping-off",
        breaks="A step does not clip gradients, whatever the recipe says.",
        file="src/vitpar/training/step.py",
        old="clip_(part, of_part, self._limit, scale)",
        new="clip_(part, of_part, 0.0, scale)",
        caught_by=f"pytest {RUN}",
    ),
)
