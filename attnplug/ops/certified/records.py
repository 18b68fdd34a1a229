"""What the kernels of `certified_attention` hand one another, field by field, and the constants of
`proof.py` for kernels, which are `tl.constexpr` there. To the base 2, like all logarithms there.

A record of a head, F fields of P programs each, lies at [head, F, P]: field f of program p is at
(head * F + f) * P + p. Its writer and its reader are named beside its fields.
"""

from attnplug.ops.certified import proof
from attnplug.ops.common.constants import Constant, table_of

# --- the proof ------------------------------------------------------------------------------------

DOT_SLACK = Constant(proof.DOT_SLACK)
DOT_EXTRA = Constant(proof.DOT_EXTRA)
CODE_REACH = Constant(proof.CODE_REACH)
NOISE_FLOOR = Constant(proof.NOISE_FLOOR)
CAP_SLACK = Constant(proof.CAP_SLACK)
QUERY_CARE = Constant(proof.QUERY_CARE)
DELTA_CARE_16_BIT = Constant(proof.DELTA_CARE_16_BIT)
EXP2_SLACK = Constant(proof.EXP2_SLACK)
SQUARE_FLOOR = Constant(proof.SQUARE_FLOOR)
MASS_FLOOR = Constant(proof.MASS_FLOOR)
CARE = Constant(proof.CARE)
SCORE_CARE = Constant(proof.SCORE_CARE)
READ_SHARE = Constant(proof.READ_SHARE)
NEED_SHARE = Constant(proof.NEED_SHARE)
SHARED_NEED = Constant(proof.SHARED_NEED)
SHARING = Constant(proof.SHARING)
OWN_PART = Constant(proof.OWN_PART)
NORM_SHARE = Constant(proof.NORM_SHARE)
MOST_NEEDED = Constant(proof.MOST_NEEDED)
ROUND_FLOOR = Constant(proof.ROUND_FLOOR)
PAIR_EXTRA = Constant(proof.PAIR_EXTRA)
VANISHING_SHARE = Constant(proof.VANISHING_SHARE)
VANISHED = Constant(proof.VANISHED)
CHAIN_SLACK = Constant(proof.CHAIN_SLACK)
CHAIN_TOKENS = Constant(proof.CHAIN_TOKENS)
CHAIN_EXTRA = Constant(proof.CHAIN_EXTRA)
LOG_FLOOR = Constant(proof.LOG_FLOOR)
DEEPEST = Constant(proof.DEEPEST)
WAYS = Constant(proof.WAYS)  # thresholds that a round of the search tries
ROUNDS = Constant(proof.ROUNDS)
HALF_CARE = Constant(proof.HALF_CARE)
LEAST_SCALE = Constant(proof.LEAST_SCALE)
MEASURED_FLOOR = Constant(proof.MEASURED_FLOOR)
SPECTRAL_SLACK = Constant(proof.SPECTRAL_SLACK)
CHECK_SEED = Constant(proof.CHECK_SEED)
CHECK_STEP = Constant(proof.CHECK_STEP)

NEEDED = Constant(proof.NEEDED)
VALUES = Constant(proof.VALUES)
HEAD = Constant(proof.HEAD)
ROW = Constant(proof.ROW)
RANKING = Constant(proof.RANKING)
BOUNDARY = Constant(proof.BOUNDARY)
BOUND = Constant(proof.BOUND)
CAPACITY = Constant(proof.CAPACITY)
SCORE = Constant(proof.SCORE)
CHECK = Constant(proof.CHECK)

LOG2E = Constant(1.4426950408889634)
LN2 = Constant(0.6931471805599453)

# --- left_sums, float32 [head, LEFT_FIELDS, chunk]: choose_blocks to finish -----------------------
# Sums over the blocks that a chunk leaves quantized, with masses m relative to all that the first
# pass has seen (docs/methods/certified-bounds.md, "Weights").

