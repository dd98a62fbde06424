"""Models in GGUF, llama.cpp's file format: read as our `GPT` where they are Llamas, and written.

A file holds the shape of the model, its tokenizer and its weights, of which llama.cpp's Q8_0 and Q4_0 are `rounding`'s
numbers of 8 and 4 bits: these are taken over without rounding again, both ways. Rows of the query and key projections
are in another order there: llama.cpp turns neighbouring entries of a head, a `GPT` those half a head apart.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

import numpy as np
import tokenizers
import torch
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers
from torch import Tensor, nn

from shoestring.core.errors import CheckpointError, ConfigError, DataError
from shoestring.data.tokenizer import Tokenizer
from shoestring.models import llama, quantized
from shoestring.models.gpt import GPT, GPTConfig
from shoestring.models.rounding import GROUP, ZERO, Bits, pack, quantize, unpack
from shoestring.storage.whole import open_aside, put_in_place

log = logging.getLogger("shoestring")

Kind = Literal["f32", "f16", "q8_0", "q4_0"]
KINDS: Mapping[int, Kind] = {32: "f32", 16: "f16", 8: "q8_0", 4: "q4_0"}
"""Types of the weights, by their bits."""
_FILE_TYPES = {"f32": "ALL_F32", "f16": "MOSTLY_F16", "q8_0": "MOSTLY_Q8_0", "q4_0": "MOSTLY_Q4_0"}

_NORMAL, _CONTROL, _UNUSED = 1, 3, 5  # types of tokens
_OUTER = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight",
          "lm_head.weight": "output.weight"}  # fmt: skip
_INNER = {"self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
          "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
          "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm",
          "post_attention_layernorm": "ffn_norm"}  # fmt: skip
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_SPLITS = {"gpt-2": "", "default": "", "llama-bpe": _LLAMA3}  # how a text is split before merging; "" is GPT-2's rule


def _library() -> Any:
    try:
        return import_module("gguf")
    except ImportError as error:
        raise ConfigError("GGUF files need the package gguf", hint="pip install shoestring[gguf]") from error


def is_file(path: Path | str) -> bool:
    """Whether a path is that of a GGUF file."""
    return str(path).endswith(".gguf") and Path(path).is_file()


def _name(part: str) -> str:
    """The tensor of a part of the Llama layout."""
    if part in _OUTER:
        return _OUTER[part]
    layer, rest = part.removeprefix("model.layers.").removesuffix(".weight").split(".", 1)
    return f"blk.{layer}.{_INNER[rest]}.weight"


def _neighbours(part: str, config: GPTConfig) -> Tensor | None:
    """The rows of our order that follow one another in llama.cpp's, for query and key projections."""
    heads = {"q_proj.weight": config.heads, "k_proj.weight": config.kv_heads}.get(part.rpartition(".self_attn.")[2])
    if heads is None:
        return None
    rows = torch.arange(heads * config.head_dim)
    return rows.view(heads, 2, config.head_dim // 2).transpose(1, 2).reshape(-1)


# -- reading -----------------------------------------------------------------------------------------------------------


def load(path: Path) -> tuple[nn.Module, Tokenizer | None]:
    """The model in a file, in float32 and with layers of 8 and 4 bits where they are, and its tokenizer.

    Weights of other quantised types are rounded to 8 bits, which is said; a tokenizer that cannot be built is None.

    Raises:
        CheckpointError: it is no GGUF file, it is damaged, or tensors are missing or of the wrong shape.
        ConfigError: `GPT` does not compute what it describes.
    """
    library = _library()
    try:
        reader = library.GGUFReader(path)
        values = {name: field.contents() for name, field in reader.fields.items()}
        tensors = {tensor.name: tensor for tensor in reader.tensors}
    except (OSError, ValueError, IndexError, KeyError) as error:
        raise CheckpointError(f"`{path}` is no GGUF file that can be read: {error}") from error
    config = _config(values, tensors, str(path))
    with torch.device("meta"):
        model = GPT(config)
    state: dict[str, Tensor] = {}
    again: list[str] = []
    for ours, parts in llama.layout(config):
        module = ours.removesuffix(".weight")
        found = [_part(tensors, part, config, path) for part in parts]
        widths = {_bits(tensor.tensor_type.name) for tensor, _ in found}
        width = widths.pop() if len(widths) == 1 else 0
        if width in (8, 4):
            blocks = [_blocks(tensor, rows, width) for tensor, rows in found]
            numbers, scales = (torch.cat(each) for each in zip(*blocks, strict=True))
        else:
            dense = torch.cat([_dense(tensor, rows, path) for tensor, rows in found])
            if width is None:
                state[ours] = dense
                continue
            again += [tensor.tensor_type.name for tensor, _ in found]
            width, (numbers, scales) = 8, quantize(dense, 8)
        quantized.replace(model, {module: width})
        state[f"{module}.weight"], state[f"{module}.scales"] = pack(numbers, scales, width)
    if again:
        log.info("%d tensors of %s are rounded to 8 bits", len(again), ", ".join(sorted(set(again))))
    model.load_state_dict(state, assign=True)
    for module in model.modules():
        if isinstance(module, quantized.QuantizedEmbedding):
            module.like = torch.empty(0)
    return model.eval(), _tokenizer(values, path)


def _config(values: Mapping[str, Any], tensors: Mapping[str, Any], where: str) -> GPTConfig:
    architecture = values.get("general.architecture")
    if architecture != "llama":
        raise ConfigError(f"{where} has the architecture {architecture!r}", hint="only llama is supported")
    given = {name.removeprefix("llama."): value for name, value in values.items() if name.startswith("llama.")}
    try:
        heads, width = given["attention.head_count"], given["embedding_length"]
        shape = GPTConfig(
            vocab_size=int(tensors["token_embd.weight"].shape[1]),
            dim=width,
            layers=given["block_count"],
            heads=heads,
            kv_heads=given.get("attention.head_count_kv", heads),
            hidden=given["feed_forward_length"],
            context=given["context_length"],
            tied="output.weight" not in tensors,
            rope_theta=given.get("rope.freq_base", 10_000.0),
            norm_eps=float(str(np.float32(given["attention.layer_norm_rms_epsilon"]))),  # 1e-5, not its fp32
        )
    except KeyError as error:
        raise CheckpointError(f"{where} lacks {error.args[0]}") from error
    for name, expected in (
        ("rope.dimension_count", shape.head_dim),
        ("attention.key_length", shape.head_dim),
        ("attention.value_length", shape.head_dim),
        ("rope.scaling.type", "none"),
        ("expert_count", 0),
    ):
        if given.get(name, expected) != expected:
            raise ConfigError(f"{where}: llama.{name} is {given[name]!r}", hint=f"only {expected!r} is supported")
    known = {_name(part.name) for _, parts in llama.layout(shape) for part in parts}
    if others := sorted(tensors.keys() - known):
        raise ConfigError(f"{where} has tensors that are not computed with: {', '.join(others[:5])}")
    return shape


def _part(
    tensors: Mapping[str, Any], part: llama.LlamaTensor, config: GPTConfig, path: Path
) -> tuple[Any, Tensor | None]:
    """The tensor of a part, and which of its rows are ours, in order; None where they are in our order."""
    tensor = tensors.get(_name(part.name))
    if tensor is None:
        raise CheckpointError(f"{path} lacks the tensor {_name(part.name)}")
    shape = tuple(int(size) for size in reversed(tensor.shape))
    if shape != part.shape:
        raise CheckpointError(f"{path}: {tensor.name} has shape {shape}, not {part.shape}")
    theirs = _neighbours(part.name, config)
    return tensor, None if theirs is None else theirs.argsort()


def _bits(kind: str) -> Bits | Literal[0] | None:
    """Bits of quantised types: 0 those of which we have no layers, None those of floating-point ones."""
    if kind in ("F32", "F16", "BF16", "F64"):
        return None
    return 8 if kind == "Q8_0" else 4 if kind == "Q4_0" else 0


def _dense(tensor: Any, rows: Tensor | None, path: Path) -> Tensor:
    try:
        values = _library().quants.dequantize(tensor.data, tensor.tensor_type)
    except (NotImplementedError, ValueError) as error:
        raise ConfigError(f"{path}: {tensor.name} has the type {tensor.tensor_type.name}, which is not read") from error
    dense = torch.from_numpy(np.array(values, np.float32))
    return dense if rows is None else dense[rows]


def _blocks(tensor: Any, rows: Tensor | None, bits: Bits) -> tuple[Tensor, Tensor]:
    """Numbers and scales as `rounding` has them, of blocks of a scale and 32 numbers."""
    count, size = int(tensor.shape[1]), 2 + GROUP * bits // 8
    blocks = torch.from_numpy(np.array(tensor.data)).view(torch.uint8).view(count, -1, size)
    blocks = blocks if rows is None else blocks[rows]
    scales, numbers = blocks[..., :2].contiguous().view(torch.float16).squeeze(-1), blocks[..., 2:]
    if bits == 8:
        return numbers ^ 128, scales  # a signed byte, moved to begin at 0
    return torch.cat((numbers & 15, numbers >> 4), -1), scales


def _tokenizer(values: Mapping[str, Any], path: Path) -> Tokenizer | None:
    """The tokenizer of a file; None, which is said, where it is of a kind that is not built."""
    given = {name.removeprefix("tokenizer.ggml."): value for name, value in values.items()}
    kind, split = given.get("model", "none"), given.get("pre", "default")
    if kind != "gpt2" or split not in _SPLITS or "merges" not in given:
        log.warning("%s: its tokenizer, of the kind %s (%s), is not built", path, kind, split)
        return None
    tokens: list[str] = given["tokens"]
    types = given.get("token_type", [_NORMAL] * len(tokens))
    vocabulary = {token: i for i, (token, its) in enumerate(zip(tokens, types, strict=True)) if its != _UNUSED}
    merges = [(first, second) for first, _, second in (merge.partition(" ") for merge in given["merges"]) if second]
    engine = tokenizers.Tokenizer(models.BPE(vocabulary, merges))
    bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not _SPLITS[split])
    if _SPLITS[split]:
        bytes_only = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(_SPLITS[split]), "isolated"), bytes_only])
    engine.pre_tokenizer, engine.decoder = bytes_only, decoders.ByteLevel()
    special = [token for token, its in zip(tokens, types, strict=True) if its == _CONTROL]
    engine.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    companions: dict[str, bytes] = {}
    if (end := given.get("eos_token_id")) is not None:
        companions["tokenizer_config.json"] = json.dumps(
            {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": tokens[end]}
        ).encode()
    if template := values.get("tokenizer.chat_template"):
        companions["chat_template.jinja"] = template.encode()
    try:
        return Tokenizer(engine, str(path), companions)
    except DataError as error:
        log.warning("%s: its tokenizer is not used: %s", path, error)
        return None


# -- writing -----------------------------------------------------------------------------------------------------------


def save(model: nn.Module, tokenizer: Tokenizer | None, path: Path, kind: Kind) -> None:
    """Write a `GPT` and its tokenizer as llama.cpp reads them. The file appears whole or not at all.

    Args:
        kind: the type of weights. Norms are f32; with q4_0, embeddings and the head are q8_0; a weight whose inputs are
            no multiple of 32 is f16. Layers that are quantised already keep their numbers where the type is theirs.

    Raises:
        ConfigError: the model is no `GPT`, or weights cannot be rounded.
    """
    library = _library()
    if not isinstance(model, GPT):
        raise ConfigError(f"a {type(model).__name__} cannot be written as GGUF", hint="only Llamas can")
    file = open_aside(path)
    try:
        writer = library.GGUFWriter(file.name, "llama")
        _describe(writer, model.config, library.LlamaFileType[_FILE_TYPES[kind]])
        if tokenizer is not None:
            _write_tokenizer(writer, tokenizer, model.config)
        for name, data, raw in _tensors(model, kind):
            writer.add_tensor(name, data, raw_dtype=None if raw is None else library.GGMLQuantizationType[raw])
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        put_in_place(file, path)
    except BaseException:
        Path(file.name).unlink(missing_ok=True)
        raise
    finally:
        file.close()


def _describe(writer: Any, config: GPTConfig, file_type: int) -> None:
    writer.add_file_type(file_type)
    writer.add_quantization_version(2)
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.context)
    writer.add_embedding_length(config.dim)
    writer.add_block_count(config.layers)
    writer.add_feed_forward_length(config.hidden)
    writer.add_head_count(config.heads)
    writer.add_head_count_kv(config.kv_heads)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_rope_dimension_count(config.head_dim)


