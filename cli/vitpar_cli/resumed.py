"""``--resume``: what a run goes on from, its folder and its recipe."""

from dataclasses import dataclass
from pathlib import Path

from vitpar.errors import RecipeError


@dataclass(frozen=True)
class Resumed:
    """source: a run's folder or one of its checkpoints, None to begin. recipe: the file that the run goes on with, if
    none is named."""

    source: Path | None = None
    recipe: Path | None = None

    @property
    def run(self) -> Path | None:
        """The folder of the run that goes on."""
        from vitpar.training.saving.resume import run_of

        return self.source and run_of(self.source)

    @property
    def begins(self) -> bool:
        """Whether there is nothing to go on from."""
        from vitpar.checkpoint import Checkpoints
        from vitpar.training.saving.resume import checkpoints_of, is_checkpoint

        source = self.source
        return source is None or not (is_checkpoint(source) or Checkpoints(checkpoints_of(source)).steps())

    def mesh(self) -> str | None:
        """The plan it had, where that was a file, which may be gone or another by now."""
        from vitpar.training.recipe import read_recipe

        if self.recipe is None:
            return None
        parallel = read_recipe(self.recipe).parallel
        # Beside others it may not be the one that ran, so the file has to be there.
        if not parallel.mesh.endswith(".json") or parallel.otherwise:
            return None
        return str(self.recipe.with_name("plan.json"))


def resumed(resume: str | None, run_dir: Path | None) -> Resumed:
    """What ``--resume`` means. Raises RecipeError."""
    from vitpar.checkpoint import Checkpoints
    from vitpar.training.saving.resume import checkpoints_of, is_checkpoint, run_of

    if resume is None or resume == "never":
        return Resumed()
    if resume == "auto":
        if run_dir is None:
            raise RecipeError("--resume auto needs to know which run: name its folder with --run-dir")
        source = run_dir
    else:
        source = Path(resume)
        if not (source / "recipe.toml").is_file():
            raise RecipeError(
                f"--resume '{resume}' is neither the folder of a run nor a checkpoint (recipe.toml is missing): name "
                "one such as runs/… or runs/…/checkpoints/step_450"
            )
        if not is_checkpoint(source) and not Checkpoints(checkpoints_of(source)).steps():
            raise RecipeError(
                f"--resume '{resume}' has no checkpoint to go on from: to begin, use --resume auto --run-dir {resume}"
            )
        if run_dir is None and run_of(source) is None:
            raise RecipeError(f"--resume '{resume}' does not lie in a run: name the folder of a new one with --run-dir")
    recipe = source / "recipe.toml"
    return Resumed(source, recipe if recipe.is_file() else None)
