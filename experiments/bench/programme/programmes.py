"""The programmes: for each call its steps, and for each step the jobs that run at once."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from bench.gpu_models import MODELS

ROOT = Path(__file__).resolve().parents[3]
BASE, LARGE, HUGE, GIANT = MODELS
MINUTES = "{minutes}"
"""Placeholder in a command: the time limit of its job."""
RESULT = "{result}"
"""Placeholder in a command: the file that it writes its measurements to."""
WORK = "{work}"
"""Placeholder in a command: a folder that the jobs of a call share."""
DATA = "{data}"
"""Placeholder in a command: CIFAR-10 as the bundle has it."""
RUN = "{run}"
"""Placeholder in a command: the folder of a training, whose evaluations are its measurements."""

CALL_S, PROGRAMME_S = 600, 1200
"""Most seconds of a call and of a programme, by the limits of their jobs."""


@dataclass(frozen=True)
class Job:
    """One program."""

    name: str
    """Name in the report."""
    limit: float
    """Seconds after which it is stopped."""
    prediction: str
    """Predicted outcome; none if the report compares figures one by one."""
    command: tuple[str, ...]
    """Arguments of the Python interpreter."""
    rehearsal: tuple[str, ...] = ()
    """Words that are added in a rehearsal on the CPU."""
    reads: Literal["file", "stdout", "junit", "run"] = "file"
    """Source of its measurements: the JSON file RESULT, the last JSON line printed, pytest's XML file RESULT, RUN."""
    environment: dict[str, str] = field(default_factory=dict)
    """Additional environment variables."""


@dataclass(frozen=True)
class Call:
    """One use of the GPU."""

    steps: tuple[tuple[Job, ...], ...]
    """Jobs in order; those of a step run at the same time."""

    @property
    def jobs(self) -> tuple[Job, ...]:
        """All jobs."""
        return tuple(job for step in self.steps for job in step)

    @property
    def limit(self) -> float:
        """Seconds that the call takes at most."""
        return sum(max(job.limit for job in step) for step in self.steps)

    @property
    def takes_data(self) -> bool:
        """Whether a job reads CIFAR-10."""
        return any(DATA in job.command for job in self.jobs)


def vitpar(*words: str) -> tuple[str, ...]:
    """Return vitpar's command with these words."""
    return ("-m", "vitpar_cli.main", *words)


TINY = ("--tiny", "--device", "cpu")
TESTS = (
    "adamw or (synchronises and 0.8) or (resumes and 197) or deterministic or math_attention or checkpoint or "
    "device_does or (dp1+ckpt and fp8 and compiled)"
)
"""Tests of tests/parallel/test_cuda.py that a first run is for."""
AT_ONCE = {"TORCHINDUCTOR_COMPILE_THREADS": "3"}
"""Environment of jobs that compile beside others."""


def check(name: str, precision: str, *model: str, small: tuple[str, ...] = (), **environment: str) -> Job:
    """Return a comparison of the compiled plan dp1 with one process. small: words that a rehearsal adds."""
    words = ("check", "--mesh", "dp1", "--precision", precision, "--compile", "--device", "cuda", "--json")
    return Job(
        name,
        130,
        "passes",
        vitpar(*words, *model),
        rehearsal=("--no-compile", "--device", "cpu", *small),
        reads="stdout",
        environment=AT_ONCE | environment,
    )


def bench(name: str, limit: float, prediction: str, *words: str) -> Job:
    """Return a call of bench_gpu.py."""
    command = ("experiments/bench_gpu.py", *words, "--minutes", MINUTES, "--json", RESULT)
    return Job(name, limit, prediction, command, rehearsal=(*TINY, "--steps", "1"))


def product(name: str, limit: float, prediction: str, *words: str, small: tuple[str, ...]) -> Job:
    """Return a call of ``vitpar bench``, on random data if no recipe is named. small: words that a rehearsal adds."""
    few = ("--repeats", "3", "--device", "cuda", "--json")
    command = vitpar("bench", "--mesh", "dp1", "--precision", "bf16", *words, *few)
    tiny = ("--no-compile", "--device", "cpu", "--precision", "fp32", "--batch-size", "4", "--steps", "1", *small)
    return Job(name, limit, prediction, command, rehearsal=tiny, reads="stdout")