LEFT_CHANGE = Constant(0)  # A, what the weights can change by
LEFT_UNDER = Constant(1)  # and can shrink by
LEFT_MOVED = Constant(2)  # A nu
LEFT_NORM = Constant(3)  # m (nu + eta)
LEFT_MASS = Constant(4)  # m
LEFT_ERROR = Constant(5)  # what the values can be off by
LEFT_REACH = Constant(6)  # the largest log-mass + D, NaN if one is
ALL_DELTA = Constant(7)  # and of all its blocks the largest D,
ALL_NOISE = Constant(8)  # the largest part of it that arithmetic can make,
ALL_NORM = Constant(9)  # and the largest nu + eta
LEFT_FIELDS = Constant(10)

# --- counts, int32 [KV head, COUNT_FIELDS, chunk]: choose_blocks to promote and finish ------------

COUNT_KEYS = Constant(0)  # promoted blocks
COUNT_VALUES = Constant(1)  # those of them that are read with their values
COUNT_WORTHY = Constant(2)  # those whose values would err too much
COUNT_NEEDED = Constant(3)  # whether a head needed some of them
COUNT_DIGEST = Constant(4)  # `set_digest` of the promoted blocks; only without a list
COUNT_FIELDS = Constant(5)

# --- block_list, int32 [KV head, chunk, rank, LIST_FIELDS]: choose_blocks to promote --------------
# A block's name is NAME_STEP times its number, plus NAME_SPOT where it is read for a spot check
# only, plus NAME_VALUES where its values are read too. Places are those of `place_item`.

LIST_NAME = Constant(0)
LIST_KEYS = Constant(1)  # place of its keys in the scratch cache
LIST_VALUES = Constant(2)  # and of its values
LIST_FIELDS = Constant(3)
NAME_VALUES = Constant(1)
NAME_SPOT = Constant(2)
NAME_STEP = Constant(4)

# --- promoted_sums, float32 [head, PROMOTED_FIELDS, piece]: read_blocks to finish -----------------
# Of the promoted blocks that one program reads, with their exact scores s.

PROMOTED_LSE = Constant(0)  # log-sum-exp of s
PROMOTED_NORM = Constant(1)  # mean of ||v'|| + eta
PROMOTED_ERROR = Constant(2)  # mean of eta where values are left quantized, else 0
PROMOTED_TOP = Constant(3)  # the score that the changes of the output are relative to
PROMOTED_BEFORE = Constant(4)  # sum of ||v'|| by quantized scores, relative to that score
# Then the first RANKS of its blocks by quantized and by exact log-mass, RANK_FIELDS each.
PROMOTED_RANKS = Constant(5)
RANKS = Constant(4)
RANK_ROUGH = Constant(0)  # log-mass by quantized keys
RANK_ROUGH_BLOCK = Constant(1)  # its block
RANK_EXACT = Constant(2)  # log-mass by exact keys
RANK_EXACT_BLOCK = Constant(3)  # its block
RANK_FIELDS = Constant(4)
PROMOTED_FIELDS = Constant(5 + 4 * 4)

# --- head_sums, float32 [head, HEAD_FIELDS]: choose_blocks or merge_heads to all behind -----------

HEAD_LSE = Constant(0)  # log-sum-exp of all that the first pass has seen
HEAD_REST_LSE = Constant(1)  # and of what is not quantized
HEAD_SIZE = Constant(2)  # norm of the output of the pass: merge_heads to weigh_heads
HEAD_SHOWN = Constant(3)  # and what the norms of its pieces that are quantized come to
HEAD_NEED = Constant(4)  # from which need on blocks are promoted: weigh_heads to choose_blocks
HEAD_FIELDS = Constant(5)

# --- rest_norms, float32 [head, REST_FIELDS]: attend_rest to finish; of what is not quantized -----

