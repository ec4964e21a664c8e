"""What `WarmPython` puts in the place of a Python interpreter: it hands its arguments to the warm one and waits.

Started in isolation and without site-packages, so that it costs hundredths of a second. Everything that makes up a
process goes over: arguments, environment, folder, and every open descriptor under its own number. Signals that can be
passed on are; if this process is killed, the connection ends and the other one is killed too.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys

PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)


def open_descriptors() -> list[int]:
    found = []
    for number in map(int, os.listdir("/proc/self/fd")):
        try:
            os.fstat(number)
        except OSError:  # the listing's own
            continue
        found.append(number)
    return found


def main() -> int:
    pid, early = 0, []

    def pass_on(number: int, _frame: object) -> None:
        if not pid:
            early.append(number)
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)

    for number in PASSED_ON:
        signal.signal(number, pass_on)
    descriptors = open_descriptors()
    request = {
        "arguments": sys.argv,
        "environment": dict(os.environ),
        "folder": os.getcwd(),
        "descriptors": descriptors,
        "client": os.getpid(),
        "parent": os.getppid(),
    }
    words = json.dumps(request).encode()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server:
        server.connect(os.path.join(os.path.dirname(os.path.abspath(sys.argv[0])), "socket"))
        socket.send_fds(server, [len(words).to_bytes(4, "little")], descriptors)
        server.sendall(words)
        pid = int.from_bytes(server.recv(4), "little")
        for number in early:
            pass_on(number, None)
        for number in descriptors:  # the other one has them: an end of a pipe must not stay open here
            os.close(number)
        answer = server.recv(4)
    if len(answer) < 4:
        return 1
    status = int.from_bytes(answer, "little", signed=True)
    if status < 0:  # die as it did
        if -status != signal.SIGKILL:
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    return status


if __name__ == "__main__":
    os._exit(main())
