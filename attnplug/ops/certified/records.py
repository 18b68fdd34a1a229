"""What the kernels of `certified_attention` hand one another, field by field, and the constants of
`proof.py` for kernels, which must be `tl.constexpr`. To the base 2, like all logarithms there.

A record of a head, F fields of P programs each, lies at [head, F, P]: field f of program p is at
(head * F + f) * P + p. Its writer and its reader are named beside its fields.
"""

import triton.language as tl

from attnplug.ops.certified import proof

# --- the proof ------------------------------------------------------------------------------------

DOT_SLACK = tl.constexpr(proof.DOT_SLACK)
DOT_EXTRA = tl.constexpr(proof.DOT_EXTRA)
CODE_REACH = tl.constexpr(proof.CODE_REACH)
NOISE_FLOOR = tl.constexpr(proof.NOISE_FLOOR)
CAP_SLACK = tl.constexpr(proof.CAP_SLACK)
QUERY_CARE = tl.constexpr(proof.QUERY_CARE)
DELTA_CARE_16_BIT = tl.constexpr(proof.DELTA_CARE_16_BIT)
EXP2_SLACK = tl.constexpr(proof.EXP2_SLACK)
SUM_SLACK = tl.constexpr(proof.SUM_SLACK)
CARE = tl.constexpr(proof.CARE)
SCORE_CARE = tl.constexpr(proof.SCORE_CARE)
ROUND_FLOOR = tl.constexpr(proof.ROUND_FLOOR)
CHAIN_SLACK = tl.constexpr(proof.CHAIN_SLACK)
CHAIN_TOKENS = tl.constexpr(proof.CHAIN_TOKENS)
CHAIN_EXTRA = tl.constexpr(proof.CHAIN_EXTRA)
LOG_FLOOR = tl.constexpr(proof.LOG_FLOOR)
BUDGET_SHARE = tl.constexpr(proof.BUDGET_SHARE)
DEEPEST = tl.constexpr(proof.DEEPEST)
WAYS = tl.constexpr(proof.WAYS)  # thresholds that a round of the search tries
ROUNDS = tl.constexpr(proof.ROUNDS)
HALF_CARE = tl.constexpr(proof.HALF_CARE)
LEAST_SCALE = tl.constexpr(proof.LEAST_SCALE)
MEASURED_FLOOR = tl.constexpr(proof.MEASURED_FLOOR)
CHECK_SEED = tl.constexpr(proof.CHECK_SEED)
CHECK_STEP = tl.constexpr(proof.CHECK_STEP)

EXPANDED = tl.constexpr(proof.EXPANDED)
VALUES = tl.constexpr(proof.VALUES)
HEAD = tl.constexpr(proof.HEAD)
ROW = tl.constexpr(proof.ROW)
RANKING = tl.constexpr(proof.RANKING)
BOUNDARY = tl.constexpr(proof.BOUNDARY)
BOUND = tl.constexpr(proof.BOUND)
CAPACITY = tl.constexpr(proof.CAPACITY)
SCORE = tl.constexpr(proof.SCORE)
CHECK = tl.constexpr(proof.CHECK)

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)

# --- left_sums, float32 [head, LEFT_FIELDS, chunk]: choose_blocks to finish -----------------------
# Sums over the blocks that a chunk leaves quantized, with masses m relative to all that the first
# pass has seen (docs/methods/certified-bounds.md, "Scores").

LEFT_OVER = tl.constexpr(0)  # m (e^D - 1)
LEFT_UNDER = tl.constexpr(1)  # m (1 - e^-D)
LEFT_NORM = tl.constexpr(2)  # m nu
LEFT_GROWN = tl.constexpr(3)  # m nu e^D
LEFT_MASS = tl.constexpr(4)  # m
LEFT_ERROR = tl.constexpr(5)  # m eta
LEFT_REACH = tl.constexpr(6)  # the largest log-mass + D, NaN if one is
ALL_DELTA = tl.constexpr(7)  # and of all its blocks the largest D,
ALL_NOISE = tl.constexpr(8)  # the largest part of it that arithmetic can make,
ALL_NORM = tl.constexpr(9)  # and the largest nu + eta
LEFT_FIELDS = tl.constexpr(10)

# --- counts, int32 [KV head, COUNT_FIELDS, chunk]: choose_blocks to promote and finish ------------

COUNT_KEYS = tl.constexpr(0)  # promoted blocks
COUNT_VALUES = tl.constexpr(1)  # those of them that are read with their values
COUNT_WORTHY = tl.constexpr(2)  # those whose values would err too much
COUNT_EXPANDED = tl.constexpr(3)  # whether rung 1 was climbed
COUNT_DIGEST = tl.constexpr(4)  # `set_digest` of the promoted blocks; only without a list
COUNT_FIELDS = tl.constexpr(5)

# --- block_list, int32 [KV head, chunk, rank, LIST_FIELDS]: choose_blocks to promote --------------
# A block's name is NAME_STEP times its number, plus NAME_SPOT where it is read for a spot check
# only, plus NAME_VALUES where its values are read too. Places are those of `place_item`.

LIST_NAME = tl.constexpr(0)
LIST_KEYS = tl.constexpr(1)  # place of its keys in the scratch cache
LIST_VALUES = tl.constexpr(2)  # and of its values
LIST_FIELDS = tl.constexpr(3)
NAME_VALUES = tl.constexpr(1)
NAME_SPOT = tl.constexpr(2)
NAME_STEP = tl.constexpr(4)