def peers(model: str, limit: float, prediction: str, *others: str) -> Job:
    """Return a comparison of vitpar's step with timm's loop on one model, and with `others`."""
    only = ("--only", "vitpar_step", "timm_loop", *others, "--rounds", "4", "--steps", "10")
    command = ("experiments/bench_peers.py", "--device", "cuda", "--models", model, *only, "--minutes", MINUTES)
    small = ("--precision", "fp32", "--models", "vit_tiny_patch16_224", "--steps", "1", "--minutes", "9")
    return Job(f"peers {model}", limit, prediction, (*command, "--json", RESULT), rehearsal=(*TINY, *small))


CIFAR = f"{WORK}/cifar10"
PACK = Job("pack", 60, "none", vitpar("data", "pack", DATA, CIFAR), ("--no-decode",), "stdout")
"""Packs CIFAR-10 for the trainings of a call."""


def train(name: str, limit: float, prediction: str, recipe: str, *words: str) -> Job:
    """Return a training on CIFAR-10."""
    command = ("train", "--recipe", recipe, "--mesh", "dp1", "--data", CIFAR, "--run-dir", RUN, "--device", "cuda")
    tiny = ("--steps", "2", "--batch-size", "64", "--device", "cpu")
    return Job(name, limit, prediction, vitpar(*command, *words), tiny, "run")


def lite(name: str, epochs: int, limit: float, prediction: str, *words: str) -> Job:
    """Return a training of a ViT-Lite-7/4 with labels, augmented on the device; 97 steps are an epoch of 50,000."""
    rate = ("--batch-size", "512", "--set", "optimizer.lr=1e-3", "--set", "train.eval_every=10 epochs")
    return train(name, limit, prediction, "cifar10_vit_lite", *rate, "--steps", str(97 * epochs), *words)


UNLABELLED = (
    (train("masked", 190, "the loss falls through 50 epochs", "experiments/cifar10_masked.toml"),),
    (lite("after masking", 20, 110, "top-1 75 to 85 % after 20 epochs", "--weights", f"{WORK}/masked/weights"),),
    (train("self-distilled", 200, "kNN 50 to 70 % after 15 epochs", "experiments/cifar10_self_distilled.toml"),),
)
"""Trainings without labels, and one with labels that begins with the weights of the first."""


MICRO = Job(
    "micro", 60, "rates of the data sheet, row by row", ("experiments/gpu_micro.py", "--json", RESULT), rehearsal=TINY
)


def tests(name: str, limit: float, prediction: str, chosen: str, *files: str) -> Job:
    """Return the tests that pytest's expression `chosen` names, of tests/parallel/test_cuda.py and other files."""
    words = ("-m", "pytest", "-q", "-o", "addopts=", "-p", "no:cacheprovider", "-n", "4", "--junitxml", RESULT)
    command = (*words, "tests/parallel/test_cuda.py", *files, "-k", chosen)
    return Job(name, limit, prediction, command, reads="junit", environment=AT_ONCE)


PYTEST = tests("tests", 130, "all pass; cuDNN's backward may not repeat bit by bit", TESTS)


def planner(name: str, limit: float, prediction: str, *words: str, small: tuple[str, ...] = ()) -> Job:
    """Return a command of the planner on one GPU. small: words that a rehearsal adds, which measures little."""
    rehearsal = (*small, "--device", "cpu", "--seconds", "0.01")
    return Job(name, limit, prediction, vitpar(*words), rehearsal=rehearsal, reads="stdout")


STEPS = ("--sections", "vitpar", "--steps", "6", "--models")
INPUT = ("--sections", "vitpar", "input", "--steps", "6", "--batch-size", "256")
WAYS = ("--workers", "4", "8", "15", "--augment", "crop", "rand", "--decode", "host", "device")
START = ("--model", LARGE, "--batch-size", "64", "--steps", "5")
SMALL = ("--model", "vit_tiny_patch16_224", "--warmup", "1")
"""Words that a rehearsal of START adds."""
HARDWARE, MODEL, RECIPE = f"{WORK}/hardware.json", f"{WORK}/model.json", "experiments/planner_gpu.toml"
SMALL_MODEL = ("--recipe", "experiments/planner.toml")
PROFILED = ("--recipe", RECIPE, "--ranks", "1", "--out", MODEL)
VALIDATED = ("--recipe", RECIPE, "--hardware", HARDWARE, "--model-profile", MODEL, "--json")
PLANNER = (
    (planner("hardware profile", 30, "none", "profile", "hardware", "--ranks", "1", "--out", HARDWARE),),
    (planner("model profile", 70, "none", "profile", "model", *PROFILED, small=SMALL_MODEL),),
    (
        # rows are kept after each run, so that a time limit costs the last one only
        replace(
            planner(
                *("validate", 150, "time within 5 %, memory within 3 %"),
                *("validate", "dp1", "dp1+ckpt", *VALIDATED, "--out", RESULT),
                small=SMALL_MODEL,
            ),
            reads="file",
        ),
    ),
)
"""Predictions of the planner on one GPU, compared with measurements."""

