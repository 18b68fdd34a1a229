"""What momo does where no option says so: from how many tokens on it serves, and its tail."""

from attnplug.policies.dense import known_from

KINDS = ("cpu", "cuda")  # of devices
# Below this many query tokens for each key that a query block may read, dense attention is
# faster, and below so many tokens in any case; measured (docs/log/momo.md).
CROSSOVER_FACTOR = {"cuda": 4, "cpu": 8}
CROSSOVER_FLOOR = {"cuda": 8192, "cpu": 4096}
# The tail of a prompt of LONG tokens, and of a shorter one, or of an engine's chunk, which may be
# any part of its prompt. With 128 queries four needles of fifty were lost at 64K and 128K, with
# 1,024 two, for 2% of the first token's time (docs/log/momo.md).
LONG = 16384
LONG_TAIL, SHORT_TAIL = 1024, 128


def default_tail(tokens: int) -> int:
    """How many of a prompt's queries are dense, its last ones."""
    return LONG_TAIL if known_from(tokens, LONG) else SHORT_TAIL


def pays_from(kind: str, near: int, far: int, block: int, until: int) -> int:
    """The crossover on a kind of device, "cpu" or "cuda", where the query blocks of a prompt's
    first `until` queries list `near` blocks of keys, and those behind them `far`: how many tokens a
    prompt has decides which of them it has."""
    factor, floor = CROSSOVER_FACTOR[kind], CROSSOVER_FLOOR[kind]
    short = max(floor, factor * near * block)
    return short if short <= until else max(floor, factor * far * block)