REST_NORM = Constant(0)  # mean ||v||
REST_WIDEST = Constant(1)  # largest ||v||
REST_REACH = Constant(2)  # largest sum |q| |k|, what the softcap can lose included
REST_FIELDS = Constant(3)

# --- head_ends, float32 [head, END_FIELDS]: finish to recompute and replace; 0 of a head that no
# error counts of ------------------------------------------------------------------------------

END_BOUND = Constant(0)  # the whole bound
END_NORM = Constant(1)  # and what the norm of the exact output is at least
END_FIELDS = Constant(2)

# --- exact_norms, float32 [head, piece, EXACT_FIELDS]: recompute to replace; of all tokens --------

EXACT_WIDEST = Constant(0)
EXACT_REACH = Constant(1)
EXACT_FIELDS = Constant(2)

# --- flags, int32 [KV head, FLAG_FIELDS]: attend_rest begins, the pass and promote add; to finish -

FLAG_SCORE = Constant(0)  # a score, a value or a slot was not what it must be
FLAG_CHECK = Constant(1)  # a check word did not fit
FLAG_FIELDS = Constant(2)

# --- of the tier and of the outputs ---------------------------------------------------------------

ETA = Constant(0)  # of `summary`: the largest ||v - v^||
NU = Constant(1)  # the largest ||v||
KEY_SPECTRUM = Constant(2)  # the spectral norm of the block's key errors [tokens, channels],
VALUE_SPECTRUM = Constant(3)  # and of its value errors
SUMMARY_FIELDS = Constant(4)
CHECK_PASS = Constant(0)  # of `check`: the word that the pass over the blocks compares
CHECK_PREPARE = Constant(1)  # and the one that goes with deviations: metadata and summaries
CHECK_FIELDS = Constant(2)

BOUND_KEY = Constant(0)  # of what is returned
BOUND_VALUE = Constant(1)
BOUND_ROUND = Constant(2)
BOUND_KEY_BEFORE = Constant(3)  # before a recomputation
BOUND_VALUE_BEFORE = Constant(4)
BOUND_PAPER = Constant(5)
BOUND_FIELDS = Constant(6)

TELEMETRY = (
    "steps", "needed", "values", "head", "row", "ranking", "boundary", "bound", "key_sum",
    "key_max", "value_sum", "value_max", "round_max", "saved", "key_tokens", "value_tokens",
    "layer_sum", "layer_max",
)  # fmt: skip  # a table
T_STEPS = Constant(TELEMETRY.index("steps"))
T_NEEDED = Constant(TELEMETRY.index("needed"))
T_VALUES = Constant(TELEMETRY.index("values"))
T_HEAD = Constant(TELEMETRY.index("head"))
T_ROW = Constant(TELEMETRY.index("row"))
T_RANKING = Constant(TELEMETRY.index("ranking"))
T_BOUNDARY = Constant(TELEMETRY.index("boundary"))
T_BOUND = Constant(TELEMETRY.index("bound"))
T_KEY_SUM = Constant(TELEMETRY.index("key_sum"))
T_KEY_MAX = Constant(TELEMETRY.index("key_max"))
T_VALUE_SUM = Constant(TELEMETRY.index("value_sum"))
T_VALUE_MAX = Constant(TELEMETRY.index("value_max"))
T_ROUND_MAX = Constant(TELEMETRY.index("round_max"))
T_SAVED = Constant(TELEMETRY.index("saved"))
T_KEY_TOKENS = Constant(TELEMETRY.index("key_tokens"))
T_VALUE_TOKENS = Constant(TELEMETRY.index("value_tokens"))
T_LAYER_SUM = Constant(TELEMETRY.index("layer_sum"))
T_LAYER_MAX = Constant(TELEMETRY.index("layer_max"))
TELEMETRY_FIELDS = Constant(len(TELEMETRY))
TELEMETRY_PADDED = Constant(32)

# What kernels import: a launch compares one table and not each of these.
R = table_of(globals())
