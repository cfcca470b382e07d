"""PPO at equal settings compared with Stable-Baselines3, SBX and RLlib: environment steps per second of training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from bench import machine
from bench.contest import Entry, contest, contest_table
from bench.options import PeerOptions, Say
from bench.peers import EnvLayout, Peers
from bench.report import Report
from bench.watch import TrainingProgram, shoal_program

BATCH = 2048
FOREVER = 10**9


@dataclass(frozen=True)
class PPOOptions(PeerOptions):
    """PPO at equal settings compared with Stable-Baselines3, SBX and RLlib: steps per second of training."""

    env: tuple[str, ...] = ("CartPole-v1", "LunarLander-v3", "HalfCheetah-v5")
    """Environments to measure."""
    rounds: int = 5
    """Number of rounds; every library takes one turn in each."""
    seconds: float = 5.0
    """Minimum length of a turn in seconds, after the first iterations."""

    QUICK: ClassVar[dict[str, Any]] = {"env": ("LunarLander-v3",), "rounds": 1, "seconds": 2.0}

    def environments(self) -> list[str]:
        return list(self.env)


OPTIONS = PPOOptions


def run(options: PPOOptions, say: Say) -> Report:
    """Measure and report."""
    peers = Peers(options.peers_folder, say)
    outcomes = [
        contest(env, _entries(env, peers), peers, options.rounds, options.seconds, options.quick, say)
        for env in options.env
    ]
    notes = (
        f"Batches of {BATCH:,} steps, minibatches of 64, 10 epochs, two networks of 64x64 tanh, gamma 0.99, lambda "
        f"0.95, learning rate 3e-4, clip range 0.2. Median of {options.rounds} interleaved rounds of "
        f"{options.seconds:g} s (lowest to highest); ratios are taken within a round. "
        f"{machine.facts(peers.versions())}"
    )
    return Report("ppo", contest_table(outcomes), notes)


LANES = ((2, 8), (2, 16), (4, 8))
SB3 = (EnvLayout(8, threads=1), EnvLayout(8), EnvLayout(1, threads=1), EnvLayout(8, subprocesses=True, threads=1))
SBX = (EnvLayout(8), EnvLayout(1), EnvLayout(8, subprocesses=True))
RLLIB = ((0, 8, 1), (2, 4, 1))
"""Env runners, environments per runner, and threads."""


def _entries(env: str, peers: Peers) -> list[Entry]:
    """List the libraries, each with its best known setting first."""
    ours = {f"2 workers, {lanes} lanes of {width}": _shoal(env, lanes, width) for lanes, width in LANES}
    return [
        Entry("Shoal", ours, peer=False),
        Entry("Shoal, lag 1", {"2 workers, 2 lanes of 8": _shoal(env, 2, 8, lag=1)}, peer=False),
        Entry("Stable-Baselines3", {str(layout): _sb3("sb3", env, peers, layout) for layout in SB3}),
        Entry("SBX", {str(layout): _sb3("sbx", env, peers, layout) for layout in SBX}),
        Entry("RLlib", dict(_rllib(env, peers, *layout) for layout in RLLIB)),
    ]


def _shoal(env: str, lanes: int, width: int, lag: int = 0) -> TrainingProgram:
    words = [
        "--no-preset", "--workers=2", f"--lanes={lanes}", f"--width={width}", f"--steps={FOREVER}",
        f"--batch-steps={BATCH}", "--minibatch=64", "--epochs=10", "--gamma=0.99", "--lam=0.95", "--lr=3e-4",
        "--clip=0.2", "--no-normalise", f"--lag={lag}",
    ]  # fmt: skip
    return shoal_program("ppo", env, words)


def _sb3(library: str, env: str, peers: Peers, layout: EnvLayout) -> TrainingProgram:
    settings = {
        "n_steps": BATCH // layout.envs, "batch_size": 64, "n_epochs": 10, "gamma": 0.99, "gae_lambda": 0.95,
        "learning_rate": 3e-4, "clip_range": 0.2, "policy_kwargs": {"net_arch": {"pi": [64, 64], "vf": [64, 64]}},
    }  # fmt: skip
    return peers.stable_baselines(library, "PPO", env, layout, settings, FOREVER)


def _rllib(env: str, peers: Peers, runners: int, envs: int, threads: int | None) -> tuple[str, TrainingProgram]:
    settings = {
        "train_batch_size_per_learner": BATCH, "minibatch_size": 64, "num_epochs": 10, "gamma": 0.99, "lambda_": 0.95,
        "lr": 3e-4, "clip_param": 0.2, "vf_clip_param": 1e9, "vf_loss_coeff": 0.5, "grad_clip": 0.5,
        "use_kl_loss": False, "entropy_coeff": 0.0,
    }  # fmt: skip
    job = {
        "env": env, "runners": runners, "envs": envs, "seed": 0, "steps": FOREVER, "settings": settings,
        "network": {"fcnet_hiddens": [64, 64], "fcnet_activation": "tanh", "vf_share_layers": False},
    }  # fmt: skip
    words = f"{runners} env runners, {envs} environments each{'' if threads is None else f', {threads} thread'}"
    return words, peers.program("rllib", job, threads)
