"""Mutations of collectives and layouts."""

from mutating.mutation import Mutation

MODERN = "tests/parallel/test_modern_plans.py::test_plan_of_a_modern_model_matches_one_process"
SHARED = "tests/parallel/test_shared.py::test_plans_match_one_process"
MUTATIONS = (
    Mutation(
        name="shared-not-between-stages",
        breaks="The gradients of a parameter that two stages share are not summed between them.",
        file="src/vitpar/parallel/shared.py",
        old="            if mesh is not None:\n",
        new="            if mesh is None:\n",
        caught_by=f'pytest "{SHARED}[tied-pp2-gpipe]"',
    ),
    Mutation(
        name="shared-norm-counts-copies",
        breaks="The gradient norm counts the copies of shared parameters.",
        file="src/vitpar/training/optim/norms.py",
        old="        if name in copies:\n",
        new="        if not name:\n",
        caught_by=f'pytest "{SHARED}[tied-dp2-]"',
    ),
    Mutation(
        name="table-not-over-the-world",
        breaks="The gradients of tables stay those of a rank's own samples and heads.",
        file="src/vitpar/parallel/shared.py",
        old="        all_reduce_(message)\n",
        new="",
        caught_by=f'pytest "{SHARED}[relative-tp2-]"',
    ),
    Mutation(
        name="side-input-of-other-samples",
        breaks="Layers get the side inputs of the first samples of a micro-batch, not of their own.",
        file="src/vitpar/parallel/pipeline.py",
        old="slice(rows.start, rows.stop)",
        new="slice(0, len(rows))",
        caught_by='pytest "tests/parallel/test_side_inputs.py::test_gradients_equal_one_process[tp2xdp2-more1]"',
    ),
    Mutation(
        name="tp-backward-sum",
        breaks="The gradient at the input of a column-parallel layer is not summed over the tensor-parallel ranks.",
        file="src/vitpar/parallel/linear.py",
        old="        summing = start_all_reduce(_for_input(gradient, operands, fast), group)\n",
        new="        summing = _for_input(gradient, operands, fast)\n",
        caught_by="vitpar check --mesh tp2",
    ),
    Mutation(
        name="tp-q-and-k-swapped",
        breaks="Tensor-parallel blocks use queries as keys and keys as queries.",
        file="src/vitpar/models/vit/attention.py",
        old="three=3, d=self.head_dim).unbind(0)\n",
        new="three=3, d=self.head_dim).unbind(0)\n"
        "        if hasattr(self.qkv.weight, 'placements'):\n            q, k = k, q\n",
        caught_by="vitpar check --mesh tp2",
    ),
    Mutation(
        name="sp-partial-sums",
        breaks="No partial gradient of a layer under fully_shard is summed over the tensor-parallel ranks.",
        file="src/vitpar/parallel/model.py",
        old="            self._tensor_sums.start()\n",
        new="",
        caught_by="vitpar check --mesh tp2xfsdp2+sp",
    ),
    Mutation(
        name="sp-one-partial-bias",
        breaks="The partial gradient of one bias of each block, mlp.fc2's, is not summed.",
        file="src/vitpar/parallel/tensor.py",
        old="for axis in split.sums]",
        new='for axis in split.sums if name != "mlp.fc2.bias"]',
        caught_by="vitpar check --mesh tp2+sp",
    ),
    Mutation(
        name="3d-row-bias",
        breaks="Under 3d the partial gradients of the biases of row-parallel layers are not summed.",
        file="src/vitpar/models/roles.py",
        old='"Linear3D", {"j": 1, "k": 0}, {"k": 0}, ("j",), ',
        new='"Linear3D", {"j": 1, "k": 0}, {"k": 0}, (), ',
        caught_by=f'pytest "{MODERN}[dinov3_qkvb tp8+3d precision=fp64 recipe_steps=0]"',
    ),
    Mutation(
        name="2d-norm-backward",
        breaks="The backward of a norm over split features leaves out its second sum.",
        file="src/vitpar/parallel/collective.py",
        old="((wide - first - normal * second) * scale)",
        new="((wide - first) * scale)",
        caught_by="vitpar check --mesh tp4+2d",
    ),
    Mutation(
        name="frozen-parameter-trained",
        breaks="Parameters of train.freeze are trained.",
        file="src/vitpar/parallel/parallelize.py",
        old="            parameter.requires_grad_(False)\n",
        new="            pass\n",
        caught_by="vitpar check --mesh dp2 --set train.freeze=embed",
    ),
    Mutation(
        name="dp-head-not-reduced",
        breaks="The gradients of the head are not summed over the data-parallel ranks.",
        file="src/vitpar/parallel/data.py",
        old="(p for p in layer.parameters() if p.requires_grad and",
        new='(p for p in layer.parameters() if p.requires_grad and not hasattr(layer, "fc") and',
        caught_by="vitpar check --mesh dp2",
    ),
    Mutation(
        name="fsdp-sum-divided",
        breaks="Gradients that fsdp sums are divided by 1.01.",
        file="src/vitpar/parallel/data.py",
        old="set_gradient_divide_factor(1.0)",
        new="set_gradient_divide_factor(1.01)",
        caught_by="vitpar check --mesh fsdp2",
    ),
    Mutation(
        name="fsdp-sum-divided-bf16",
        breaks="Gradients that fsdp sums are divided by 1.01, seen in bf16.",
        file="src/vitpar/parallel/data.py",
        old="set_gradient_divide_factor(1.0)",
        new="set_gradient_divide_factor(1.01)",
        caught_by="vitpar check --mesh fsdp2 --precision bf16",
    ),
    Mutation(
        name="zero2-head-loses-micro-batches",
        breaks="Under zero2 the gradients of the head are those of the last micro-batch alone.",
        file="src/vitpar/parallel/model.py",
        old="                    loss.backward()\n",
        new="                    loss.backward()\n"
        "                if number < count and hasattr(stage.head, 'reshard'):\n"
        "                    stage.head.reshard()\n"
        "                    stage.head.zero_grad()\n",
        caught_by="vitpar check --mesh dp2+zero2 --microbatches 2",
    ),
    Mutation(
        name="micro-batch-dropped",
        breaks="The last of several micro-batches counts nothing.",
        file="src/vitpar/parallel/model.py",
        old="                    loss = self.loss(stage(part, key, **others), target)\n",
        new="                    loss = self.loss(stage(part, key, **others), target)\n"
        "                    loss = loss * (number < count or count == 1)\n",
        caught_by="vitpar check --mesh dp2 --microbatches 2",
    ),
    Mutation(
        name="sample-keys-off-by-one",
        breaks="Every sample drops what its neighbour in the micro-batch should.",
        file="src/vitpar/parallel/pipeline.py",
        old="given_sides(layer, keys, sides",
        new="given_sides(layer, None if keys is None else keys.roll(1), sides",
        caught_by="vitpar check --mesh dp2",
    ),
    Mutation(
        name="2d-dropout-offset",
        breaks="Ranks that hold other features of a token drop the same places of their own.",
        file="src/vitpar/models/keyed_random.py",
        old="list(x.shape[1:]), first_feature) >= rate",
        new="list(x.shape[1:]), 0) >= rate",
        caught_by="vitpar check --mesh tp4+2d",
    ),
)
