"""Runs whose digests must not change by accident, spelled as command lines so that any commit can run them."""

FIXTURES = ("dqn", "es", "nevergrad", "ppo", "trpo")
"""Run folders in `tests/golden/saved`: two iterations each, resumed to four by the case `resume ALGO`."""

_SMALL = "--batch-steps 128 --lanes 2 --width 4"
_POPULATION = "--population 16 --width 4 --max-episode-steps 60"

TRAIN = {
    "trpo fragments": f"trpo CartPole-v1 {_SMALL}",
    "trpo episodes": f"trpo CartPole-v1 {_SMALL} --batch episodes",
    "trpo continuous": f"trpo Pendulum-v1 {_SMALL} --fisher-stride 2",
    "trpo unnormalised": f"trpo CartPole-v1 {_SMALL} --no-normalise --activation relu",
    "ppo lag 0": f"ppo CartPole-v1 {_SMALL} --seed 5",
    "ppo lag 1": f"ppo CartPole-v1 {_SMALL} --lag 1",
    "ppo episodes": f"ppo CartPole-v1 {_SMALL} --batch episodes",
    "ppo continuous": (
        f"ppo Pendulum-v1 {_SMALL} --lr-schedule linear --clip-schedule linear --value-clip 0.2 --max-kl 0.02 "
        "--entropy 0.01"
    ),
    "ppo unnormalised": f"ppo CartPole-v1 {_SMALL} --no-normalise",
    "ppo actions of several choices": f'ppo tests.support.toys:Walk-v0 {_SMALL} --env-kwargs {{"action":"multi"}}',
    "ppo pixels": f'ppo tests.support.toys:Walk-v0 {_SMALL} --env-kwargs {{"observation":"uint8"}}',
    "ppo dict observations": f'ppo tests.support.toys:Walk-v0 {_SMALL} --env-kwargs {{"observation":"dict"}}',
    "ppo gymnasium vector": f"ppo CartPole-v1 {_SMALL} --vector gymnasium",
    "ppo envpool vector": f"ppo CartPole-v1 {_SMALL} --vector envpool",
    "dqn lag 1": f"dqn CartPole-v1 {_SMALL} --learning-starts 128 --hidden 32",
    "dqn lag 0": f"dqn CartPole-v1 {_SMALL} --learning-starts 128 --hidden 32 --lag 0 --no-double --loss squared",
    "dqn prioritised": (
        f"dqn CartPole-v1 {_SMALL} --learning-starts 128 --hidden 32 --priority 0.6 --n-step 3 --dueling --ladder 7 "
        "--tau 0.01 --target-every 1"
    ),
    "es linear": f"es CartPole-v1 {_POPULATION}",
    "es hidden": f"es Pendulum-v1 {_POPULATION} --hidden 16 --normalise --optimizer sgd --shaping utilities",
    "es lstm": f"es shoal/CartPolePartial-v1 {_POPULATION} --hidden 4 --memory lstm --environments all",
    "es elman": f"es shoal/PendulumPartial-v1 {_POPULATION} --hidden 4 --memory elman --bins 5 --length-factor 2",
    "es budgets": f"es CartPole-v1 {_POPULATION} --min-steps 40 --fixed-seeds --weight-decay 0.01 --shaping standard",
    "nevergrad cma": f"nevergrad CartPole-v1 {_POPULATION} --optimizer CMA",
    "nevergrad de": f"nevergrad CartPole-v1 {_POPULATION} --optimizer DE --environments independent",
    "nevergrad elman": f"nevergrad shoal/CartPolePartial-v1 {_POPULATION} --optimizer PSO --hidden 3 --memory elman",
    "nevergrad one plus one": f"nevergrad Pendulum-v1 {_POPULATION} --optimizer OnePlusOne --episodes 2",
}
"""Name of a case -> what follows `shoal train`."""

COMMON = "--no-preset --engine serial --iterations 3 --no-tensorboard --learner-threads 1"