# --- promoted_sums, float32 [head, PROMOTED_FIELDS, piece]: read_blocks to finish -----------------
# Of the promoted blocks that one program reads, with their exact scores s.

PROMOTED_LSE = tl.constexpr(0)  # log-sum-exp of s
PROMOTED_NORM = tl.constexpr(1)  # mean of nu, plus eta where values are left quantized
PROMOTED_ERROR = tl.constexpr(2)  # mean of eta where values are left quantized, else 0
PROMOTED_TOP = tl.constexpr(3)  # the score that the changes of the output are relative to
# Then the first RANKS of its blocks by quantized and by exact log-mass, RANK_FIELDS each.
PROMOTED_RANKS = tl.constexpr(4)
RANKS = tl.constexpr(4)
RANK_ROUGH = tl.constexpr(0)  # log-mass by quantized keys
RANK_ROUGH_BLOCK = tl.constexpr(1)  # its block
RANK_EXACT = tl.constexpr(2)  # log-mass by exact keys
RANK_EXACT_BLOCK = tl.constexpr(3)  # its block
RANK_FIELDS = tl.constexpr(4)
PROMOTED_FIELDS = tl.constexpr(4 + 4 * 4)

# --- head_lse, float32 [head, HEAD_FIELDS]: choose_blocks to finish -------------------------------

HEAD_LSE = tl.constexpr(0)  # log-sum-exp of all that the first pass has seen
HEAD_REST_LSE = tl.constexpr(1)  # and of what is not quantized
HEAD_FIELDS = tl.constexpr(2)

# --- rest_norms, float32 [head, REST_FIELDS]: attend_rest to finish; of what is not quantized -----

REST_NORM = tl.constexpr(0)  # mean ||v||
REST_WIDEST = tl.constexpr(1)  # largest ||v||
REST_REACH = tl.constexpr(2)  # largest sum |q| |k|, what the softcap can lose included
REST_FIELDS = tl.constexpr(3)

# --- exact_norms, float32 [head, piece, EXACT_FIELDS]: recompute to replace; of all tokens --------

EXACT_WIDEST = tl.constexpr(0)
EXACT_REACH = tl.constexpr(1)
EXACT_FIELDS = tl.constexpr(2)

# --- flags, int32 [KV head, FLAG_FIELDS]: attend_rest begins, the pass and promote add; to finish -

FLAG_SCORE = tl.constexpr(0)  # a score, a value or a slot was not what it must be
FLAG_CHECK = tl.constexpr(1)  # a check word did not fit
FLAG_FIELDS = tl.constexpr(2)

# --- of the tier and of the outputs ---------------------------------------------------------------

ETA = tl.constexpr(0)  # of `summary`: the largest ||v - v^||
NU = tl.constexpr(1)  # the largest ||v||
SUMMARY_FIELDS = tl.constexpr(2)
CHECK_PASS = tl.constexpr(0)  # of `check`: the word that the pass over the blocks compares
CHECK_PREPARE = tl.constexpr(1)  # and the one that goes with deviations: metadata and summaries
CHECK_FIELDS = tl.constexpr(2)

BOUND_KEY = tl.constexpr(0)  # of what is returned
BOUND_VALUE = tl.constexpr(1)
BOUND_ROUND = tl.constexpr(2)
BOUND_KEY_BEFORE = tl.constexpr(3)  # before a recomputation
BOUND_VALUE_BEFORE = tl.constexpr(4)
BOUND_PAPER = tl.constexpr(5)
BOUND_FIELDS = tl.constexpr(6)

TELEMETRY = (
    "steps", "expanded", "values", "head", "row", "ranking", "boundary", "bound", "key_sum",
    "key_max", "value_sum", "value_max", "round_max", "saved", "key_tokens", "value_tokens",
)  # fmt: skip  # a table
T_STEPS = tl.constexpr(TELEMETRY.index("steps"))
T_EXPANDED = tl.constexpr(TELEMETRY.index("expanded"))
T_VALUES = tl.constexpr(TELEMETRY.index("values"))
T_HEAD = tl.constexpr(TELEMETRY.index("head"))
T_ROW = tl.constexpr(TELEMETRY.index("row"))
T_RANKING = tl.constexpr(TELEMETRY.index("ranking"))
T_BOUNDARY = tl.constexpr(TELEMETRY.index("boundary"))
T_BOUND = tl.constexpr(TELEMETRY.index("bound"))
T_KEY_SUM = tl.constexpr(TELEMETRY.index("key_sum"))
T_KEY_MAX = tl.constexpr(TELEMETRY.index("key_max"))
T_VALUE_SUM = tl.constexpr(TELEMETRY.index("value_sum"))
T_VALUE_MAX = tl.constexpr(TELEMETRY.index("value_max"))
T_ROUND_MAX = tl.constexpr(TELEMETRY.index("round_max"))
T_SAVED = tl.constexpr(TELEMETRY.index("saved"))
T_KEY_TOKENS = tl.constexpr(TELEMETRY.index("key_tokens"))
T_VALUE_TOKENS = tl.constexpr(TELEMETRY.index("value_tokens"))
TELEMETRY_FIELDS = tl.constexpr(len(TELEMETRY))
