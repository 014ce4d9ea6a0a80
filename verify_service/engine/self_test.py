"""Tests an attached draft: measures its accept length on built-in prompts while the engine idles.

The engine runs the test's requests like any others, but cancels them as soon as a client's request
comes.
"""

import logging
from collections.abc import Callable, Sequence
from pathlib import Path

from foredraft.errors import CheckpointError
from foredraft.text.tokenizer import Tokenizer
from foredraft.types import FinishReason, SamplingParams
from verify_service.engine.live_requests import EngineRequest
from verify_service.outputs import Load, StepOutput

TEXTS = (
    "The water cycle describes how water moves from the oceans to the sky and back again. First,",
    "Once upon a time, there was a small village at the foot of a mountain, where",
    "def fibonacci(n):\n    ",
    "Question: What is the capital of France?\nAnswer:",
)
NUM_NEW_TOKENS = 24
SUSPICIOUS = 1.1  # accept length below which a warning is logged; the target's own token counts 1
MANY = 16  # minimum number of verifications for a warning

logger = logging.getLogger(__name__)


def built_in_prompts(target: Path, vocab_size: int) -> list[list[int]]:
    """Encodes the texts for the target; a target without a tokenizer gets a few low token ids."""
    try:
        tokenizer = Tokenizer.from_dir(target)
    except CheckpointError:
        return [[(7 * i + start) % vocab_size for i in range(8)] for start in range(len(TEXTS))]
    prompts = (tokenizer.encode(text) for text in TEXTS)
    return [prompt for prompt in prompts if prompt and max(prompt) < vocab_size]


class SelfTest:
    """Runs the self-test of one draft. Belongs to the engine's thread.

    Args:
        prompts: Prompts to continue.
        on_result: Called with the mean number of tokens per verified tree.
        draft: Name of the draft, where there are several.

    Attributes:
        draft: Name of the draft.
    """

    def __init__(
        self,
        prompts: Sequence[Sequence[int]],
        on_result: Callable[[float], None],
        draft: str = "",
    ) -> None:
        self.draft = draft
        self._name = f"draft {draft} self-test" if draft else "draft self-test"
        self._prompts = prompts
        self._on_result = on_result
        self._tested_epoch = 0
        self._epoch = 0
        self._num_left = 0
        self._num_trees = 0
        self._num_tokens = 0
        self._interrupted = False
        self._sampling = SamplingParams(
            temperature=0.0, max_new_tokens=NUM_NEW_TOKENS, ignore_eos=True
        )

    def due(self, epoch: int, is_quiet: bool) -> list[EngineRequest]:
        """Returns the requests to run now, in an idle engine.

        Args:
            epoch: Number of the draft's attach; 0 for none.
            is_quiet: Whether the engine has idled for a while. An interrupted test waits for that,
                or it would begin between any two requests of a client, which then wait for it.
        """
        if epoch in (0, self._tested_epoch) or self._num_left or not self._prompts:
            return []
        if self._interrupted and epoch == self._epoch and not is_quiet:
            return []
        self._epoch, self._interrupted = epoch, False
        self._num_left, self._num_trees, self._num_tokens = len(self._prompts), 0, 0
        return [
            EngineRequest(
                tag=i,
                prompt=list(prompt),
                sampling=self._sampling,
                sink=self._take,
                return_provenance=True,
                is_probe=True,
                draft=self.draft,
            )
            for i, prompt in enumerate(self._prompts)
        ]

    def interrupt(self) -> bool:
        """Interrupts the test for a client; returns whether there are requests to cancel."""
        was_running = self._num_left > 0 and not self._interrupted
        self._interrupted |= was_running
        return was_running

    def _take(self, outputs: list[StepOutput], load: Load) -> None:
        for output in outputs:
            if output.tree is not None:
                self._num_trees += 1
                self._num_tokens += len(output.tree.accepted) + 1
            if output.finish is not None:
                self._num_left -= 1
                self._interrupted |= output.finish.reason is FinishReason.CANCELLED
        if self._num_left == 0 and not self._interrupted:
            self._tested_epoch = self._epoch
            self._conclude()

    def _conclude(self) -> None:
        if self._num_trees == 0:
            logger.warning("%s: the draft proposed nothing", self._name)
            return
        length = self._num_tokens / self._num_trees
        self._on_result(length)
        logger.info("%s: accept length %.2f over %d trees", self._name, length, self._num_trees)
        if length < SUSPICIOUS and self._num_trees >= MANY:
            logger.warning(
                "%s: the draft is almost never right. Check that its checkpoint was made for this"
                " very target (model, revision, instruct or base), that it reads the layers it was"
                " trained on, and that target and draft have the same tokenizer and --dtype",
                self._name,
            )
