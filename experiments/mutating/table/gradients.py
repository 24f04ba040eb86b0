"""Mutations that make gradients of single parameters slightly wrong."""

from mutating.mutation import Mutation

FILE = "src/vitpar/parallel/model.py"
REDUCED = "            self._tensor_sums.wait()\n"
"""Line of `FILE` after which the gradients of a step are complete."""


def scaled(parameter: str, change: str) -> str:
    """Return REDUCED followed by code that changes one parameter's gradient.

    change: statement that changes the variable `gradient`.
    """
    return (
        f"{REDUCED}"
        "        for name, parameter in self.named_parameters():\n"
        f'            if name == "{parameter}":\n'
        "                gradient = parameter.grad\n"
        f"                {change}\n"
    )


MUTATIONS = (
    Mutation(
        name="bias-1.01",
        breaks="The gradient of one bias is 1 % too large.",
        file=FILE,
        old=REDUCED,
        new=scaled("blocks.3.mlp.fc1.bias", "gradient.mul_(1.01)"),
        caught_by="vitpar check --mesh dp2",
    ),
    Mutation(
        name="bias-element-1.01",
        breaks="One element of the gradient of one bias is 1 % too large.",
        file=FILE,
        old=REDUCED,
        new=scaled("blocks.3.mlp.fc1.bias", "gradient[0] *= 1.01"),
        caught_by="vitpar check --mesh dp2",
    ),
    Mutation(
        name="small-qkv-1.01",
        breaks="The gradient of one qkv weight is 1 % too large, where layer scale makes it small.",
        file=FILE,
        old=REDUCED,
        new=scaled("blocks.3.attn.qkv.weight", "gradient.mul_(1.01)"),
        caught_by="vitpar check --mesh dp2 --set model.layer_scale=1e-6",
    ),
    Mutation(
        name="small-qkv-2-bf16",
        breaks="The gradient of one qkv weight is twice as large, where layer scale makes it small, in bf16.",
        file=FILE,
        old=REDUCED,
        new=scaled("blocks.3.attn.qkv.weight", "gradient.mul_(2)"),
        caught_by="vitpar check --mesh dp2 --set model.layer_scale=1e-6 --precision bf16",
    ),
    Mutation(
        name="weight-1.1-bf16",
        breaks="The gradient of one weight is 10 % too large, in bf16.",
        file=FILE,
        old=REDUCED,
        new=scaled("blocks.3.mlp.fc1.weight", "gradient.mul_(1.1)"),
        caught_by="vitpar check --mesh dp2 --precision bf16",
    ),
)
