"""A base model that is tuned on chats ends its answers by the token that its template ends them with: in `generate`, in
the server, in transformers, and in llama.cpp.
"""

import json
from contextlib import contextmanager

import pytest
import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers, trainers

from shoestring.cli import main
from shoestring.decode.serve.server import serving
from shoestring.decode.settings.generation import Generation, SamplingOptions, SeededOptions
from shoestring.decode.settings.serving import Serving
from shoestring.models.loading import load_model
from shoestring.verbs.generate import generate
from shoestring.verbs.interchange import export
from shoestring.verbs.quantize import quantize
from shoestring.verbs.serve import build_app
from shoestring.verbs.settings import Quantization

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.slow

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'user' %}Q: {{ m.content }}\nA:"
    "{% else %} {{ m.content }}<|over|>\n{% endif %}{% endfor %}"
)
PROMPT, TOKENS = "Q: what is seven?\nA:", 60


@pytest.fixture(scope="module")
def tuned(tmp_path_factory):
    """The run folder of a base model that was tuned on chats; its files name `<|endoftext|>` alone."""
    root = tmp_path_factory.mktemp("tuned")
    base = root / "base"
    base.mkdir()
    engine = tokenizers.Tokenizer(models.BPE())
    engine.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    engine.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<|endoftext|>", "<|begins|>", "<|over|>"]  # llama.cpp knows the names of usual ends by itself
    trainer = trainers.BpeTrainer(vocab_size=280, special_tokens=special, initial_alphabet=alphabet)
    engine.train_from_iterator(["what is the answer? it is"] * 9, trainer)
    engine.save(str(base / "tokenizer.json"))
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>", "chat_template": TEMPLATE}
    (base / "tokenizer_config.json").write_text(json.dumps(names))
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=engine.get_vocab_size(), hidden_size=48, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128, bos_token_id=None, eos_token_id=0,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(base)
    words = ["one", "two", "three", "four", "five", "six", "seven", "eight"]
    chats = root / "chats.jsonl"
    with chats.open("w") as file:
        for number in range(64):
            word = words[number % 8]
            talk = [
                {"role": "user", "content": f"what is {word}{'?' * (1 + number // 8)}"},
                {"role": "assistant", "content": f"it is {word}."},
            ]
            file.write(json.dumps({"messages": talk}) + "\n")
    (root / "run.toml").write_text(
        "[run]\nsteps = 120\nbatch = 8\n[optim.adamw]\nlr = 1e-2\n"
        '[data]\nform = "chat"\ntokenizer = "model"\nsequence = 64\n'
    )
    run = root / "run"
    assert (
        main(["train", str(root / "run.toml"), "--model", str(base), "--data", str(chats), "--folder", str(run)]) == 0
    )
    return run


@pytest.fixture(scope="module")
def answer(tuned):
    """What transformers writes, greedily: it ends by `<|over|>`, and of its own accord."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(tuned / "model")
    model = transformers.AutoModelForCausalLM.from_pretrained(tuned / "model")
    prompt = tokenizer(PROMPT, return_tensors="pt")
    tokens = model.generate(**prompt, max_new_tokens=TOKENS, do_sample=False)[0, prompt.input_ids.shape[1] :].tolist()
    assert tokens[-1] == tokenizer.convert_tokens_to_ids("<|over|>") and len(tokens) < TOKENS / 2
    return tokenizer.decode(tokens[:-1])


def test_the_files_name_the_end_of_text_and_the_end_of_answers(tuned):
    assert json.loads((tuned / "model" / "generation_config.json").read_text())["eos_token_id"] == [0, 2]
    assert json.loads((tuned / "model" / "config.json").read_text())["eos_token_id"] == [0, 2]


@pytest.mark.parametrize("form", ["hf", "safetensors"])
def test_an_export_of_a_checkpoint_names_them_too(tuned, tmp_path, form):
    export(tuned, tmp_path / "out", format=form)
    assert json.loads((tmp_path / "out" / "generation_config.json").read_text())["eos_token_id"] == [0, 2]


def test_check_describes_the_model(tuned, capsys):
    assert main(["check", "--model", str(tuned)]) == 0
    lines = dict(line.split("  ", 1) for line in capsys.readouterr().out.splitlines())
    assert lines["texts end by"].strip() == "0 <|endoftext|>, 2 <|over|>"
    assert lines["chat template"].strip() == "yes" and lines["context"].strip() == "128 tokens"


def test_generate_ends_as_transformers_does(tuned, answer):
    chosen = Generation(max_tokens=TOKENS, sampling=SeededOptions(temperature=0))
    assert "".join(generate(tuned, PROMPT, chosen)) == answer


@contextmanager
def client(model):
    from openai import OpenAI

    app = build_app(str(model), Serving(port=0), SamplingOptions(temperature=0))
    with serving(app) as url, OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as asking:
        yield asking, app.served.name


def test_the_server_ends_as_transformers_does(tuned, answer):
    with client(tuned) as (asking, name):
        plain = asking.completions.create(model=name, prompt=PROMPT, max_tokens=TOKENS).choices[0]
        talk = [{"role": "user", "content": "what is seven?"}]
        chat = asking.chat.completions.create(model=name, messages=talk, max_tokens=TOKENS).choices[0]
    assert (plain.text, plain.finish_reason) == (answer, "stop")
    assert (chat.message.content, chat.finish_reason) == (answer, "stop")


def test_llama_cpp_ends_as_transformers_does(tuned, answer, tmp_path):
    llama_cpp = pytest.importorskip("xllamacpp")
    file = tmp_path / "tuned.gguf"
    quantize(str(tuned), file, Quantization(bits=32, format="gguf"))
    params = llama_cpp.CommonParams()
    params.model.path, params.n_ctx, params.cpuparams.n_threads, params.warmup = str(file), 128, 1, False
    server = llama_cpp.Server(params)
    replied = server.handle_completions({"prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0})
    choice = replied["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == (answer, "stop")
    _, tokenizer = load_model(file)
    text = "".join(generate(file, PROMPT, Generation(max_tokens=TOKENS, sampling=SeededOptions(temperature=0))))
    assert tokenizer is not None and text == answer
