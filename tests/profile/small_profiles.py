"""Small profiles with known times, as a program and an attacker leave them."""

from dataclasses import replace

from shoestring.profile.recording import Facts, Profile
from shoestring.profile.tree import NodeKind, TreeBuilder

SOURCE = "import torch\n\n\ndef main():\n    loss = model(x)\n    loss.backward()\n    item()\n\n\nmain()\n"
HOSTILE = "</script><img src=x onerror=\"document.documentElement.dataset.pwned='yes'\"><!--"
MILLION = 1_000_000
TORCH = "/v/lib/python3.11/site-packages/torch/nn/modules/module.py"


def small(file="/a/train.py", source=SOURCE, scale=1, extra="", shift=0, operator="aten::mm"):
    """A program whose forward line takes 40 ms with 25 ms of backward, and another one 30 ms; `scale` times that."""
    builder = TreeBuilder()
    main = builder.node(0, NodeKind.PYTHON, f"{file}\t<module>", 10 + shift)

    def line(number, above=main):
        return builder.node(above, NodeKind.PYTHON, f"{file}\tmain", number + shift)

    def took(node, milliseconds, **more):
        time = milliseconds * MILLION * scale
        builder.add(node, own=time, **({"count": 4, "least": time // 8, "most": time // 2} | more))

    module = builder.node(line(5), NodeKind.PYTHON, f"{TORCH}\tModule._call_impl", 1700)
    linear = builder.node(module, NodeKind.OPERATOR, "aten::linear")
    took(linear, 10)
    matrix = builder.node(linear, NodeKind.OPERATOR, operator)
    took(matrix, 30, bytes=4096, flops=8192)
    link = builder.node(line(6), NodeKind.LINK, "", 0, linear)
    took(builder.node(link, NodeKind.BACKWARD, "AddmmBackward0"), 25)
    builder.add(line(7), own=30 * MILLION * scale)
    if extra:
        took(builder.node(main, NodeKind.SPAN, extra), 5)
    tree = builder.build()
    seconds = tree.inclusive[0] / 1e9
    facts = Facts(["train.py", "--fast"], seconds, 0.001 * scale, versions={"torch": "2.13"})
    return Profile(tree, facts, {file: source})


def hostile():
    """A profile all of whose texts would run, were they taken for markup."""
    profile = small(f"/a/{HOSTILE}.py", SOURCE.replace("item()", HOSTILE), extra=HOSTILE, operator=HOSTILE)
    facts = replace(profile.facts, command=[HOSTILE, HOSTILE], versions={HOSTILE: HOSTILE})
    return replace(profile, facts=facts)
