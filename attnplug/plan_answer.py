"""What `attnplug plan` answers for a policy: a step's time where the bill knows it, the bytes that
the caches take and that a step reads, from which length the method serves, and in a sentence each
what cannot be predicted.

A token by `exact` takes a round of m drafts and a verification, divided by the tokens that the
round gives where dense accepts each draft with the chance p: 1 + p + ... + p^m. `pace` says what a
verification takes beside a dense step, and chooses m, as it does while a model decodes.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from rich.table import Table

from attnplug.call import LayerShape
from attnplug.errors import ArgumentError
from attnplug.models.pace import Costs, Pace, steps_in_drafts
from attnplug.plan import Bill, Shape, Sparse, first_length, on_gpu
from attnplug.plan_memory import memory_of, serving
from attnplug.policies.auto import CANDIDATES, Auto
from attnplug.policies.base import Phase
from attnplug.policies.certified import Certified
from attnplug.policies.crossover import NEVER, OWN_CARD, DenseBelow
from attnplug.policies.dense import Dense
from attnplug.policies.exact import Exact
from attnplug.policies.gather import Gather
from attnplug.policies.gvr import Gvr
from attnplug.policies.policy import Policy
from attnplug.policies.sketch import Sketch
from attnplug.policies.tuned import card_name

# With which dense accepts a draft, unless the command says otherwise: of gather's in a small model
# at 64K tokens, with which exact's rows were measured (bench/results/exact.json).
ACCEPTED = 0.906
CUDA = torch.device("cuda")
MOST = 1 << 44  # tokens of a batch: their bytes can be counted in 64 bits


class Asked(NamedTuple):
    """What is planned: a model on a machine, the method that decodes, the sequences of a batch, the
    policy where it is more than the method, and the chance with which dense accepts a draft."""

    shape: Shape
    bill: Bill
    method: Phase
    batch: int = 1
    policy: Policy | None = None
    accepted: float = ACCEPTED


def read_options(
    contexts: Sequence[int], batch: int, policy: str, accepted: float = ACCEPTED
) -> tuple[Policy, Phase]:
    """The policy that the command's options name and the method that decodes; for auto, what it
    takes on a GPU with room for its cache. Raises ArgumentError for numbers out of range, or
    PolicyError for the policy's text."""
    from attnplug.policies import parse

    if min(contexts) < 1:
        raise ArgumentError(f"plan: context is {min(contexts)}, needs at least 1")
    if batch < 1:
        raise ArgumentError(f"plan: batch is {batch}, needs at least 1")
    if batch * max(contexts) > MOST:
        raise ArgumentError(
            f"plan: {batch:,} sequences of {max(contexts):,} tokens are more than {MOST:,} tokens"
        )
    if not 0 <= accepted <= 1:
        raise ArgumentError(f"plan: accepted is {accepted}, needs 0 to 1")
    found = parse(policy)
    assert found.decode is not None  # filled by the policy itself
    return found, _chosen(found.decode, "decode")


def _chosen(method: Phase, slot: str) -> Phase:
    if isinstance(method, Auto):
        return CANDIDATES[method.quality][slot][0].method
    return method


def mapped(method: Phase) -> Sparse:
    """The method, if a map of its speed-ups can be drawn. Raises ArgumentError."""
    if isinstance(method, Gather | Gvr | Sketch) and on_gpu(method):
        return method
    raise ArgumentError(f"plan: there is no map of {method}, only of gather, gvr and sketch")


def plan_for(
    shape: Shape,
    bill: Bill,
    policy: tuple[Policy, Phase],
    batch: int = 1,
    accepted: float = ACCEPTED,
) -> Asked:
    """What is planned, of what `read_options` has read. Raises ArgumentError where no layer of the
    model is one that the method serves."""
    named, method = policy
    if not shape.layers and not isinstance(method, Dense):
        if not isinstance(named.decode, Auto):
            raise ArgumentError(
                f"plan: {method.name} serves no layer of this model, whose cache keeps latents: "
                f"{shape.cached(1):,.0f} bytes a token, of all layers and for all heads together"
            )
        method = Dense()  # or trained, which auto takes where the model picks what it reads
    if is_here(bill):
        method = _on_this_machine(shape, method)
    return Asked(shape, bill, method, batch, named, accepted)


def is_here(bill: Bill) -> bool:
    """Whether this machine's GPU is the card that a bill is of."""
    if not torch.cuda.is_available():
        return False
    name = card_name(CUDA)
    return name == bill.card or (OWN_CARD in name and OWN_CARD in bill.card)


