"""All mutations, in modules by subject."""

from mutating.mutation import Mutation
from mutating.table import gradients, images, loss, model, parallel, results, steps

MUTATIONS: tuple[Mutation, ...] = (
    *parallel.MUTATIONS,
    *gradients.MUTATIONS,
    *loss.MUTATIONS,
    *steps.MUTATIONS,
    *model.MUTATIONS,
    *images.MUTATIONS,
    *results.MUTATIONS,
)
"""All mutations, in the order of the printed table."""