def _write_tokenizer(writer: Any, tokenizer: Tokenizer, config: GPTConfig) -> None:
    table = json.loads(tokenizer.engine.to_str())
    if table["model"]["type"] != "BPE":
        raise ConfigError(f"a tokenizer of type {table['model']['type']} cannot be written as GGUF")
    special = {token["id"] for token in table["added_tokens"] if token["special"]}
    names = {i: token for token, i in tokenizer.engine.get_vocab().items()}
    tokens = [names.get(i, f"[unused{i}]") for i in range(max(config.vocab_size, len(names)))]
    types = [_CONTROL if i in special else _NORMAL if i in names else _UNUSED for i in range(len(tokens))]
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in table["model"]["merges"]]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(_split_of(table["pre_tokenizer"]))
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(merges or [""])
    writer.add_eos_token_id(tokenizer.end_of_text)
    writer.add_bos_token_id(tokenizer.end_of_text)
    writer.add_add_bos_token(False)
    if template := tokenizer.companions.get("chat_template.jinja"):
        writer.add_chat_template(template.decode())


def _split_of(pre_tokenizer: Any) -> str:
    """What llama.cpp calls the way in which a byte-level tokenizer splits a text before merging.

    Raises:
        ConfigError: it has no name for it, or we do not know it.
    """
    steps = pre_tokenizer.get("pretokenizers", [pre_tokenizer]) if isinstance(pre_tokenizer, dict) else []
    patterns = [step["pattern"].get("Regex", "") for step in steps if step["type"] == "Split"]
    if steps and steps[-1]["type"] == "ByteLevel" and not steps[-1]["add_prefix_space"]:
        for name, pattern in _SPLITS.items():
            if patterns == ([pattern] if pattern else []):
                return name
    raise ConfigError("the tokenizer splits texts in a way that cannot be written as GGUF", hint="write it without")


