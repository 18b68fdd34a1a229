"""Paired statistics: Wilson's interval, McNemar's exact test, the paired bootstrap. All 95%."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from attnplug.extras import require

require("eval", "attnplug eval")

from scipy import stats  # noqa: E402

CONFIDENCE = 0.95
RESAMPLES = 10_000


class Interval(NamedTuple):
    """A value and its 95% interval."""

    value: float
    low: float
    high: float


def wilson(scores: Sequence[float]) -> Interval:
    """The mean of scores in [0, 1] with Wilson's interval.

    For scores of 0 and 1 it is scipy's `binomtest(...).proportion_ci(method="wilson")`. Scores
    between vary less than such a coin of the same mean: the interval is then on the wide side."""
    n, mean = len(scores), float(np.mean(scores))
    z2 = float(stats.norm.ppf(0.5 + CONFIDENCE / 2)) ** 2
    centre = (mean + z2 / (2 * n)) / (1 + z2 / n)
    half = (z2 * (mean * (1 - mean) / n + z2 / (4 * n * n))) ** 0.5 / (1 + z2 / n)
    return Interval(mean, max(0.0, centre - half), min(1.0, centre + half))


class Discordant(NamedTuple):
    """Pairs that only the one side solved, and McNemar's exact two-sided p."""

    dense_only: int
    policy_only: int
    p_value: float


def mcnemar(dense: Sequence[bool], policy: Sequence[bool]) -> Discordant:
    """McNemar's exact test: among discordant pairs, both directions are equally likely if the two
    are equally good. Without a discordant pair p is 1."""
    pairs = list(zip(dense, policy, strict=True))
    lost, won = (sum(a and not b for a, b in p) for p in (pairs, [(b, a) for a, b in pairs]))
    p_value = float(stats.binomtest(lost, lost + won, 0.5).pvalue) if lost + won else 1.0
    return Discordant(lost, won, p_value)


def bootstrap_mean(values: Sequence[float]) -> Interval:
    """The mean with the bootstrap's percentile interval over samples. For a paired comparison,
    give the differences: resampling them is resampling pairs. Seeded: same values, same interval.
    Zero width where all values are equal."""
    if len(set(values)) == 1:  # one value too: nothing to resample
        return Interval(*[float(values[0])] * 3)
    seeded: Any = {"random_state": np.random.default_rng(0)}  # `rng` only from scipy 1.15 on
    found = stats.bootstrap(
        (np.asarray(values, dtype=np.float64),),
        np.mean,
        confidence_level=CONFIDENCE,
        n_resamples=RESAMPLES,
        method="percentile",
        **seeded,
    ).confidence_interval
    return Interval(float(np.mean(values)), float(found.low), float(found.high))


def paired_difference(dense: Sequence[float], policy: Sequence[float]) -> Interval:
    """The mean of policy - dense over pairs, with the paired bootstrap's interval."""
    return bootstrap_mean([b - a for a, b in zip(dense, policy, strict=True)])
