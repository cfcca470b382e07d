"""The `shoal` command: finds the subcommand and turns errors into messages and exit codes."""

from __future__ import annotations

import os
import sys

from shoal.base.host import BLAS_THREADS

# One BLAS thread, set before anything loads NumPy: the serial engine runs lanes in this process. `up` computes nothing,
# and the command that it starts may use more threads.
if sys.argv[1:2] != ["up"]:
    os.environ |= dict.fromkeys(BLAS_THREADS, "1")

import difflib
import errno
import importlib
import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from shoal import __version__
from shoal.errors import ShoalError, Stopped, UsageError, problem_list

USAGE = """\
shoal: distributed reinforcement learning, with the same result on any number of workers

  shoal train trpo CartPole-v1                     train an agent, on all cores
  shoal train trpo --help                          list all settings of an algorithm
  shoal resume trpo-CartPole-v1-0001               continue a run
  shoal evaluate trpo-CartPole-v1-0001             evaluate the policy of a run
  shoal replay trpo-CartPole-v1-0001 --iteration 9 --episode 0
                                                   play one episode of a run again, and check it
  shoal compare CartPole-v1 --algos ppo trpo dqn   compare algorithms over several seeds: a table and a plot
  shoal sweep ppo CartPole-v1 --grid lr=1e-3,3e-4 epochs=5,10 --seeds 3
                                                   try settings, or let Optuna search for them: a table and a plot
  shoal runs                                       list runs
  shoal presets                                    list tuned settings for known environments
  shoal optimizers                                 list Nevergrad's optimizers by family
  shoal check-env CartPole-v1                      check that an environment is deterministic, and its speed
  shoal verify trpo CartPole-v1 --engines serial,processes:1,processes:3
                                                   check that results are equal, bit for bit
  shoal worker --redis redis://HOST:PORT           offer this machine's cores to runs on other machines
  shoal redis start                                start a Redis server for them
  shoal doctor                                     check what works on this machine
  mpirun -n 4 shoal up -- COMMAND                  run a command on a Ray cluster inside an allocation
  shoal bench --quick                              measure speed next to other libraries

Each command has --help. Exit codes: 0 done; 1 failed or different; 2 wrong settings or environment; 130, 143 stopped.
"""

COMMANDS = {
    "train": "train:train",
    "resume": "train:resume",
    "compare": "compare:compare",
    "sweep": "sweep:sweep",
    "verify": "verify:verify",
    "evaluate": "evaluate:evaluate",
    "replay": "replay:replay",
    "runs": "runs:list_runs",
    "presets": "presets:show_presets",
    "optimizers": "optimizers:list_optimizers",
    "check-env": "check_env:check_env",
    "doctor": "doctor:doctor",
    "bench": "bench:bench",
    "up": "up:up",
    "worker": "worker:worker",
    "redis": "redis:redis",
}
"""Name of each command -> module of this package, and its function."""


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run one command and exit with its code."""
    words = list(sys.argv[1:] if argv is None else argv)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # for files and pipes, too: users watch long commands there
    # The working directory is searched for the module in `module:Env-v0`; last, so that it shadows nothing.
    sys.path.append(str(Path.cwd()))
    _serve_if_rank(words)
    try:
        sys.exit(_dispatch(words))
    except Stopped as stop:
        sys.exit(128 + stop.number)
    except ShoalError as error:
        for problem in problem_list(error):
            print(f"error: {problem}", file=sys.stderr)
        for note in getattr(error, "__notes__", []):
            print(note, file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:  # the reader of the output is gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    except OSError as error:
        if error.errno not in (errno.EMFILE, errno.ENFILE):
            raise
        # Whatever needs the next file raises this, also libraries.
        print(f"error: {error.strerror}. Use fewer --workers, or raise the limit: ulimit -n 4096", file=sys.stderr)
        sys.exit(1)


def _serve_if_rank(words: list[str]) -> None:
    """Serve as a worker, if this is a rank other than 0 under mpirun, until rank 0 ends; rank 0 runs the command."""
    if words[:1] not in (["train"], ["resume"], ["evaluate"], ["compare"], ["sweep"]):
        return
    from shoal.spmd.launching import launched_rank

    here = launched_rank(os.environ)
    if here is None or here.size == 1:
        return
    if {"-h", "--help"} & set(words):
        if here.rank:
            sys.exit(0)
        return
    from shoal.engines.mpi import MPIJob

    job = MPIJob.of_this_process()
    if here.rank:
        job.serve()
        sys.exit(0)


def _dispatch(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help", "help"):
        print(USAGE, end="")
        return 0
    if words[0] == "--version":
        print(__version__)
        return 0
    command = COMMANDS.get(words[0])
    if command is None:
        near = difflib.get_close_matches(words[0], COMMANDS, n=1)
        hint = f" Did you mean {near[0]}?" if near else ""
        raise UsageError(f"there is no command {words[0]!r}.{hint} To list all commands, run: shoal --help")
    module, _, function = command.partition(":")
    run: Callable[[list[str]], int] = getattr(importlib.import_module(f"shoal.cli.{module}"), function)
    return run(words[1:])
