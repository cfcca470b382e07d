"""The command `sweep`: a grid or a search over the settings of one algorithm."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console

from shoal.base import signals
from shoal.cli.console import console, say
from shoal.cli.parsing import parse_spec_and
from shoal.errors import Stopped

if TYPE_CHECKING:
    from shoal.commands.sweep.trials import Sweep


def sweep(words: list[str]) -> int:
    """Train all trials and print their results; the exit code is 1 if no trial finished."""
    from shoal.commands.campaign.heads import refuse_mpi_outside_a_job
    from shoal.commands.sweep.plan import plan_sweep
    from shoal.commands.sweep.space import assignments, setting_name
    from shoal.commands.sweep.trials import SweepOptions

    base, options = parse_spec_and(SweepOptions, "sweep", words, "--grid hidden=32,64 --seeds 3")
    out = console()
    problems: list[str] = []
    grid, search = (
        assignments(texts, option, problems)
        for texts, option in ((options.grid, "--grid"), (options.search, "--search"))
    )
    flags = [word.partition("=")[0] for word in words if word.startswith("-")]
    fixed = {"steps" if flag == "-n" else setting_name(flag.removeprefix("--no-")) for flag in flags}
    planned = plan_sweep(base, options, grid, search, fixed, problems)
    refuse_mpi_outside_a_job("sweep", base.settings.engine, base.settings.workers)
    try:
        with signals.listening():
            return _sweep(out, planned)
    except Stopped as stop:
        say(out, f"{stop}: all runs are saved in {planned.folder}. To continue them, run the same command again")
        return 128 + stop.number


def _sweep(out: Console, planned: Sweep) -> int:
    from shoal.commands.sweep.console import printer_of
    from shoal.commands.sweep.session import SweepSession
    from shoal.runs.hints import train_command
    from shoal.runs.run import make_engine

    with make_engine(planned.base.settings) as engine, printer_of(out, planned) as printer:
        session = SweepSession(planned, engine, printer)
        result = session.run()
        report = session.report(result)
    say(out, f"\n{report.table}\n\n{report.note}\n")
    report.write()
    say(out, f"Saved:   {', '.join(map(str, [planned.folder / 'trials.json', *report.files]))}")
    say(out, f"Runs:    shoal runs --runs {planned.folder}")
    if result.best is None:
        say(out, "No trial finished. Fix the errors above and run the same command again")
        return 1
    best = planned.trial_with(result.best.number, result.best.settings)
    say(out, f"Best:    trial {best.label}; score {result.best.score:.1f}")
    say(out, f"Train:   {train_command(best.runs[0].spec)}")
    failed = [str(trial.number) for trial in result.trials if trial.state == "failed"]
    if failed:
        say(out, f"Failed:  trial {', '.join(failed)}; see the messages above and in trials.json")
    more = "a higher --trials" if planned.searched else "more values or --seeds"
    say(out, f"More:    run the same command again with {more}; finished runs are kept")
    return 0