SMALL_IMAGES = (
    (
        PACK,
        tests(
            "tests of small images", 90, "all pass", "device_images or synchronises", "tests/data/test_device_images.py"
        ),
    ),
    (
        Job(
            *("small images", 40, "60,000 images/s with RandAugment"),
            ("experiments/bench_data.py", "--small", CIFAR, "--device", "cuda", "--json", RESULT),
            rehearsal=("--device", "cpu"),
        ),
    ),
    (
        product(
            *("small model", 75, "60,000 images/s"),
            *("--recipe", "cifar10_vit_lite", "--data", CIFAR, "--batch-size", "512", "--steps", "20"),
            small=(),
        ),
    ),
)
"""Small images augmented on a GPU: the pixels of the host, and how many a second."""

PROGRAMMES: dict[str, tuple[Call, ...]] = {
    # Truth and headline: is it correct, how fast is it, and where is the time?
    "A": (
        Call(
            (
                (MICRO,),
                (
                    check("check bf16", "bf16"),
                    # upstream: pytorch#190796 and #193061, wrong gradients with mix-order reduction.
                    check("check bf16, no mix-order", "bf16", TORCHINDUCTOR_MIX_ORDER_REDUCTION="0"),
                    check("check fp32", "fp32"),
                    PYTEST,
                ),
                (bench("steps", 250, "each model in the table", "--sections", "vitpar", "--steps", "6"),),
            )
        ),
        Call(
            (
                (PACK,),
                (lite("with labels", 25, 140, "top-1 75 to 82 % after 25 epochs"),),
                (peers(BASE, 130, "timm takes 1.1 to 1.25 times as long"),),
            )
        ),
    ),
    # What takes longest to start: JPEG input, predictions of the planner, peers on larger models.
    "C": (
        Call(((bench("JPEG", 150, "at most 1.03", *INPUT, "--models", BASE),), *PLANNER)),
        Call((*SMALL_IMAGES, (peers(LARGE, 130, "timm takes 1.1 to 1.25 times as long"),))),
    ),
    # Input: by threads, with and without RandAugment, decoded on the host and on the GPU.
    "I": (
        Call(
            (
                (tests("tests", 60, "all pass", "decoding or synchronises", "tests/data/test_device_decoding.py"),),
                (bench("JPEG", 420, "at most 1.05 with 15 threads", *INPUT, *WAYS, "--models", BASE),),
            )
        ),
    ),
    # Start of a process, without and with what the compiler has cached; peers on larger models.
    "P": (
        Call(
            (
                (product("first start", 150, "60 s to the end of the first step", *START, small=SMALL),),
                (product("second start", 75, "20 s to the end of the first step", *START, small=SMALL),),
                (peers(LARGE, 220, "timm takes 1.1 to 1.25 times as long, by hand 1.0", "plain"),),
            )
        ),
        Call(((peers(HUGE, 300, "timm takes 1.05 to 1.2 times as long, by hand 1.0", "plain"),),)),
    ),
    # Quality: a small model with labels, then without.
    "D": (
        Call(((PACK,), (lite("with labels", 100, 520, "top-1 87 to 90 % after 100 epochs"),))),
        Call(((replace(PACK, name="pack again"),), *UNLABELLED)),
    ),
    # Packed attention; products whose algorithm, with what follows them in their epilogue, torch's compiler chooses by
    # measurement.
    "E": (
        Call(
            (
                (tests("tests", 70, "all pass", "packed"),),
                (bench("steps", 95, "MFU 46 %", *STEPS, LARGE),),
                (
                    replace(
                        bench("steps, packed", 95, "1 to 6 % less time", "--attention", "packed", *STEPS, LARGE),
                        rehearsal=(*TINY, "--steps", "1", "--attention", "auto"),
                    ),
                ),
                (
                    replace(
                        bench("steps, products chosen", 300, "1 to 4 % less time", *STEPS, LARGE),
                        environment={"TORCHINDUCTOR_MAX_AUTOTUNE_GEMM": "1"},
                    ),
                ),
            )
        ),
    ),
}
"""Calls by programme."""
