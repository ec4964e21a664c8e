"""Each rank reads its own share and holds little more while it does: 4 ranks, 12 million parameters with Adam."""

import gc
import threading
from pathlib import Path

import torch
from torch import nn

import trilithon
from trilithon.testing import ranks

LAYERS, WIDTH = 12, 1024
SHARE = LAYERS * WIDTH * WIDTH * 12 // 4
TENSOR = WIDTH * WIDTH * 4


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


class Peak:
    """The largest resident size while the context is open, above that at its beginning."""

    def __enter__(self):
        gc.collect()
        self.start = self.most = resident_bytes()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self):
        while not self._over.wait(0.002):
            self.most = max(self.most, resident_bytes())

    def __exit__(self, *args):
        self.most = max(self.most, resident_bytes())
        self._over.set()
        self._thread.join()

    @property
    def grown(self) -> int:
        return self.most - self.start


def engine():
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    return trilithon.initialize(model, {"zero": {"stage": 3}, "optimizer": "adamw"})


@ranks(4)
def test_peak_and_bytes_read_are_those_of_the_own_share(tmp_path):
    with engine() as saved:
        saved.save(tmp_path)
    with engine() as loaded:
        with Peak() as peak:
            report = loaded.load(tmp_path)
        assert peak.grown <= 2 * SHARE + TENSOR
        total = sum(loaded._sharding.exchange(report.bytes_read, "bytes read"))
        assert report.bytes_read <= 1.1 * SHARE  # whole blocks of 1 MiB at the ends of ranges
        assert total <= 1.1 * 4 * SHARE
        assert torch.isfinite(next(loaded.full_parameters())[1]).all()
