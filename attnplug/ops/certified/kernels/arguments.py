"""Arguments that several kernels of `certified_attention` share, bundled: tuples of pointers and of
compile-time constants, as Triton takes them."""

from typing import Any, NamedTuple


class Shape(NamedTuple):
    """What of a call's shape the kernels are compiled for."""

    GROUP: int  # query heads of a KV head
    ROWS: int  # of a tile of their queries, one of them spare: it sums the key codes
    D: int
    DP: int  # D, padded to a power of two
    BLOCK: int
    HALF: int  # groups of 16 channels in the lower half of a value
    HALF_P: int  # padded to a power of two


class Arithmetic(NamedTuple):
    """How products are computed. Dtypes are numbers here: Triton hands each argument to the hooks
    of other programs (vLLM 0.30 has one) as JSON, and finds no dtype in a tuple."""

    FLOAT32_KEYS: bool  # products with key codes are in float32, or else in bfloat16
    FLOAT32_VALUES: bool  # and products with values, or else in float16
    PARTS: int  # of that dtype into which a float32 factor is split
    CAPPED: bool


class BlockScores(NamedTuple):
    """Pointers to what the first pass leaves of every head and block, `[B Hq, N]` each."""

    base: Any  # query times zeros
    delta: Any  # what a score can be off by
    noise: Any  # the part of it that arithmetic can make
    logs: Any  # log-mass
    squares: Any  # log of the sum of squared weights


class Splits(NamedTuple):
    """Pointers to the pieces of a head's output and to their log-sum-exps, `[B Hq, P, D]` and
    `[B Hq, P]`."""

    out: Any
    lse: Any


class Promotion(NamedTuple):
    """What the kernels that choose and read promoted blocks leave one another: see records.py."""

    counts: Any
    block_list: Any
    promoted_sums: Any
    changes: Any  # or the pieces of a recomputation, which replace them
    flags: Any
    read_digest: Any


class Choice(NamedTuple):
    """How many blocks are read exactly, as in `certified_attention`; numbers a kernel is given."""

    coverage: Any
    least: Any  # k_min
    most: Any  # k_max
    v_tol: Any
    explore: Any


class Search(NamedTuple):
    """How `choose_blocks` searches, and which rungs it can climb."""

    TILE: int  # blocks at a time
    HELD: int  # blocks that it holds in registers; 0: reads them again in every round
    ONE_SWEEP: bool  # coverage 0 and few blocks: `search_one_sweep`
    COVERS: bool  # the coverage is above 0
    PROMOTES: bool  # by coverage or number
    NEEDS: bool  # by need: there is a tolerance, and `weigh_heads` ran
    EXPLORES: bool  # blocks are spot-checked


class Programs(NamedTuple):
    """Of a KV head in `choose_blocks`."""

    CHUNKS: int  # that sum up, block j belonging to chunk j % CHUNKS
    OWN: int  # blocks of a chunk at most, a power of two, 16 at least
    READERS: int  # that read promoted blocks, which are not listed then; 0: `promote` reads
    SPLITS: int  # pieces that the first pass leaves at most, a power of two
    WAYS: int  # slots of the scratch cache that a chunk looks after, a power of two
    SETS: int  # of the scratch cache
