"""Specification of `gru_imdb`: a GRU that tells positive from negative film reviews.

Embedding 30,000 × 125; one GRU layer of 100 units, its last output; dense 2. Softmax cross-entropy (mean over the
batch), Adam with dense updates of every row. No dropout, no masking: padding is a token like any other.

The GRU is cuDNN's, from h = 0: r = σ(W_ir x + b_ir + W_hr h + b_hr), z likewise,
n = tanh(W_in x + b_in + r ∘ (W_hn h + b_hn)), h ← (1 − z) ∘ n + z ∘ h.

Parameters are named, shaped and laid out as PyTorch does it: (out, in), with the gates r, z, n one below the other in
the GRU's. Each notebook converts on load.
"""

from __future__ import annotations

from typing import Dict, Iterator, List, NamedTuple, Tuple

import numpy as np

from common import data as datasets
from common.batches import shuffled

TITLE = "GRU on IMDB, training"
METRIC = "test accuracy"

VOCABULARY = 30_000
LENGTH = 150  # tokens of a review: longer ones lose their beginning, shorter ones are padded in front
EMBEDDING = 125
UNITS = 100
CLASSES = 2
BATCH_SIZE = 64
EVALUATION_BATCH_SIZE = 125  # divides every profile's number of test reviews
# As float32 numbers, which is how some frameworks keep them whatever the precision: so float64 runs agree, too.
LEARNING_RATE = float(np.float32(0.001))
BETA1, BETA2 = float(np.float32(0.9)), float(np.float32(0.999))
EPSILON = float(np.float32(1e-8))

#: Canonical parameter names and shapes, in the order of the forward pass.
PARAMETERS: Dict[str, Tuple[int, ...]] = {
    "embedding.weight": (VOCABULARY, EMBEDDING),
    "gru.weight_ih": (3 * UNITS, EMBEDDING),
    "gru.weight_hh": (3 * UNITS, UNITS),
    "gru.bias_ih": (3 * UNITS,),
    "gru.bias_hh": (3 * UNITS,),
    "dense.weight": (CLASSES, UNITS),
    "dense.bias": (CLASSES,),
}

#: Where Adam adds its epsilon: not the same optimizer, since many of this embedding's gradients are smaller than it.
#: Each notebook says which one its framework has, and is held to that one's reference.
OPTIMIZERS = {
    "Adam": "w ← w − η m̂ / (√v̂ + ε), with m̂ = m / (1 − β₁ᵗ) and v̂ = v / (1 − β₂ᵗ)",
    "Adam, epsilon hat": "w ← w − η (√(1 − β₂ᵗ) / (1 − β₁ᵗ)) m / (√v + ε)",
}


class Profile(NamedTuple):
    """How much work one trial does."""

    epochs: int  # at most; `steps` can end sooner
    steps: int  # optimizer steps in all, warm-up included
    warmup_steps: int  # the first steps, trained but left out of the timing
    test_reviews: int  # reviews in the evaluation
    timeout_s: int  # a trial that takes longer is ended
    synthetic: bool  # whether a synthetic set may stand in for IMDB


PROFILES: Dict[str, Profile] = {
    "smoke": Profile(epochs=1, steps=8, warmup_steps=3, test_reviews=250, timeout_s=600, synthetic=True),
    "quick": Profile(epochs=1, steps=80, warmup_steps=10, test_reviews=2000, timeout_s=1800, synthetic=True),
    "full": Profile(epochs=3, steps=1170, warmup_steps=20, test_reviews=25000, timeout_s=3 * 3600, synthetic=False),
}

#: The largest error, relative to the float64 reference, with which a float32 trial is timed.
GATES: Dict[str, float] = {"forward": 1e-5, "loss": 1e-5, "gradient": 1e-4, "steps": 1e-4, "update": 1e-3}


