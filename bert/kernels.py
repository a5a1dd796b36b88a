"""What `fast` puts in the places of a BERT's modules: above all an encoder that leaves padding out.

Texts of a batch are padded to the longest, and the page computes padding like text. `UnpaddedBert` takes the real
tokens out of a batch, one text after another, and gives them to the page's own layers as one long text, 1 n D: all
but attention looks at each token alone. Attention is told by `Texts`, in the mask's place, where each text ends.
(Zeng et al. 2022, "Boosting Distributed Training Performance of the Unpadded BERT Model", arXiv:2208.08124.)

Shapes: b batch   s position   n real tokens of all texts   D model dim
"""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from bert.attention import FusedBertAttention, scores_check, small_bert
from bert.config import BertConfig
from bert.model import Bert, BertAttention, BertFeedForward, BertLayer, Embeddings
from bert.unpadded import Texts, put_back, take_out
from fast.equivalence import Case, Comparison, EquivalenceCheck, notice
from fast.kernel import has_hooks, own_methods
from fast.layers import CheckedKernel
from fast.linear import OneDNNLinear
from fast.plan import KernelPlan, plan_linears, plan_parts

LEAST = 2**27  # multiplications of padding: some milliseconds, which taking the texts apart may take as well
PADDING = 0.1  # the share of it from which it is left out


