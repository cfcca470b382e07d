"""TRPO at equal settings compared with sb3-contrib: environment steps per second of training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from bench import machine
from bench.contest import Entry, contest, contest_table
from bench.options import PeerOptions, Say
from bench.peers import EnvLayout, Peers
from bench.report import Report
from bench.watch import TrainingProgram, shoal_program

BATCH = 10_000
FOREVER = 10**9
LANES = ((2, 8), (4, 4), (4, 10))
LAYOUTS = (EnvLayout(8, threads=1), EnvLayout(8), EnvLayout(1, threads=1), EnvLayout(2, subprocesses=True, threads=1))


@dataclass(frozen=True)
class TRPOOptions(PeerOptions):
    """TRPO at equal settings compared with sb3-contrib: steps per second of training."""

    env: tuple[str, ...] = ("CartPole-v1", "LunarLander-v3", "HalfCheetah-v5")
    """Environments to measure."""
    rounds: int = 5
    """Number of rounds; every library takes one turn in each."""
    seconds: float = 10.0
    """Minimum length of a turn in seconds, after the first iterations."""

    QUICK: ClassVar[dict[str, Any]] = {"env": ("LunarLander-v3",), "rounds": 1, "seconds": 1.0}

    def environments(self) -> list[str]:
        return list(self.env)


OPTIONS = TRPOOptions


def run(options: TRPOOptions, say: Say) -> Report:
    """Measure and report."""
    peers = Peers(options.peers_folder, say)
    outcomes = []
    for env in options.env:
        ours = {f"2 workers, {lanes} lanes of {width}": _shoal(env, lanes, width) for lanes, width in LANES}
        theirs = {str(layout): _contrib(env, peers, layout) for layout in LAYOUTS}
        entries = [Entry("Shoal", ours, peer=False), Entry("sb3-contrib", theirs)]
        outcomes.append(contest(env, entries, peers, options.rounds, options.seconds, options.quick, say))
    notes = (
        f"Batches of {BATCH:,} steps, 15 conjugate gradient steps, damping 0.1, KL 0.01, at most 10 line search steps, "
        f"10 passes in minibatches of 128 for the value function, two networks of 64x64 tanh, gamma 0.99, lambda 0.95. "
        f"Median of {options.rounds} interleaved rounds of {options.seconds:g} s (lowest to highest); ratios are taken "
        f"within a round. {machine.facts(peers.versions())}"
    )
    return Report("trpo", contest_table(outcomes), notes)


def _shoal(env: str, lanes: int, width: int) -> TrainingProgram:
    words = [
        "--no-preset", "--workers=2", f"--lanes={lanes}", f"--width={width}", f"--steps={FOREVER}",
        f"--batch-steps={BATCH}", "--cg-iterations=15", "--cg-damping=0.1", "--max-kl=0.01", "--line-search-steps=10",
        "--value-epochs=10", "--value-batch=128", "--value-lr=1e-3", "--gamma=0.99", "--lam=0.95", "--no-normalise",
    ]  # fmt: skip
    return shoal_program("trpo", env, words)


def _contrib(env: str, peers: Peers, layout: EnvLayout) -> TrainingProgram:
    settings = {
        "n_steps": BATCH // layout.envs, "batch_size": 128, "cg_max_steps": 15, "cg_damping": 0.1, "target_kl": 0.01,
        "line_search_max_iter": 10, "n_critic_updates": 10, "learning_rate": 1e-3, "gamma": 0.99, "gae_lambda": 0.95,
        "policy_kwargs": {"net_arch": {"pi": [64, 64], "vf": [64, 64]}},
    }  # fmt: skip
    return peers.stable_baselines("sb3-contrib", "TRPO", env, layout, settings, FOREVER)
