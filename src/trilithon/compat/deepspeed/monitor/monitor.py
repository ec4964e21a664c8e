"""`engine.monitor`: events of a program's own, beside what the engine records by itself.

With csv_monitor one file for each event, named by it with "/" as "_", of rows "step, value"; with tensorboard scalars.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from trilithon.compat.deepspeed.comm import get_rank
from trilithon.engine.monitor import TensorBoard, WholeLines

Event = tuple[str, Any, int]  # name, value, step


class MonitorMaster:
    """config: the DeepSpeed block, or a DeepSpeedConfig. Rank 0 writes; elsewhere nothing happens."""

    def __init__(self, config: Any) -> None:
        raw: Mapping[str, Any] = getattr(config, "raw", config)
        self._csv = _folder(raw.get("csv_monitor"))
        self._board = _folder(raw.get("tensorboard"))
        self.enabled = get_rank() == 0 and (self._csv is not None or self._board is not None)
        self._files: dict[str, WholeLines] = {}
        self._writer: TensorBoard | None = None

    def write_events(self, event_list: Iterable[Event]) -> None:
        for name, value, step in event_list if self.enabled else ():
            if self._csv is not None:
                self._file(self._csv, name.replace("/", "_")).write(f"{int(step)},{float(value)!r}")
            if self._board is not None:
                self._writer = self._writer or TensorBoard(self._board / "events")
                self._writer.write(int(step), 0.0, {name: float(value)})

    def _file(self, folder: Path, name: str) -> WholeLines:
        if name not in self._files:
            folder.mkdir(parents=True, exist_ok=True)
            self._files[name] = WholeLines(folder / f"{name}.csv")
            if self._files[name].empty:
                self._files[name].write(f"step,{name}")
        return self._files[name]


def _folder(section: Any) -> Path | None:
    if not isinstance(section, Mapping) or section.get("enabled") is not True:
        return None
    return Path(section.get("output_path") or "runs") / (section.get("job_name") or "DeepSpeedJobName")
