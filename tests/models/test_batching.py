"""The life of a manager of continuous batching: what is refused meanwhile, what is reported, and
that nothing is left behind."""

import gc
import threading

import pytest
import torch
from batching_cases import (
    ENDLESS,
    GATHER,
    MOMO,
    NEW,
    batched,
    first_layer,
    llama,
    one_by_one,
    prompts,
    settings,
)

import attnplug
from attnplug.models.batching import SESSION
from attnplug.models.hf import tracing


def test_generate_while_batching_runs_is_refused():
    with attnplug.applied(llama(), "dense") as model:
        before = dict(vars(model))
        manager = model.init_continuous_batching(ENDLESS, settings(num_blocks=32))
        manager.start()
        try:
            request = manager.add_request(prompts((40,))[0], max_new_tokens=NEW)
            with pytest.raises(attnplug.UnsupportedCallError, match="continuous batching runs"):
                model.generate(torch.tensor(prompts((5,))))
            with pytest.raises(attnplug.UnsupportedCallError, match="stop its manager first"):
                with torch.no_grad():
                    model(torch.tensor(prompts((5,))))
            with pytest.raises(attnplug.UnsupportedCallError, match="already"):
                model.init_continuous_batching(ENDLESS, settings(num_blocks=32))
            with pytest.raises(attnplug.UnsupportedCallError, match="stop its manager first"):
                attnplug.remove(model)
            result = manager.get_result(request_id=request, timeout=60)
            assert result is not None and result.error is None
        finally:
            manager.stop()
        assert SESSION not in vars(model) and vars(model).keys() == before.keys()
        assert len(one_by_one(model, prompts((5,)))[0]) == NEW


def test_a_manager_that_stops_in_the_background():
    """generate comes back when its thread has ended, and not before."""
    with attnplug.applied(llama(), "dense") as model:
        manager = model.init_continuous_batching(ENDLESS, settings(num_blocks=32))
        alive, running = threading.Event(), manager.is_running
        manager.is_running = lambda: not alive.is_set()
        manager.stop()
        with pytest.raises(attnplug.UnsupportedCallError, match="continuous batching runs"):
            model.generate(torch.tensor(prompts((5,))))
        alive.set()
        assert model.generate(torch.tensor(prompts((5,))), generation_config=ENDLESS).shape[1] == 11
        manager.is_running = running


def answer(manager, ids: list[int]) -> list[int]:
    request = manager.add_request(ids, max_new_tokens=NEW)
    result = manager.get_result(request_id=request, timeout=60)
    assert result is not None and result.error is None
    return result.generated_tokens


def fail(thread) -> None:
    raise RuntimeError("no thread is left")


def test_a_manager_that_was_stopped_starts_again(monkeypatch):
    (ids,) = prompts((40,))
    with attnplug.applied(llama(), GATHER) as model:
        (want,) = one_by_one(model, [ids])
        manager = model.init_continuous_batching(ENDLESS, settings(num_blocks=32))
        for _ in range(2):
            manager.start()
            assert answer(manager, ids) == want
            with pytest.raises(attnplug.UnsupportedCallError, match="continuous batching runs"):
                model.generate(torch.tensor([ids]))
            manager.stop()
            assert SESSION not in vars(model)
        other = model.init_continuous_batching(ENDLESS, settings(num_blocks=32))
        with pytest.raises(attnplug.UnsupportedCallError, match="another manager runs"):
            manager.start()
        manager.stop()  # once more: it is not the other's
        assert vars(model)[SESSION].manager() is other
        other.stop()
        with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="no thread is left"):
            patch.setattr(threading.Thread, "start", fail)
            manager.start()
        assert SESSION not in vars(model)
    with pytest.raises(attnplug.UnsupportedCallError, match="of a policy that has gone"):
        manager.start()
    with attnplug.applied(model, "dense"):
        with pytest.raises(attnplug.UnsupportedCallError, match="of a policy that has gone"):
            manager.start()


def test_a_manager_that_is_lost_locks_nothing():
    with attnplug.applied(llama(), "dense") as model:
        manager = model.init_continuous_batching(ENDLESS, settings(num_blocks=32))
        del manager
        gc.collect()
        assert len(one_by_one(model, prompts((5,)))[0]) == NEW
        assert SESSION not in vars(model)


def test_a_manager_kept_for_the_next_session_goes_with_the_policy():
    ids = prompts((40, 100))
    with attnplug.applied(llama(), GATHER) as model:
        want = one_by_one(model, ids)
        for _ in range(2):
            got = model.generate_batch(
                ids,
                generation_config=ENDLESS,
                continuous_batching_config=settings(num_blocks=32),
                persistent_manager=True,
                warmup=False,
            )
            assert [x.generated_tokens for x in got.values()] == want
        assert model._cached_continuous_batching_manager is not None
    assert not hasattr(model, "_cached_continuous_batching_manager")
    assert batched(model, ids, num_blocks=32) == one_by_one(llama(), ids)  # stock again


def test_a_manager_made_before_apply():
    """It is refused, not served by half: it knows neither the name nor the summaries."""
    model = llama()
    model.generate_batch(
        prompts((5,)),
        generation_config=ENDLESS,
        continuous_batching_config=settings(num_blocks=32),
        persistent_manager=True,
        warmup=False,
    )
    with attnplug.applied(model, "dense"):
        with pytest.raises(attnplug.UnsupportedCallError, match="made before attnplug"):
            model.init_continuous_batching(ENDLESS, settings(num_blocks=32))
        assert SESSION not in vars(model)
        model.destroy_cached_continuous_batching_manager()
        assert len(batched(model, prompts((5,)), num_blocks=32)[0]) == NEW


def test_a_trace_of_batching_is_refused():
    """It would be empty: a request's calls carry no number of their own."""
    with attnplug.applied(llama(), "dense+stream") as model:
        with tracing({first_layer(model): object()}):
            got = model.generate_batch(
                prompts((40,)),
                generation_config=ENDLESS,
                continuous_batching_config=settings(num_blocks=32),
                warmup=False,
            )
    assert "a trace is recorded of generate" in next(iter(got.values())).error


def test_the_users_settings_stay_as_they_are():
    own = settings(num_blocks=32, max_blocks_per_request=7)
    with attnplug.applied(llama(), MOMO) as model:
        manager = model.init_continuous_batching(ENDLESS, own)
        assert manager.continuous_batching_config.max_blocks_per_request == 7
        manager.stop()
    assert own.allow_block_sharing and own.use_cuda_graph is None


def test_a_failed_manager_leaves_the_model_alone():
    with attnplug.applied(llama(), "dense") as model:
        before = dict(vars(model))
        with pytest.raises(TypeError):
            model.init_continuous_batching(nonsense=1)
        with pytest.raises(AttributeError):
            model.init_continuous_batching(ENDLESS, object())
        assert vars(model).keys() == before.keys()
        assert len(one_by_one(model, prompts((5,)))[0]) == NEW


def test_report_says_what_batching_serves_otherwise():
    with attnplug.applied(llama(), "momo+sketch") as model:
        text = str(attnplug.report(model))
    assert "continuous batching: momo serves prompts that come whole, dense serves pieces" in text
    assert "sketch needs rows of a cache of its own: dense decodes" in text
    with attnplug.applied(llama(), GATHER) as model:
        assert "continuous batching" not in str(attnplug.report(model))
