"""Which layers become sparse: the feed-forward ones of models that we know, those that are named, and no others."""

import pytest
import torch
from torch import nn

import shoestring as ss
from shoestring.core.errors import ConfigError, ConflictError
from shoestring.core.job import attachments_of
from shoestring.models.gpt import GPT, GPTConfig
from shoestring.sparse import SRSTE, SSTE, STE, TSRSTE
from shoestring.sparse.layers import choose, is_feed_forward


def gpt(**changes):
    shape = {"vocab_size": 64, "dim": 32, "layers": 2, "heads": 4, "kv_heads": 2, "hidden": 48, "context": 16}
    return GPT(GPTConfig(**shape | changes))


def sparse_layers(model, *patterns, rows_too=True):
    return list(choose(model, patterns, rows_too=rows_too).sparse)


def test_the_feed_forward_layers_of_our_gpt():
    expected = [f"blocks.{block}.mlp.{name}" for block in range(2) for name in ("gate_up", "down")]
    assert sparse_layers(gpt(tied=False)) == expected


@pytest.mark.parametrize(
    ("name", "sparse"),
    [
        ("model.layers.0.mlp.gate_proj", True),
        ("model.layers.0.self_attn.q_proj", False),
        ("model.layers.11.self_attn.o_proj", False),
        ("transformer.h.3.mlp.c_fc", True),
        ("transformer.h.3.attn.c_proj", False),
        ("encoder.layer.0.intermediate.dense", True),
        ("encoder.layer.0.output.dense", True),
        ("encoder.layer.0.attention.output.dense", False),
        ("gpt_neox.layers.0.mlp.dense_h_to_4h", True),
        ("decoder.block.0.layer.2.DenseReluDense.wi_0", True),
        ("layers.0.feed_forward.w1", True),
        ("layers.0.fc1", True),
        ("model.layers.0.block_sparse_moe.gate", True),
        ("lm_head", False),
        ("classifier", False),
        ("embed.proj", False),
    ],
)
def test_names_of_other_models(name, sparse):
    assert is_feed_forward(name) == sparse


def test_a_hugging_face_llama():
    transformers = pytest.importorskip("transformers")
    shape = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape, num_attention_heads=4))
    assert sparse_layers(model) == [f"model.layers.0.mlp.{name}_proj" for name in ("gate", "up", "down")]


def test_patterns():
    assert sparse_layers(gpt(), "blocks.0.*") == [
        f"blocks.0.{name}" for name in ("attention.qkv", "attention.out", "mlp.gate_up", "mlp.down")
    ]


def test_why_layers_stay_dense():
    class Own(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    model = nn.ModuleDict(
        {
            "good": nn.Linear(8, 8),
            "columns": nn.Linear(6, 8),
            "rows": nn.Linear(8, 6),
            "frozen": nn.Linear(8, 8).requires_grad_(False),
            "own": Own(8, 8),
            "attention": nn.MultiheadAttention(8, 2),
            "encoder": nn.TransformerEncoderLayer(8, 2, 8),
            "one": nn.Linear(8, 8),
            "two": nn.Linear(8, 8),
            "patched": nn.Linear(8, 8),
        }
    )
    model["two"].weight = model["one"].weight
    model["patched"].forward = lambda x: x
    choice = choose(model, ["*"], rows_too=True)
    assert list(choice.sparse) == ["good"]
    reasons = {name: why for name, why in choice.dense.items() if not name.startswith("encoder.self")}
    assert reasons == {
        "columns": "8 x 6 does not divide into groups of four",
        "rows": "6 x 8 does not divide into groups of four",
        "frozen": "it is not trained",
        "own": "Own has a forward pass of its own",
        "attention.out_proj": "nn.MultiheadAttention reads its weight itself",
        "encoder.linear1": "nn.TransformerEncoderLayer reads its weight itself",
        "encoder.linear2": "nn.TransformerEncoderLayer reads its weight itself",
        "one": "another layer has the same weight",
        "two": "another layer has the same weight",
        "patched": "another feature replaces its forward pass",
    }
    assert "rows" in choose(model, ["rows"], rows_too=False).sparse


@pytest.mark.parametrize(
    ("features", "message"),
    [
        ([SSTE(layers=("nothing",))], "`sparse.sste` matches no linear layer of GPT"),
        ([TSRSTE(layers=("head",))], "leaves every layer dense: head: 30 x 32 does not divide into groups of four"),
        ([TSRSTE(refresh=0)], "`sparse.tsrste.refresh` must be at least 1 step, got 0"),
        ([TSRSTE(tail=1.0)], "`sparse.tsrste.tail` is a share of the steps"),
        ([TSRSTE(calibrate=-0.1)], "`sparse.tsrste.calibrate` is a share of the steps"),
        ([SRSTE(masked_decay=-1.0)], "`sparse.srste.masked_decay` must lie in"),
        ([SRSTE(masked_decay=float("nan"))], "`sparse.srste.masked_decay` must lie in"),
        ([STE(refresh=-1)], "`sparse.ste.refresh` must be at least 1 step"),
    ],
)
def test_bad_settings_in_one_line(features, message):
    with pytest.raises(ConfigError, match="`sparse") as error:
        ss.compose(ss.Job(gpt(tied=False, vocab_size=30)), features)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_two_that_want_the_same_layer():
    with pytest.raises(ConflictError, match=r"`sparse\.sste` and `sparse\.srste` both make `blocks"):
        ss.compose(ss.Job(gpt()), [SSTE(), SRSTE()])
    with ss.compose(ss.Job(gpt()), [SSTE(layers=("*.down",)), SRSTE(layers=("*.gate_up",))]):
        pass


def test_what_check_says():
    job = ss.Job(gpt())
    said = TSRSTE(layers=("blocks.*",)).explain(attachments_of(job))
    assert "8 linear layers, 100% of the weights of all, in 2 of the 3 products" in said
    assert "no step is faster here: a cpu has no sparse units" in said
    said = SSTE(layers=("blocks.*.mlp.*", "head")).explain(
        attachments_of(ss.Job(gpt(tied=False, dim=36, hidden=50, heads=6)))
    )
    assert "dense: `blocks.0.mlp.down`" in said


def test_gpt2s_transposed_layers_are_left_dense_and_it_is_said():
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=8, n_positions=8, n_embd=8, n_layer=1, n_head=1)
    choice = choose(transformers.GPT2LMHeadModel(config), [], rows_too=False)
    assert not choice.sparse and list(choice.dense) == ["transformer.h.0.mlp.c_fc", "transformer.h.0.mlp.c_proj"]
    assert "it is a Conv1D" in choice.dense["transformer.h.0.mlp.c_fc"]
