"""The constants of the proof in docs/methods/certified-bounds.md, as plain numbers. The numba
reference uses them as they are, kernels by the same names in `records.py`.

u = 2^-24 is the unit roundoff of float32. Where kernels and reference compute differently they have
constants of their own, and the reason stands beside the pair. None of these is a tolerance that
could be tuned: a smaller one may leave a bound that does not hold.
"""

import hashlib

# --- what arithmetic can make of a score ("noise"), and what a score can be off by ("delta") ------

# A float32 sum of D products is off by at most (D + DOT_EXTRA) * DOT_SLACK * sum |products|. A
# chain of fused multiply-adds that truncate loses 2^-23 of the sum in each: D * 2^-23, or
# D * 2^-22 where the query is split into two 16-bit parts. That is half of it at most. The other
# half, at least 2^-15.7, has room for what the split drops (2^-16) and for a |q| short by 2^-8.
DOT_SLACK = 2.0**-21
DOT_EXTRA = 16
# Codes are -127..127, so that sum |q| scale |code| <= CODE_REACH * sum |q| scale / 2.
CODE_REACH = 254
NOISE_FLOOR = 1e-18  # products may underflow
# softcap * tanh(s / softcap) is off by at most this share of the softcap, also for small scores:
# the kernels compute tanh as 1 - 2 / (exp(2 y) + 1), which has an absolute error of 2^-21.2. For
# exactly read tokens the reference does without: numpy's tanh has a relative error only, which the
# noise of a dot product has room for.
CAP_SLACK = 2.0**-20
# delta = half * DELTA_CARE + noise, half = sum |q| scale / 2. Codes are rounded in float32, so that
# a key may be off by (1 + 2^-14) scale / 2; the rest of 2^-6 is room.
DELTA_CARE = 1 + 2.0**-6
# The kernels' `half` is a product of the tensor cores: |q| is rounded to bf16, raised by QUERY_CARE
# to be no less than |q|, and rounded again. That second rounding raises it to the next bf16, except
# where |q| was rounded to a power of two: there it ties to even, back down, and |q| is short by up
# to 2^-8. The sum of D <= 256 products is short by another 2^-12.9. In all that is
# (1 + 2^-6) (1 + 2^-12) / (1 - 2^-8) = 1.0198; the kernels have 1 + 2^-6 + 2^-7 = 1.0234. The
# reference sums in float64 and has no such loss.
QUERY_CARE = 1 + 2.0**-8
DELTA_CARE_16_BIT = 1 + 2.0**-6 + 2.0**-7

# --- the sums over the blocks that are left quantized ---------------------------------------------

# Added to e^D - 1 and to 1 - e^-D. The reference has both from `expm1` in float64: this is room for
# masses that are float32. The kernels subtract 1 from a float32 `exp2`, which cancels: its relative
# error of 2^-22 becomes an absolute one, 2^-22 e^D. Above e^D = 8 CARE has room for it.
EXPM1_SLACK = 2.0**-20
EXP2_SLACK = 2.0**-19
# Squares of weights below 2^-63 vanish in float32: this share of all mass is added to every
# block's root of their sum. 128 tokens and the sums so far, whose squares are below 2^-126 each,
# make 2^-59.4.
SQUARE_FLOOR = 2.0**-59
# And a block's mass below 2^-126 vanishes, while e^D may be 2^127: this is added to the mass.
MASS_FLOOR = 2.0**-120
CARE = 1 + 2.0**-10  # on every bound: masses, their sums and products are float32

# --- rounding of the output (E_round) -------------------------------------------------------------

# Scores off by x move weights by 2 tanh(x / 2) <= x in all. Twice that in a recomputation.
SCORE_CARE = 2.02
# Scores of originals are off by this share of what those of quantized blocks can lose by arithmetic
# (DOT_SLACK), beside what a softcap loses: one chain, 2^-23 each, and nothing is split.
READ_SHARE = 0.25
ROUND_FLOOR = 2.0**-20  # values may vanish in 16 bits
# A promoted block's quantized score is computed twice: by the pass, which adds its weights to the
# sum, and by the program that reads the block, which takes them out again. Each is off by D * 2^-22
# and the 2^-16 that the split drops (DOT_SLACK): the two differ by (D + PAIR_EXTRA) * DOT_SLACK of
# the sum of products. What is left behind is that share of the block's former part of the sum.
PAIR_EXTRA = 64
# Probabilities are 16-bit floats relative to the largest of a program: one of them is off by 2^-25
# where its relative error is more, and that is this share of `unit_p`. (Float32 has no such bottom,
# and is given 2^-38.) Unlike a relative error it does not shrink with the probability.
VANISHING_SHARE = 2.0**-14
# Values of blocks whose nu + eta is at most this are zero, or below 2^-49. Their mean has no norm
# that an error could be a share of.
VANISHED = 2.0**-48
# Share of the largest ||v|| that sums can lose. The reference sums in float64 and stores float32;
# where it recomputes a head it sums float32 tiles, as many terms as tokens.
REFERENCE_SUMS = 2.0**-16
REFERENCE_TOKEN = 2.0**-26
# The kernels round probabilities and values to 16 bits, or to float32: unit roundoff `unit_p`, four
# times where blocks are promoted (old and new weights), twice in a recomputation. Every addition of
# a program's share of the tokens, 16 tokens at a time, may truncate: 2^-23, of which this is 4.
CHAIN_SLACK = 2.0**-21
CHAIN_TOKENS = 16
CHAIN_EXTRA = 64  # additions beside those of the tokens: within a tile, and across programs

