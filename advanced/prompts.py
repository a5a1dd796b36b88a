"""The entries of the table for methods that ask the language model for words, and the questions that they ask.

`table.py` has the others. No PyTorch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from advanced.entries import Argument, MethodEntry, count, one_of
from engine.plan import ChosenMethod
from utils import QUESTION_OF_TEXTS

TEMPLATE = Argument(
    "",
    "the question after the sentence; if it is empty the course's, of these words",
    lambda text: "{label}" not in text,
    "what stands before the label, without {label}; {labels} are all of them",
)
WORDS = Argument(
    "",
    "a word for each label, joined by +; if it is empty the label names",
    lambda text: not text or all(word.strip() for word in text.split("+")),
    "words joined by +",
)
CHANNEL_TEMPLATE = Argument(
    "This movie is {label}.",
    "what stands before the sentence",
    lambda text: "{label}" in text,
    "a text with {label} in it",
)
ABOUT_TEXTS = {TEMPLATE.default: QUESTION_OF_TEXTS, CHANNEL_TEMPLATE.default: "This text is {label}."}


def about_texts(chosen: Sequence[ChosenMethod]) -> tuple[ChosenMethod, ...]:
    """The methods with templates about texts in the place of those about films, for data about anything."""

    def about(settings: dict[str, Any]) -> dict[str, Any]:
        template = settings.get("template")
        if settings.get("scoring") == "channel":
            template = template or CHANNEL_TEMPLATE.default
        return settings if template is None else settings | {"template": ABOUT_TEXTS.get(template, template)}

    return tuple(each._replace(settings=tuple(about(dict(each.settings)).items())) for each in chosen)


def _misplaced_template(settings: dict[str, Any], every: Mapping[str, dict[str, Any]]) -> str:
    """Why the template of `in-context` does not fit its scoring; "" if it does."""
    template, argument = settings["template"], CHANNEL_TEMPLATE if settings["scoring"] == "channel" else TEMPLATE
    if template and not (argument.fits(template) and template.strip()):
        return f"with scoring={settings['scoring']} the template must be {argument.wanted}"
    return ""


# fmt: off
OF_WORDS = {
    "linear-probe": "there is no head to train",
    "pooling": "a label word is read where it would stand",
    "padding-mask": "padding is hidden from a label word in any case",
    "r-drop": "there is no head, whose dropout its two passes differ by",
}
PREDICTED = {
    "direct": MethodEntry(
        "advanced.zero_shot.Direct", "scores a label by the likelihood of all its tokens after the question", {
            "template": TEMPLATE, "words": WORDS,
            "normalized": Argument(False, "the mean over a label's tokens in the place of their sum"),
        },
        paper="arXiv:2005.14165", cost="a short second pass where a label has several tokens",
        options=("prompt",), is_head=True, attention="causal",
    ),
    "calibrated": MethodEntry(
        "advanced.zero_shot.Calibrated",
        "divides a label's probability by that after texts without content, or after training texts", {
            "template": TEMPLATE, "words": WORDS,
            "source": one_of(("content-free", "train"), "content-free", "texts that it is estimated from"),
        },
        paper="arXiv:2102.09690", cost="as direct", options=("prompt",), is_head=True, attention="causal",
    ),
    "pmi": MethodEntry(
        "advanced.zero_shot.PMI", "divides a label's likelihood by that after the question alone", {
            "template": TEMPLATE, "words": WORDS,
            "premise": Argument("", "what stands for the question alone; if it is empty the question's last clause"),
        },
        paper="arXiv:2104.08315", cost="as direct, and a pass over the question alone for each batch",
        options=("prompt",), is_head=True, attention="causal",
    ),
    "channel": MethodEntry(
        "advanced.zero_shot.Channel", "scores a label by the likelihood of the sentence after it",
        {"template": CHANNEL_TEMPLATE, "words": WORDS},
        paper="arXiv:2108.04106", cost="a pass a label", options=("prompt",), is_head=True, attention="causal",
    ),
    "in-context": MethodEntry(
        "advanced.in_context.in_context", "puts labelled training sentences before each sentence", {
            "shots": count(4, "how many, drawn with the seed, as many of each class as possible", least=0),
            "scoring": one_of(("direct", "calibrated", "channel"), "direct", "as the method of that name"),
            "template": replace(TEMPLATE, help="as of the scoring's method; if it is empty Sentiment: or channel's",
                                fits=lambda text: True),
            "words": WORDS,
        },
        paper="arXiv:2005.14165", cost="as its scoring's method; longer texts to look back at",
        options=("prompt",), is_head=True, attention="causal", refuses=_misplaced_template,
    ),
    "prompt-finetune": MethodEntry(
        "advanced.prompt_finetune.PromptFinetune",
        "trains the language model to say the label word, without a new head", {
            "template": TEMPLATE, "words": WORDS,
            "control": one_of(("none", "shuffled-words", "null-template"), "none", "what it is compared with"),
        },
        conflicts=OF_WORDS,
        paper="arXiv:2012.15723", cost="longer texts; a short second pass where a label has several tokens",
        is_head=True,
        refuses=lambda s, _: "a null template is none" if s["template"] and s["control"] == "null-template" else "",
    ),
    "auto-words": MethodEntry(
        "advanced.auto_words.AutoWords", "finds the label words in the training sentences; else as prompt-finetune",
        {
            "template": replace(TEMPLATE, default="It was", help="the question; {labels} in it are the label names"),
            "words": replace(WORDS, help="those that it has found, in what it saves"),
            "candidates": count(10, "words of each class that are tried", most=1000),
        },
        conflicts=OF_WORDS, paper="arXiv:2012.15723", cost="as prompt-finetune, and a pass over the training sentences",
        options=("prompt", "finetune"), is_head=True,
        refuses=lambda s, _: "it finds its words; prompt-finetune takes some" if s["words"] else "",
    ),
}
# fmt: on
