"""The command `replay`."""

from __future__ import annotations

from bdb import BdbQuit
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import tyro
from rich.console import Console

from shoal.cli.console import console, print_table, say
from shoal.cli.parsing import parse
from shoal.errors import UsageError

if TYPE_CHECKING:
    from shoal.commands.replay import RecordedEpisode, RelearnedIteration
    from shoal.runs.folder import RunDir


@dataclass(frozen=True)
class ReplayArgs:
    """Play one episode of a run again, alone, and compare it with its lane's record, bit for bit.

    Learns from the newest checkpoint before the iteration, in this process, and checks every digest. The run is only
    read. Without --episode: lists the episodes that ended in the iteration.
    """

    run: tyro.conf.Positional[str]
    """Name of the run, or path of its folder."""
    iteration: int
    """Iteration in which the episode ended."""
    episode: int | None = None
    """Number of the episode among those that ended in the iteration, from 0 (default: list all)."""
    pdb: bool = False
    """Stop in Python's debugger before the first step, with env, action and observation, and where env raises."""
    at: int = 0
    """Step before which --pdb stops."""
    save: Path | None = None
    """Write the episode to this .csv file, a row for each step (default: do not). Never replaces a file."""
    runs: str = "runs"
    """Folder of all runs."""
    allow: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """Module to import for a run of another user; may be repeated (default: none)."""


def replay(words: list[str]) -> int:
    """List the episodes of an iteration, or replay one; the exit code is 1 if anything differs."""
    wanted = parse(ReplayArgs, words, "replay")
    from shoal.commands import replay as replaying
    from shoal.runs.folder import RunDir

    out = console()
    problems = [] if wanted.save is None else replaying.save_problems(wanted.save)
    if wanted.episode is None and (wanted.pdb or wanted.save is not None):
        problems.append("--pdb and --save are for one episode: choose it with --episode")
    if wanted.at and not wanted.pdb:
        problems.append("--at sets the step before which --pdb stops: give both")
    try:
        run = RunDir.find(Path(wanted.runs), wanted.run)
        problems += replaying.replay_problems(run, wanted.iteration, wanted.episode)
    except UsageError as error:
        problems += error.problems
    if problems:
        raise UsageError(problems)
    relearned = replaying.relearn(run, wanted.iteration, wanted.episode, lambda text: say(out, text), wanted.allow)
    if relearned.difference:
        say(
            out,
            f"DIFFERENT: {relearned.difference}\n"
            f"Likely causes: other versions than the run's (a warning above lists them), or an environment that is not "
            f"deterministic. To check the environment, run: {replaying.check_command(relearned.env)}",
        )
        return 1
    if wanted.episode is None:
        _list_episodes(out, relearned)
        return 0
    return _play(out, wanted, run, relearned, relearned.episodes[wanted.episode])


def _play(
    out: Console, wanted: ReplayArgs, run: RunDir, relearned: RelearnedIteration, episode: RecordedEpisode
) -> int:
    from shoal.commands import replay as replaying
    from shoal.runs.hints import program, runs_flag

    say(
        out,
        f"Episode {wanted.episode}: lane {episode.lane}, slot {episode.slot}, episode {episode.number} of the slot, "
        f"reset seed {episode.seed}",
    )
    if wanted.pdb:
        if not 0 <= wanted.at < episode.length:
            raise UsageError(f"the episode has no step {wanted.at}: use --at 0 to --at {episode.length - 1}")
        say(out, f"Stopping before step {wanted.at}: see env, action, observation; s steps into it, c continues")
    try:
        played = replaying.replay_episode(episode, relearned.env, wanted.at if wanted.pdb else None)
    except BdbQuit:
        say(out, "You left the debugger before the end, so nothing was compared")
        return 1
    if wanted.save is not None and played.answers:
        replaying.save_episode(played, wanted.save)
        say(out, f"Saved: {wanted.save}")
    if played.difference:
        at = f"step {played.step}" if played.step >= 0 else "the reset"
        this = f"{run.name} --iteration {wanted.iteration} --episode {wanted.episode}{runs_flag(run)}"
        say(
            out,
            f"DIFFERENT from {at} on: {played.difference}\n"
            f"To check whether the environment is deterministic, run: {replaying.check_command(relearned.env)}\n"
            f"To debug that step, run: {program()} replay {this} --pdb --at {max(played.step, 0)}",
        )
        return 1
    say(
        out,
        f"Equal: {episode.length} steps, return {episode.total}, {episode.end}; "
        f"every observation and reward equals the lane's record bit for bit",
    )
    if episode.unseen:
        say(
            out,
            f"Only the actions of its first {episode.unseen} steps, before that checkpoint, are known: "
            f"these steps were compared by the return alone",
        )
    return 0


def _list_episodes(out: Console, relearned: RelearnedIteration) -> None:
    rows = [["episode", "lane", "slot", "of slot", "reset seed", "length", "return", "end"]]
    for number, found in enumerate(relearned.episodes):
        place = [number, found.lane, found.slot, found.number, found.seed, found.length]
        rows.append([*map(str, place), f"{found.total:.6g}", found.end])
    print_table(out, rows)
