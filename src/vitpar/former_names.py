"""Settings and model fields that were renamed before version 0.1.0, so that errors can name their successors."""

from __future__ import annotations

FORMER_NAMES = {
    "model.heads": "model.num_heads",
    "model.hidden": "model.mlp_hidden_dim",
    "model.registers": "model.num_reg_tokens",
    "model.width": "model.embed_dim",
    "parallel.otherwise": "parallel.fallback_meshes",
}
"""Present key of a recipe by its former key. Fields of ``ViTConfig`` are the keys of the section ``model``."""


def present_field(field: str) -> str | None:
    """Return the present name of a former field of ``ViTConfig``, None if it never was one."""
    key = FORMER_NAMES.get(f"model.{field}")
    return None if key is None else key.removeprefix("model.")