def _tensors(model: GPT, kind: Kind) -> Iterator[tuple[str, np.ndarray, str | None]]:
    """Name, data and type (None of floating-point ones) of every tensor."""
    config = model.config
    for ours, parts in llama.layout(config):
        module: Any = model.get_submodule(ours.removesuffix(".weight"))
        outer = ours.startswith(("embed", "head"))
        for part, rows in zip(parts, _spans(parts), strict=True):
            theirs = _neighbours(part.name, config)
            order = torch.arange(rows.start, rows.stop) if theirs is None else theirs + rows.start
            if len(part.shape) == 1:
                yield _name(part.name), module.weight.detach().float().cpu().numpy(), None
            elif kind in ("f32", "f16") or part.shape[1] % GROUP:
                dense = _weight(module)[order].cpu()
                yield _name(part.name), (dense if kind == "f32" else dense.half()).numpy(), None
            else:
                bits: Bits = 8 if outer or kind == "q8_0" else 4
                yield _name(part.name), _as_blocks(module, order, bits), f"Q{bits}_0"


def _spans(parts: Sequence[llama.LlamaTensor]) -> Iterator[slice]:
    start = 0
    for part in parts:
        yield slice(start, start + part.shape[0])
        start += part.shape[0]


def _weight(module: Any) -> Tensor:
    """The weight of a layer in float32, quantised or not."""
    if isinstance(module, quantized.Quantized):
        return module.dense()
    return module.weight.detach().float()


def _as_blocks(module: Any, order: Tensor, bits: Bits) -> np.ndarray:
    """Rows as bytes: blocks of a scale and 32 numbers."""
    if isinstance(module, quantized.Quantized) and module.bits == bits and module.places is None:
        numbers, scales = unpack(module.weight, module.scales, module.rows)
        numbers, scales = numbers[order], scales[order]
    else:
        numbers, scales = quantize(_weight(module)[order], bits)
    numbers = numbers ^ ZERO[8] if bits == 8 else numbers[..., :16] | numbers[..., 16:] << 4
    blocks = torch.cat((scales.contiguous().unsqueeze(-1).view(torch.uint8), numbers), -1)
    return blocks.flatten(1).cpu().numpy()
