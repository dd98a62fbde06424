"""Tiny models of every architecture that is written as GGUF, and llama.cpp itself, to read what was written."""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import json
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import tokenizers
import torch
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers
from torch import nn

from shoestring.data.tokenizer import END, Tokenizer
from shoestring.models import gguf_file, gguf_tokenizer

TEXT = "the quick brown fox jumps over the lazy dog, and the dog sleeps on 12 mats; isn't it 7 o'clock?\n " * 4
_GROUPED = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
            "num_key_value_heads": 2, "max_position_embeddings": 64}  # fmt: skip
_LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}
_YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
_LLAMA3 = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
           "original_max_position_embeddings": 32}  # fmt: skip
_LONG = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0 + i / 8 for i in range(8)],
         "long_factor": [2.0 + i for i in range(8)], "original_max_position_embeddings": 32}  # fmt: skip
MODELS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", _GROUPED),
    "llama, biases and width of heads": (
        "llama",
        _GROUPED | {"attention_bias": True, "mlp_bias": True, "head_dim": 32, "tie_word_embeddings": True},
    ),
    "llama, linear": ("llama", _GROUPED | {"rope_parameters": _LINEAR}),
    "llama, yarn": ("llama", _GROUPED | {"rope_parameters": _YARN}),
    "llama, llama3": ("llama", _GROUPED | {"rope_parameters": _LLAMA3}),
    "mistral": ("mistral", _GROUPED | {"sliding_window": None, "head_dim": 16}),
    "qwen2": ("qwen2", _GROUPED | {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", _GROUPED | {"head_dim": 32}),
    "gemma": ("gemma", _GROUPED | {"head_dim": 16}),
    "gemma2": ("gemma2", _GROUPED | {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 8}),
    "gemma3": (
        "gemma3_text",
        _GROUPED | {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 8, "num_hidden_layers": 6},
    ),
    "phi3": ("phi3", _GROUPED),
    "phi3, longrope": ("phi3", _GROUPED | {"max_position_embeddings": 128, "rope_parameters": _LONG}),
    "gpt2": ("gpt2", {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64}),
    "olmo2": ("olmo2", _GROUPED),
    "starcoder2": ("starcoder2", _GROUPED),
    "granite": (
        "granite",
        _GROUPED
        | {"attention_multiplier": 0.3, "embedding_multiplier": 2.0, "residual_multiplier": 0.5, "logits_scaling": 3.0},
    ),
    "stablelm": ("stablelm", _GROUPED | {"use_qkv_bias": True}),
    "gptneox": (
        "gpt_neox",
        {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
         "max_position_embeddings": 64},
    ),
    "smollm3": ("smollm3", _GROUPED | {"num_hidden_layers": 4}),
    "cohere2": (
        "cohere2",
        _GROUPED | {"head_dim": 16, "sliding_window": 8, "num_hidden_layers": 4, "logit_scale": 0.5},
    ),
    "arcee": ("arcee", _GROUPED | {"head_dim": 16}),
    "phi2": ("phi", _GROUPED),
    "falcon": (
        "falcon",
        {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 64},
    ),
}  # fmt: skip
"""Type of transformers' model and entries of its configuration, by a name that begins with llama.cpp's."""


def byte_level(**bpe: Any) -> Tokenizer:
    """A byte-level tokenizer with a special token and one that is not, in the middle of a text."""
    engine = tokenizers.Tokenizer(models.BPE(**bpe))
    engine.pre_tokenizer, engine.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=[END], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    engine.train_from_iterator([TEXT], trainer)
    engine.add_tokens([AddedToken("<think>", normalized=False)])
    engine.add_special_tokens([AddedToken("<|im_end|>", normalized=False)])
    return Tokenizer(engine)


def byte_fallback() -> Tokenizer:
    """A tokenizer as Llama 2's: SentencePiece's merges, and bytes for what has no token."""
    letters = sorted(set(TEXT.replace(" ", "\u2581")))
    trained = tokenizers.Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    trained.train_from_iterator([TEXT], trainers.BpeTrainer(vocab_size=80, show_progress=False))
    merges = [tuple(merge) for merge in json.loads(trained.to_str())["model"]["merges"]]
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *letters]
    names += [first + second for first, second in merges]
    vocabulary = {name: i for i, name in enumerate(dict.fromkeys(names))}
    engine = tokenizers.Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    engine.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    engine.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    engine.add_special_tokens(["<unk>", "<s>", "</s>"])
    engine.add_tokens([AddedToken("<think>", normalized=False)])
    engine.post_processor = processors.TemplateProcessing(
        single=["<s>", "$A"], special_tokens=[("<s>", engine.token_to_id("<s>"))]
    )
    return Tokenizer(engine)


