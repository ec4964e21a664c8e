"""`engine.monitor`: events of a program's own, beside what the engine records by itself.

With csv_monitor one file for each event, named by it with "/" as "_", of rows "step,value"; with tensorboard scalars.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from trilithon.compat.deepspeed.comm import get_rank
from trilithon.engine.monitor import Csv, Sink, TensorBoard

Event = tuple[str, Any, int]  # name, value, step


class MonitorMaster:
    """config: the DeepSpeed block, or a DeepSpeedConfig. Rank 0 writes; elsewhere nothing happens."""

    def __init__(self, config: Any) -> None:
        raw: Mapping[str, Any] = getattr(config, "raw", config)
        self._sinks: list[Sink] = []
        for key in ("csv_monitor", "tensorboard") if get_rank() == 0 else ():
            section = raw.get(key)
            if isinstance(section, Mapping) and section.get("enabled") is True:
                folder = Path(section.get("output_path") or "runs") / (section.get("job_name") or "DeepSpeedJobName")
                self._sinks.append(TensorBoard(folder / "events") if key == "tensorboard" else Csv(folder, times=False))
        self.enabled = bool(self._sinks)

    def write_events(self, event_list: Iterable[Event]) -> None:
        for name, value, step in event_list:
            for sink in self._sinks:
                sink.write(int(step), time.time(), {name: float(value)})
