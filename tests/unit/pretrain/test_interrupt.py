import os
import signal
import subprocess
import sys
import time

import pytest

from trilithon.pretrain.interrupt import StopRequest

HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_request_to_stop_is_noted_and_the_handlers_put_back(number):
    before = [signal.getsignal(each) for each in HANDLED]
    with StopRequest() as request:
        assert request.signal == 0
        os.kill(os.getpid(), number)
        os.kill(os.getpid(), number)  # the same request, arriving a second time
        assert request.signal == number
        request.at_boundary()
    assert [signal.getsignal(each) for each in HANDLED] == before
    assert signal.set_wakeup_fd(-1) == -1, "the descriptor is put back, too"


def test_sigusr1_asks_to_save_once_and_not_to_stop():
    with StopRequest() as request:
        assert not request.take_save()
        os.kill(os.getpid(), signal.SIGUSR1)
        assert request.take_save() and not request.take_save()
        assert request.signal == 0


def test_without_termination_only_ctrl_c_is_taken():
    before = signal.getsignal(signal.SIGTERM)
    with StopRequest(on_termination=False) as request:
        assert signal.getsignal(signal.SIGTERM) is before
        os.kill(os.getpid(), signal.SIGINT)
        assert request.signal == signal.SIGINT


IMPATIENT = """
import os, signal
from trilithon.pretrain import interrupt
interrupt._PATIENCE_S = 0.0
with interrupt.StopRequest():
    os.kill(os.getpid(), signal.SIGINT)
    os.kill(os.getpid(), signal.SIGINT)
    print("still here")
"""

# What a collective is to Python: a call that does not return, and no handler runs until it does.
IN_A_COLLECTIVE = """
import ctypes, sys
from trilithon.pretrain import interrupt
interrupt._PATIENCE_S, interrupt._STEP_S = 0.2, float(sys.argv[1])
libc = ctypes.CDLL(None)
lock = ctypes.create_string_buffer(128)
libc.pthread_mutex_init(lock, None)
libc.pthread_mutex_lock(lock)
with interrupt.StopRequest():
    print("ready", flush=True)
    libc.pthread_mutex_lock(lock)
    print("still here")
"""


def run(program: str, *arguments: str) -> subprocess.Popen[str]:
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([sys.executable, "-c", program, *arguments], text=True, **pipes)


def test_a_later_ctrl_c_ends_the_process_at_once():
    out, _ = (process := run(IMPATIENT)).communicate(timeout=60)
    assert process.returncode == 130 and out == ""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_ends_a_process_that_waits_in_a_collective(number):
    process = run(IN_A_COLLECTIVE, "60")
    assert process.stdout is not None
    process.stdout.readline()
    process.send_signal(number)
    time.sleep(0.5)
    assert process.poll() is None, "the first one is a request"
    process.send_signal(number)
    out, _ = process.communicate(timeout=20)
    assert process.returncode == 128 + number and out == ""


def test_after_sigterm_a_step_that_does_not_end_is_cut_short_and_says_so():
    process = run(IN_A_COLLECTIVE, "0.3")
    assert process.stdout is not None
    process.stdout.readline()
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=20)
    assert process.returncode == 143
    assert "rank 0 could not end its step after SIGTERM; it ends without saving" in err


HOPELESS = IN_A_COLLECTIVE.replace("StopRequest()", "StopRequest(hopeless=lambda: True)")


def test_after_sigterm_a_rank_whose_peers_are_gone_ends_at_once_and_without_a_word():
    process = run(HOPELESS, "60")
    assert process.stdout is not None
    process.stdout.readline()
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=10)
    assert process.returncode == 143 and err == ""


def test_what_is_done_at_the_boundary_is_not_cut_short(monkeypatch):
    monkeypatch.setattr("trilithon.pretrain.interrupt._STEP_S", 1.0)
    with StopRequest() as request:
        os.kill(os.getpid(), signal.SIGTERM)
        request.at_boundary()
        time.sleep(1.3)  # a checkpoint is written
    assert request.signal == signal.SIGTERM