def _on_this_machine(shape: Shape, method: Phase) -> Phase:
    """The method with the crossovers that `apply` gives it for such a model on this machine."""
    return method.on_this_machine(
        LayerShape(shape.heads or 0, shape.heads_kv, shape.head_dim, 0.0, False, CUDA)
    )


def seconds(asked: Asked, tokens: int) -> float | None:
    """Of a token of each sequence, were the method to run at every length; None where the bill
    cannot tell."""
    shape, bill, method, batch = asked[:4]
    if isinstance(method, Exact):
        return _in_rounds(asked, tokens, asked.accepted)[0]
    if isinstance(method, Gather | Gvr | Sketch):
        return bill.sparse(shape, tokens, batch, method) if on_gpu(method) else None
    if isinstance(method, Dense):
        return None if shape.shared else bill.dense(shape, tokens, batch)
    return None


def _in_rounds(asked: Asked, tokens: int, accepted: float) -> tuple[float, float]:
    """Seconds of a token by exact's rounds, and bytes of the caches that it reads."""
    shape, bill, method, batch = asked[:4]
    assert isinstance(method, Exact)
    cache = batch * shape.cached(tokens)
    dense = bill.dense(shape, tokens, batch)
    draft = bill.sparse(shape, tokens, batch, method.drafter)
    step, verification = steps_in_drafts(cache / shape.weights, batch)
    verified = dense * verification / step
    costs = Costs(dense / draft, verified / draft, 0.0)
    pace = Pace(method.rounds(), costs, method.varies_rounds, accepted=accepted, judged=1.0)
    drafts = pace.next()
    given = sum(accepted**i for i in range(drafts + 1))
    read = drafts * batch * shape.read(method.drafter, tokens) + cache
    return (drafts * draft + verified) / given, read / given


def least_accepted(asked: Asked, tokens: int) -> float | None:
    """The chance of a draft from which on exact's rounds are no slower than dense steps; None where
    no chance is enough."""
    dense = asked.bill.dense(asked.shape, tokens, asked.batch)
    if _in_rounds(asked, tokens, 1.0)[0] > dense:
        return None
    low, high = 0.0, 1.0
    for _ in range(20):
        middle = (low + high) / 2
        if _in_rounds(asked, tokens, middle)[0] > dense:
            low = middle
        else:
            high = middle
    return high


def pays_from(asked: Asked) -> int | None:
    """The tokens from which on the method is faster than dense by the bill; None where it is at no
    length, or where its time is not predicted."""
    shape, bill, method, batch = asked[:4]
    if isinstance(method, Gather | Gvr | Sketch) and on_gpu(method):
        return bill.crossover(shape, batch, method)
    if isinstance(method, Exact):
        return first_length(
            lambda n: _in_rounds(asked, n, asked.accepted)[0] < bill.dense(shape, n, batch)
        )
    return None


def serves_from(asked: Asked) -> int | None:
    """The tokens that a cache needs for the method to serve on a GPU; None where it serves none."""
    if not isinstance(asked.method, DenseBelow):
        return 0
    least = asked.method.row_crossover(CUDA).least(asked.batch)
    return None if least >= NEVER else least


def origin(method: Phase) -> str | None:
    """Where the crossover of a method comes from; None where it has none."""
    if not isinstance(method, DenseBelow):
        return None
    if method.min_tokens is None and method.here is None:
        return f"as measured on an {OWN_CARD}"
    return method.origin(CUDA).removeprefix(", ")


def steps(asked: Asked, contexts: Iterable[int]) -> list[dict[str, float | None]]:
    """A step of each context that the model reads: `tokens`; milliseconds `dense_ms` and
    `METHOD_ms`, `speedup`, and `METHOD_tokens_per_s` of the whole batch; GB that the caches take,
    `dense_gb`, `METHOD_gb` and `METHOD_host_gb`; GB that a step reads of them, `dense_read_gb` and,
    a token and at least, `METHOD_read_gb`. None is what is not predicted. Where the model's GPU has
    less memory than the weights and the cache take, `METHOD_fits` is False. For exact `break_even`
    is the chance of a draft from which on rounds pay."""
    shape, bill, method, batch = asked[:4]
    name, found = method.name, []
    for tokens in filter(shape.reads, contexts):
        took = seconds(asked, tokens)
        plain = (
            None if shape.shared and isinstance(method, Dense) else bill.dense(shape, tokens, batch)
        )
        dense, held = (
            memory_of(shape, Dense(), batch, tokens),
            memory_of(shape, method, batch, tokens),
        )
        is_exact = isinstance(method, Exact)
        read = _in_rounds(asked, tokens, asked.accepted)[1] if is_exact else held.reads
        step: dict[str, float | None] = {
            "tokens": tokens,
            "dense_ms": plain and plain * 1e3,
            f"{name}_ms": took and took * 1e3,
            "speedup": plain / took if plain and took else None,
            f"{name}_tokens_per_s": batch / took if took else None,
            "dense_gb": dense.gpu / 1e9,
            f"{name}_gb": held.gpu / 1e9,
            f"{name}_host_gb": held.host / 1e9,
            "dense_read_gb": dense.reads and dense.reads / 1e9,
            f"{name}_read_gb": read and read / 1e9,
            "dense_fits": shape.weights + dense.gpu <= bill.memory,
            f"{name}_fits": shape.weights + held.gpu <= bill.memory,
        }
        if is_exact:
            step["break_even"] = least_accepted(asked, tokens)
        found.append(step)
    return found


