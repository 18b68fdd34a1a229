"""What no attention of attnplug serves: gradients, dropout, attention weights. It is told before
the first layer has put the tokens into its cache: left there, the next call would go on behind
them."""

from typing import Any

import torch

from attnplug.errors import GradientError, UnsupportedCallError


def refuse_options(query: torch.Tensor, dropout: float, kwargs: dict[str, Any]) -> None:
    """Raise for a call of the attention function."""
    _refuse(query.requires_grad and torch.is_grad_enabled(), dropout, kwargs)


def refuse_layer(module: torch.nn.Module, hidden: torch.Tensor, kwargs: dict[str, Any]) -> None:
    """Raise for a call of an attention layer, before it has a query."""
    records = torch.is_grad_enabled() and (
        hidden.requires_grad or any(weight.requires_grad for weight in module.parameters())
    )
    dropout = getattr(module, "attention_dropout", 0.0) if module.training else 0.0
    _refuse(records, dropout if isinstance(dropout, float) else 0.0, kwargs)


def refuse_float64(dtype: torch.dtype) -> None:
    """Raise for queries, or weights, of a layer with a policy."""
    if dtype == torch.float64:
        raise UnsupportedCallError(
            "attnplug computes in float32, float16 or bfloat16, and this model was cast to float64 "
            "after apply. Cast it back, or attnplug.remove(model) and apply again: float64 layers "
            "then stay the model's own."
        )


def _refuse(records: bool, dropout: float, kwargs: dict[str, Any]) -> None:
    if records:
        raise GradientError(
            "attnplug is inference only, and this forward pass records gradients. Call the model "
            "under torch.no_grad() or torch.inference_mode()."
        )
    if dropout:
        raise UnsupportedCallError(
            f"attention dropout is {dropout}: attnplug is inference only. Call model.eval() first."
        )
    if kwargs.get("output_attentions"):
        raise UnsupportedCallError(
            "output_attentions=True: attnplug never builds the attention matrix. Remove the policy "
            "(attnplug.remove) and load the model with attn_implementation='eager' to see it."
        )