def split_as(rule: gguf_tokenizer.Rule) -> Tokenizer:
    """A byte-level tokenizer that splits texts by a rule of llama.cpp, as transformers' tokenizers express it."""
    tokenizer = byte_level(ignore_merges=rule.ignore_merges)
    steps: list[Any] = []
    for pattern in rule.patterns:
        if pattern == r"\p{N}":
            steps.append(pre_tokenizers.Digits(individual_digits=True))
        else:
            steps.append(pre_tokenizers.Split(Regex(pattern), "isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    tokenizer.engine.pre_tokenizer = pre_tokenizers.Sequence(steps)
    return tokenizer


def random_text(draw: Random) -> str:
    """Letters, digits, spaces, marks and special tokens in any order."""
    letters = "abcdthequickfox  \n\r\t'sStTllLL0123456789.,;:!?-_()[]{}<>|éßÀ漢字ü🙂\u200b\u00a0\u0301²½٣"
    words = ["the quick", "don't", "I'LL", "<think>", "<|im_end|>", END, "</s>", " fox ", "  \n\n", "12345", "\r\n",
             "\u3000", "isn't", "naïve", "foo_bar", "x=1;", " \t"]  # fmt: skip
    return "".join(draw.choice([draw.choice(letters), draw.choice(words)]) for _ in range(draw.randint(0, 25)))


def read_special(tokenizer: Tokenizer, text: str) -> list[int]:
    """Ids of a text as it begins and ends, with what spells a special token read as that token."""
    engine = tokenizers.Tokenizer.from_str(tokenizer.engine.to_str())
    engine.encode_special_tokens = False
    return engine.encode(text, add_special_tokens=True).ids


def build(name: str, vocabulary: int) -> nn.Module:
    """A random model whose texts depend on all of its weights."""
    import transformers

    kind, entries = MODELS[name]
    ids = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    config = transformers.AutoConfig.for_model(kind, **entries, **ids, vocab_size=vocabulary)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(len(name))
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        for weight in model.parameters():
            noise = torch.randn_like(weight)
            weight.data = noise / 8 if weight.dim() == 2 else weight.data + noise / 5
    return model


@torch.inference_mode()
def logits(model: nn.Module, tokens: list[int]) -> torch.Tensor:
    """Logits (T, V) of a text."""
    answer = model(torch.tensor([tokens]))
    return getattr(answer, "logits", answer)[0]


def greedy(model: nn.Module, tokenizer: Tokenizer, prompt: list[int], tokens: int) -> list[int]:
    """The likeliest tokens after a prompt; none ends it."""
    ends = [token for token in map(tokenizer.engine.token_to_id, (END, "<|im_end|>", "</s>")) if token is not None]
    text = list(prompt)
    for _ in range(tokens):
        last = logits(model, text)[-1].clone()
        last[ends] = -torch.inf
        text.append(int(last.argmax()))
    return text[len(prompt) :]


# -- llama.cpp ---------------------------------------------------------------------------------------------------------


def has_llama_cpp() -> bool:
    """Whether the package xllamacpp, llama.cpp in a wheel, is installed."""
    return importlib.util.find_spec("xllamacpp") is not None


class LlamaCpp:
    """llama.cpp's server on loopback."""

    def __init__(self, address: str) -> None:
        self.address = address

    def post(self, path: str, **content: Any) -> dict[str, Any]:
        request = urllib.request.Request(
            self.address + path, json.dumps(content).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request) as answer:
            return json.load(answer)

    def tokenize(self, text: str, *, special: bool = False) -> list[int]:
        """Ids of a text; with `special` it begins and ends as the file says, and special tokens are read."""
        return self.post("/tokenize", content=text, add_special=special, parse_special=special)["tokens"]

    def greedy(self, prompt: list[int], tokens: int) -> list[int]:
        """The likeliest tokens after a prompt; ends do not end them."""
        return self._complete(prompt, tokens)["tokens"]

    def logarithms(self, prompt: list[int], vocabulary: int) -> dict[int, float]:
        """Logarithms of the probabilities of the next token; empty where it is an incomplete character."""
        steps = self._complete(prompt, 1, vocabulary).get("completion_probabilities", [])
        return {entry["id"]: entry["logprob"] for step in steps for entry in step["top_logprobs"]}

    def _complete(self, prompt: list[int], tokens: int, likeliest: int = 0) -> dict[str, Any]:
        return self.post(
            "/completion", prompt=prompt, n_predict=tokens, temperature=0, ignore_eos=True, cache_prompt=False,
            n_probs=likeliest, samplers=["top_k"], top_k=1, return_tokens=True,
        )  # fmt: skip


def lost_keys(path: Path, again: Path) -> list[str]:
    """Keys of a file that have another value where llama.cpp has read and saved it."""
    library = importlib.import_module("gguf")
    ours, theirs = (gguf_file.read(file, library)[0] for file in (path, again))
    of_file = ("general.file_type", "general.quantization_version")
    return [
        key
        for key, value in ours.items()
        if key not in of_file and not np.array_equal(np.array(theirs.get(key)), np.array(value))
    ]


def save_again(path: Path, out: Path) -> None:
    """Have llama.cpp open a file and save the model itself, by the C functions of the same wheel.

    Their arguments are passed as bytes: which fields the structure has is not known here, and they are not changed.
    """
    spec = importlib.util.find_spec("xllamacpp")
    assert spec is not None and spec.submodule_search_locations
    library = ctypes.CDLL(str(next(Path(spec.submodule_search_locations[0]).glob("xllamacpp*.so"))))

    class Arguments(ctypes.Structure):
        _fields_ = (("content", ctypes.c_char * 1024),)

    library.llama_model_default_params.restype = Arguments
    library.llama_model_load_from_file.argtypes = [ctypes.c_char_p, Arguments]
    library.llama_model_load_from_file.restype = ctypes.c_void_p
    library.llama_model_save_to_file.argtypes = [ctypes.c_void_p, ctypes.c_char_p]
    library.llama_model_free.argtypes = [ctypes.c_void_p]
    silent = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)(lambda *_: None)
    library.llama_log_set(silent, None)
    model = library.llama_model_load_from_file(str(path).encode(), library.llama_model_default_params())
    if model is None:
        raise ValueError(f"llama.cpp does not open {path}")
    library.llama_model_save_to_file(model, str(out).encode())
    library.llama_model_free(model)
    library.llama_log_set(None, None)


@contextmanager
def llama_cpp(path: Path, context: int = 64) -> Iterator[LlamaCpp]:
    """llama.cpp with the model of a file, with keys and values in f32."""
    xllamacpp = importlib.import_module("xllamacpp")
    params = xllamacpp.CommonParams()
    params.model.path = str(path)
    params.n_ctx, params.n_parallel, params.warmup, params.verbosity = context, 1, False, -1
    params.cpuparams.n_threads = 1
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    server = xllamacpp.Server(params)
    yield LlamaCpp(server.listening_address)
    del server