def facts(asked: Asked, contexts: Iterable[int]) -> dict[str, Any]:
    """What `tables` and `notes` tell, for a program. `pays_from` is the crossover by bytes, and
    `serves_from` the length below which attnplug runs dense, with its `origin`; lengths in tokens,
    None where there is none, and `positions` None where only the model's shape is known."""
    return {
        "policy": str(asked.method),
        "batch": asked.batch,
        "gpus": asked.shape.gpus,
        "positions": asked.shape.positions,
        "pays_from": pays_from(asked),
        "serves_from": serves_from(asked),
        "origin": origin(asked.method),
        "accepted": asked.accepted if isinstance(asked.method, Exact) else None,
        "bill": asked.bill.source,
        "not_predicted": not_predicted(asked),
        "steps": steps(asked, contexts),
    }


def not_predicted(asked: Asked) -> list[str]:
    """What the bill cannot tell of the policy, a sentence each."""
    method, found = asked.method, []
    if isinstance(method, Certified):
        found.append(
            "The time of a step is not predicted, because it depends on how many originals the "
            "bounds make it read from the host; it reads the quantized cache at least."
        )
    elif not on_gpu(method):
        found.append(
            "The time of a step is not predicted, because it depends on the link to the host and "
            "on how much of what it reads the GPU has already."
        )
    elif isinstance(method, Exact):
        found.append(
            "How often dense accepts a draft is not predicted, because it depends on the model and "
            "the text. The table has the time of a token where dense accepts each draft with the "
            f"chance {asked.accepted:g} (--accepted); `attnplug.report` counts it after a call."
        )
    elif not isinstance(method, Dense | Gather | Gvr | Sketch):
        found.append(
            f"The time of a step is not predicted, because the bill has no steps of {method.name}."
        )
    elif seconds(asked, 1) is None:
        found.append(
            "The time of a step is not predicted, because this model's cache holds latents or the "
            "model picks what its layers read, and the bill was fitted to keys and values."
        )
    return found + _besides(asked)


def _besides(asked: Asked) -> list[str]:
    """The same of the policy's other methods."""
    policy = asked.policy
    if policy is None:
        return []
    assert policy.prefill is not None  # filled by the policy itself
    found, prefill = [], _chosen(policy.prefill, "prefill")
    if is_here(asked.bill):
        prefill = _on_this_machine(asked.shape, prefill)
    if isinstance(prefill, DenseBelow):
        found.append(
            f"{prefill.name} serves prompts from {prefill.crossover(CUDA):,} tokens on, "
            f"{origin(prefill)}; how long a prompt takes is not predicted."
        )
    if policy.trace is not None:
        found.append(
            f"{policy.trace.name} changes no step; how much longer a recorded one takes is not "
            "predicted."
        )
    if policy.trained is not None and not asked.shape.shared:  # else the model may pick
        found.append(
            f"No layer of this model picks what it reads: {policy.trained.name} serves none."
        )
    return found


def notes(asked: Asked) -> str:
    """From where on it pays and serves, and what the bill leaves out, a sentence a line."""
    method, shape = asked.method, asked.shape
    told = [_pays(asked), _serves(asked), _elsewhere(asked)]
    if shape.positions is not None:
        least = serves_from(asked)
        never = least is None or least > shape.positions
        why = f": {method.name} never serves it" if never else ""
        told.append(
            f"The model reads {shape.positions:,} tokens{why}; longer contexts are left out."
        )
    if shape.gpus > 1:
        told.append(
            f"Each of {shape.gpus} GPUs reads its heads and its part of the weights. Bytes are "
            "told for one GPU; the time in which GPUs add up their parts is counted beside reading."
        )
    told += not_predicted(asked)
    return "\n".join([*filter(None, told), f"Bill of: {asked.bill.source}."])