def weights(seed: int = 0) -> Dict[str, np.ndarray]:
    """Return initial parameters by canonical name, float32.

    Zero biases, an embedding drawn from U(±.05), and Glorot-uniform weights, each gate of the GRU a matrix of its own.
    Glorot and Bengio (2010), equation 16: U(±sqrt(6 / (fan_in + fan_out))).
    """
    random = np.random.RandomState(seed)
    parameters = {}
    for name, shape in PARAMETERS.items():
        if "bias" in name:
            parameters[name] = np.zeros(shape, np.float32)
        else:
            fan_out = UNITS if name.startswith("gru") else shape[0]
            limit = 0.05 if name.startswith("embedding") else np.sqrt(6.0 / (shape[1] + fan_out))
            parameters[name] = random.uniform(-limit, limit, shape).astype(np.float32)
    return parameters


def flops_per_example() -> int:
    """Return floating-point operations of one training step for one example.

    A multiply-add counts as two. Only matrix products are counted; the backward pass costs twice the forward pass.
    """
    per_token = 3 * UNITS * (EMBEDDING + UNITS)
    return 3 * 2 * (LENGTH * per_token + CLASSES * UNITS)


def prepare(profile: str, choice: str = "auto") -> str:
    """See to it that the data are at hand, downloading them if need be, and return "real" or "synthetic".

    Raises `common.data.DataError` where there are no data to be had.
    """
    source: str = load(profile, choice).source
    return source


def load(profile: str, choice: str = "auto") -> datasets.Reviews:
    """Return IMDB as int32 tokens (reviews, 150) with int64 labels, 1 for a positive review.

    `choice` is "real", "synthetic" or "auto": real where it can be had, else synthetic if the
    profile allows it. Raises `common.data.DataError` where there are no data to be had.
    """
    spec = PROFILES[profile]
    only_real = choice == "auto" and not spec.synthetic
    reviews = datasets.imdb("real" if only_real else choice, VOCABULARY, LENGTH)
    chosen = np.random.RandomState(0).permutation(len(reviews.test_labels))[: spec.test_reviews]
    return reviews._replace(test_tokens=reviews.test_tokens[chosen], test_labels=reviews.test_labels[chosen])


def batches(
    reviews: datasets.Reviews, profile: str, seed: int = 0, batch_size: int = BATCH_SIZE
) -> Iterator[Tuple[np.ndarray, np.ndarray]]:
    """Yield the training batches of a trial: x int32 tokens (batch, 150), y int64 (batch,), full batches only.

    The order is reshuffled every epoch and depends on `seed` alone, so all frameworks see the same batches.
    """
    spec = PROFILES[profile]
    for chosen in shuffled(len(reviews.train_labels), batch_size, spec.epochs, spec.steps, seed):
        yield reviews.train_tokens[chosen], reviews.train_labels[chosen]


def test_batches(reviews: datasets.Reviews) -> Iterator[Tuple[np.ndarray, np.ndarray]]:
    """Yield the evaluation batches: x int32 tokens (125, 150), y int64 (125,)."""
    for start in range(0, len(reviews.test_labels), EVALUATION_BATCH_SIZE):
        chosen = slice(start, start + EVALUATION_BATCH_SIZE)
        yield reviews.test_tokens[chosen], reviews.test_labels[chosen]


def check_inputs() -> List[Tuple[np.ndarray, np.ndarray]]:
    """Return the two batches on which forward pass, loss and gradients are held against the reference.

    One of the training batch size, of padded reviews; one of a single review as long as can be.
    """
    random = np.random.RandomState(1)
    single = random.randint(3, VOCABULARY, (1, LENGTH)).astype(np.int32)
    return [_made_up(random, BATCH_SIZE), (single, np.array([1]))]


def check_batches() -> List[Tuple[np.ndarray, np.ndarray]]:
    """Return the ten batches on which ten optimizer steps are held against the reference."""
    random = np.random.RandomState(2)
    return [_made_up(random, BATCH_SIZE) for _ in range(10)]


def _made_up(random: np.random.RandomState, count: int) -> Tuple[np.ndarray, np.ndarray]:
    """Return random reviews, padded in front with 0 as real ones are, and labels, three in four of them 1.

    Were they balanced, the gradient of the last bias would nearly cancel, and its relative error say little.
    """
    tokens = random.randint(1, VOCABULARY, (count, LENGTH)).astype(np.int32)
    padding = random.randint(0, LENGTH, count)
    tokens[np.arange(LENGTH) < padding[:, np.newaxis]] = 0
    return tokens, (random.uniform(size=count) < 0.75).astype(np.int64)
