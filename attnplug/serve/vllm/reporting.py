"""What really serves a vLLM engine's layers, asked of its worker processes.

    llm = LLM(model, attention_backend="CUSTOM", additional_config={"attnplug": "momo+gather"},
              worker_extension_cls=attnplug.serve.vllm.REPORTING)
    llm.generate(prompts)
    print(attnplug.serve.vllm.report(llm))

vLLM's layers live in other processes, which take orders by name alone: a function would have to be
pickled, which vLLM allows under a variable that it calls insecure. `worker_extension_cls` is vLLM's
way to give its workers one more order.
"""

import pkgutil
import re
from typing import Any

from attnplug.errors import ServeError
from attnplug.reports import LastCall, LayerReport, Report
from attnplug.serve.paged.layer import ServedLayer
from attnplug.serve.vllm.options import policy_of

ORDER = "attnplug_report"
SLOTS = ("prefill", "decode")


class Reporting:
    """The methods that vLLM's workers have besides their own."""

    vllm_config: Any  # the worker's

    def attnplug_report(self) -> dict[str, Any]:
        """What serves this worker's layers, and what has served them since this was last asked."""
        layers = self.vllm_config.compilation_config.static_forward_context
        impls = {name: getattr(layer, "impl", None) for name, layer in layers.items()}
        found = {name: getattr(impl, "serving", None) for name, impl in impls.items()}
        served = {name: x for name, x in found.items() if isinstance(x, ServedLayer)}
        told = [_of_layer(name, layer) for name, layer in served.items()]
        for layer in served.values():
            layer.forget_served()
        return {"policy": policy_of(self.vllm_config).text, "layers": told}


NAME = f"{Reporting.__module__}.{Reporting.__qualname__}"


def _of_layer(name: str, layer: ServedLayer) -> dict[str, str]:
    prefill, decode, trace = layer.phases.prefill, layer.phases.decode, layer.phases.trace
    reasons = [layer.why, f"traced by {trace}" if trace else ""]
    last = dict(zip(SLOTS, layer.last_served(), strict=True))
    return {
        "name": name,
        "prefill": str(prefill or "dense"),
        "decode": str(decode or "dense"),
        "reason": "; ".join(reason for reason in reasons if reason),
        **{f"last_{slot}": served for slot, served in last.items()},
    }


def report(llm: Any) -> Report:
    """`attnplug.serve.vllm.report`."""
    named = llm.llm_engine.vllm_config.parallel_config.worker_extension_cls
    found = pkgutil.resolve_name(named) if named else None
    if not (isinstance(found, type) and issubclass(found, Reporting)):
        raise ServeError(
            "attnplug in vLLM: the workers know no reports; start the engine with "
            f"worker_extension_cls={NAME!r}, or with a subclass of it"
        )
    answers = llm.collective_rpc(ORDER)
    layers: dict[str, list[dict[str, str]]] = {}
    for answer in answers:
        for layer in answer["layers"]:
            layers.setdefault(layer["name"], []).append(layer)
    if not layers:
        raise ServeError(
            "attnplug in vLLM: no layer has attnplug's backend; start the engine with "
            "attention_backend='CUSTOM' and the option attnplug"
        )
    numbered = sorted((_index(name, place), name) for place, name in enumerate(layers))
    return Report(
        answers[0]["policy"],
        tuple(
            LayerReport(
                index,
                name,
                "attention",
                *(_joined(layers[name], key) for key in (*SLOTS, "reason")),
            )
            for index, name in numbered
        ),
        last=tuple(
            LastCall(index, *(_joined(layers[name], f"last_{slot}") for slot in SLOTS))
            for index, name in numbered
        ),
    )


def _index(name: str, place: int) -> int:
    """The layer's number, which is the only number in most names; else its place."""
    found = re.findall(r"(?<=\.)\d+(?=\.)", name)
    return int(found[0]) if len(found) == 1 else place


def _joined(ranks: list[dict[str, str]], key: str) -> str:
    """What the ranks say, once where they agree."""
    return " | ".join(dict.fromkeys(rank[key] for rank in ranks if rank[key]))