def _pays(asked: Asked) -> str:
    method = asked.method
    if isinstance(method, Dense) or seconds(asked, 1) is None:
        return ""
    tokens = pays_from(asked)
    pays = "does not pay at any length up to 16M tokens"
    chance = f", with drafts of the chance {asked.accepted:g}" * isinstance(method, Exact)
    pays = pays if tokens is None else f"pays from {tokens:,} tokens on"
    return f"By bytes {method} {pays}{chance}."


def _serves(asked: Asked) -> str:
    method, least = asked.method, serves_from(asked)
    chosen = ""
    if asked.policy is not None and isinstance(asked.policy.decode, Auto):
        chosen = f"auto takes {method.name}, on a GPU with room for its cache. "
        if isinstance(method, Dense):
            chosen = "auto takes trained where the model picks what it reads, and else dense. "
    if isinstance(method, Dense):
        return chosen + ("" if chosen else "Every decode step is dense.")
    if least is None:
        asks = serving(method)
        told = f"runs dense in every cache, {origin(method)}, unless you ask for"
        return f'{chosen}attnplug {told} "{asks}".'
    where = origin(method)
    where = f", {where}" if where else ""  # a method of the user's may have no crossover
    return f"{chosen}attnplug runs dense in caches below {least:,} tokens{where}."


def _elsewhere(asked: Asked) -> str:
    """That the lengths are not this machine's, where the bill is of another card, and its own."""
    method, bill = asked.method, asked.bill
    asks = isinstance(method, DenseBelow) and method.min_tokens is None
    if not asks or is_here(bill):
        return ""
    known = bill.card not in ("", "none")  # rows of several cards, or of a machine without
    of = f"for the {bill.card.removeprefix('NVIDIA ')}" if known else "for no card that is known"
    if not torch.cuda.is_available():
        return f"The bill is {of}, and there is no GPU here: no file of `attnplug tune` is read."
    own = _on_this_machine(asked.shape, method)
    least = serves_from(asked._replace(method=own))
    serves = "at no length" if least is None else f"from {least:,} tokens on"
    told = f"The bill is {of}. The GPU here is {card_name(CUDA)}"
    return f"{told}, where {method.name} serves {serves}, {origin(own)}."


def tables(asked: Asked, contexts: Iterable[int]) -> list[Table]:
    """For each context that the model reads: milliseconds a step and the speed-up, where these are
    predicted, and GB of the caches."""
    found = steps(asked, contexts)
    on = f", each of {asked.shape.gpus} GPUs" if asked.shape.gpus > 1 else ""
    title = f"{asked.method}, batch {asked.batch}{on}"
    predicted = seconds(asked, 1) is not None
    made = [_times(asked.method, title, found)] if predicted else []
    return [*made, _bytes(asked.method, "caches" if predicted else f"{title}: caches", found)]


def _times(method: Phase, title: str, found: list[dict[str, float | None]]) -> Table:
    name, printed = method.name, Table(title=title)
    columns = ["tokens", "dense ms"]
    if not isinstance(method, Dense):
        columns += [f"{name} ms", "speed-up"]
    columns += [f"{name} tokens/s"]
    if isinstance(method, Exact):
        columns += ["pays from chance"]
    for column in columns:
        printed.add_column(column, justify="right")
    for step in found:
        cells = [f"{step['tokens']:,}", f"{step['dense_ms']:.2f}"]
        if not isinstance(method, Dense):
            cells += [f"{step[f'{name}_ms']:.2f}", f"{step['speedup']:.2f}"]
        cells += [f"{step[f'{name}_tokens_per_s']:,.0f}"]
        if isinstance(method, Exact):
            chance = step["break_even"]
            cells += ["none" if chance is None else f"{chance:.2f}"]
        printed.add_row(*cells)
    return printed


def _bytes(method: Phase, title: str, found: list[dict[str, float | None]]) -> Table:
    names = ["dense"] if isinstance(method, Dense) else ["dense", method.name]
    is_hosted = any(step[f"{method.name}_host_gb"] for step in found)
    a = "a token" if isinstance(method, Exact) else "a step"
    columns = [f"{name} GB" for name in names] + ["on the host"] * is_hosted
    printed = Table(title=title)
    for column in ["tokens", *columns, *(f"{name} reads {a}" for name in names)]:
        printed.add_column(column, justify="right")
    for step in found:
        cells = [f"{step['tokens']:,}"]
        for name in names:
            room = "" if step[f"{name}_fits"] else ", no room"
            cells.append(f"{step[f'{name}_gb']:.2f}{room}")
        cells += [f"{step[f'{method.name}_host_gb']:.2f}"] * is_hosted
        for name in names:
            read = step[f"{name}_read_gb"]
            cells.append("?" if read is None else f"{read:.2f}")
        printed.add_row(*cells)
    return printed
