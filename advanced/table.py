"""The table of methods, without PyTorch: names, papers, typed arguments with defaults, conflicts.

`prompts.py` has the entries of the methods that ask the language model for words.

The order of the entries is the order in which methods work: what predicts the label, what adds parameters, what changes
the loss, what sets the pace, what averages the weights. `combined.py` has those that take saved models.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from advanced.combined import COMBINED
from advanced.entries import (
    EVERY,
    Argument,
    MethodEntry,
    count,
    models_joined,
    not_negative,
    one_of,
    part,
    positive,
    share,
    some_of,
)
from advanced.prompts import PREDICTED

WHY = {
    "causal": "reads likelihoods, and a bidirectional model sees the words that it would predict",
    "bidirectional": "does nothing in a causal model, which never sees what follows; add --attention bidirectional",
}
CONTRASTIVE_WHY = "contrastive search needs hidden states that stay; a bidirectional model's do not"
MATRICES = ("compute_query", "compute_key", "compute_value", "compute_output", "w1", "w2", "w3")
FROZEN = ("linear-probe", "lora", "adapter", "prefix", "prompt-tuning", "bitfit", "ia3")  # the pretrained weights stay
READ_ANYWAY = "the last token is what is read anyway"
NO_HEAD = "there is no head that could begin with zeros: the model predicts words"
SOLVED = "the head could not begin with zeros: lp-ft solves it"
NOT_PRETRAINED = "what is drawn anew has no pretrained weights to go back to"
LITTLE_KEPT = "less time, and little for the optimizer to keep"


def of_frozen(reason: str) -> dict[str, str]:
    """A conflict with each method that freezes the pretrained weights."""
    return dict.fromkeys(FROZEN, reason)


def _nothing_anew(settings: dict[str, Any], every: Mapping[str, dict[str, Any]]) -> str:
    if settings["head"] == "zero":
        return NO_HEAD if every.keys() & {"prompt-finetune", "auto-words"} else SOLVED if "lp-ft" in every else ""
    return "" if settings["layers"] else "layers=0 and a head as it is anyway leave nothing to do"


def _nothing_smooth(settings: dict[str, Any], every: Mapping[str, dict[str, Any]]) -> str:
    if not (settings["weight"] or settings["bregman"]):
        return "weight=0 and bregman=0 leave nothing to do"
    if settings["bregman"] and not (settings["decay"] or settings["late_decay"]):
        return "decay=0 and late_decay=0 make the model its own teacher, so that bregman has nothing to do"
    return ""


def _falling_rate(settings: dict[str, Any], every: Mapping[str, dict[str, Any]]) -> str:
    decay = every.get("schedule", {}).get("decay", "none")
    falls = f"it cannot be combined with schedule.decay={decay}, because its mean is one of a constant rate"
    return "" if decay == "none" else f"{falls}; add schedule.decay=none"


# fmt: off
READING = {
    "padding-mask": MethodEntry(
        "advanced.padding_mask.PaddingMask", "hides padding from a bidirectional model and reads the last real token",
        paper="Vaswani et al. 2017", options=("prompt", "finetune"), attention="bidirectional",
    ),
    "pooling": MethodEntry(
        "advanced.pooling.Pooling",
        "represents a text by the mean of its tokens, or by what a trained query attends to",
        {"kind": one_of(("mean", "attention", "last"), "mean", "what is read")},
        paper="arXiv:1908.10084", cost="the last layer of all positions",
        refuses=lambda s, every: READ_ANYWAY if s["kind"] == "last" and "padding-mask" in every else "", families=EVERY,
    ),
    "prompt-tuning": MethodEntry(
        "advanced.prompt_tuning.PromptTuning", "trains vectors before the text and the head alone",
        {"length": count(16, "vectors")},
        conflicts={"linear-probe": "one trains the head alone"}, paper="arXiv:2104.08691", cost="longer texts",
    ),
}

PARAMETERS = {
    "reinit": MethodEntry(
        "advanced.reinit.Reinit", "draws the weights of the top layers anew before training",
        {"layers": count(1, "how many, from the top", 0), "head": one_of(("uniform", "zero"), "uniform", "the head")},
        conflicts=of_frozen("what is drawn anew would never be trained"), paper="arXiv:2006.05987",
        refuses=_nothing_anew, families=EVERY,
    ),
    "linear-probe": MethodEntry(
        "advanced.linear_probe.LinearProbe", "trains the head alone",
        {"solved": Argument(False, "whether the head is solved by logistic regression, without training")},
        conflicts=dict.fromkeys((*FROZEN[1:], "layer-decay"), "it trains the head alone"), paper="arXiv:1610.01644",
        cost="less: no gradients of the model", families=EVERY,
    ),
    "lp-ft": MethodEntry(
        "advanced.lp_ft.LPFT", "solves the head as a linear probe, then fine-tunes everything from there",
        conflicts={
            "linear-probe": "it trains the head alone; with solved=true it solves the head as lp-ft does",
            **dict.fromkeys(("prompt-finetune", "auto-words"), "there is no head to solve"),
        },
        paper="arXiv:2202.10054", cost="a pass over train and a logistic regression before training", families=EVERY,
    ),
    "ia3": MethodEntry(
        "advanced.ia3.IA3", "trains vectors that scale keys, values and the feed-forward",
        paper="arXiv:2205.05638", cost=LITTLE_KEPT, families=EVERY,
    ),
    "lora": MethodEntry(
        "advanced.lora_variants.lora", "trains low-rank updates of frozen matrices", {
            "rank": count(8, "r, the rank of an update"),
            "alpha": positive(16.0, "updates are scaled by alpha / r"),
            "dropout": share(0.0, "of what the update reads"),
            "targets": some_of(MATRICES, "compute_query+compute_value", "matrices that are updated", "matrices"),
            "variant": one_of(("plain", "dora", "rslora", "pissa", "normal"), "plain", "of the formula"),
            "plus": positive(1.0, "LoRA+: B's learning rate divided by A's; 16 is the paper's"),
        },
        paper="arXiv:2106.09685", cost=LITTLE_KEPT, families=EVERY,
    ),
    "adapter": MethodEntry(
        "advanced.adapter.Adapter", "trains bottlenecks behind or beside frozen sub-layers", {
            "width": count(32, "of the bottleneck"),
            "form": one_of(("sequential", "parallel"), "parallel", "behind the sub-layer, or beside it"),
            "scale": positive(4.0, "of what the bottleneck adds"),
            "places": some_of(("attention", "feed_forward"), "feed_forward", "sub-layers that have one", "sub-layers"),
            "dropout": share(0.0, "within the bottleneck"),
        },
        paper="arXiv:2110.04366", cost=LITTLE_KEPT, families=EVERY,
    ),
    "prefix": MethodEntry(
        "advanced.prefix.Prefix", "trains keys and values that every token attends to",
        {"length": count(16, "of the prefix, for each head")},
        paper="arXiv:2101.00190", cost=LITTLE_KEPT, families=EVERY,
    ),
    "bitfit": MethodEntry(
        "advanced.bitfit.BitFit", "trains biases alone; a Llama has none, so they are added",
        paper="arXiv:2106.10199", cost=LITTLE_KEPT, families=EVERY,
    ),
    "mixout": MethodEntry(
        "advanced.mixout.Mixout",
        "takes some input neurons of each matrix from the pretrained weights, drawn anew in every step",
        {"p": share(0.7, "the share of neurons that are pretrained")},
        conflicts=of_frozen("frozen weights are the pretrained ones") | {"reinit": NOT_PRETRAINED},
        paper="arXiv:1909.11299", cost="half as much time again, and a copy of the weights", families=EVERY,
    ),
    "mixconnect": MethodEntry(
        "advanced.mixout.Mixconnect", "mixout of single weights in the place of neurons",
        {"p": share(0.7, "the share of weights that are pretrained")},
        conflicts={
            **of_frozen("frozen weights are the pretrained ones"),
            "mixout": "each takes weights in the other's place",
            "reinit": NOT_PRETRAINED,
        },
        paper="arXiv:1909.11299", cost="twice the time, and a copy of the weights", families=EVERY,
    ),
}

LOSSES = {
    "label-smoothing": MethodEntry(
        "advanced.losses.LabelSmoothing", "gives every class a part of the target's probability",
        {"epsilon": share(0.1, "the probability that is spread evenly over all classes")},
        paper="arXiv:1512.00567", families=EVERY,
    ),
    "ordinal": MethodEntry(
        "advanced.losses.Ordinal", "gives near classes more of the target's probability than far ones",
        {"sharpness": positive(1.5, "how fast it falls with the squared distance")},
        conflicts={"label-smoothing": "each says how the target spreads over the classes"}, paper="Diaz & Marathe 2019",
        families=EVERY,
    ),
    "class-weights": MethodEntry(
        "advanced.losses.ClassWeights", "weighs rare classes more in the loss",
        {"power": part(1.0, "of the inverse frequency; 0 is no weight")},
        paper="King & Zeng 2001", families=EVERY,
    ),
    "r-drop": MethodEntry(
        "advanced.r_drop.RDrop", "keeps two passes with different dropout close to each other",
        {"weight": positive(1.0, "of the divergence")},
        paper="arXiv:2106.14448", cost="twice the time", families=EVERY,
    ),
    "smart": MethodEntry(
        "advanced.smart.SMART", "keeps predictions smooth around each embedding, and near those of an averaged teacher",
        {
            "weight": not_negative(1.0, "lambda, of the smoothness"),
            "radius": positive(0.1, "of the perturbation, in units of the embeddings' root mean square"),
            "step": positive(0.1, "eta, of the inner ascent, in the same units"),
            "noise": positive(0.01, "sigma, of what the ascent begins with, in the same units"),
            "steps": count(1, "of the inner ascent", most=64),
            "bregman": not_negative(1.0, "mu, of the proximal term; 0 for none"),
            "decay": share(0.99, "beta, of the teacher in the first tenth of training"),
            "late_decay": share(0.999, "and afterwards"),
        },
        paper="arXiv:1911.03437", cost="three to four times the time, and a copy of the weights",
        refuses=_nothing_smooth, families=EVERY,
    ),
    "freelb": MethodEntry(
        "advanced.freelb.FreeLB", "takes the mean gradient over perturbed embeddings, found by ascent", {
            "steps": count(3, "K, of the ascent, and passes", most=64),
            "radius": positive(0.1, "epsilon, of a text's perturbation, in units of the norm of a token's embedding"),
            "step": positive(0.05, "alpha, of the ascent, in the same units"),
        },
        conflicts=dict.fromkeys(("distill", "self-training"), "freelb moves the texts of a batch, not others"),
        paper="arXiv:1909.11764", cost="K times the time, and a copy of the gradients", families=EVERY,
    ),
    "sam": MethodEntry(
        "advanced.sam.SAM", "takes the gradient at the worst weights nearby",
        {"rho": positive(0.05, "how far the weights move, the norm of all together")},
        paper="arXiv:2010.01412", cost="twice the time, and a copy of the weights", families=EVERY,
    ),
}

NO_SENTENCES = "learns from training sentences without their labels, which --shots N leaves aside; add --shots N"


def _nothing_taught(settings: dict[str, Any], every: Mapping[str, dict[str, Any]]) -> str:
    if not settings["teacher"]:
        return "name its teacher, a model that finetune has saved: --method-args teacher=SAVED.pt"
    return "" if settings["weight"] else "weight=0 leaves the teacher nothing to do"


TAUGHT = {
    "distill": MethodEntry(
        "advanced.distill.Distill", "learns the probabilities that saved models give, also of sentences without labels",
        {
            "teacher": models_joined("saved models, whose mean is learned"),
            "temperature": positive(2.0, "of both distributions"),
            "weight": part(0.9, "of the teacher's part of the loss; the rest is the labels'"),
        },
        conflicts={"self-training": "each has another use for sentences without labels"},
        paper="arXiv:1503.02531", cost="the teacher's predictions at first; with --shots twice the time",
        families=EVERY, refuses=_nothing_taught,
    ),
    "self-training": MethodEntry(
        "advanced.self_training.SelfTraining", "learns labels that it has given itself to sentences without labels", {
            "after": share(0.5, "the share of all steps after which it labels them"),
            "threshold": part(0.6, "the least probability of a label"),
            "per_class": count(256, "sentences at most that join, of each class"),
            "weight": positive(1.0, "of their loss"),
        },
        paper="Lee 2013", cost="one evaluation, then twice the time", families=EVERY, needs_shots=True,
    ),
}

PACING = {
    "layer-decay": MethodEntry(
        "advanced.layer_decay.LayerDecay", "trains lower layers at lower rates",
        {"factor": Argument(0.9, "from a layer to the one below it", lambda f: 0 < f <= 1, "above 0 and at most 1")},
        conflicts={"prompt-tuning": "no layer is trained"}, paper="arXiv:1801.06146", families=EVERY,
    ),
    "schedule": MethodEntry(
        "advanced.schedule.Schedule", "raises the learning rate at first and lets it fall afterwards", {
            "warmup": share(0.06, "the share of all steps in which it rises"),
            "decay": one_of(("cosine", "linear", "none"), "cosine", "how it falls"),
        },
        paper="arXiv:1608.03983", families=EVERY,
    ),
    "early-stopping": MethodEntry(
        "advanced.early_stopping.EarlyStopping", "stops when the score has not risen for some epochs",
        {"patience": count(2, "epochs without a better score")},
        paper="Prechelt 1998", cost="less; a tenth of train is held out", holds_out=True, families=EVERY,
    ),
}

AVERAGES = {
    "ema": MethodEntry(
        "advanced.ema.EMA", "evaluates and saves an exponential moving average of the weights",
        {"decay": share(0.99, "of the average, per step")},
        paper="arXiv:1703.01780", cost="a copy of the weights", families=EVERY,
    ),
    "swa": MethodEntry(
        "advanced.swa.SWA", "evaluates and saves the mean of the weights in the last part of training", {
            "start": share(0.75, "the share of all steps before the mean"),
            "every": one_of(("step", "epoch"), "step", "when weights are added to the mean"),
        },
        conflicts={"ema": "each says which average is evaluated"},
        paper="arXiv:1803.05407", cost="a copy of the weights", refuses=_falling_rate, families=EVERY,
    ),
    "wise-ft": MethodEntry(
        "advanced.wise_ft.WiSEFT", "saves the best mixture of the pretrained and the fine-tuned weights",
        {"points": count(11, "mixtures that are tried, both ends among them", least=2, most=101)},
        conflicts=of_frozen("frozen weights are the pretrained ones") | {"reinit": NOT_PRETRAINED},
        paper="arXiv:2109.01903",
        cost="a copy of the weights, an evaluation for each mixture at the end; a tenth of train is held out",
        holds_out=True, families=EVERY,
    ),
}

METHODS = {**PREDICTED, **READING, **PARAMETERS, **LOSSES, **TAUGHT, **PACING, **AVERAGES, **COMBINED}
# fmt: on
