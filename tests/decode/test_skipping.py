"""Skipping: what is measured, what it costs, and which sublayers each rule chooses."""

from dataclasses import replace
from itertools import combinations, pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoestring.core.errors import ConfigError
from shoestring.decode.adapter import adapt
from shoestring.decode.drafters import skipping as drafting
from shoestring.decode.drafters.skipping import SkippingDrafter
from shoestring.decode.engine import Engine, Request, Row
from shoestring.decode.settings.generation import Sampling, Speculation
from shoestring.decode.skipping import adapters, baselines, choice
from shoestring.decode.skipping.adapters import OnlineSkipping, Skipping
from shoestring.decode.skipping.choice import SkipCandidate, Statistics, least_harm, saved_bytes
from shoestring.decode.skipping.cost import count_bytes
from shoestring.decode.skipping.importance import Observer
from shoestring.decode.skipping.plan import SkipPlan, make_plan
from shoestring.models.gpt import GPT, GPTConfig
from shoestring.models.sublayers import skipping, sublayers

LAYERS = 6
SHAPE = {"vocab_size": 31, "dim": 16, "layers": 3, "heads": 4, "kv_heads": 2, "hidden": 24, "context": 32}
TOKENS = torch.randint(31, (2, 8), generator=torch.Generator().manual_seed(1))


@pytest.fixture
def model():
    torch.manual_seed(0)
    return GPT(GPTConfig(**SHAPE, init_std=0.3)).eval()


# -- importance --------------------------------------------------------------------------------------------------------


@torch.no_grad()
def streams(model, tokens):
    """x and y of each sublayer and of each block, computed from the model's parts."""
    given = {}
    handles = [
        block.attention.register_forward_hook(lambda _, __, out, i=i: given.__setitem__(i, out))
        for i, block in enumerate(model.blocks)
    ]
    model(tokens)
    for handle in handles:
        handle.remove()
    x, found, blocks = model.embed(tokens), {}, []
    for i, block in enumerate(model.blocks):
        y = x + given[i]
        z = y + block.mlp(block.mlp_norm(y))
        found |= {f"blocks.{i}.attention": (x, y), f"blocks.{i}.mlp": (y, z)}
        blocks.append((x, z))
        x = z
    return found, blocks


def cosine(x, y):
    return float((x * y).sum(-1).div(x.norm(dim=-1) * y.norm(dim=-1)).mean())


@torch.no_grad()
def test_running_means_equal_those_of_all_tokens_at_once(model):
    with Observer(model) as observer:
        assert observer.changes() == {}
        for piece in TOKENS:
            model(piece[None])
    model(TOKENS + 1)  # no longer observed
    found, blocks = streams(model, TOKENS)
    assert list(observer.changes()) == list(found)
    for name, change in observer.changes().items():
        x, y = found[name]
        assert change.similarity == pytest.approx(cosine(x, y), abs=1e-6)
        assert change.ratio == pytest.approx(float(y.norm() / x.norm()), abs=1e-6)
    for change, (x, y) in zip(observer.block_changes(), blocks, strict=True):
        assert change.similarity == pytest.approx(cosine(x, y), abs=1e-6)


@torch.no_grad()
def test_padding_and_skipped_sublayers_teach_nothing(model):
    names = list(sublayers(model))
    with skipping(model, {names[1]: 0.7}), Observer(model, leave_out=[names[1]]) as observer:
        observer.real = torch.tensor([[True] * 8, [True] * 5 + [False] * 3])
        model(TOKENS)
    with skipping(model, {names[1]: 0.7}), Observer(model, leave_out=[names[1]]) as expected:
        model(TOKENS[:1])
        model(TOKENS[1:, :5])
    assert names[1] not in observer.changes()
    assert len(observer.changes()) == len(names) - 1
    for name, change in observer.changes().items():
        assert change.similarity == pytest.approx(expected.changes()[name].similarity, abs=1e-6)
        assert change.ratio == pytest.approx(expected.changes()[name].ratio, abs=1e-6)


# -- cost --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [True, False])
def test_bytes_are_those_of_the_weights_and_of_the_context(tied):
    model = GPT(GPTConfig(**SHAPE, tied=tied)).half()
    costs = count_bytes(model)
    attention, mlp = costs.sublayers["blocks.1.attention"], costs.sublayers["blocks.1.mlp"]
    assert attention.weights == 2 * (16 * (4 + 2 * 2) * 4 + 16 * 16 + 16)
    assert attention.at(10) - attention.at(4) == 6 * 2 * (2 * 2 * 4)
    assert mlp.at(10) == mlp.at(0) == 2 * (3 * 16 * 24 + 16)
    assert costs.total(0) == 2 * (sum(each.numel() for each in model.parameters()) - (0 if tied else 31 * 16))
    assert costs.total(7) - costs.total(0) == 3 * 7 * 2 * (2 * 2 * 4)


