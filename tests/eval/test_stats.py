"""The statistics against values computed by hand."""

import math

import pytest
from scipy import stats

from attnplug.eval.stats import bootstrap_mean, mcnemar, paired_difference, wilson


def test_wilson_of_half_of_ten():
    # (0.5 + z2/20 -+ z sqrt(0.025 + z2/400)) / (1 + z2/10), z2 = 3.841459
    assert wilson([1] * 5 + [0] * 5) == pytest.approx((0.5, 0.236593, 0.763407), abs=1e-6)


@pytest.mark.parametrize(("solved", "n"), [(0, 1), (0, 20), (3, 7), (50, 50)])
def test_wilson_is_scipys(solved, n):
    theirs = stats.binomtest(solved, n).proportion_ci(method="wilson")
    ours = wilson([1.0] * solved + [0.0] * (n - solved))
    assert ours == pytest.approx((solved / n, theirs.low, theirs.high), abs=1e-12)


def test_mcnemar_counts_pairs_and_tests_the_discordant_ones():
    dense = [True] * 8 + [False] * 4
    policy = [True] * 2 + [False] * 6 + [True] + [False] * 3
    # 6 against 1: 2 (C(7,0) + C(7,1)) / 2^7
    assert mcnemar(dense, policy) == (6, 1, pytest.approx(2 * (1 + 7) / 2**7))


def test_mcnemar_without_discordant_pairs_is_1_and_six_of_six_is_1_in_32():
    assert mcnemar([True, False], [True, False]) == (0, 0, 1.0)
    assert mcnemar([True] * 6, [False] * 6) == (6, 0, pytest.approx(1 / 32))


def test_pairs_of_different_number_are_refused():
    with pytest.raises(ValueError):
        mcnemar([True], [True, False])
    with pytest.raises(ValueError):
        paired_difference([1.0], [1.0, 0.0])


def test_the_bootstrap_of_two_values_is_their_range():
    # resampled means are 0, 1/2 and 1 with 1/4, 1/2, 1/4: the 2.5th percentile is the least
    assert bootstrap_mean([0.0, 1.0]) == (0.5, 0.0, 1.0)


def test_the_bootstrap_is_near_the_normal_interval_and_repeatable():
    values = [(i % 10) / 10 for i in range(200)]
    found = bootstrap_mean(values)
    half = 1.96 * math.sqrt(0.0825 / 200)
    assert found == pytest.approx((0.45, 0.45 - half, 0.45 + half), abs=0.003)
    assert found == bootstrap_mean(values)


def test_pairing_removes_what_the_samples_share():
    dense = [float(i) for i in range(20)]
    assert paired_difference(dense, [d - 0.25 for d in dense]) == (-0.25, -0.25, -0.25)
