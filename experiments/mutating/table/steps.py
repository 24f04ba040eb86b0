"""Mutations of the use of gradients: norm, clipping, optimizers, averages, learning rates."""

from mutating.mutation import Mutation

NORMS = "tests/training/test_training_parts.py::test_norm_and_clipping_match_one_process"
AVERAGE = "tests/training/test_training_parts.py::test_moving_average_matches_a_plain_loop"
MUTATIONS = (
    Mutation(
        name="clipping-ignores-replicas",
        breaks="The norm of the gradients counts a gradient once for every rank that holds it.",
        file="src/vitpar/training/optim/norms.py",
        old="squares / replicas if replicas > 1 else squares",
        new="squares",
        caught_by="vitpar check --mesh dp2",
    ),
    Mutation(
        name="norm-ignores-stages",
        breaks="The norm of the gradients takes ranks of other pipeline stages for replicas.",
        file="src/vitpar/parallel/model.py",
        old="dist.get_world_size() // self.plan.pipeline_degree // shards",
        new="dist.get_world_size() // shards",
        caught_by=f"pytest {NORMS}[pp2xtp2]",
    ),
    Mutation(
        name="clipping-limit",
        breaks="Gradients below the limit are scaled up to it.",
        file="src/vitpar/training/optim/norms.py",
        old="(limit / (norm + 1e-6)).clamp(max=1.0)",
        new="(limit / (norm + 1e-6))",
        caught_by=f"pytest {NORMS}[dp1]",
    ),
    Mutation(
        name="trust-ratio-of-shards",
        breaks="LAMB and LARS take the norm of a rank's shard for that of the whole parameter.",
        file="src/vitpar/training/optim/norms.py",
        old="            dist.all_reduce(part, group=group)\n",
        new="",
        caught_by="pytest tests/training/optim/test_optimizers.py::test_norms_count_every_element_once[fsdp2]",
    ),
    Mutation(
        name="fp16-norm-scaled",
        breaks="In fp16 the norm is that of the scaled gradients, so clipping sees a norm that is too large.",
        file="src/vitpar/training/step.py",
        old="            norm = norm / scale if self._scaler else norm\n",
        new="",
        caught_by="pytest tests/training/optim/test_fp16.py::test_fp16_losses_and_norms_match_fp32",
    ),
    Mutation(
        name="layer-decay",
        breaks="The learning rate of optimizer.layer_decay rises from the head to the embedding.",
        file="src/vitpar/training/optim/optimizer.py",
        old="settings.layer_decay**above",
        new="settings.layer_decay**-above",
        caught_by="vitpar check --mesh dp2 --set optimizer.layer_decay=0.5",
    ),
    Mutation(
        name="ema-decay",
        breaks="The moving average gives the present parameters the weight of the past.",
        file="src/vitpar/training/optim/average.py",
        old="list(self._trained.values()), 1.0 - self.decay(step))",
        new="list(self._trained.values()), self.decay(step))",
        caught_by=f"pytest {AVERAGE}[dp1]",
    ),
    Mutation(
        name="muon-qkv-order",
        breaks="Muon makes matrices of mixed rows of queries, keys and values orthogonal.",
        file="src/vitpar/training/optim/muon.py",
        old='"(g r) i -> g r i", r=',
        new='"(r g) i -> g r i", r=',
        caught_by="pytest tests/training/optim/test_optimizers.py::test_maps_are_orthogonalised_separately",
    ),
    Mutation(
        name="adafactor-sums-of-shards",
        breaks="Adafactor takes the rows and columns of a rank's shard for those of the whole parameter.",
        file="src/vitpar/training/optim/norms.py",
        old="        dist.all_reduce(message, group=group)\n",
        new="",
        caught_by="vitpar check --mesh tp2 --set optimizer.name=adafactor",
    ),
    Mutation(
        name="cosine-late",
        breaks="The cosine of the learning rate falls one step late.",
        file="src/vitpar/training/optim/schedule.py",
        old="min(done - begun, length)",
        new="min(max(0, done - 1 - begun), length)",
        caught_by="pytest tests/training/optim/test_schedules.py::test_shapes_after_a_warmup_equal_timm",
    ),
    Mutation(
        name="decay-on-everything",
        breaks="Weight decay applies to biases, norms, tokens and positions too.",
        file="src/vitpar/training/optim/optimizer.py",
        old="    return parameter.dim() in (2, 4)\n",
        new="    return True\n",
        caught_by="pytest tests/training/test_training_parts.py::test_only_matrices_decay",
    ),
)
