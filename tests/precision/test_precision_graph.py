"""[precision.graph]: what is computed in 16 bits, in a step that is traced and in a job."""

from __future__ import annotations

import operator

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

import shoestring as ss
from shoestring.core.errors import ConfigError, ConflictError
from shoestring.graph.trace import trace
from shoestring.precision import Autocast, Graph
from shoestring.precision.casts import CAST
from shoestring.precision.graph_pass import Rules, narrow
from shoestring.precision.operators import operator_name
from shoestring.testing.jobs import batch, sgd, tiny


class Block(nn.Module):
    """Products with a gate between them, a norm, attention and a loss."""

    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)
        self.head = nn.Linear(16, 8)

    def forward(self, x, targets):
        x = x + self.down(F.silu(self.up(self.norm(x))))
        heads = x.unflatten(-1, (2, 8)).transpose(1, 2)
        x = x + F.scaled_dot_product_attention(heads, heads, heads, is_causal=True).transpose(1, 2).flatten(2)
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


def step_of(model=None, rows=3):
    torch.manual_seed(0)
    model = model or Block()
    inputs = torch.randn(rows, 4, 16), torch.randint(8, (rows, 4))
    return model, inputs, trace(model, *inputs)


def computed(step, model, inputs):
    """Loss and gradients, operator by operator."""
    own = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    values = {node: own[name].detach() for name, node in {**step.nodes.parameters, **step.nodes.buffers}.items()}
    values |= dict(zip(step.nodes.inputs, inputs, strict=True)) | {node: torch.ones(()) for node in step.nodes.tangents}
    holders = [node for node in step.module.graph.nodes if node.op == "placeholder"]
    return fx.Interpreter(step.module).run(*(values[node] for node in holders), enable_io_processing=False)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("forward", [False, True])
def test_types_of_results_are_kept_and_values_are_close(dtype, forward):
    model, inputs, step = step_of()
    before = computed(step, model, inputs)
    narrowing = narrow(step.module, Rules(dtype, forward))
    step.module.recompile()
    step.module.graph.lint()
    after = computed(step, model, inputs)
    assert [one.dtype for one in after if one is not None] == [one.dtype for one in before if one is not None]
    for new, old in zip(after, before, strict=True):
        if old is not None and old.is_floating_point():
            assert (new - old).norm() <= 0.03 * old.norm()
    assert 0 < narrowing.narrow < narrowing.elements
    made = [node for node in step.module.graph.nodes if node.op == "call_function"]
    for node in made:
        if operator_name(node) in ("mm", "addmm", "bmm"):
            assert node.meta["val"].dtype == dtype
        if operator_name(node) in ("_log_softmax", "nll_loss_forward"):
            value = node.meta["val"]
            assert (value[0] if isinstance(value, tuple) else value).dtype == torch.float32
        if node.target is not operator.getitem:  # what the graph says of types is what it computes
            assert "val" in node.meta


def test_what_is_said_of_types_is_what_is_computed():
    model, inputs, step = step_of()
    narrow(step.module, Rules(forward=True))

    class Checked(fx.Interpreter):
        def run_node(self, node):
            made = super().run_node(node)
            said = node.meta.get("val")
            for one, other in zip(*((v if isinstance(v, tuple | list) else (v,)) for v in (made, said)), strict=False):
                if isinstance(one, torch.Tensor) and node.op == "call_function":
                    assert (one.dtype, one.shape) == (other.dtype, other.shape), node.format_node()
            return made

    own = dict(model.named_parameters())
    values = {node: own[name].detach() for name, node in step.nodes.parameters.items()}
    values |= dict(zip(step.nodes.inputs, inputs, strict=True)) | {node: torch.ones(()) for node in step.nodes.tangents}
    holders = [node for node in step.module.graph.nodes if node.op == "placeholder"]
    Checked(step.module).run(*(values[node] for node in holders), enable_io_processing=False)


def test_a_tensor_is_cast_once():
    _, _, step = step_of()
    narrow(step.module)
    casts = [(node.args[0], node.args[1]) for node in step.module.graph.nodes if node.target is CAST]
    assert len(casts) == len({*casts})


def test_an_operator_may_be_kept_wide():
    _, _, step = step_of()
    bits = narrow(step.module, Rules(wide=("silu", "silu_backward"))).bits
    assert {bits.wide[node] for node in bits.wide if operator_name(node) == "silu"} == {"needs 32 bits"}


def losses(*features):
    with ss.compose(ss.Job(tiny(), optimizer=sgd()), features) as job:
        return [job.step(batch(number)).item() for number in range(3)], dict(job.trace.facts)


@pytest.mark.slow
def test_a_job_computes_in_16_bits_and_says_how_much():
    plain, _ = losses()
    narrow_ones, facts = losses(Graph(dtype="bf16"))
    assert plain != narrow_ones
    assert torch.allclose(torch.tensor(plain), torch.tensor(narrow_ones), rtol=2e-2)
    assert 0 < facts["narrowed_elements"] <= 1
    assert facts["narrowed_casts"] > 0
    assert losses(Graph(dtype="fp32"))[0] == plain


@pytest.mark.slow
def test_a_compiler_takes_operators_apart_after_the_pass():
    alone, facts = losses(Graph(dtype="bf16"))
    compiled, facts_compiled = losses(Graph(dtype="bf16"), ss.graph.Compile())
    assert facts == facts_compiled
    assert torch.allclose(torch.tensor(alone), torch.tensor(compiled), rtol=1e-2)


def test_what_cannot_be_is_refused():
    with pytest.raises(ConflictError, match="both choose the types"):
        losses(Autocast(dtype="bf16"), Graph(dtype="bf16"))
    with pytest.raises(ConfigError, match="no operator `sillu`"):
        losses(Graph(dtype="bf16", wide=("sillu",)))