# --- what is chosen -------------------------------------------------------------------------------

LOG_FLOOR = 1e-37  # added before a logarithm: blocks of no mass rank last and are no NaN
# Of what a head may add to the layer's bound, what promotion by need fills with the bound as it
# foresees it, E_round included. The rest is what weighing does not know: exact scores move all
# weights and the output's norm (it falls by 2% at most). A head too many costs more than all that
# is promoted (docs/log/certified.md).
NEED_SHARE = 0.96
# The same where a KV head has SHARING query heads or more. What one of them reads, the others have
# too, so that bounds end below what each foresees for itself. In a model of the kernels on a CPU no
# layer of a text comes to more than 0.985 of what it may have with 1.15, and one does with 1.2.
SHARED_NEED, SHARING = 1.1, 3
# Of the squared error that a layer may have, the part that is shared out by the heads' squared
# norms; the rest is shared out evenly. With none, a head that has most of the layer's norm may not
# even have what its own rounding takes, and is recomputed; with all, each head would be held to the
# tolerance by itself, and those with small outputs would read the most.
OWN_PART = 0.5
# E_round grows with the weighted norms of values, which the pass does not sum up. The norms of its
# outputs show a part of them. A block's heaviest token holds at least a = r^2 / m^2 of its mass, so
# that at most 2 (1 - a) m (nu + eta) does not show; and with what shows it is at most m (nu + eta).
# This share of it is what promotion takes for true. With more, heads of a text are given up that
# can be met: 3 of 720 at 0.7, none at 0.6. With 0.5 a head came to the tolerance itself.
NORM_SHARE = 0.6
# A block that adds more than what all may add has to be read in any case, by how much it does:
# counted as this, it leaves the sum of the others its bits. Below 2, where the search begins.
MOST_NEEDED = 1.9
# The search for a threshold, in powers of two.
DEEPEST, WAYS, ROUNDS = -40.0, 8, 4

# --- the tier -------------------------------------------------------------------------------------

HALF_CARE = 1.00001  # on max |k - zero|, before it is divided in float32
LEAST_SCALE = 2.0**-100  # of keys that are not constant: codes are quotients by it
MEASURED_FLOOR = 2.0**-50  # on what is measured, whose squares may underflow
# A spectral norm is measured by G = E E^T and F = G G, of errors E whose longest row is 1. Their
# factors are rounded to fp16, so that an entry of G is off by 2^-10 |e_i| |e_j| at most, hence G by
# 2^-10 of its trace, and F by 2^-10 ||G||_F^2, in the Frobenius norm. This is four times that, for
# float32 sums and what vanishes. ||E||^2 <= ||G|| <= sqrt(||F||_F) with both added. Kernels measure
# E in float32, which loses 2^-24 of the original. NOISE has room for that of keys: 2^-24 of
# |q| |k^|. E_round has room for that of values, as its sums lose more of them.
SPECTRAL_SLACK = 2.0**-8
# Check words begin at CHECK_SEED + CHECK_STEP j: an empty block must not look like a written one,
# nor one block like another. So do the seals of the scratch cache.
CHECK_SEED, CHECK_STEP = 100_000_007, 7919

# --- rungs: what was done for a head, and why it was recomputed -----------------------------------

NEEDED, VALUES, HEAD, ROW = 1, 2, 4, 8
RANKING, BOUNDARY, BOUND, CAPACITY, SCORE, CHECK = 16, 32, 64, 128, 256, 512


def digest() -> str:
    """A digest of these constants. numba's cache looks at the file of a compiled function, and not
    at the files that it imports: whoever compiles these in writes the digest down
    (`reference.PROOF`, `quantize_kv.PROOF`), so that a changed constant changes that file too."""
    constants = sorted((name, x) for name, x in globals().items() if name.isupper())
    return hashlib.sha256(repr(constants).encode()).hexdigest()[:16]
