import os
import signal
import subprocess
import sys

from trilithon.pretrain.interrupt import StopRequest


def test_ctrl_c_is_noted_and_the_handler_put_back():
    before = signal.getsignal(signal.SIGINT)
    with StopRequest() as request:
        assert request.signal == 0
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)  # the same Ctrl-C, arriving a second time
        assert request.signal == signal.SIGINT
    assert signal.getsignal(signal.SIGINT) is before


IMPATIENT = """
import os, signal
from trilithon.pretrain import interrupt
interrupt._PATIENCE_S = 0.0
with interrupt.StopRequest():
    os.kill(os.getpid(), signal.SIGINT)
    os.kill(os.getpid(), signal.SIGINT)
    print("still here")
"""


def test_a_later_ctrl_c_ends_the_process_at_once():
    done = subprocess.run([sys.executable, "-c", IMPATIENT], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 130 and done.stdout == ""
