"""The kernels of Arm, compiled by a cross compiler and run by an emulator: the numbers are those of this processor.

Sums of quantised products are exact integers, so these are equal bit by bit. How fast they are is not measured.
"""

import mmap
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from shoestring import native
from shoestring.models import packed24, quantized, rounding
from tests.shares import ALL_CASES

COMPILER, EMULATOR = "aarch64-linux-gnu-gcc", "qemu-aarch64"
NATIVE = Path(native.__file__).parent
KERNELS = ("skinny_quantized", "blocked_quantized", "skinny_dense", "skinny_attention")
MEMORY = 32 << 20
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (shutil.which(COMPILER) and shutil.which(EMULATOR)), reason=f"{COMPILER} or {EMULATOR}"),
]


class Arm:
    """A program of another processor, with memory that it shares with this process."""

    def __init__(self, program: Path, shared: Path) -> None:
        shared.write_bytes(bytes(MEMORY))
        with shared.open("r+b") as file:
            self.memory = mmap.mmap(file.fileno(), MEMORY)
        self.used = 0
        self.process = subprocess.Popen(
            [EMULATOR, "-cpu", "max", program, shared], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def tensor(self, like: torch.Tensor) -> torch.Tensor:
        """A copy of a tensor in the shared memory."""
        size = like.numel() * like.element_size()
        at, self.used = self.used, -(-(self.used + size) // 64) * 64 + 64
        if not size:
            return like.clone()
        shared = torch.frombuffer(self.memory, dtype=like.dtype, count=like.numel(), offset=at).view(like.shape)
        return shared.copy_(like)

    def call(self, name: str, *arguments: int | torch.Tensor | None) -> int:
        base = torch.frombuffer(self.memory, dtype=torch.uint8, count=1).data_ptr()
        given = [f"@{a.data_ptr() - base}" if isinstance(a, torch.Tensor) else int(a or 0) for a in arguments]
        print(name, len(given), *given, file=self.process.stdin, flush=True)
        answer = self.process.stdout.readline()
        assert answer, f"{name} ended with {self.process.wait()}"
        self.used = 0  # what the call has returned is copied before the next tensors are made
        return int(answer)

    def close(self) -> None:
        self.process.stdin.close()
        assert self.process.wait(60) == 0


@pytest.fixture(scope="module", params=["armv8-a", *(["armv8.2-a+dotprod"] if ALL_CASES else []), "armv8.6-a"])
def arm(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("arm")
    flags = [flag for flag in native._language(".c").flags if flag != "-march=native"]
    march, sources = f"-march={request.param}", [str(NATIVE / f"{name}.c") for name in KERNELS]
    driver = folder / "driver.o"
    subprocess.run(
        [COMPILER, "-c", "-O1", str(Path(__file__).with_name("arm_driver.c")), "-o", str(driver)], check=True
    )
    program = folder / "program"
    # One by one, as they are compiled for use.
    objects = [str(folder / f"{name}.o") for name in KERNELS]
    for source, to in zip(sources, objects, strict=True):
        subprocess.run([COMPILER, *flags, march, "-c", source, "-o", to], check=True)
    subprocess.run([COMPILER, "-static", "-fopenmp", str(driver), *objects, "-lm", "-o", str(program)], check=True)
    running = Arm(program, folder / "memory")
    running.march = request.param
    yield running
    running.close()


def test_every_kernel_compiles_for_arm(arm, tmp_path):
    flags = [flag for flag in native._language(".c").flags if flag != "-march=native"]
    others = [source for source in sorted(NATIVE.glob("*.c")) if source.stem not in KERNELS]  # `arm` compiles those
    for source in others:
        command = [COMPILER, *flags, "-O1", f"-march={arm.march}", "-c", str(source), "-o", str(tmp_path / "object.o")]
        done = subprocess.run(command, capture_output=True, text=True)
        assert not done.returncode, done.stderr


def test_many_rows_are_multiplied_by_bytes_where_an_instruction_does(arm):
    limits = [arm.call("few_rows", sparse) for sparse in (0, 1)]
    assert limits == ([3, 40] if arm.march == "armv8-a" else [2**31 - 1] * 2)


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def inputs(rows, columns):
    """Rows of unlike sizes, with a group of zeros, ties between integers, tiny numbers, infinity and NaN."""
    x = draw(rows, columns, seed=rows) * torch.logspace(-3, 3, rows)[:, None]
    x[0, :32] = 0
    x[-1, :32] = torch.arange(-16, 16) + 0.5
    if rows > 2:
        x[1, :32] = 1e-38
        x[2, 5] = float("nan")
        x[-1, -1] = -float("inf")
    return x


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("bits", [8, 4])
def test_products_of_quantised_weights_are_the_same_bits(arm, bits, sparse):
    for outputs, columns in ((1, 64), (17, 192), (33, 320)):
        weight, places = draw(outputs, columns), None
        if sparse:
            groups = weight.view(-1, 4)
            kept = torch.zeros_like(groups, dtype=torch.bool).scatter_(1, groups.abs().topk(2, 1).indices, True)
            weight, chosen = packed24.pack(torch.where(kept, groups, 0).view(outputs, columns))
            places = rounding.pack_places(chosen)
        packed, scales = rounding.pack(*rounding.quantize(weight, bits), bits)
        for rows in (1, 2, 7, 8, 9, 17):
            for name in ("skinny_quantized", "blocked_quantized"):
                x = inputs(rows, columns)
                wanted = quantized._native(quantized.kernel(name), x, packed, scales, outputs, places)
                given = [arm.tensor(each) for each in (packed, scales)]
                given.append(arm.tensor(places) if sparse else None)
                room = arm.tensor(torch.zeros(quantized.room(rows, columns), dtype=torch.uint8))
                y = arm.tensor(torch.full((rows, outputs), 7.0))
                arm.call(name, bits, rows, outputs, columns, *given, arm.tensor(x), room, y, 1)
                torch.testing.assert_close(y, wanted, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dequantised_weights_are_the_same_bits(arm, bits, dtype):
    packed, scales = rounding.pack(*rounding.quantize(draw(37, 96), bits), bits)
    scales.view(-1)[:8] = torch.tensor([0, 1e-7, 6e-5, 65504, -1, float("inf"), -float("inf"), 1e-8]).half()
    dense = arm.tensor(torch.zeros(37, 96, dtype=dtype))
    bf16 = dtype is torch.bfloat16
    arm.call("dequantize", bits, bf16, 37, 3, arm.tensor(packed), arm.tensor(scales), dense, 1)
    torch.testing.assert_close(dense, rounding.dequantize(packed, scales, 37, dtype), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dense_products_agree_with_float64_alone_and_beside_others(arm, dtype):
    for outputs, columns in ((1, 1), (17, 5), (49, 192), (64, 1027)):
        weight, x = draw(outputs, columns).to(dtype), draw(17, columns, seed=1).to(dtype)
        for rows in (1, 3, 8, 9, 17):
            y = arm.tensor(torch.zeros(rows, outputs, dtype=dtype))
            where = arm.tensor(torch.cat([weight.flatten(), torch.zeros(8, dtype=dtype)]))
            arm.call("skinny_dense", dtype is torch.bfloat16, rows, outputs, columns, where, arm.tensor(x[:rows]), y, 1)
            wanted = x[:rows].double() @ weight.double().T
            size = x[:rows].double().abs() @ weight.double().abs().T
            bound = size * 2e-6 + wanted.abs() * (2**-8 if dtype is torch.bfloat16 else 0) + 1e-30
            assert bool(((y.double() - wanted).abs() <= bound).all())
            if rows == 1:
                alone = y.clone()
            assert torch.equal(y[:1], alone)


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("width", [16, 64, 128, 208])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_agrees_with_float64(arm, dtype, width, window):
    B, T, H, K, S = 2, 3, 4, 2, 150
    q, k, v = (draw(B, *shape, width, seed=i).to(dtype) for i, shape in enumerate(((T, H), (K, S), (K, S))))
    positions = torch.tensor([[0, 63, 64], [17, 128, 149]])
    y = arm.tensor(torch.zeros_like(q))
    given = [arm.tensor(each) for each in (q, k, v, positions)]
    shape, strides = (B, H, K, T, width, window or 0), (K * S * width, S * width, width)
    arm.call("skinny_attention", dtype is torch.bfloat16, *shape, *given[:3], *strides, given[3], T, y, 1)
    at = torch.arange(S)
    seen = (at <= positions[..., None]) & (at > positions[..., None] - (window or S))
    scores = torch.einsum("bthd,bhsd->bhts", q.double(), k.double().repeat_interleave(H // K, 1)) / width**0.5
    weights = scores.masked_fill(~seen[:, None], -torch.inf).softmax(-1)
    wanted = torch.einsum("bhts,bhsd->bthd", weights, v.double().repeat_interleave(H // K, 1))
    error = 1e-2 if dtype is torch.bfloat16 else 1e-5
    torch.testing.assert_close(y.double(), wanted, rtol=error, atol=error)
