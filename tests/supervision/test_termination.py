"""SIGTERM is noted at once, by any rank for all, and a process that does not leave by itself is made to."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from hf_longctx.parallel.reduction import agree_on_plan
from hf_longctx.supervision.termination import EXIT_CODE, say
from tests.worlds.patience import PATIENCE
from tests.worlds.rank_pool import RankPool

ROOT = Path(__file__).parents[2]
IMPORTS = """
import os, signal, subprocess, sys, threading, time
from hf_longctx.supervision.termination import Termination
def noted():
    while not termination.requested:
        time.sleep(0.01)
"""
"""What every program here begins with."""


def run(program: str) -> subprocess.CompletedProcess[str]:
    """A program in a process of its own."""
    return subprocess.run(
        [sys.executable, "-c", IMPORTS + program],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )


@pytest.mark.processes
def test_the_signal_is_noted_and_given_back():
    ended = run("""
calls, said, write = [], threading.Event(), os.write
def before(number, frame):
    calls.append(number)
def write_and_say_so(descriptor, message):
    write(descriptor, message)
    said.set()
os.write = write_and_say_so
signal.signal(signal.SIGTERM, before)
for signals in (0, 1):
    termination = Termination(3600, lambda: "step 3, saving")
    termination.start()
    assert not termination.requested
    if signals:
        os.kill(os.getpid(), signal.SIGTERM)
        noted()
    termination.stop()
    termination.stop()
    assert signal.getsignal(signal.SIGTERM) is before
    assert signal.set_wakeup_fd(-1) == -1
    assert len(calls) == signals  # who handled it before still hears of it
    assert threading.active_count() == 1 + signals  # the grace time goes on
said.wait()  # the program must not end before
print("done")
""")
    assert (ended.returncode, ended.stdout) == (0, "done\n"), ended.stderr
    assert "SIGTERM: this process leaves within 3600 s. It was at step 3, saving" in ended.stderr


@pytest.mark.processes
def test_a_process_that_does_not_leave_is_made_to_even_if_its_main_thread_runs_no_python():
    """The C call in which the main thread is takes no notice of signals, as a wait for a peer."""
    ended = run("""
termination = Termination(1.0, lambda: "step 3, summing gradients")
termination.start()
import ctypes
def wait_in_c():
    ctypes.CDLL(None).pthread_mutex_lock(mutex)
mutex = ctypes.create_string_buffer(128)
ctypes.CDLL(None).pthread_mutex_lock(mutex)
def kill_once_it_waits(thread):
    while sys._current_frames()[thread].f_code.co_name != "wait_in_c":
        time.sleep(0.01)
    time.sleep(0.2)
    os.kill(os.getpid(), signal.SIGTERM)
threading.Thread(target=kill_once_it_waits, args=(threading.get_ident(),)).start()
wait_in_c()
""")
    assert ended.returncode == EXIT_CODE == 143
    assert "SIGTERM came 1 s ago (grace_seconds): leaving now, at step 3, summing gradients" in ended.stderr
    assert "in wait_in_c" in ended.stderr


@pytest.mark.processes
def test_a_process_leaves_where_nothing_can_be_written():
    """The thread that ends it would end alone otherwise, and the process hang for ever."""
    ended = run("""
import faulthandler
from hf_longctx.supervision.termination import leave, say
def fail(descriptor):
    raise OSError("no room")
os.close(2)
say("nobody reads this")
faulthandler.dump_traceback = fail
threading.Thread(target=leave, args=(75, "it stands still")).start()
time.sleep(3600)
""")
    assert ended.returncode == 75


def test_a_name_that_is_no_text_is_said_all_the_same(capfd):
    say("reading \udcff.jsonl")
    assert capfd.readouterr().err == "hf_longctx: reading \\udcff.jsonl\n"


@pytest.mark.processes
def test_children_end_on_the_signal_as_ever():
    """A forked child, such as a worker that reads documents, and one that runs another program."""
    ended = run("""
termination = Termination(3600, lambda: "")
termination.start()
program = subprocess.Popen(["sleep", "3600"])
program.terminate()
assert program.wait() == -signal.SIGTERM
reader, writer = os.pipe()
child = os.fork()
if child == 0:
    os.write(writer, b"!")
    time.sleep(3600)
os.read(reader, 1)
os.kill(child, signal.SIGTERM)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
assert not termination.requested
termination.stop()
print("done")
""")
    assert (ended.returncode, ended.stdout) == (0, "done\n"), ended.stderr


@pytest.mark.processes
def test_outside_the_main_thread_the_signal_stays_as_it_was():
    ended = run("""
import logging
logging.basicConfig()
termination = Termination(3600, lambda: "")
thread = threading.Thread(target=termination.start)
thread.start()
thread.join()
assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
termination.stop()
""")
    assert ended.returncode == 0, ended.stderr
    assert "training runs outside the main thread: SIGTERM ends this process without a checkpoint" in ended.stderr


def leaving(who: list[int]) -> bool:
    """Agree as a rank that leaves because its next step is not prepared, and as others that have it."""
    leaves = dist.get_rank() in who
    return agree_on_plan(0 if leaves else -7, torch.device("cpu"), leave=leaves)


@pytest.mark.parametrize("who", [[], [1], [0, 1]])
def test_what_one_rank_was_told_all_ranks_know(who, ranks2: RankPool):
    assert ranks2.run(leaving, who) == [bool(who)] * 2


def test_one_process_alone_knows_what_it_was_told():
    assert agree_on_plan(5, torch.device("cpu"), leave=True)
    assert not agree_on_plan(5, torch.device("cpu"))