def test_a_sliding_window_bounds_what_attention_costs():
    transformers = pytest.importorskip("transformers")
    shape = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.MistralConfig(vocab_size=31, num_key_value_heads=2, sliding_window=5, **shape)
    cost = count_bytes(adapt(transformers.MistralForCausalLM(config), 32)).sublayers["model.layers.0.self_attn"]
    assert cost.at(5) == cost.at(30) > cost.at(4)


# -- choice ------------------------------------------------------------------------------------------------------------


def statistics(harms, sizes, loss=None):
    kinds = ("attention", "feed-forward")
    candidates = [
        SkipCandidate(f"{i}", kinds[i % 2], i // 2, size, 1 - harm, 1 + 0.1 * i, harm)
        for i, (harm, size) in enumerate(zip(harms, sizes, strict=True))
    ]
    blocks = [1 - harms[2 * i] - harms[2 * i + 1] for i in range(len(harms) // 2)]
    losses = None if loss is None else lambda ratios: [loss(ratios)] * 3
    return Statistics(candidates, blocks, sum(sizes) + 10, losses)


@given(
    st.lists(st.tuples(st.floats(0, 1), st.integers(1, 40)), min_size=2, max_size=8).filter(lambda x: len(x) % 2 == 0),
    st.floats(0, 1),
)
@settings(max_examples=150)
def test_the_knapsack_is_solved_exactly(sublayers, share):
    harms, sizes = zip(*sublayers, strict=True)
    given = statistics(harms, sizes)
    budget = share * sum(sizes)
    chosen = least_harm(given, budget)
    assert saved_bytes(given, chosen) >= budget
    assert all(chosen[name] == 1 + 0.1 * int(name) for name in chosen)
    every = (set(each) for n in range(len(harms) + 1) for each in combinations(range(len(harms)), n))
    least = min(sum(harms[i] for i in each) for each in every if sum(sizes[i] for i in each) >= budget)
    assert sum(harms[int(name)] for name in chosen) == pytest.approx(least, abs=1e-9)


def test_bytes_without_a_common_divisor_are_rounded_in_favour_of_the_budget(monkeypatch):
    monkeypatch.setattr(choice, "GRID", 10)
    given = statistics([0.1, 0.2, 0.3, 0.4], [997, 1009, 1013, 1021])
    for budget in (1, 900, 1500, 2500, 4040):
        assert saved_bytes(given, least_harm(given, budget)) >= budget


@pytest.mark.parametrize("rule", [least_harm, baselines.early_exit, baselines.released_adaskip, baselines.layer_drop])
def test_more_than_all_sublayers_is_refused(rule):
    with pytest.raises(ConfigError, match=r"all sublayers together move 91%"):
        rule(statistics([0.1] * 4, [25] * 4), 101)


def test_published_rules_choose_what_they_are_published_to_choose():
    sizes = [30, 10] * LAYERS
    given = statistics([0.5, 0.01, 0.02, 0.5, 0.3, 0.1, 0.4, 0.4, 0.1, 0.1, 0.6, 0.6], sizes)

    def layers(ratios):
        assert set(ratios.values()) <= {1.0}
        found = sorted({int(name) // 2 for name in ratios})
        assert len(ratios) == 2 * len(found)  # whole ones
        return found

    assert layers(baselines.early_exit(given, 80)) == [4, 5]
    assert layers(baselines.early_exit(given, 81)) == [3, 4, 5]
    assert layers(baselines.unified_skipping(given, 80)) == [1, 4]
    assert layers(baselines.unified_skipping(given, 120)) == [1, 3, 5]
    assert layers(baselines.layer_drop(given, 80)) == [2, 4]
    assert list(baselines.released_adaskip(given, 50)) == ["1", "2", "5"]  # by similarity alone, 50 bytes
    assert list(baselines.released_adaskip(given, 51)) == ["1", "2", "5", "8"]
    # Skipped layers rise from one to three over the text, which is two on average.
    assert layers(baselines.skip_decode(given, 80, progress=0.0)) == [1]
    assert layers(baselines.skip_decode(given, 80, progress=1.0)) == [1, 2, 3]
    grid = [(i + 0.5) / 32 for i in range(32)]
    mean = sum(saved_bytes(given, baselines.skip_decode(given, 80, at)) for at in grid) / 32
    assert mean >= 80


def test_the_oracle_takes_what_costs_least_for_its_bytes_together_with_what_is_skipped_already():
    alone = {"0": 0.3, "1": 0.05, "2": 0.2, "3": 0.5}

    def loss(ratios):  # "1" and "2" do each other's work: one of them may go
        return sum(alone[name] for name in ratios) + (1.0 if {"1", "2"} <= ratios.keys() else 0.0)

    given = statistics([0.1] * 4, [30, 10, 30, 10], loss)
    assert list(baselines.greedy_oracle(given, 10)) == ["1"]
    assert list(baselines.greedy_oracle(given, 40)) == ["1", "0"]
    with pytest.raises(ConfigError, match="loss"):
        baselines.greedy_oracle(statistics([0.1] * 4, [1] * 4), 1)


def test_measured_losses_tell_apart_what_similarity_cannot():
    """Of four alike, the first is needed, and of the second and the third, only one."""
    names = ("0", "2", "4", "6")

    def loss(ratios):
        needed = 5.0 * ("0" in ratios) + 2.0 * ({"2", "4"} <= ratios.keys())
        scaled = sum(0.1 for ratio in ratios.values() if ratio != 1)
        return needed + 0.01 * len(ratios) + scaled + 3.0 * sum(int(name) % 2 for name in ratios)

    given = statistics([0.1, 0.9] * 4, [10, 10] * 4, loss)
    assert "0" in least_harm(given, 30)
    chosen = choice.least_loss(given, 20)
    assert len(chosen) == 2
    assert chosen.keys() < set(names) - {"0"}
    assert loss(chosen) < 0.1
    assert set(chosen.values()) == {1.0}
    # What is better on one text of three, and worse on the others, is not taken.
    unsure = replace(given, losses=lambda ratios: [loss(ratios), *([0.9 * ("0" not in ratios)] * 2)])
    assert choice.least_loss(unsure, 20).keys() == least_harm(given, 20).keys()
    assert choice.least_loss(statistics([0.1, 0.9] * 4, [10, 10] * 4), 20) == least_harm(given, 20)


def test_sublayers_are_exchanged_while_that_lowers_the_loss():
    """Six alike of which neighbours must not be skipped together: no sum over sublayers says so."""

    def loss(ratios):
        skipped = sorted(int(name) for name in ratios)
        return sum(other - one == 2 for one, other in pairwise(skipped)) + 3.0 * sum(name % 2 for name in skipped)

    given = statistics([0.1, 0.9] * 6, [10, 10] * 6, loss)
    assert loss(choice.least_loss(given, 30)) == 0
    assert loss(choice.in_order_of_similarity(given, 30)) > 0
    assert len(choice.least_loss(given, 30)) == 3


# -- plans -------------------------------------------------------------------------------------------------------------


def test_a_plan_saves_what_it_says_and_survives_a_file(model, tmp_path):
    plan = make_plan(model, [TOKENS], 0.4, context=16)
    with torch.no_grad(), skipping(model, plan.ratios):
        after = torch.nn.functional.cross_entropy(model(TOKENS)[:, :-1].flatten(0, 1), TOKENS[:, 1:].flatten())
    assert plan.loss_after == pytest.approx(float(after), abs=1e-4)
    costs = count_bytes(model)
    saved = sum(costs.sublayers[name].at(16) for name in plan.ratios) / costs.total(16)
    assert plan.saved == pytest.approx(saved)
    assert 0.4 <= plan.saved < 0.6
    plan.save(tmp_path / "plan.json")
    assert SkipPlan.load(tmp_path / "plan.json") == plan
    for text in ("", "[]", '{"format": 2}', '{"format": 1, "ratios": {"a": "b"}, "context": 1, "saved": 0.1}'):
        (tmp_path / "bad.json").write_text(text)
        with pytest.raises(ConfigError, match="is no skip plan"):
            SkipPlan.load(tmp_path / "bad.json")
    with pytest.raises(ConfigError, match="share of 1"):
        make_plan(model, [TOKENS], 1.0, context=16)


@torch.no_grad()
def test_a_plan_in_every_pass_takes_no_memory_for_attention_that_is_skipped(model):
    ratios = {"blocks.0.attention": 1.1, "blocks.1.mlp": 0.9}
    engine = Engine(Skipping(adapt(model), SkipPlan(ratios, 0, 0.0)))
    row = engine.submit(Request(tokens=[1, 2, 3], max_new=12, sampling=Sampling(temperature=0)))
    while engine.busy:
        engine.step()
    assert sorted(engine.cache.layers) == [1, 2]
    history = [1, 2, 3]
    with skipping(model, ratios):
        for token in row.text:
            assert token == int(model(torch.tensor([history]))[0, -1].argmax())
            history.append(token)


@torch.no_grad()
def test_online_the_prompt_is_read_whole_and_more_feed_forward_is_skipped_where_it_costs_as_little(model, monkeypatch):
    monkeypatch.setattr(adapters, "LEARNT", 10)
    monkeypatch.setattr(adapters, "WATCHED", 6)
    online = OnlineSkipping(adapt(model), 0.3, context=16)
    cache, chosen = online.new_cache(1, 32), []
    whole = online.read(TOKENS[:1], cache)
    torch.testing.assert_close(whole, model(TOKENS[:1]))  # eight tokens are too few: two more are decoded whole
    tokens = torch.arange(18)
    for index, token in enumerate(tokens):
        logits = online.read(token.view(1, 1), cache)
        if index < 2:
            expected = model(torch.cat([TOKENS[0], tokens[: index + 1]])[None])[:, -1:]
            torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
        chosen.append(dict(online.ratios))
    assert chosen[1] == {}
    first, last = chosen[2], chosen[-1]
    assert sum(count_bytes(model).sublayers[name].at(16) for name in first) >= 0.3 * count_bytes(model).total(16)
    assert first.items() <= last.items()
    assert all(name.endswith("mlp") for name in last.keys() - first.keys())
    assert chosen[7] == first  # what was watched counts after six tokens
    assert all(each == last for each in chosen[8:])


def test_the_price_of_a_choice_admits_what_costs_no_more():
    given = statistics([0.3, 0.04, 0.1, 0.2], [30, 10, 30, 10])
    assert choice.price(given, {"1": 1.0}) == pytest.approx(0.004)
    assert choice.price(given, {}) == 0
    assert list(choice.within_price(given, 0.005)) == ["1"]
    assert list(choice.within_price(given, 0.004, "attention")) == ["2"]


# -- drafting ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("slots", [1, 3])
def test_drafting_without_sublayers_changes_no_text_and_leaves_the_cache_as_it_was(model, slots, monkeypatch):
    monkeypatch.setattr(drafting, "LEAST", 6)
    model = model.double()

    def generate(**options):
        engine = Engine(model, slots=slots, **options)
        rows = [
            engine.submit(Request(tokens=[1 + i, 2, 3], max_new=12 + i, sampling=Sampling(temperature=i % 2, seed=i)))
            for i in range(5)
        ]
        while engine.busy:
            engine.step()
        return [row.text for row in rows], engine

    speculation = Speculation(draft_length=3)
    drafter = SkippingDrafter(speculation, share=0.2)
    texts, engine = generate(drafter=drafter, speculation=speculation)
    plain, without = generate()
    assert texts == plain
    assert 0 < engine.counts.drafts.accepted[0] < engine.counts.drafts.drafts
    assert drafter.ratios
    assert engine.counts.passes < without.counts.passes
    for layer, pair in engine.cache.layers.items():
        for mine, theirs in zip(pair, without.cache.layers[layer], strict=True):
            for row, length in enumerate(engine.cache.lengths[:1]):
                torch.testing.assert_close(mine[row, :, :length], theirs[row, :, :length], rtol=0, atol=1e-9)


@torch.no_grad()
def test_drafts_lie_behind_the_text_and_are_overwritten_when_they_are_verified(model):
    adapter = adapt(model)
    cache = adapter.new_cache(1, 32)
    adapter.read(TOKENS[:1], cache)
    drafter = SkippingDrafter(Speculation(draft_length=3), ratios={"blocks.1.attention": 1.0})
    drafter.attach(adapter, cache)
    row = Row(Request(tokens=[1], max_new=9), [*TOKENS[0].tolist(), 4], slot=0)
    before = {layer: pair[0].clone() for layer, pair in cache.layers.items()}
    (draft,) = drafter.draft([row], [3])
    assert len(draft.tokens) == 3
    assert cache.lengths == [8]
    written = [layer for layer in before if not torch.equal(before[layer], cache.layers[layer][0])]
    assert written == [0, 2]
    full, fresh = adapter.read(torch.tensor([[4, *draft.tokens]]), cache), adapter.new_cache(1, 32)
    whole = adapter.read(torch.tensor([[*row.history, *draft.tokens]]), fresh)
    torch.testing.assert_close(full, whole[:, 8:], rtol=1e-4, atol=1e-4)
