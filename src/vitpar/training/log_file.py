"""The events of a run as plain lines of its log.txt, whatever is shown elsewhere."""

from typing import Any

from vitpar.training.events import Reporter, RunHeader
from vitpar.training.run_folder import RunFolder


class Logged:
    """A `vitpar.training.events.Reporter` that writes every event to the log of `folder` and hands it on to `shown`."""

    def __init__(self, folder: RunFolder, shown: Reporter) -> None:
        self._log, self._shown = folder.log, shown

    def started(self, header: RunHeader) -> None:
        """What will run."""
        self._log(
            f"start  {header.config.name}, {header.parameters:,} parameters, {header.plan} on {header.device}, "
            f"{header.train_samples:,} images to train on, {header.val_samples:,} to validate with, "
            f"{header.steps:,} steps of {header.recipe.train.batch_size:,}"
        )
        self._shown.started(header)

    def stepped(self, row: dict[str, Any]) -> None:
        """One line a log interval."""
        loss, norm = (float("nan") if row[key] is None else row[key] for key in ("loss", "grad_norm"))
        scale = f"scale {row['loss_scale']:,.10g}  " if "loss_scale" in row else ""
        self._log(
            f"step {row['step']:,}  loss {loss:.4f}  lr {row['lr']:.3g}  gradients {norm:.3g}  {scale}"
            f"{row['images_per_second']:,.1f} images/s  step {row['step_ms']:,.1f} ms  data {row['data_ms']:,.1f} ms"
        )
        self._shown.stepped(row)

    def evaluated(self, row: dict[str, Any]) -> None:
        """One line an evaluation."""
        self._log(f"eval {row['step']:,}  {_result(row)}")
        self._shown.evaluated(row)

    def note(self, text: str) -> None:
        """One line a warning."""
        self._log(f"warning: {text}")
        self._shown.note(text)

    def told(self, text: str) -> None:
        """One line."""
        self._log(text)
        self._shown.told(text)

    def finished(self, summary: dict[str, Any]) -> None:
        """The result and where the weights are."""
        self._log(f"done  {_result(summary)}  weights {summary['weights']}")
        self._shown.finished(summary)


def _result(row: dict[str, Any]) -> str:
    return f"val loss {row['loss']:.4f}  top-1 {row['top1']:.2%}  top-5 {row['top5']:.2%}"