class UnpaddedBert(CheckedKernel, Bert):
    """`Bert` that computes real tokens alone where a batch has so much padding that this pays.

    What it gives at padding is zeros. Dropout draws for real tokens alone, so that a run's random numbers are others
    than the page's. least: multiplications that must be saved.
    """

    __slots__ = ("least",)
    replaces = Bert

    @classmethod
    def from_bert(cls, bert: Bert, least: int | None = None) -> UnpaddedBert:
        kernel = cls.sharing(bert)
        kernel.least = LEAST if least is None else least
        return kernel

    def forward(
        self,
        input_ids: torch.Tensor,
        segment_ids: torch.Tensor | None = None,
        padding_mask: torch.Tensor | None = None,
        *others: Any,
        **named: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """As the page's. With more arguments the page is another one than this kernel stands in for."""
        if others or named or input_ids.device.type != "cpu":
            return super().forward(input_ids, segment_ids, padding_mask, *others, **named)
        is_real = input_ids != self.config.pad_id if padding_mask is None else padding_mask.bool()  # b s
        if is_real.shape != input_ids.shape or not (self._pays(is_real) and self._is_usual() and self._agrees()):
            return super().forward(input_ids, segment_ids, padding_mask)
        texts = Texts.of(is_real)
        h = take_out(self.embeddings(input_ids, segment_ids).flatten(0, 1), texts.at)[None]  # 1 n D
        for layer in self.layers:
            h = layer(h, texts)
        h = put_back(h[0], texts.at, is_real.numel()).unflatten(0, is_real.shape)  # b s D
        return h, None if self.pooler is None else torch.tanh(self.pooler(h[:, 0]))

    def _pays(self, is_real: torch.Tensor) -> bool:
        """Whether there is enough padding, and none where the pooled vector is read."""
        config, n_padding = self.config, is_real.numel() - int(is_real.sum())
        of_position = config.n_layers * (4 * config.dim**2 + 2 * config.dim * config.hidden_dim)  # multiplications
        is_much = n_padding >= PADDING * is_real.numel() and n_padding * of_position >= self.least
        return n_padding > 0 and is_much and bool(is_real[:, 0].all())

    def _agrees(self) -> bool:
        """Whether this computes what the page does. Attention, which also drops weights, is asked for by itself."""
        return self.may_compute(scores_check("cpu")) and self.may_compute(ENCODER)

    def _is_usual(self) -> bool:
        """Whether the layers consist of the page's modules alone, and nobody is told of what these compute."""
        for name, part in self.layers.named_modules(prefix="layers"):
            if type(part) not in PARTS or vars(part).get("activation", F.gelu) not in (F.gelu, F.relu):
                what = f"{name} is another one than the page's"
            elif has_hooks(part) or own_methods(part):
                what = f"something hangs on {name}"
            else:
                continue
            notice(f"padding is computed like text: {what}")
            return False
        return True


# Of these, attention alone looks at more than one token at a time.
PARTS = {nn.ModuleList, BertLayer, FusedBertAttention, BertFeedForward}
PARTS |= {nn.LayerNorm, nn.Linear, OneDNNLinear, nn.Dropout, nn.GELU}


def _encoders() -> Comparison:
    """The page and the kernel on the same weights; of the hidden states what stands at real tokens."""
    plain = [small_bert(), small_bert(n_segments=0, has_pooler=False, pad_id=3)]
    kernels = []
    for bert in plain:
        twin = copy.deepcopy(bert, {id(parameter): parameter for parameter in bert.parameters()})
        for layer in twin.layers:
            layer.attention = FusedBertAttention.sharing(layer.attention)
        kernels.append(UnpaddedBert.from_bert(twin, least=0))

    def ask(berts: list[Bert]) -> Any:
        def run(which: int, training: bool, ids: torch.Tensor, *others: torch.Tensor | None) -> list[torch.Tensor]:
            hidden, pooled = berts[which].train(training)(ids, *others)
            is_real = others[1].bool() if len(others) > 1 else ids != berts[which].config.pad_id
            return [hidden[is_real], *([] if pooled is None else [pooled])]

        return run

    lengths = torch.tensor([3, 20, 1, 9, 9])
    is_real = torch.arange(20) < lengths[:, None]  # b s
    ids, segments = torch.randint(4, 20, (5, 20)), torch.randint(0, 2, (5, 20))
    cases = []
    for which, bert in enumerate(plain):
        # gradients of the keys' biases, which are added to all scores of a query alike, are nothing but rounding
        parameters = tuple(p for name, p in bert.named_parameters() if not name.endswith("compute_key.bias"))
        padded = ids.where(is_real, bert.config.pad_id)
        cases.append(Case("ids alone", (which, False, padded)))
        cases.append(Case("segments and a mask", (which, True, ids, segments, is_real.long()), parameters))
        cases.append(Case("a mask with gaps", (which, True, ids, None, is_real & (ids != ids[0, 1])), parameters))
    return Comparison(ask(plain), ask(kernels), cases)


ENCODER = EquivalenceCheck("Bert", (Bert, BertLayer, BertAttention, BertFeedForward, Embeddings), _encoders)


# ----------------------------------------------------------------------------------------------------- what is chosen

KERNELS = {FusedBertAttention, UnpaddedBert}


def products(bert: Bert) -> dict[str, Any]:
    """What is to be measured of its linear layers (`fast.apply.Products`): those of one layer."""
    dim, hidden_dim = bert.config.dim, bert.config.hidden_dim
    question = f"float32 products with biases of {dim} and {hidden_dim}"
    return dict(question=question, shapes=((dim, dim),) * 4 + ((hidden_dim, dim), (dim, hidden_dim)), biases=True)


def plan_kernels(
    plan: KernelPlan, bert: Bert, model: nn.Module, device: torch.device, linears: tuple[type, dict[str, Any]] | None
) -> list[tuple[str, str, str]]:
    """Put kernels for a BERT inside `model` into `plan`, where its modules are the page's own.

    linears: the kernel of linear layers, and how it computes; None for PyTorch's own. Returns what was chosen for its
    attention and its padding: part, kernel, reason.
    """
    attention, why_attention = _choose_attention(device)
    padding, why_padding = _choose_padding(device, attention, bert, model)
    if linears is not None:
        plan_linears(plan, bert, *linears, biases=True)
    if attention != "plain":
        plan_parts(plan, bert, BertAttention, FusedBertAttention.sharing)
    if padding != "plain":
        plan_parts(plan, bert, Bert, UnpaddedBert.from_bert)
    return [("BERT's attention", attention, why_attention), ("BERT's padding", padding, why_padding)]


@torch.no_grad()
def reads_padding(model: nn.Module, bert: Bert) -> bool:
    """Whether other states at padding make `model` say something else of real tokens or texts, which is tried.

    So it is where answers are log-probabilities over all positions, or somebody takes the mean of all states.
    """
    length, pad = min(5, bert.config.max_seq_len), bert.config.pad_id
    ids = torch.tensor([[pad + 1 if pad == 0 else 0] * length] * 2)  # b s
    ids[1, length // 2 :] = pad
    is_real = ids != pad
    was_training, answers = model.training, []
    for share in (1.0, -1.0):  # of what stands at padding

        def change(_: nn.Module, __: Any, output: tuple, share: float = share) -> tuple:
            hidden, pooled = output
            return torch.where(is_real[..., None], hidden, share * hidden + share), pooled

        handle = bert.register_forward_hook(change)
        try:
            answers.append(_at_real_tokens(model.eval()(ids, None, is_real), is_real))
        except Exception:  # of whatever model it is: then nobody knows
            return True
        finally:
            handle.remove()
            model.train(was_training)
    return not all(torch.allclose(*pair, rtol=1e-4, atol=1e-5) for pair in zip(*answers, strict=True))


def _at_real_tokens(answer: Any, is_real: torch.Tensor) -> list[torch.Tensor]:
    """The tensors of an answer; of one that has a part for each token, those of real tokens. is_real: b s"""
    parts = answer if isinstance(answer, tuple) else (answer,)
    return [part[is_real] if part.shape[:2] == is_real.shape else part for part in parts]


def _choose_attention(device: torch.device) -> tuple[str, str]:
    if found := scores_check(device.type).difference():
        return "plain", f"the page has changed: {found}"
    return "fused", "keeps no scores, but where weights are dropped in training"


def _choose_padding(device: torch.device, attention: str, bert: Bert, model: nn.Module) -> tuple[str, str]:
    if device.type != "cpu":
        return "plain", f"to find it, a batch would have to be waited for on {device.type}"
    if bert is model:
        return "plain", "an encoder by itself has no place in a model that a kernel could take"
    if attention == "plain":
        return "plain", "attention is computed as it is written"
    if found := ENCODER.difference():
        return "plain", f"the page has changed: {found}"
    if reads_padding(model, bert):
        return "plain", f"{type(model).__name__} reads the states at padding, or does not say"
    return "left out", f"where it is {PADDING:.0%} or more of a batch, and milliseconds of work"


def one_layer() -> Bert:
    """A small BERT, for `python -m fast`, which prints the kernels that this machine gives to one."""
    return Bert(BertConfig(vocab_size=300, dim=384, n_heads=12, n_layers=1))
