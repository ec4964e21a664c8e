"""The program of one rank: `python -m trilithon.pretrain.rank CONFIG`, where CONFIG is a PretrainConfig as JSON.

`main` turns the outcome into an exit status and a failure into one message. Under `trilithon train --nproc` the message
goes to the file that the launcher reads, which shows that of the rank that failed first; under another launcher it is
printed, once for errors that all ranks meet together.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time
import traceback

from trilithon.errors import ConfigError, DataError, NonFiniteError, TrilithonError
from trilithon.pretrain.settings import PretrainConfig

MESSAGE_FILE = "TORCHELASTIC_ERROR_FILE"  # set for each rank by torch's elastic agent
OURS = "TRILITHON_TRAIN_LAUNCHER"  # set by our launcher, which will show the message: its process id
_MET_TOGETHER = (ConfigError, DataError, NonFiniteError)


def main(config: PretrainConfig) -> int:
    """Train and return the exit status: 0, 1 after an error that was told, 128 + signal when asked to stop."""
    _end_with_launcher()
    try:
        import torch.distributed as dist

        from trilithon.pretrain.job import run

        status = run(config).exit_status
        if dist.is_initialized():
            dist.destroy_process_group()
        return status
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except TrilithonError as error:
        together = isinstance(error, _MET_TOGETHER)
        _tell(str(error), shown=_rank() == 0 or not together)
        if not together:
            _tell_the_others(error)
        return 1
    except Exception as error:
        _tell(traceback.format_exc().rstrip(), shown=True)
        _tell_the_others(error)
        return 1


def _tell_the_others(error: Exception) -> None:
    from trilithon.engine.build import report_failure

    report_failure(error)


def _rank() -> int:
    return int(os.environ.get("RANK", "0"))


def _tell(message: str, *, shown: bool) -> None:
    """Into the launcher's file when it is ours, otherwise to the terminal if it is to be shown."""
    path = os.environ.get(MESSAGE_FILE)
    if path and os.environ.get(OURS):
        content = {"message": {"message": message, "extraInfo": {"timestamp": str(int(time.time()))}}}
        with open(path, "w", encoding="utf-8") as stream:
            json.dump(content, stream)
        shown = shown and _starts_again()  # the launcher shows it only if this was the last start
    if shown:
        print(f"rank {_rank()}: {message}" if _rank() else message, file=sys.stderr, flush=True)


def _starts_again() -> bool:
    done, most = (int(os.environ.get(f"TORCHELASTIC_{name}", "0")) for name in ("RESTART_COUNT", "MAX_RESTARTS"))
    return done < most


def _end_with_launcher() -> None:
    """On Linux: be ended when our launcher dies without a word, so that no rank is left behind."""
    launcher = os.environ.get(OURS)
    if launcher is None or not sys.platform.startswith("linux"):
        return
    set_parent_death_signal = 1  # PR_SET_PDEATHSIG
    ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)
    if os.getppid() != int(launcher):  # it died before the call above
        os._exit(1)


if __name__ == "__main__":
    sys.exit(main(PretrainConfig.model_validate_json(sys.argv[1])))
