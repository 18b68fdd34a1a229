"""Attention over latents by dense: absorbed and expanded forms against an fp64 oracle."""

import pytest
import torch

from attnplug.call import LatentCall, LayerShape
from attnplug.policies import Dense, parse
from attnplug.policies._absorbed import attend_absorbed, attend_expanded, expanded_width
from attnplug.policies.dense import _expanding_pays

HEADS, LATENT, ROPE = 3, 24, 8
SHAPE = LayerShape(8, 8, 20, 0.0, False, torch.device("cpu"), latent=576)


def made(queries: int, tokens: int, widths: tuple[int, int], dtype=torch.float32, **options):
    """A call whose keys have the first of the widths without the rotated part, and values the
    second."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    return LatentCall(
        draw(2, HEADS, queries, widths[0] + ROPE),
        latents=draw(2, tokens, LATENT),
        rope=draw(2, tokens, ROPE),
        up=draw(HEADS, sum(widths), LATENT) / LATENT**0.5,
        picks=None,
        scale=0.2,
        **options,
    )


def oracle(call: LatentCall) -> torch.Tensor:
    """`[B,S,H,Dv]` in float64, by keys and values of all tokens."""
    keys = call.q.shape[3] - ROPE
    q, up, c, r = (x.double() for x in (call.q, call.up, call.latents, call.rope))
    both = torch.einsum("btr,hdr->bhtd", c, up)
    scores = torch.einsum("bhsd,bhtd->bhst", q[..., :keys], both[..., :keys])
    scores = (scores + torch.einsum("bhsp,btp->bhst", q[..., keys:], r)) * call.scale
    tokens, queries = c.shape[1], q.shape[2]
    length = tokens if call.lengths is None else int(call.lengths)
    seen = torch.arange(tokens) <= torch.arange(length - queries, length)[:, None]
    shown = seen if call.key_mask is None else seen & call.key_mask[:, None, None]
    scores = scores.masked_fill(~shown, float("-inf"))
    if call.sinks is not None:
        sinks = call.sinks.double()[None, :, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, sinks], -1)
    weights = scores.softmax(-1).nan_to_num()[..., :tokens]
    return torch.einsum("bhst,bhtd->bshd", weights, both[..., keys:])


def mask(tokens: int) -> torch.Tensor:
    shown = torch.ones(2, tokens, dtype=torch.bool)
    shown[0, :4] = False
    return shown


@pytest.mark.parametrize("widths", [(8, 16), (40, 16), (8, 48)])
@pytest.mark.parametrize(
    ("queries", "options"),
    [
        (1, {}),
        (20, {}),
        (20, {"key_mask": mask(20)}),
        (5, {"lengths": torch.tensor([17])}),
        (5, {"lengths": torch.tensor([17]), "key_mask": mask(20)}),
        (20, {"sinks": torch.tensor([0.5, -1.0, 2.0])}),
    ],
)
def test_both_forms_are_the_oracles(queries, options, widths, monkeypatch):
    call = made(queries, 20, widths, **options)
    wanted = oracle(call)
    monkeypatch.setattr("attnplug.policies._absorbed.EXPANDED", 1)
    width = expanded_width(call)
    assert width == -(-(max(widths[0] + ROPE, widths[1])) // 16) * 16
    expanded = attend_expanded(call, width, Dense().attend)
    for found in (attend_absorbed(call, 100), attend_absorbed(call, 3), expanded):
        assert found.shape == (2, queries, HEADS, widths[1])
        torch.testing.assert_close(found.double(), wanted, atol=1e-5, rtol=1e-5)
    served = Dense().attend_all_latents(call)
    torch.testing.assert_close(served.double(), wanted, atol=1e-5, rtol=1e-5)
    assert call.served_by == "dense"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_is_near_what_plain_attention_gives(dtype):
    for queries, options in ((1, {}), (20, {})):
        call = made(queries, 20, (40, 16), dtype, **options)
        wanted = oracle(call)
        both = torch.einsum("btr,hdr->bhtd", call.latents, call.up)
        k = torch.cat((both[..., :40], call.rope[:, None].expand(-1, HEADS, -1, -1)), -1)
        seen = torch.ones(queries, 20, dtype=torch.bool).tril(20 - queries)
        plain = torch.nn.functional.scaled_dot_product_attention(
            call.q, k, both[..., 40:], attn_mask=seen, scale=call.scale
        ).transpose(1, 2)
        error = (Dense().attend_all_latents(call).double() - wanted).norm()
        assert error < 3 * (plain.double() - wanted).norm()


def test_the_cache_is_expanded_where_that_is_fewer_products():
    wide = made(1, 20, (8, 16))
    assert _expanding_pays(wide) == -(-24 * 24 // 24)
    wide.up = torch.empty(128, 256, 512)
    assert _expanding_pays(wide) == 171
    wide.up = torch.empty(2, 256, 100)  # a latent that is narrower than keys and values
    assert _expanding_pays(wide) > 1 << 40


def test_heads_that_are_too_wide_for_kernels_are_absorbed():
    call = made(6, 6, (8, 600))
    assert expanded_width(call) is None
    wanted = oracle(call)
    found = Dense().attend_all_latents(call)
    torch.testing.assert_close(found.double(), wanted, atol=1e-5, rtol=1e-5)


def test_who_serves_such_a_layer():
    for text in ("dense", "auto", "auto(quality='fast')", "trained"):
        policy, _ = parse(text).resolve(SHAPE, 1)
        assert policy.attends_all_latents, text
        assert policy.decode.refusal(SHAPE) is None
        assert policy.decode.note(SHAPE) == "keeps latents, 576 numbers a token"
    for text in ("momo", "gather", "sketch", "exact", "momo+gather+trained"):
        assert not parse(text).resolve(SHAPE, 1)[0].attends_all_latents, text
    policy, why = parse("dense+stream").resolve(SHAPE, 1)
    assert policy.trace is None and "not traced" in why
