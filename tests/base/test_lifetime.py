"""The reaper: what a process has started ends with it."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import psutil
import pytest

from shoal.base import lifetime

pytestmark = pytest.mark.processes

OWNER = """
    import os, subprocess, sys, time
    from shoal.base.lifetime import Reaper

    one = Reaper()
    one.remove(sys.argv[1])
    marked = subprocess.Popen(["sleep", "600"], env=os.environ | one.variables, start_new_session=True)
    # One that has lost the mark, writes into the folder, and opens and closes other files all the time.
    writer = "import sys, time\\nfile = open(sys.argv[1] + '/log', 'w')\\nwhile True:\\n  open('/dev/null').close()"
    writing = subprocess.Popen([sys.executable, "-c", writer, sys.argv[1]], start_new_session=True)
    reading = subprocess.Popen(["tail", "-f", sys.argv[2]], stdout=subprocess.DEVNULL, start_new_session=True)
    while not os.path.exists(sys.argv[1] + "/log"):
        time.sleep(0.01)
    print(marked.pid, writing.pid, reading.pid, flush=True)
    time.sleep(600)
"""


def test_everything_of_a_killed_owner_ends(tmp_path: Path) -> None:
    folder, other = tmp_path / "folder", tmp_path / "other"
    folder.mkdir()
    other.touch()
    command = [sys.executable, "-c", textwrap.dedent(OWNER), str(folder), str(other)]
    environment = os.environ | {"PYTHONPATH": str(Path(lifetime.__file__).parents[2])}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as owner:
        assert owner.stdout is not None
        *kept, free = [psutil.Process(int(pid)) for pid in owner.stdout.readline().split()]
        (its_reaper,) = [one for one in psutil.Process(owner.pid).children() if lifetime.__file__ in one.cmdline()]
        owner.kill()
    assert not psutil.wait_procs([*kept, its_reaper], timeout=20)[1]
    assert not folder.exists()
    assert free.is_running(), "what is not its own is left alone"
    free.kill()
