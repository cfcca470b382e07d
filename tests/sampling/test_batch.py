import numpy as np

from shoal.base.moments import Moments
from shoal.base.trees import Tree
from shoal.sampling.batch import _rounded, make_batch, minibatch_orders
from shoal.sampling.scores import Scores


def record(steps: list[int], ends: list[tuple[int, int, bool]], start: float = 0.0) -> Tree:
    """A record of two slots whose observations count up."""
    time = max(steps)
    observations = start + np.arange((time + 1) * 2, dtype=np.float32).reshape(time + 1, 2, 1)
    return {
        "observations": observations,
        "actions": np.arange(time * 2, dtype=np.int32).reshape(time, 2, 1),
        "rewards": np.ones((time, 2), np.float32),
        "steps": np.array(steps, np.int32),
        "ends": np.array([end[:2] for end in ends], np.int32).reshape(-1, 2),
        "terminated": np.array([end[2] for end in ends], bool),
        "finals": np.array([[1000.0 + end[0]] for end in ends], np.float32).reshape(-1, 1),
        "returns": np.array([float(end[0] + 1) for end in ends]),
        "lengths": np.array([end[0] + 1 for end in ends]),
        "skipped": np.zeros((0, 2), np.int32),
    }


def test_fragments_make_a_batch_without_padding() -> None:
    batch = make_batch([record([5, 5], [(2, 1, True), (3, 0, False)]), record([5, 5], [], start=100)])
    assert batch["observations"].shape == (6, 4, 1)
    assert batch["weights"].min() == 1
    assert batch["observations"][0, :, 0].tolist() == [0, 1, 100, 101]
    assert np.argwhere(batch["ended"]).tolist() == [[2, 1], [3, 0]]
    assert np.argwhere(batch["terminated"]).tolist() == [[2, 1]]
    assert batch["finals_at"].tolist() == [3 * 4 + 0, 20, 20, 20], "only the truncated one, then padding"
    assert batch["finals"][0, 0] == 1003.0


def test_episodes_of_different_length_are_padded() -> None:
    batch = make_batch(
        [record([3, 20], [(2, 0, True), (19, 1, False)]), record([7, 2], [(6, 0, False), (1, 1, False)])]
    )
    assert batch["rewards"].shape == (24, 4)
    assert batch["weights"].sum(axis=0).tolist() == [3, 20, 7, 2]
    assert batch["finals_at"][:3].tolist() == [19 * 4 + 1, 6 * 4 + 2, 1 * 4 + 3]


def test_room_for_finals_grows() -> None:
    many = record([12, 12], [(t, s, False) for t in range(12) for s in range(2)])
    assert len(make_batch([many])["finals"]) == 32


def test_lengths_are_rounded_to_few_shapes() -> None:
    sizes = {_rounded(n) for n in range(1, 1000)}
    assert sorted(sizes) == [16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024]
    assert all(_rounded(n) >= n for n in range(1, 1000))


def test_scores_keep_a_window_and_survive_a_resume() -> None:
    scores = Scores()
    for _ in range(80):
        scores.add([record([5, 5], [(2, 1, True), (3, 0, False)])])
    assert scores.metrics() == {
        "time/total_timesteps": 800,
        "rollout/episodes": 160,
        "rollout/ep_rew_mean": 3.5,
        "rollout/ep_len_mean": 3.5,
    }
    again = Scores(scores.state())
    assert again.metrics() == scores.metrics()
    assert len(again.state()["returns"]) == 100


def test_moments_merge_like_one_batch() -> None:
    rng = np.random.default_rng(0)
    parts = [rng.normal(3, 2, (n, 4)).astype(np.float32) for n in (1, 50, 7)]
    merged = Moments.empty(4)
    for part in parts:
        merged = merged.merge(Moments.of(part))
    whole = np.concatenate(parts).astype(np.float64)
    np.testing.assert_allclose(merged.mean, whole.mean(axis=0), rtol=1e-12)
    np.testing.assert_allclose(merged.m2 / merged.count, whole.var(axis=0), rtol=1e-12)
    mean, scale = merged.normaliser()
    np.testing.assert_allclose((whole - mean) * scale, (whole - whole.mean(0)) / whole.std(0), rtol=1e-4, atol=1e-4)


def test_no_data_normalises_to_nothing() -> None:
    mean, scale = Moments.empty(3).normaliser()
    assert mean.tolist() == [0, 0, 0]
    assert scale.tolist() == [1, 1, 1]


def test_every_sample_is_in_one_minibatch_of_each_epoch() -> None:
    batch = make_batch([record([5, 5], []), record([5, 5], [])])
    found = minibatch_orders(np.random.default_rng(0), batch, epochs=3, minibatch=5)
    assert found.shape == (3, 4, 5)
    assert [sorted(epoch.ravel().tolist()) for epoch in found] == [list(range(20))] * 3
    assert found[0].tolist() != found[1].tolist()
    assert minibatch_orders(np.random.default_rng(0), batch, epochs=2, minibatch=6).shape == (2, 3, 6), "2 are left out"
    assert minibatch_orders(np.random.default_rng(0), batch, epochs=1, minibatch=100).shape == (1, 1, 20)
    assert minibatch_orders(np.random.default_rng(0), batch, epochs=0, minibatch=5).shape == (0, 4, 5)
