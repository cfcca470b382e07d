"""Go on a 9x9 board against an opponent, with OpenSpiel's rules (positional superko, area scoring)."""

from __future__ import annotations

from typing import Any, Literal

import gymnasium
import numpy as np

from shoal.envs.gtp import Program
from shoal.errors import EnvironmentFault

SIZE = 9
PASS = SIZE * SIZE
COLUMNS = "ABCDEFGHJ"  # Go skips the letter I
PROGRAMS = {
    # The same rules as here: area scoring in which stones not captured are alive, and positional superko.
    "gnugo": "gnugo --mode gtp --level 1 --chinese-rules --capture-all-dead --positional-superko",
}
"""Named opponents and their commands."""
_LONGEST = 10_000  # moves after which OpenSpiel ends a game; never reached, because Gymnasium's time limit is shorter


class Go(gymnasium.Env[np.ndarray, Any]):
    """The agent plays one colour; the opponent is part of the environment.

    Observation (6, 9, 9) uint8 of 0 and 255: own stones, the opponent's stones, legal points, the opponent's last move;
    then two constant planes: the opponent has just passed, the agent is black. Row 0 is rank 1 of the board.
    Action: 9 * row + column of a point, or 81 to pass. `info["action_mask"]` (82,) is 1 for each legal action.
    Reward at the end of a game: 1 for a win, -1 for a loss. It is 0 otherwise, also when the game is truncated.

    opponent   "random": uniform over legal moves, from the episode's seed. "gnugo", or the command of any program that
               speaks the Go Text Protocol; `shoal check-env` tests whether it is deterministic
    colour     of the agent: "black" plays first
    komi       points that white gets
    illegal    an illegal move "lose"s the game, or is replaced by a "random" legal one
    timeout    seconds that a program has to answer
    """

    observation_space = gymnasium.spaces.Box(0, 255, (6, SIZE, SIZE), np.uint8)
    action_space = gymnasium.spaces.Discrete(PASS + 1)

    def __init__(
        self,
        opponent: str = "random",
        colour: Literal["black", "white"] = "black",
        komi: float = 7.5,
        illegal: Literal["lose", "random"] = "lose",
        timeout: float = 60.0,
    ) -> None:
        try:
            import pyspiel
        except ImportError:
            raise gymnasium.error.DependencyNotInstalled(
                "OpenSpiel, for the rules of Go. Install it: pip install 'shoal[go]'"
            ) from None
        problems = [
            f"{name} must be {' or '.join(allowed)}, not {value!r}"
            for name, value, allowed in (
                ("colour", colour, ("black", "white")),
                ("illegal", illegal, ("lose", "random")),
            )
            if value not in allowed
        ]
        if timeout <= 0:
            problems.append(f"timeout must be above 0, not {timeout}")
        if problems:
            raise gymnasium.error.Error("; ".join(problems))
        self._game = pyspiel.load_game("go", {"board_size": SIZE, "komi": float(komi), "max_game_length": _LONGEST})
        self._me = 0 if colour == "black" else 1
        self._komi, self._illegal = komi, illegal
        self._program = None if opponent == "random" else Program(PROGRAMS.get(opponent, opponent), timeout)
        self._answer: int | None = None  # the opponent's last move

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """Start a new game. If the agent is white, the opponent plays first."""
        super().reset(seed=seed)
        self._state: Any = self._game.new_initial_state()
        self._answer = None
        if self._program is not None:
            self._program.begin(SIZE, self._komi, int(self.np_random.integers(2**31)))
        if self._me == 1:
            self._reply()
        return self._observe()

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """Play a move and the opponent's reply."""
        move = int(action)
        legal = self._state.legal_actions()
        if move not in legal:
            if self._illegal == "lose":
                observation, info = self._observe()
                return observation, -1.0, True, False, info | {"illegal": True}
            move = int(self.np_random.choice(legal))
        self._state.apply_action(move)
        if self._program is not None:
            self._program.ask(f"play {_COLOURS[self._me]} {_vertex(move)}")
        resigned = not self._state.is_terminal() and self._reply() is None
        over = resigned or self._state.is_terminal()
        reward = 1.0 if resigned else float(self._state.returns()[self._me]) if over else 0.0
        observation, info = self._observe()
        return observation, reward, over, False, info

    def close(self) -> None:
        if self._program is not None:
            self._program.close()

    def _reply(self) -> int | None:
        """Play and return the opponent's move, or return None if it resigns."""
        legal = self._state.legal_actions()
        if self._program is None:
            move = int(self.np_random.choice(legal))
        else:
            answer = self._program.ask(f"genmove {_COLOURS[1 - self._me]}")
            if answer.lower() == "resign":
                return None
            point = _point(answer)
            if point is None or point not in legal:
                raise EnvironmentFault(
                    f"the opponent plays {answer!r}, which is not a legal move in\n{self._state}\nIt may play by other "
                    f"rules: here no position may repeat (positional superko) and suicide is illegal"
                )
            move = point
        self._state.apply_action(move)
        self._answer = move
        return move

    def _observe(self) -> tuple[np.ndarray, dict[str, Any]]:
        stones = np.array(self._state.observation_tensor(0), np.uint8).reshape(-1, SIZE, SIZE)  # black, white, ...
        mask = np.zeros(PASS + 1, np.int8)
        mask[self._state.legal_actions()] = 1
        planes = np.zeros(self.observation_space.shape, np.uint8)
        planes[0], planes[1] = stones[self._me], stones[1 - self._me]
        planes[2] = mask[:PASS].reshape(SIZE, SIZE)
        if self._answer == PASS:
            planes[4] = 1
        elif self._answer is not None:
            planes[3].flat[self._answer] = 1
        planes[5] = 1 - self._me
        return planes * np.uint8(255), {"action_mask": mask}


_COLOURS = ("b", "w")


def _vertex(move: int) -> str:
    return "pass" if move == PASS else f"{COLUMNS[move % SIZE]}{move // SIZE + 1}"


def _point(vertex: str) -> int | None:
    """Action of a vertex such as D4, or None if it is not a vertex."""
    if vertex.lower() == "pass":
        return PASS
    column, rank = COLUMNS.find(vertex[:1].upper()), vertex[1:]
    if column < 0 or not rank.isdigit() or not 1 <= int(rank) <= SIZE:
        return None
    return (int(rank) - 1) * SIZE + column
