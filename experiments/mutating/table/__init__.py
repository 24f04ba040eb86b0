"""All mutations, by what they break. A new one goes into the module of its subject."""

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
"""In the order of the table that is printed."""
