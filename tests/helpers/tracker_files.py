"""Readers of what trackers wrote, with their own code where they have some."""

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

BLOCK = 32_768
"""Bytes of a block in W&B's file, which is a log of LevelDB with another header."""
FULL, LAST = 1, 4
"""Kinds of parts that end a record of that log."""


class EventFiles:
    """Event files of a run, as TensorBoard shows them."""

    def __init__(self, run: Path) -> None:
        accumulator = pytest.importorskip(
            "tensorboard.backend.event_processing.event_accumulator", reason="tensorboard is not installed"
        )
        self.files = sorted((run / "tensorboard").iterdir())
        self._read = accumulator.EventAccumulator(str(run / "tensorboard"), {"scalars": 0, "tensors": 0})
        self._read.Reload()

    @property
    def names(self) -> set[str]:
        """Return the names of all scalars."""
        return set(self._read.Tags()["scalars"])

    def scalars(self, name: str) -> list[tuple[int, float]]:
        """Return steps and values of a scalar, in order."""
        return [(event.step, event.value) for event in self._read.Scalars(name)]

    def texts(self, name: str) -> list[tuple[int, str]]:
        """Return steps and content of a text, in order."""
        tag = f"{name}/text_summary"
        found = [(event.step, event.tensor_proto.string_val[0].decode()) for event in self._read.Tensors(tag)]
        assert self._read.SummaryMetadata(tag).plugin_data.plugin_name == "text"
        return found

    def hyper_parameters(self) -> dict[str, Any]:
        """Return the hyper-parameters by name."""
        from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

        metadata = self._read.SummaryMetadata("_hparams_/session_start_info")
        found = HParamsPluginData.FromString(metadata.plugin_data.content).session_start_info.hparams
        return {key: getattr(value, value.WhichOneof("kind")) for key, value in found.items()}


def wandb_records(run: Path) -> Iterator[Any]:
    """Yield the records of all files that W&B wrote offline in the folder of a run, in the order of their time."""
    records = pytest.importorskip("wandb.proto.wandb_internal_pb2", reason="wandb is not installed")
    for path in sorted(run.glob("wandb/offline-run-*/*.wandb"), key=lambda path: path.stat().st_mtime_ns):
        data = path.read_bytes()
        position, record = 7, b""
        while position + 7 <= len(data):
            if (left := BLOCK - position % BLOCK) < 7:
                position += left
                continue
            _, size, kind = struct.unpack_from("<IHB", data, position)
            record += data[position + 7 : position + 7 + size]
            position += 7 + size
            if kind in (FULL, LAST):
                yield records.Record.FromString(record)
                record = b""


def wandb_history(run: Path) -> list[tuple[int, dict[str, float]]]:
    """Return the steps that W&B wrote offline with their values."""
    found = [record.history for record in wandb_records(run) if record.WhichOneof("record_type") == "history"]
    return [
        (one.step.num, {item.key or item.nested_key[0]: json.loads(item.value_json) for item in one.item})
        for one in found
    ]
