"""The interpreter goes away while the watch thread talks to the store."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap


def test_a_program_that_ends_while_the_thread_asks_the_store_ends_well(tmp_path):
    """A thread found inside a C++ call at that moment would end the process with std::terminate (SIGABRT)."""
    script = tmp_path / "ends.py"
    script.write_text(
        textwrap.dedent(
            """
            import threading, time
            import torch.distributed as dist
            from trilithon.comm import watchdog
            from trilithon.comm.journal import Journal

            watchdog._IDLE_TICK_S = 0.0  # the thread does nothing but ask
            store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            watch = watchdog.Watchdog(600.0, store, rank=1, world_size=2)
            journal = Journal("data", (0, 1))
            watch.follow(journal)
            time.sleep(0.2)
            assert any(thread.name == "trilithon-watchdog" for thread in threading.enumerate())
            print("over", flush=True)
            """
        )
    )
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=60, check=False, env=environment
    )
    assert (ended.returncode, ended.stdout) == (0, "over\n"), ended.stderr
