"""The figures of a fine-tuning and its page: `--log_dir` and `--html` of `finetune`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from engine.metrics import FILE, MetricsLog, has_tensorboard
from engine.tasks import Judging, WithProbabilities, outcome_of

if TYPE_CHECKING:
    import torch

    from engine.checkpointer import Checkpointer
    from engine.methods import EpochResult
    from engine.tasks import Sentences

EXAMPLES = 4  # sentences of dev on the page: at most half of them are the worst errors


class RunReport:
    """Keeps the figures of a run and writes its page."""

    def __init__(
        self,
        log_dir: str | None,
        html: str | None,
        checkpointer: Checkpointer,
        device: torch.device,
        history: Sequence[EpochResult],
        is_first: bool,
    ):
        self.html, self.checkpointer, self.is_first = html, checkpointer, is_first
        self.task = Judging()
        begun = 0 if checkpointer.begun is None else checkpointer.begun.steps
        self.log = MetricsLog(log_dir, checkpointer.identity, device, history, is_first, begun)
        if log_dir is not None and is_first:
            what = "and TensorBoard's events" if has_tensorboard() else "alone: tensorboard is not installed"
            print(f"figures of the steps go to {self.log.folder / FILE} {what}")

    def finish(
        self, datasets: Mapping[str, Sentences], judged: Mapping[str, WithProbabilities], label_names: Sequence[str]
    ) -> None:
        """Keep the results on the splits, and write the page if --html asks for one."""
        if not self.is_first:
            return
        for split, result in judged.items():
            self.log.judged(outcome_of(split, datasets[split].sentences, result, label_names))
        if self.html is not None:
            self._write_page(datasets["dev"], judged["dev"])

    def _write_page(self, dev: Sentences, result: WithProbabilities) -> None:
        from engine.families import LLAMA_FAMILY
        from explore.inspected import InspectedModel, examples_of, page_of_model
        from explore.page import write_page
        from explore.trained import page_of_log

        content: dict[str, Any] = page_of_log(self.log.all_records(), str(self.checkpointer.model_path))
        # Other families have no page of their model, only of their run.
        if self.checkpointer.record["family"] == LLAMA_FAMILY.name:
            inspected = InspectedModel.open(str(self.checkpointer.model_path))
            content |= page_of_model(inspected, examples_of(dev.sentences, dev.labels, result, EXAMPLES))
        write_page(self.html, content)
        print(f"wrote {self.html}")
